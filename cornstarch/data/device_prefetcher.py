"""Copies the microbatches of a step to a GPU, ahead of their computation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cornstarch.data.collate import CollatedBatch
from cornstarch.data.loader import StepBatch
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.parallel.device import DevicePlacement, pin_batch
from cornstarch.trees import tensors_in


class _PendingCopy(NamedTuple):
    microbatch: CollatedBatch
    inputs: dict[str, Any]  # on the device, but not to be read before `done`
    done: torch.cuda.Event


class DevicePrefetcher:
    """Copies microbatches to a GPU, one ahead, on a stream of its own: on the compute stream, copies would wait."""

    def __init__(self, placement: DevicePlacement) -> None:
        self._placement = placement
        self._stream = torch.cuda.Stream(placement.device) if placement.device.type == "cuda" else None
        self._next: _PendingCopy | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, batch: StepBatch, number: int = 0) -> None:
        """Start to copy a microbatch, if there is one of this number. Its tensors must not change any more."""
        if self._stream is None or number >= len(batch.microbatches):
            return
        microbatch = batch.microbatches[number]
        with torch.cuda.stream(self._stream):
            inputs = self._placement.move_batch(pin_batch(microbatch.inputs))
            done = torch.cuda.Event()
            done.record(self._stream)
        self._next = _PendingCopy(microbatch, inputs, done)

    def inputs(self, batch: StepBatch, number: int) -> dict[str, Any]:
        """Return a microbatch's inputs on the device, and start to copy the next."""
        microbatch = batch.microbatches[number]
        if self._stream is None:
            return self._placement.move_batch(microbatch.inputs)
        if self._next is None or self._next.microbatch is not microbatch:
            self.begin(batch, number)
        pending, self._next = self._next, None
        assert pending is not None
        # Let the compute stream wait for the copy, and measure the wait.
        stream = torch.cuda.current_stream(self._placement.device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(pending.done)
        after.record(stream)
        self._waits.append((before, after))
        facts = pending.inputs.get("facts")
        places = facts.places.values() if isinstance(facts, BatchFacts) else ()
        for tensor in (*tensors_in(pending.inputs), *places):
            tensor.record_stream(stream)  # or the allocator could reuse its memory for the next copy while it is read
        self.begin(batch, number + 1)
        return pending.inputs

    def wait_seconds(self) -> float:
        """Return the seconds that the GPU waited for copies since the last call, without waits in progress."""
        over = [pair for pair in self._waits if pair[1].query()]
        self._waits = [pair for pair in self._waits if pair not in over]
        return sum(before.elapsed_time(after) for before, after in over) / 1000
