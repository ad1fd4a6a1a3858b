"""Random number generators: seed them, save their states, and restore them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cornstarch.checkpoint.flatten import flatten_values, list_tensors, unflatten_values
from cornstarch.checkpoint.shards import Tensorlike
from cornstarch.parallel import distributed


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
        restore_random_state(unflatten_values(flat, tensors))
    else:
        seed_all(derive_seed(flat, tensors, rank, size))


def derive_seed(flat: Any, tensors: Mapping[str, Any], rank: int, size: int) -> int:
    """Return the seed of one of `size` ranks that resume a run of another number of ranks.

    The seed depends on rank 0's flattened random state, on `rank` and on `size` alone: a checkpoint is resumed in the
    same way each time, and no two ranks draw the same numbers.
    """
    digest = hashlib.sha256(json.dumps([flat, rank, size]).encode())
    for name in sorted(list_tensors(flat)):
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 1
