"""Batches on their way to the device, while it computes others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.loader import StepBatch
from cornstarch.train.precision import Placement, pinned


@dataclass(frozen=True)
class _Coming:
    """A portion that is being copied."""

    portion: CollatedBatch
    inputs: dict[str, Any]
    """On the device, but not to be read before `done`."""
    done: torch.cuda.Event


class Feed:
    """Copies portions to a GPU beside what it computes: one ahead, so that memory is taken for two of them.

    A step is begun on a GPU long before it is done. So the copy that is begun when a batch is there, on a stream of its
    own, goes on while the step before it is computed; on the stream of that step, it would come after it.

    On a CPU there is nothing to copy.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._stream = torch.cuda.Stream(placement.device) if placement.device.type == "cuda" else None
        self._next: _Coming | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, batch: StepBatch, number: int = 0) -> None:
        """Begin to copy a portion, if there is such. What it is made of must not change any more."""
        if self._stream is None or number >= len(batch.portions):
            return
        portion = batch.portions[number]
        with torch.cuda.stream(self._stream):
            inputs = self._placement.moved(pinned(portion.inputs))
            done = torch.cuda.Event()
            done.record(self._stream)
        self._next = _Coming(portion, inputs, done)

    def inputs(self, batch: StepBatch, number: int) -> dict[str, Any]:
        """Return a portion's inputs on the device, and begin to copy the next one's."""
        portion = batch.portions[number]
        if self._stream is None:
            return self._placement.moved(portion.inputs)
        if self._next is None or self._next.portion is not portion:
            self.begin(batch, number)
        coming, self._next = self._next, None
        assert coming is not None
        self._wait(coming)
        self.begin(batch, number + 1)
        return coming.inputs

    def _wait(self, coming: _Coming) -> None:
        """Let what computes wait for a copy, and note how long it does."""
        stream = torch.cuda.current_stream(self._placement.device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(coming.done)
        after.record(stream)
        self._waits.append((before, after))
        for tensor in _tensors(coming.inputs):
            tensor.record_stream(stream)  # or its memory could be given to the next copy while it is still read

    def waited(self) -> float:
        """Return the seconds that the GPU has waited for copies since this was last asked; those that are over."""
        over = [pair for pair in self._waits if pair[1].query()]
        self._waits = [pair for pair in self._waits if pair not in over]
        return sum(before.elapsed_time(after) for before, after in over) / 1000


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, BatchFacts):
        yield from value.places.values()
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


__all__ = ["Feed"]
