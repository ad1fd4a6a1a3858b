"""Rows of any fields into a batch: by a function of the user's, or stacked field by field."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.train.config import DataConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.media import load_audio, load_image
from cornstarch.train.data.sample import Media, Sample, SampleError
from cornstarch.train.tasks.text import numbers_of

CollateFunction = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
"""Makes a batch of rows; their images are RGB images of Pillow, their sounds float32 arrays."""

_LABELS = ("label", "labels")


class PreparedRow(NamedTuple):
    """One row, decoded."""

    id: str
    epoch: int
    fields: Mapping[str, Any]
    items: Mapping[str, int]
    """Images and sounds in it."""


class RowCollator:
    """Makes batches of rows.

    Args:
        data: The limits.
        seed: Of the random numbers that `collate` draws. They depend on the samples and the epoch besides, so they are
            the same after resuming and with any number of workers, and the model's own are left alone.
        collate: What makes a batch of rows. Default: numbers, arrays and images are stacked.
    """

    def __init__(self, data: DataConfig, seed: int, collate: CollateFunction | None = None) -> None:
        self.data, self.seed, self.collate = data, seed, collate

    def prepare(self, sample: Sample) -> PreparedRow:
        """Decode one row."""
        if not sample.fields:
            raise SampleError("has no fields")
        if all(isinstance(value, Tensor) and not value.requires_grad for value in sample.fields.values()):
            return PreparedRow(sample.id, sample.epoch, sample.fields, {})  # nothing to decode
        items: dict[str, int] = {}
        fields = {name: self._decoded(value, items) for name, value in sample.fields.items()}
        if self.collate is None:
            fields = {name: _as_value(name, value) for name, value in fields.items()}
        return PreparedRow(sample.id, sample.epoch, fields, items)

    def _decoded(self, value: Any, items: dict[str, int]) -> Any:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, list | tuple) and any(isinstance(one, Media) for one in value):
            return [self._decoded(one, items) for one in value]
        if isinstance(value, Image.Image):
            value = Media("image", value)
        if not isinstance(value, Media):
            return value
        items[value.kind] = items.get(value.kind, 0) + 1
        if _is_ready(value):
            return value.source
        return load_image(value, self.data.max_pixels) if value.kind == "image" else load_audio(value, None)

    def join(self, samples: Sequence[PreparedRow]) -> CollatedBatch:
        """Return the batch of prepared rows; the loss is a mean over them."""
        ids = [sample.id for sample in samples]
        inputs = stacked(samples) if self.collate is None else self._own(self.collate, samples)
        items: dict[str, int] = {}
        for sample in samples:
            for kind, count in sample.items.items():
                items[kind] = items.get(kind, 0) + count
        return CollatedBatch(inputs, ids, len(ids), len(ids), items)

    def _own(self, collate: CollateFunction, samples: Sequence[PreparedRow]) -> dict[str, Any]:
        name = str(getattr(collate, "name", getattr(collate, "__name__", "collate")))
        place = "\0".join([str(self.seed), str(samples[0].epoch), *(sample.id for sample in samples)])
        try:
            with _random_numbers_of(place):
                made = collate([dict(sample.fields) for sample in samples])
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{name} failed with {samples[0].id} and {len(samples) - 1} more rows: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, Mapping) or not all(isinstance(key, str) for key in made):
            raise ConfigError(f"{name} returned a {type(made).__name__}, expected a dict with names as keys.")
        return dict(made)


def _is_ready(media: Media) -> bool:
    """Whether an image or a sound is the numbers already that a model takes."""
    source = media.source
    return isinstance(source, Tensor) or (
        media.kind == "image" and isinstance(source, np.ndarray) and source.dtype != np.uint8
    )


@contextmanager
def _random_numbers_of(place: str) -> Iterator[None]:
    """Give a block random numbers of its own; outside of it all go on as if it had not been."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    first, *words = numbers_of(place)
    try:
        random.seed(first)
        np.random.seed(words)
        torch.default_generator.manual_seed(first)  # not manual_seed: that is the GPU's too
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


