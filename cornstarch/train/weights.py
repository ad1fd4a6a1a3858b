"""Weights of an earlier run: to begin another run with, or to use them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.train.checkpoint import Checkpoint, CheckpointStore
from cornstarch.train.runs import CHECKPOINTS, CONFIG, open_run
from cornstarch.train.state import named_parameters

Which = Literal["best", "last"]

_EXPORTED = "cornstarch_model.json"
_ADAPTER_NAMES = re.compile(r"(?<![^.])base_model\.model\.|\.base_layer(?=\.)")


def without_adapters(name: str) -> str:
    """Return the name that a parameter has without the adapters around it."""
    return _ADAPTER_NAMES.sub("", name)


def checkpoint_of(folder: Path, which: Which | int = "best") -> Checkpoint:
    """Return a checkpoint of a run: the best (without evaluations: the last), the last, or that of a step."""
    run = open_run(folder)
    config = run.stored_config()
    assert config is not None  # open_run
    better: Literal["lower", "higher"] = "lower" if config.checkpoint.best_by == "loss" else "higher"
    store = CheckpointStore(run / CHECKPOINTS, config.checkpoint.keep, better)
    if isinstance(which, int):
        return store.verify(which)
    found = (store.best() if which == "best" else None) or store.latest()
    if found is None:
        raise ConfigError(f"{folder} has no checkpoint yet.")
    return found


@torch.no_grad()
def begin_with(model: nn.Module, folder: Path) -> None:
    """Give a model the weights of a run, or of a model exported from one.

    A run holds what it trained; what it kept frozen comes from where its description says: from an earlier run, whose
    weights are then taken first, or from where this model has it too. The model may have adapters around the layers
    that the run trained.
    """
    for stage in _stages(folder):
        with ExitStack() as stack:
            if (stage / CONFIG).is_file():
                checkpoint = checkpoint_of(stage)
                weights = _trained(stack.enter_context(checkpoint.tensors()), checkpoint.data()["state"])
            else:
                weights = _state_of(MultimodalModel.from_pretrained(stage))
            _take_over(model, weights, stage)


def _stages(folder: Path) -> list[Path]:
    """Return the runs that built upon each other, the first one first."""
    stages: list[Path] = []
    following: Path | None = folder
    while following is not None:
        if following in stages:
            raise ConfigError(f"model.start_from = {folder}\n  This run begins, by way of others, with itself.")
        stages.insert(0, following)
        following = _earlier(following)
    return stages


def _earlier(folder: Path) -> Path | None:
    if (folder / CONFIG).is_file():
        config = open_run(folder).stored_config()
        assert config is not None  # open_run
        return None if config.model.start_from is None else Path(config.model.start_from)
    if not (folder / _EXPORTED).is_file():
        raise ConfigError(
            f"model.start_from = {folder}\n  Expected the folder of a run ({CONFIG}) or of a model exported from "
            f"one ({_EXPORTED}); it has neither."
        )
    return None


def _trained(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a checkpoint has of its model, with averaged weights if there are any."""
    kinds = {kind: [name for name in tensors if name.startswith(kind)] for kind in ("parameters/", "ema/", "buffers/")}
    kept = [f"buffers/{name}" for name, entry in state["buffers"].items() if entry["persistent"]]
    names = [*kinds["parameters/"], *kinds["ema/"], *(name for name in kinds["buffers/"] if name in kept)]
    return {name.partition("/")[2]: tensors[name] for name in names}


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, and the buffers that belong to the model's state, by their names."""
    kept = model.state_dict().keys()
    return {**named_parameters(model), **{name: buffer for name, buffer in model.named_buffers() if name in kept}}


def _take_over(model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    own = _state_of(model)
    by_plain_name = {without_adapters(name): tensor for name, tensor in own.items()}
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
