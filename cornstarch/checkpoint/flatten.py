"""Nested state dicts as JSON and named tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.checkpoint.shards import Sharded, Tensorlike
from cornstarch.errors import ConfigError


def flatten_values(value: Any, at: str, tensors: dict[str, Tensorlike]) -> Any:
    """Return a nested value as JSON, from which `unflatten_values` restores it; tensors are put into `tensors`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (Tensor, Sharded, np.ndarray)):
        while at in tensors:
            at += "_"
        if isinstance(value, np.ndarray):
            tensors[at] = torch.from_numpy(value.copy())
            return {"$array": at}
        tensors[at] = value if isinstance(value, Sharded) else value.detach()
        return {"$tensor": at}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: flatten_values(item, f"{at}/{key}", tensors) for key, item in value.items()}
        pairs = enumerate(value.items())
        flat = [[flatten_values(k, at, tensors), flatten_values(v, f"{at}/{i}", tensors)] for i, (k, v) in pairs]
        return {"$items": flat}
    if isinstance(value, (list, tuple)):
        items = [flatten_values(item, f"{at}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise ConfigError(
        f"{at} is a {type(value).__name__}, which cannot be saved. Give numbers, texts, tensors, arrays, and lists, "
        "tuples and dictionaries of them."
    )


def unflatten_values(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the value that `flatten_values` was given; the tensors are copies."""
    if isinstance(value, list):
        return [unflatten_values(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]].clone()
    if "$array" in value:
        return tensors[value["$array"]].numpy().copy()
    if "$tuple" in value:
        return tuple(unflatten_values(item, tensors) for item in value["$tuple"])
    if "$items" in value:
        return {unflatten_values(key, tensors): unflatten_values(item, tensors) for key, item in value["$items"]}
    return {key: unflatten_values(item, tensors) for key, item in value.items()}


def list_tensors(value: Any) -> list[str]:
    """Return the names of the tensors in a flattened value."""
    if isinstance(value, dict) and ("$tensor" in value or "$array" in value):
        return list(value.values())
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [name for part in parts for name in list_tensors(part)]
