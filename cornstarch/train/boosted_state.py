"""A model's weights alone, an optimizer's states alone, or other plain values, in a folder that any layout loads.

They are saved as checkpoints are (`checkpoint`): safetensors and JSON, complete or not at all, in a folder of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.parallel.data import reshard
from cornstarch.train.checkpoint import CheckpointStore, Sharded
from cornstarch.train.checkpoint.pieces import Tensorlike
from cornstarch.train.checkpoint.ranks import Ranks
from cornstarch.train.holdings import (
    describe,
    held_parameters,
    is_trained,
    named_buffers,
    named_parameters,
)
from cornstarch.train.nested import pack, tensor_names, unpack
from cornstarch.train.optimizer_state import (
    group_members,
    joined_groups,
    needed_tensors,
    optimizer_differences,
    packed_groups,
    packed_states,
    restore_optimizer,
)
from cornstarch.train.state import FORMAT, restore_weights

_SHOWN = 5


# ---------------------------------------------------------------------------------------------------- models


def save_weights(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Save all parameters and buffers of a model, of which each process has its part; all must call it."""
    reshard(model)
    held = held_parameters(model, Ranks.here())
    tensors: dict[str, Tensorlike] = {f"parameters/{name}": _live(parameter) for name, parameter in held.items()}
    tensors |= {f"buffers/{name}": buffer.detach() for name, buffer, _ in named_buffers(model)}
    state = {
        "format": FORMAT,
        "parameters": {
            name: {"is": describe(parameter), "trained": is_trained(parameter), "saved": True}
            for name, parameter in held.items()
        },
        "buffers": {n: {"is": describe(b), "persistent": persistent} for n, b, persistent in named_buffers(model)},
        "ema": None,
    }
    return _saved(folder, "model", tensors, {"state": state})


def load_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Fill a model, of which each process takes what it has; all must call it."""
    found = _found(folder, "model")
    with found.tensors() as tensors:
        restore_weights(tensors, found.data(), model)


# ---------------------------------------------------------------------------------------------------- optimizers


def save_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str], more: Mapping[str, Any]
) -> Path:
    """Save the states and options of an optimizer, and some plain values with it; all processes must call it."""
    ranks = Ranks.here()
    reshard(model)
    tensors: dict[str, Tensorlike] = {}
    parameters, held = named_parameters(model), held_parameters(model, ranks)
    groups = ranks.reduced(lambda: packed_groups(optimizer, parameters, tensors), joined_groups)
    saved = {
        "class": type(optimizer).__qualname__,
        "groups": groups,
        **packed_states(optimizer, parameters, held, tensors),
    }
    return _saved(folder, "optimizer", tensors, {"optimizer": saved, "more": dict(more)})


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]
) -> dict[str, Any]:
    """Bring an optimizer into a saved state; return what was saved with it. All processes must call it."""
    ranks = Ranks.here()
    reshard(model)
    checkpoint = _found(folder, "optimizer")
    data = checkpoint.data()
    saved, (parameters, held) = data["optimizer"], (named_parameters(model), held_parameters(model, ranks))

    def held_here() -> list[str]:
        return [name for members in group_members(optimizer, parameters) for name in members]

    of_all = ranks.reduced(held_here, lambda found: list(dict.fromkeys(name for one in found for name in one)))
    with checkpoint.tensors() as tensors:

        def check() -> None:
            differences = optimizer_differences(saved, optimizer, parameters, of_all)
            if differences:
                shown = "\n  ".join(differences[:_SHOWN])
                raise ConfigError(f"{folder} does not fit the optimizer, and nothing was loaded:\n  {shown}")
            missing = [name for name in needed_tensors(saved, optimizer, parameters, held) if name not in tensors]
            if missing:
                raise ConfigError(f"{folder} is incomplete: {missing[0]} is missing. Nothing was loaded.")

        ranks.agreed(check)
        ranks.agreed(lambda: restore_optimizer(saved, tensors, optimizer, parameters, held))
    return dict(data["more"])


# ---------------------------------------------------------------------------------------------------- plain values


def save_values(values: Mapping[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Save numbers, texts, tensors, and lists and dictionaries of them, alike in all processes; all must call it."""
    tensors: dict[str, Tensorlike] = {}
    packed = pack(dict(values), "values", tensors)
    return _saved(folder, "values", tensors, {"values": packed})


def load_values(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `save_values` saved; all processes must call it."""
    found = _found(folder, "values")
    packed = found.data()["values"]
    with found.tensors() as tensors:
        assert all(name in tensors for name in tensor_names(packed))
        values: dict[str, Any] = unpack(packed, tensors)
    return values


# ---------------------------------------------------------------------------------------------------- folders


def _saved(folder: str | os.PathLike[str], what: str, tensors: dict[str, Tensorlike], data: dict[str, Any]) -> Path:
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; expected a folder, or a name that is free.")
    return CheckpointStore(path, keep=1).save(0, tensors, {**data, "holds": what})


def _found(folder: str | os.PathLike[str], what: str) -> Any:
    found = CheckpointStore(folder, keep=1).latest()
    if found is None:
        raise ConfigError(f"{folder} has nothing that booster.save_{what} saved.")
    holds = None
    with suppress(AttributeError):
        holds = found.data().get("holds")
    if holds != what:
        raise ConfigError(f"{folder} holds {holds or 'a checkpoint of a run'}, not what was asked for: {what}.")
    return found


def _live(tensor: Tensorlike) -> Tensorlike:
    return tensor if isinstance(tensor, Sharded) else tensor.detach()


__all__ = [
    "load_optimizer_state", "load_values", "load_weights", "save_optimizer_state", "save_values", "save_weights",
]  # fmt: skip
