"""Frozen encoders run once for the items of several portions of a step, where each portion has only a few.

What they make is handed on as features that are known: projectors, which may be trained, run with their portion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.items import KNOWN
from cornstarch.models.multimodal_language_model.routing import route
from cornstarch.models.multimodal_language_model.unwrap import is_sharded
from cornstarch.train.config import RunConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.loader import StepBatch
from cornstarch.train.features.refusal import check_task, try_encoder
from cornstarch.train.precision import Placement, pinned
from cornstarch.train.tasks.conversation import ConversationTask
from cornstarch.train.tasks.task import Task

_FEW = 8  # items of a portion: with more, one portion alone keeps an encoder busy
_AT_ONCE = 32  # items that are encoded together: what an encoder holds for a moment stays small


def encoded_ahead(task: Task, config: RunConfig, placement: Placement) -> EncodedAhead | None:
    """Return what encodes ahead, if the run can; to be asked for when the model is ready to train.

    It can where features could be kept, too: an item must come out the same whatever it is encoded with.
    """
    if not config.features.ahead or config.features.cache or config.loop.accumulation == 1:
        return None
    if config.parallel.plan().is_pipeline:  # encoders have stages of their own
        return None
    try:
        checked = check_task(task)
        for name, encoder in checked.model.encoders.items():
            if is_sharded(encoder):  # its runs are counted: other processes take part in them
                return None
            try_encoder(checked, name, placement)
    except ConfigError:
        return None
    return EncodedAhead(checked, placement)


class EncodedAhead:
    """Encodes the items of the portions of a step."""

    def __init__(self, task: ConversationTask, placement: Placement) -> None:
        self._model, self._placement = task.model, placement

    def __call__(self, batch: StepBatch) -> StepBatch:
        """Return a batch whose portions have features in the place of items; those of many items stay as they are."""
        inputs = [dict(portion.inputs) for portion in batch.portions]
        for name in self._model.encoders:
            for group in self._groups(name, inputs):
                self._encode(name, [inputs[number] for number in group])
        portions = [
            portion if _is_same(own, portion) else replace(portion, inputs=own)
            for portion, own in zip(batch.portions, inputs, strict=True)
        ]
        return replace(batch, portions=portions)

    def _groups(self, name: str, inputs: Sequence[Mapping[str, Any]]) -> Iterator[list[int]]:
        """Yield the numbers of portions whose items are encoded together."""
        group: list[int] = []
        taken, form = 0, None
        for number, portion in enumerate(inputs):
            own = route(self._model.encoders, portion)[0].get(name)
            if own is None or KNOWN in own or (count := item_count(own)) > _FEW:
                continue
            if group and (taken + count > _AT_ONCE or _form(own) != form):
                yield group
                group, taken = [], 0
            group, taken, form = [*group, number], taken + count, _form(own)
        yield group

    def _encode(self, name: str, portions: Sequence[dict[str, Any]]) -> None:
        """Put what an encoder makes of items in their place, in the inputs of portions."""
        if len(portions) < 2:
            return
        encoder = self._model.encoders[name]
        given = [route(self._model.encoders, portion)[0][name] for portion in portions]
        told = {key: _joined([own[key] for own in given]) for key in given[0]}
        moved = self._placement.moved(pinned(told) if self._placement.device.type == "cuda" else told)
        with self._placement.computing():
            found = encoder.tokens(moved, told)
        counts = [item_count(own) for own in given]
        if found.lengths is None or len(found.lengths) != sum(counts):
            return  # it is unknown which tokens are whose
        first = start = 0
        for portion, count in zip(portions, counts, strict=True):
            lengths = found.lengths[first : first + count]
            tokens = found.tokens[start : start + sum(lengths)]
            first, start = first + count, start + sum(lengths)
            if not isinstance(portion.get(name), Mapping):
                for key in encoder.input_names:
                    portion.pop(key, None)
            known = {"lengths": lengths, "is_known": [True] * count, "digests": [""] * count, "tokens": tokens}
            portion[name] = {KNOWN: known}


def item_count(inputs: Mapping[str, Any]) -> int:
    """Return how many items an encoder is given: the sizes it is told, or else the first dimension."""
    sizes = [value for key, value in inputs.items() if key.endswith(("grid_thw", "image_sizes"))]
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    return len((sizes or tensors)[0])


def _form(inputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what inputs must have in common to be joined."""
    return [
        (key, (value.shape[1:], value.dtype) if isinstance(value, Tensor) and value.dim() else repr(value))
        for key, value in sorted(inputs.items())
    ]


def _joined(values: Sequence[Any]) -> Any:
    return torch.cat(list(values)) if isinstance(values[0], Tensor) and values[0].dim() else values[0]


def _is_same(own: Mapping[str, Any], portion: CollatedBatch) -> bool:
    return own.keys() == portion.inputs.keys() and all(own[key] is portion.inputs[key] for key in own)


__all__ = ["EncodedAhead", "encoded_ahead", "item_count"]
