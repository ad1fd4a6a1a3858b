"""Nested values as JSON and named tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.train.checkpoint.pieces import Sharded, Tensorlike


def pack(value: Any, at: str, tensors: dict[str, Tensorlike]) -> Any:
    """Return a nested value as JSON that `unpack` turns back into an equal one; tensors go into `tensors`."""
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
            return {key: pack(item, f"{at}/{key}", tensors) for key, item in value.items()}
        pairs = enumerate(value.items())
        return {"$items": [[pack(k, at, tensors), pack(v, f"{at}/{i}", tensors)] for i, (k, v) in pairs]}
    if isinstance(value, (list, tuple)):
        items = [pack(item, f"{at}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise ConfigError(
        f"{at} is a {type(value).__name__}, which cannot be saved. Give numbers, texts, tensors, arrays, and lists, "
        "tuples and dictionaries of them."
    )


def unpack(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Return what `pack` packed; the tensors are copies."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]].clone()
    if "$array" in value:
        return tensors[value["$array"]].numpy().copy()
    if "$tuple" in value:
        return tuple(unpack(item, tensors) for item in value["$tuple"])
    if "$items" in value:
        return {unpack(key, tensors): unpack(item, tensors) for key, item in value["$items"]}
    return {key: unpack(item, tensors) for key, item in value.items()}


def tensor_names(value: Any) -> list[str]:
    """Return the names of the tensors in something packed."""
    if isinstance(value, dict) and ("$tensor" in value or "$array" in value):
        return list(value.values())
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [name for part in parts for name in tensor_names(part)]
