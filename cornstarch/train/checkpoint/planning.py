"""What the processes of a run have, put together before anything is written: who writes what, and one JSON for all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.train.checkpoint.files import DTYPES
from cornstarch.train.checkpoint.pieces import Box, Sharded, Tensorlike, is_cut, parts_of, tile
from cornstarch.train.checkpoint.reading import Form

PER_RANK = "per_rank"
"""The key of `data` under which each process keeps something of its own."""

Description = dict[str, Any]
Parts = dict[str, dict[str, Any]]
"""By name: `dtype` and `shape` of a tensor, and its `parts` as [rank that writes it, offsets, sizes]."""


def describe(
    step: object, tensors: Mapping[str, Tensorlike], data: Mapping[str, Any], metric: float | None, form: object
) -> Description:
    """Return what this process wants to save, as JSON; refuse what cannot be saved."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ConfigError(f"step = {step!r}; expected a whole number, 0 or more.")
    if form not in get_args(Form):
        raise ConfigError(f"form = {form!r}; expected one of {', '.join(get_args(Form))}.")
    _check_tensors(tensors)
    _check_plain(data, "data")
    return {
        "step": step,
        "form": form,
        "metric": None if metric is None or not math.isfinite(metric) else float(metric),
        "tensors": {name: _described(tensor) for name, tensor in tensors.items()},
        "meshes": sorted({_mesh(tensor) for tensor in tensors.values() if is_cut(tensor)}),
        "data": data,
    }


def _described(tensor: Tensorlike) -> dict[str, Any]:
    boxes = [[list(box.offsets), list(box.sizes)] for box, _ in parts_of(tensor)]
    return {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "boxes": boxes}


def _mesh(tensor: Any) -> str:
    """Return the mesh that a tensor is spread over, for people: `replicate 2 x shard 4`."""
    if isinstance(tensor, Sharded) and tensor.boxes is None:
        return "flat"
    spread: Any = tensor.local if isinstance(tensor, Sharded) else tensor
    mesh = spread.device_mesh
    names = mesh.mesh_dim_names or [f"axis {number}:" for number in range(mesh.ndim)]
    return " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))


# ---------------------------------------------------------------------------------------------------- together


def common(descriptions: Sequence[Description], key: str) -> Any:
    """Return what all processes say alike."""
    return _joined([(rank, one[key]) for rank, one in enumerate(descriptions)], key)


def writers(descriptions: Sequence[Description]) -> Parts:
    """Return who writes which part of which tensor.

    What several processes have, a replicated part or a plain tensor of the same name, the lowest of them writes. Plain
    tensors of one name are taken to be equal; if they are not (running means of a batch norm), the lowest rank's count.
    """
    found: Parts = {}
    taken: dict[str, dict[tuple[Any, ...], list[Any]]] = {}
    for rank, description in enumerate(descriptions):
        for name, entry in description["tensors"].items():
            known = found.setdefault(name, {"dtype": entry["dtype"], "shape": entry["shape"], "parts": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise ConfigError(
                    f"{name} is {entry['dtype']} {entry['shape']} on rank {rank}, but {known['dtype']} "
                    f"{known['shape']} on a lower one."
                )
            for offsets, sizes in entry["boxes"]:
                taken.setdefault(name, {}).setdefault((*offsets, *sizes), [rank, offsets, sizes])
    for name, entry in found.items():
        entry["parts"] = list(taken.get(name, {}).values())
        boxes = [Box(tuple(offsets), tuple(sizes)) for _, offsets, sizes in entry["parts"]]
        if not tile(entry["shape"], boxes):
            raise ConfigError(
                f"{name} {entry['shape']} cannot be saved: the parts that the {len(descriptions)} processes have do "
                f"not make a whole ({', '.join(map(str, boxes[:4]))})."
            )
    return found


def joined_data(descriptions: Sequence[Description]) -> dict[str, Any]:
    """Return the JSON of all processes as one: what only some have is added, what they have alike is there once."""
    given = [dict(one["data"]) for one in descriptions]
    apart = {str(rank): one.pop(PER_RANK) for rank, one in enumerate(given) if PER_RANK in one}
    joined: dict[str, Any] = _joined(list(enumerate(given)), "data")
    return {**joined, PER_RANK: apart} if apart else joined


def _joined(values: list[tuple[int, Any]], at: str) -> Any:
    (first_rank, first), *rest = values
    if not rest:
        return first
    if all(isinstance(value, Mapping) for _, value in values):
        keys = dict.fromkeys(key for _, value in values for key in value)
        return {
            key: _joined([(rank, value[key]) for rank, value in values if key in value], f"{at}.{key}") for key in keys
        }
    text = json.dumps(first)
    for rank, value in rest:
        if json.dumps(value) != text:
            raise ConfigError(
                f"The processes do not save the same thing: {at} is {_short(text)} on rank {first_rank}, "
                f"{_short(json.dumps(value))} on rank {rank}. What differs belongs under data[{PER_RANK!r}]."
            )
    return first


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


# ---------------------------------------------------------------------------------------------------- what is given


def _check_tensors(tensors: Mapping[str, Tensorlike]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise ConfigError(f"A tensor cannot be saved under the name {name!r}.")
        if tensor.dtype not in DTYPES:
            raise ConfigError(f"{name} cannot be saved: safetensors has no {tensor.dtype}.")
        try:
            held = [part for _, part in parts_of(tensor)]
        except (ValueError, RuntimeError) as error:  # sums that were not added up over processes yet
            raise ConfigError(f"{name} cannot be saved: {error}") from error
        for part in held:
            if type(part) is not Tensor or part.layout is not torch.strided or part.is_meta:
                raise ConfigError(
                    f"{name} cannot be saved: it is no plain dense tensor with values, but a {type(part).__name__} "
                    f"({part.layout}, on {part.device})."
                )


def _check_plain(value: object, at: str) -> None:
    """Refuse what JSON would change on the way or cannot hold."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{at} has the key {key!r}, a {type(key).__name__}; JSON has words as keys only.")
            _check_plain(item, f"{at}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_plain(item, f"{at}.{index}")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ConfigError(f"{at} is a {type(value).__name__}, which JSON cannot hold; tensors are given apart.")
