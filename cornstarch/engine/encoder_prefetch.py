"""Encoder prefetch: run frozen encoders once for the items of several microbatches that have few items each.

The features replace the items; projectors, which may be trained, run with their microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cornstarch.config import RunConfig
from cornstarch.data.loader import StepBatch
from cornstarch.engine.feature_cache import check_encoder, check_task
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.encoder import route_batch
from cornstarch.models.multimodal_language_model.encoder_features import CACHED_FEATURES
from cornstarch.models.multimodal_language_model.unwrap import is_sharded
from cornstarch.parallel.device import DevicePlacement, pin_batch
from cornstarch.tasks.conversation import ConversationTask
from cornstarch.tasks.task import Task

_FEW = 8  # items of a microbatch: with more, one microbatch alone keeps an encoder busy
_MAX_ITEMS = 32  # encoded together: limits the encoder's activation memory


def build_encoder_prefetch(task: Task, config: RunConfig, placement: DevicePlacement) -> EncoderPrefetch | None:
    """Return the encoder prefetch of a model that is ready to train; None if the run cannot use one.

    The conditions are those of the feature cache: an item must give the same features beside any other.
    """
    if not config.features.ahead or config.features.cache or config.loop.gradient_accumulation_steps == 1:
        return None
    if config.parallel.is_pipeline:  # encoders have stages of their own
        return None
    try:
        checked = check_task(task)
        for name, encoder in checked.model.encoders.items():
            if is_sharded(encoder):  # other ranks take part in each run of the encoder: all must run it equally often
                return None
            check_encoder(checked, name, placement)
    except ConfigError:
        return None
    return EncoderPrefetch(checked, placement)


class EncoderPrefetch:
    """Encodes the items of the microbatches of a step."""

    def __init__(self, task: ConversationTask, placement: DevicePlacement) -> None:
        self._model, self._placement = task.model, placement

    def __call__(self, batch: StepBatch) -> StepBatch:
        """Replace items by features, except in microbatches with many items."""
        inputs = [dict(one.inputs) for one in batch.microbatches]
        for name in self._model.encoders:
            for group in self._groups(name, inputs):
                self._encode(name, [inputs[number] for number in group])
        microbatches = [
            one if _is_unchanged(own, one.inputs) else replace(one, inputs=own)
            for one, own in zip(batch.microbatches, inputs, strict=True)
        ]
        return replace(batch, microbatches=microbatches)

    def _groups(self, name: str, inputs: Sequence[Mapping[str, Any]]) -> Iterator[list[int]]:
        """Yield the numbers of microbatches whose items are encoded together."""
        group: list[int] = []
        items, form = 0, None
        for number, microbatch in enumerate(inputs):
            own = route_batch(self._model.encoders, microbatch)[0].get(name)
            if own is None or CACHED_FEATURES in own or (count := count_items(own)) > _FEW:
                continue
            if group and (items + count > _MAX_ITEMS or _form(own) != form):
                yield group
                group, items = [], 0
            group, items, form = [*group, number], items + count, _form(own)
        yield group

    def _encode(self, name: str, microbatches: Sequence[dict[str, Any]]) -> None:
        """Replace the items in the inputs of microbatches by an encoder's features."""
        if len(microbatches) < 2:
            return
        encoder = self._model.encoders[name]
        given = [route_batch(self._model.encoders, one)[0][name] for one in microbatches]
        joined = {key: _concatenate([own[key] for own in given]) for key in given[0]}
        moved = self._placement.move_batch(pin_batch(joined) if self._placement.device.type == "cuda" else joined)
        with self._placement.forward_context():
            found = encoder.tokens(moved, joined)
        counts = [count_items(own) for own in given]
        if found.lengths is None or len(found.lengths) != sum(counts):
            return  # it is unknown which tokens belong to which item
        first = start = 0
        for microbatch, count in zip(microbatches, counts, strict=True):
            lengths = found.lengths[first : first + count]
            tokens = found.tokens[start : start + sum(lengths)]
            first, start = first + count, start + sum(lengths)
            if not isinstance(microbatch.get(name), Mapping):
                for key in encoder.input_names:
                    microbatch.pop(key, None)
            known = {"lengths": lengths, "is_known": [True] * count, "digests": [""] * count, "tokens": tokens}
            microbatch[name] = {CACHED_FEATURES: known}


def count_items(inputs: Mapping[str, Any]) -> int:
    """Return the number of items in an encoder's inputs: of its size tensors, or else the first dimension."""
    sizes = [value for key, value in inputs.items() if key.endswith(("grid_thw", "image_sizes"))]
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    return len((sizes or tensors)[0])


def _form(inputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the properties that inputs must share to be concatenated."""
    return [
        (key, (value.shape[1:], value.dtype) if isinstance(value, Tensor) and value.dim() else repr(value))
        for key, value in sorted(inputs.items())
    ]


def _concatenate(values: Sequence[Any]) -> Any:
    return torch.cat(list(values)) if isinstance(values[0], Tensor) and values[0].dim() else values[0]


def _is_unchanged(own: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    return own.keys() == given.keys() and all(own[key] is given[key] for key in own)
