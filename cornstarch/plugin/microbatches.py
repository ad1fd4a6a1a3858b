"""A batch cut into microbatches, sample by sample, with the images and sounds that belong to each.

A processor lays the items of all samples in one row (`pixel_values` [images, …]), or even the patches of all images.
Which belong to which sample follows from the text: each sample has as many placeholders as its items make tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.items import Features
from cornstarch.models.multimodal_language_model.merge import check_counts, placeholder_masks
from cornstarch.models.multimodal_language_model.preprocessing.features import FeatureCounter

Batch = Mapping[str, Any]

_TEXT = ("input_ids", "inputs_embeds", "labels", "attention_mask")


@dataclass(frozen=True)
class _Encoder:
    """What is known of an encoder before the model is cut."""

    names: tuple[str, ...]
    """Keys of a batch that it takes."""
    triggers: tuple[str, ...]
    """Those of which one must be there for it to run."""
    counter: FeatureCounter


@dataclass(frozen=True)
class _Items:
    """The items of one modality in a batch."""

    modality: str
    starts: list[int]
    """The first item of each sample, and behind the last one their number."""
    patches: list[int] | None
    """Of each item, where all of them come in one row."""

    @property
    def count(self) -> int:
        return self.starts[-1]


class BatchCutter:
    """Cuts batches.

    Args:
        model: The model, before it is cut itself.
        microbatches: Parts of a batch; None: what follows from `size`.
        size: Samples of a part; None: what follows from `microbatches`.
    """

    def __init__(self, model: nn.Module, microbatches: int | None, size: int | None) -> None:
        self._model, self._microbatches, self._size = model, microbatches, size
        self._encoders: dict[str, _Encoder] = {}
        if isinstance(model, MultimodalModel):
            # The copy of a counter has shapes only: weights of other stages are given up.
            self._encoders = {
                name: _Encoder(encoder.input_names, encoder.trigger_names, copy.copy(FeatureCounter(encoder)))
                for name, encoder in model.encoders.items()
            }

    def cut(self, batch: Any) -> list[dict[str, Any]]:
        """Return the microbatches of a batch, in order."""
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"A batch is a {type(batch).__name__}; expected a dictionary: the model is called with model(**batch)."
            )
        given = {key: value for key, value in batch.items() if value is not None}
        samples = count_samples(given)
        size = self.size_of(samples)
        if size == samples:
            return [given]
        items = {name: self._items(name, given, samples) for name in self.modalities(given)}
        return [self._part(given, items, samples, start, start + size) for start in range(0, samples, size)]

    def modalities(self, batch: Batch) -> list[str]:
        """Return the encoders that a batch has something for."""
        return [
            name
            for name, encoder in self._encoders.items()
            if isinstance(batch.get(name), Mapping) or any(batch.get(key) is not None for key in encoder.triggers)
        ]

    def size_of(self, samples: int) -> int:
        """Return the samples of each microbatch of a batch."""
        many, size = self._microbatches, self._size
        if many is not None and size is not None and many * size != samples:
            raise ConfigError(
                f"num_microbatches = {many} and microbatch_size = {size} take batches of {many * size} samples; this "
                f"one has {samples}. Give one of the two, or let the dataloader make such batches "
                f"(batch_size={many * size}, drop_last=True)."
            )
        name, number = ("num_microbatches", many) if many is not None else ("microbatch_size", size)
        assert number is not None
        if not samples or samples % number:
            fitting = [str(n) for n in range(1, samples + 1) if samples % n == 0]
            advice = f"Use {' or '.join(fitting[-6:])}, or another" if fitting else "Use another"
            raise ConfigError(
                f"{name} = {number}: a batch of {samples} samples does not divide by it. {advice} batch_size "
                "(drop_last=True leaves out a last batch that is smaller)."
            )
        return samples // number if many is not None else number

    # -------------------------------------------------------------------------------------------- items

    def _own(self, name: str, batch: Batch) -> dict[str, Any]:
        """Return what of a batch is an encoder's."""
        if isinstance(nested := batch.get(name), Mapping):
            return {key: value for key, value in nested.items() if value is not None}
        return {key: batch[key] for key in self._encoders[name].names if key in batch}

    def _items(self, name: str, batch: Batch, samples: int) -> _Items:
        own = self._own(name, batch)
        tokens = self._tokens(name, batch)
        grid = next((value for key, value in own.items() if key.endswith("grid_thw")), None)
        patches = None if grid is None else torch.as_tensor(grid).prod(-1).tolist()
        counter = self._encoders[name].counter
        try:
            lengths = counter.lengths(counter.arguments(own))
        except ConfigError as error:  # it depends on values; then only one item in each sample is certain
            first = next((value for value in own.values() if isinstance(value, Tensor | list)), [])
            if len(first) != samples or (tokens is not None and not all(tokens.sum(-1))):
                raise ConfigError(
                    f"The batch cannot be cut: it is unknown which {name} items belong to which sample ({error}) "
                    "Have one item in each sample, or cut into one microbatch."
                ) from error
            return _Items(name, list(range(samples + 1)), patches)
        if tokens is None:
            raise ConfigError(
                f"The batch cannot be cut: without input_ids it is unknown which {name} items belong to which sample."
            )
        check_counts(name, tokens, Features(torch.empty(sum(lengths), 0), list(lengths)))
        return _Items(name, _starts(tokens.sum(-1).tolist(), lengths), patches)

    def _tokens(self, name: str, batch: Batch) -> Tensor | None:
        """Return where the placeholders of a modality are."""
        assert isinstance(self._model, MultimodalModel)
        known = self._model.modality_token_ids
        if name not in known:
            raise ConfigError(
                f"The batch has {name} items, and the model does not know their token: make the processor with "
                "model=…, or call set_modality_token_ids."
            )
        ids = batch.get("input_ids")
        return None if ids is None else placeholder_masks(ids, {name: known[name]})[name]

    # -------------------------------------------------------------------------------------------- cutting

    def _part(self, batch: Batch, items: Mapping[str, _Items], samples: int, start: int, stop: int) -> dict[str, Any]:
        owners = {key: items[name] for name in items for key in (*self._encoders[name].names, name) if key in batch}
        found: dict[str, Any] = {}
        for key, value in batch.items():
            if key not in owners or key in _TEXT:
                found[key] = _rows(key, value, samples, start, stop)
                continue
            one = owners[key]
            if one.starts[start] == one.starts[stop]:
                continue  # no item in these samples: the encoder is not run
            if isinstance(value, Mapping):
                found[key] = {
                    inner: _of_items(f"{key}.{inner}", v, one, samples, start, stop) for inner, v in value.items()
                }
            else:
                found[key] = _of_items(key, value, one, samples, start, stop)
        return found


