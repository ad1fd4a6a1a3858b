"""Parts of a training state: a model's weights, an optimizer's state, plain values; and weights of an earlier run.

`Booster.save_model`, `save_optimizer` and `save_lr_scheduler` write them in the format of checkpoints, each into a
folder of its own, which any layout can load. `initialize_from` starts a model with the weights of another run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cornstarch.checkpoint import named_state
from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.named_state import NamedOptimizer, local_parameters, named_buffers, named_parameters
from cornstarch.checkpoint.reader import Checkpoint
from cornstarch.checkpoint.shards import Tensorlike
from cornstarch.checkpoint.state import describe_model, detach, restore_weights
from cornstarch.checkpoint.state_values import flatten_values, unflatten_values
from cornstarch.checkpoint.store import CheckpointStore
from cornstarch.config import RunConfig
from cornstarch.config.run_folder import CHECKPOINTS, CONFIG, read_run_config
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel.ddp_fsdp import reshard

PathLike = str | os.PathLike[str]
CheckpointChoice = Literal["best", "last"]

_SHOWN = 5
_EXPORTED = "cornstarch_model.json"
_ADAPTER_NAMES = re.compile(r"(?<![^.])base_model\.model\.|\.base_layer(?=\.)")

# All calls that save and load parts of a state are collective.


def save_weights(model: nn.Module, folder: PathLike) -> Path:
    """Save all parameters and buffers of a model."""
    reshard(model)
    local = local_parameters(model)
    tensors: dict[str, Tensorlike] = {f"parameters/{name}": detach(parameter) for name, parameter in local.items()}
    tensors |= {f"buffers/{name}": buffer.detach() for name, buffer, _ in named_buffers(model)}
    return _save_part(folder, "model", tensors, {"state": {**describe_model(model, local, {}), "ema": None}})


def load_weights(model: nn.Module, folder: PathLike) -> None:
    """Load the weights that `save_weights` saved, in any layout."""
    checkpoint = _open_part(folder, "model")
    with checkpoint.tensors() as tensors:
        restore_weights(tensors, checkpoint.data(), model)


def save_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: PathLike, more: Mapping[str, Any]
) -> Path:
    """Save the state and options of an optimizer, and the plain values `more`."""
    reshard(model)
    tensors: dict[str, Tensorlike] = {}
    named = NamedOptimizer(optimizer, model)
    groups = Coordinator.default().reduce(lambda: named.flatten_groups(tensors), named_state.merge_groups)
    saved = named.flatten(groups, tensors)
    return _save_part(folder, "optimizer", tensors, {"optimizer": saved, "more": dict(more)})


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: PathLike) -> dict[str, Any]:
    """Load an optimizer state, in any layout; return the `more` that was saved with it."""
    coordinator = Coordinator.default()
    reshard(model)
    checkpoint = _open_part(folder, "optimizer")
    data = checkpoint.data()
    saved, named = data["optimizer"], NamedOptimizer(optimizer, model)
    optimized = coordinator.reduce(
        lambda: sum(named.members, []),
        lambda found: list(dict.fromkeys(name for one in found for name in one)),
    )
    with checkpoint.tensors() as tensors:

        def check() -> None:
            if differences := named.find_differences(saved, optimized):
                shown = "\n  ".join(differences[:_SHOWN])
                raise ConfigError(f"{folder} does not fit the optimizer, and nothing was loaded:\n  {shown}")
            if missing := [name for name in named.list_needed_tensors(saved) if name not in tensors]:
                raise ConfigError(f"{folder} is incomplete: {missing[0]} is missing. Nothing was loaded.")

        coordinator.run_on_all(check)
        coordinator.run_on_all(lambda: named.restore(saved, tensors))
    return dict(data["more"])


def save_values(values: Mapping[str, Any], folder: PathLike) -> Path:
    """Save numbers, strings, tensors, and lists and dictionaries of them, alike on all ranks."""
    tensors: dict[str, Tensorlike] = {}
    flat = flatten_values(dict(values), "values", tensors)
    return _save_part(folder, "values", tensors, {"values": flat})


def load_values(folder: PathLike) -> dict[str, Any]:
    """Return the values that `save_values` saved."""
    checkpoint = _open_part(folder, "values")
    with checkpoint.tensors() as tensors:
        values: dict[str, Any] = unflatten_values(checkpoint.data()["values"], tensors)
    return values


def _save_part(folder: PathLike, kind: str, tensors: dict[str, Tensorlike], data: dict[str, Any]) -> Path:
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; expected a folder, or a name that is free.")
    return CheckpointStore(folder, keep=1).save(0, tensors, {**data, "holds": kind})


def _open_part(folder: PathLike, kind: str) -> Checkpoint:
    found = CheckpointStore(folder, keep=1).latest()
    if found is None:
        raise ConfigError(f"{folder} has nothing that booster.save_{kind} saved.")
    data = found.data()
    holds = data.get("holds") if isinstance(data, dict) else None
    if holds != kind:
        raise ConfigError(f"{folder} holds {holds or 'a checkpoint of a run'}, not what was asked for: {kind}.")
    return found


def open_store(config: RunConfig, folder: Path) -> CheckpointStore:
    """Return the checkpoints of the run in a folder, which its config may keep elsewhere."""
    better: Literal["lower", "higher"] = "lower" if config.checkpoint.best_by == "loss" else "higher"
    return CheckpointStore(config.checkpoint.folder or folder / CHECKPOINTS, config.checkpoint.keep, better)


def open_checkpoint(folder: Path, which: CheckpointChoice | int = "best") -> Checkpoint:
    """Return a checkpoint of a run: the best (without evaluations: the last), the last, or that of a step."""
    store = open_store(read_run_config(folder), folder)
    if isinstance(which, int):
        return store.verify(which)
    found = (store.best() if which == "best" else None) or store.latest()
    if found is None:
        raise ConfigError(f"{folder} has no checkpoint yet.")
    return found


@torch.no_grad()
def initialize_from(model: nn.Module, folder: Path) -> None:
    """Load the weights of a run, or of a model exported from one, into a model.

    A run has the weights that it trained. Its frozen weights come from an earlier run, which is then loaded first, or
    from where this model has them too. The model may have adapters around the layers that the run trained.
    """
    for stage in _list_stages(folder):
        with ExitStack() as stack:
            if (stage / CONFIG).is_file():
                checkpoint = open_checkpoint(stage)
                tensors, state = stack.enter_context(checkpoint.tensors()), checkpoint.data()["state"]
                names = [name for kind in ("parameters/", "ema/") for name in tensors if name.startswith(kind)]
                names += [f"buffers/{name}" for name, entry in state["buffers"].items() if entry["persistent"]]
                # Averaged weights come later, and so replace the others.
                weights = {name.partition("/")[2]: tensors[name] for name in names if name in tensors}
            else:
                weights = _model_state(MultimodalModel.from_pretrained(stage))
            _assign_weights(model, weights, stage)


def _list_stages(folder: Path) -> list[Path]:
    """Return the runs that were started from each other, the first one first."""
    stages: list[Path] = []
    following: Path | None = folder
    while following is not None:
        if following in stages:
            raise ConfigError(f"model.start_from = {folder}\n  This run begins, by way of others, with itself.")
        stages.insert(0, following)
        earlier = None
        if (following / CONFIG).is_file():
            earlier = read_run_config(following).model.start_from
        elif not (following / _EXPORTED).is_file():
            raise ConfigError(
                f"model.start_from = {following}\n  Expected the folder of a run ({CONFIG}) or of a model exported "
                f"from one ({_EXPORTED}); it has neither."
            )
        following = None if earlier is None else Path(earlier)
    return stages


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    return {**named_parameters(model), **{name: buffer for name, buffer, keeps in named_buffers(model) if keeps}}


def strip_adapter_names(name: str) -> str:
    """Return the name of a parameter without the adapters around it."""
    return _ADAPTER_NAMES.sub("", name)


def _assign_weights(model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    own = _model_state(model)
    by_plain_name = {strip_adapter_names(name): tensor for name, tensor in own.items()}
    targets = {name: own.get(name, by_plain_name.get(name)) for name in weights}
    wrong = [f"{name} is not in this model" for name, target in targets.items() if target is None]
    wrong += [
        f"{name} is {list(weights[name].shape)} there, {list(target.shape)} here"
        for name, target in targets.items()
        if target is not None and target.shape != weights[name].shape
    ]
    if wrong:
        raise ConfigError(
            f"model.start_from = {folder}\n  Its weights do not fit this model: {'; '.join(wrong[:3])}"
            + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            + ". Describe the same parts as that run did."
        )
    for name, target in targets.items():
        assert target is not None
        target.data = weights[name].detach().clone().to(target.device)
