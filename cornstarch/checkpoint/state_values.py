"""Nested values as JSON and named tensors, and back; and the states of random number generators as such values."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.checkpoint.shards import Sharded, Tensorlike
from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed


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


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the generator states of Python, NumPy, torch, and of every GPU that this process uses."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # One of several processes has one GPU; asking for the others would take memory on each of them.
        state["cuda"] = (
            torch.cuda.get_rng_state_all() if distributed.is_single_process() else [torch.cuda.get_rng_state()]
        )
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore a `random_state`; GPUs that only one of the two machines has are left alone."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count()) if distributed.is_single_process() else [torch.cuda.current_device()]
        for index, one in zip(devices, state.get("cuda", []), strict=False):
            torch.cuda.set_rng_state(one, index)


def flatten_random_state(
    state: Mapping[str, Any], rank: int, size: int, tensors: dict[str, Tensorlike]
) -> dict[str, Any]:
    """Return the random state of a rank for a checkpoint, where `rngs` has those of all ranks by number."""
    if size == 1:
        return {"rng": flatten_values(state, "rng", tensors)}
    return {"rng": None, "rngs": {str(rank): flatten_values(state, f"rng/{rank}", tensors)}}


def find_random_state(saved: Mapping[str, Any], rank: int, size: int) -> tuple[Any, bool]:
    """Return the saved random state for one of `size` ranks, and whether the rank saved it itself."""
    states = saved.get("rngs") or {"0": saved["rng"]}
    is_own = len(states) == size
    return states[str(rank) if is_own else "0"], is_own


def resume_random_state(saved: Mapping[str, Any], tensors: Mapping[str, Any], rank: int, size: int) -> None:
    """Continue a rank's random numbers; with another number of ranks than before, seed it from the saved state."""
    flat, is_own = find_random_state(saved, rank, size)
    if is_own:
        return restore_random_state(unflatten_values(flat, tensors))
    # The seed depends on rank 0's random state, on `rank` and on `size` alone: a checkpoint is resumed in the same way
    # each time, and no two ranks draw the same numbers.
    digest = hashlib.sha256(json.dumps([flat, rank, size]).encode())
    for name in sorted(list_tensors(flat)):
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    seed_all(int.from_bytes(digest.digest()[:8], "little") >> 1)