def count_samples(batch: Batch) -> int:
    """Return how many samples a batch has: the rows of its text, or of its first tensor."""
    for key in _TEXT:
        if isinstance(value := batch.get(key), Tensor) and value.dim():
            return len(value)
    found = next((value for value in batch.values() if isinstance(value, Tensor) and value.dim()), None)
    if found is None:
        raise ConfigError(f"The batch has no tensor whose rows are samples; it has {', '.join(batch) or 'nothing'}.")
    return len(found)


def _starts(tokens: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the first item of each sample, and behind the last one all items; they are known to fit."""
    ends = [0, *accumulate(lengths)]
    starts, item, wanted = [0], 0, 0
    for count in tokens:
        wanted += count
        while item < len(lengths) and ends[item] < wanted:
            item += 1
        starts.append(item)
    starts[-1] = len(lengths)
    return starts


def _rows(key: str, value: Any, samples: int, start: int, stop: int) -> Any:
    """Return some samples' part of what is not an encoder's."""
    if key == "position_ids" and isinstance(value, Tensor) and value.dim() == 3:
        return value[:, start:stop]  # mRoPE: [axes, samples, tokens]
    if isinstance(value, Tensor) and value.dim():
        if len(value) == samples:
            return value[start:stop]
        if key == "position_ids" and len(value) == 1:
            return value
        raise ConfigError(
            f"The batch cannot be cut: {key} has shape {list(value.shape)} beside {samples} samples, so it is unknown "
            "which part belongs to which sample. Cut into one microbatch, or let its first dimension be samples."
        )
    if isinstance(value, list | tuple) and len(value) == samples:
        return value[start:stop]
    return value


def _of_items(key: str, value: Any, items: _Items, samples: int, start: int, stop: int) -> Any:
    """Return what belongs to the items of some samples."""
    first, last = items.starts[start], items.starts[stop]
    if not isinstance(value, Tensor | list | tuple) or (isinstance(value, Tensor) and not value.dim()):
        return value  # an option
    if len(value) == items.count:
        return value[first:last]
    if items.patches is not None and len(value) == sum(items.patches):
        return value[sum(items.patches[:first]) : sum(items.patches[:last])]
    if len(value) == samples:
        return value[start:stop]
    raise ConfigError(
        f"The batch cannot be cut: {key} has {len(value)} rows beside {items.count} {items.modality} items of "
        f"{samples} samples, so it is unknown which belong to which item. Cut into one microbatch."
    )


__all__ = ["BatchCutter", "count_samples"]