# ------------------------------------------------------------------------------------------------ stacking


def _as_value(name: str, value: Any) -> Any:
    """Return a field as a tensor if it is numbers, an image or a sound; texts and the like as they are."""
    if isinstance(value, Tensor):
        return value.detach()
    if name in _LABELS and isinstance(value, str):
        raise ConfigError(
            f"`{name}` is {value!r}: a word has no number. Write numbers into the rows, or give a function `collate` "
            "that turns words into numbers."
        )
    if value is None:
        raise SampleError(f"`{name}` is empty")
    if isinstance(value, Image.Image):
        return torch.from_numpy(np.array(value)).permute(2, 0, 1).float() / 255
    if isinstance(value, np.ndarray | np.generic):
        return _from_array(name, np.asarray(value))
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else torch.long)
    if isinstance(value, list | tuple) and value:
        return _from_list(name, list(value))
    return value


def _from_list(name: str, values: list[Any]) -> Any:
    if all(isinstance(value, str) for value in values):
        return values
    if any(isinstance(value, Image.Image | np.ndarray | Tensor) for value in values):
        parts = [_as_value(name, value) for value in values]
        if len({part.shape for part in parts}) > 1:
            raise SampleError(f"`{name}` has parts of the sizes {_sizes(parts)}, expected one size")
        return torch.stack(parts)
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise SampleError(f"`{name}` is a list that is no table of numbers: {error}") from error
    if array.dtype.kind not in "biuf":
        return values
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def _from_array(name: str, array: np.ndarray) -> Tensor:
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError as error:
        raise SampleError(f"`{name}` is an array of {array.dtype}, expected numbers") from error


def stacked(samples: Sequence[PreparedRow]) -> dict[str, Any]:
    """Return tensors stacked along a new first dimension, all else as lists, field by field."""
    first = samples[0]
    for sample in samples:
        if first.fields.keys() != sample.fields.keys():
            missing = sorted(map(str, first.fields.keys() ^ sample.fields.keys()))
            raise ConfigError(f"Only one of {first.id} and {sample.id} has {missing}; expected the same in all rows.")
    batch: dict[str, Any] = {}
    for name in first.fields:
        values = [sample.fields[name] for sample in samples]
        if not any(isinstance(value, Tensor) for value in values):
            batch[name] = values
            continue
        try:
            batch[name] = torch.stack(values)
        except (TypeError, RuntimeError):
            _check_alike(name, samples)
            raise
        if any(value.dtype != batch[name].dtype for value in values):  # torch has made one kind of several
            _check_alike(name, samples)
    return batch


def _check_alike(name: str, samples: Sequence[PreparedRow]) -> None:
    """Say which two rows cannot be stacked, if it is that."""
    for other in samples[1:]:
        _check_pair(name, samples[0], other)


def _check_pair(name: str, first: PreparedRow, other: PreparedRow) -> None:
    a, b = first.fields[name], other.fields[name]
    advice = "Give a function `collate` that makes them alike."
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        found = f"{type(a).__name__} in {first.id} and {type(b).__name__} in {other.id}"
    elif a.shape != b.shape:
        found = f"{list(a.shape)} in {first.id} and {list(b.shape)} in {other.id}"
    elif a.dtype != b.dtype:
        found = f"of {_numbers(a)} in {first.id} and of {_numbers(b)} in {other.id}"
        advice = "Write all in one way: 1.0 instead of 1 where others have fractions."
    else:
        return
    raise ConfigError(f"`{name}` is {found}: they cannot be stacked. {advice}")


def _numbers(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sizes(parts: Sequence[Tensor]) -> str:
    return ", ".join(str(list(part.shape)) for part in parts)


__all__ = ["CollateFunction", "PreparedRow", "RowCollator", "stacked"]
