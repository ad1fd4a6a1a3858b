"""The random numbers of a process: begun anew, remembered, continued."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cornstarch.train.checkpoint.ranks import world_size
from cornstarch.train.nested import tensor_names


def seed_all(seed: int) -> None:
    """Begin the random numbers of Python, NumPy and torch anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's random numbers, of every GPU that this process uses."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # One of many processes has one GPU; asking for the others would take memory on each of them.
        state["cuda"] = torch.cuda.get_rng_state_all() if world_size() == 1 else [torch.cuda.get_rng_state()]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Continue the random numbers of a `random_state`; GPUs that only one of the two machines has are left alone."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count()) if world_size() == 1 else [torch.cuda.current_device()]
        for index, one in zip(devices, state.get("cuda", []), strict=False):
            torch.cuda.set_rng_state(one, index)


def derived_seed(packed: Any, tensors: Mapping[str, Any], rank: int, size: int) -> int:
    """Return the seed of one of `size` processes that go on where another number of them stopped.

    It depends on the random numbers that rank 0 had, packed with their tensors, on `rank` and on `size`, and on nothing
    else: the same checkpoint continues in the same way each time, and no two processes draw alike.
    """
    digest = hashlib.sha256(json.dumps([packed, rank, size]).encode())
    for name in sorted(tensor_names(packed)):
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 1
