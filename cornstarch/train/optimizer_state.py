"""An optimizer's state by the names of the parameters, whichever process holds it in whatever part."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.train.checkpoint.pieces import Sharded, Tensorlike, is_cut
from cornstarch.train.checkpoint.reading import TensorReader
from cornstarch.train.holdings import describe, fill
from cornstarch.train.nested import pack, tensor_names, unpack

_IMPLEMENTATION = {"foreach", "fused", "capturable", "param_names"}  # how a step is computed, not which step

Group = dict[str, Any]
"""The `parameters` of a group by name, and its `options`, packed."""


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the one that holds states: torch's ZeroRedundancyOptimizer has an ordinary one for its own parameters."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def group_members(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"The optimizer holds a parameter ({describe(parameter)}) that is not one of the model's "
                    f"{len(names)}. Make the optimizer from the model that is trained."
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


# ---------------------------------------------------------------------------------------------------- capturing


def packed_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: dict[str, Tensorlike]
) -> list[Group]:
    """Return the groups that this process has; options that are tensors go into `tensors`."""
    members = group_members(optimizer, parameters)
    groups = [
        {"parameters": names, "options": {key: value for key, value in group.items() if key != "params"}}
        for names, group in zip(members, optimizer.state_dict()["param_groups"], strict=True)
    ]
    packed: list[Group] = pack(groups, "optimizer/groups", tensors)
    return packed


def joined_groups(of_ranks: Sequence[list[Group]]) -> list[Group]:
    """Return the groups of all processes as one list: those with equal options are one group, cut among processes."""
    if all(groups == of_ranks[0] for groups in of_ranks):
        return of_ranks[0]
    joined: dict[str, Group] = {}
    for group in (group for groups in of_ranks for group in groups):
        options = group["options"]
        if tensor_names(options):
            raise ConfigError(
                "Processes hold different parameters in their optimizers, and an option is a tensor "
                f"({tensor_names(options)[0]}), of which nobody could tell whose it is. Give it as a number."
            )
        known = joined.setdefault(json.dumps(options, sort_keys=True), {"parameters": [], "options": options})
        known["parameters"] += [name for name in group["parameters"] if name not in known["parameters"]]
    return list(joined.values())


def packed_states(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    held: Mapping[str, Tensorlike],
    tensors: dict[str, Tensorlike],
) -> dict[str, Any]:
    """Return the states that this process has, by parameter; the tensors go into `tensors`."""
    packed = optimizer.state_dict()
    names = {
        number: name
        for group, members in zip(packed["param_groups"], group_members(optimizer, parameters), strict=True)
        for number, name in zip(group["params"], members, strict=True)
    }
    states = {names[key]: _cut_alike(value, held[names[key]]) for key, value in packed["state"].items() if key in names}
    whole = {key: value for key, value in packed["state"].items() if key not in names}
    return {
        "parameters": pack(states, "optimizer/parameters", tensors),
        "whole": pack(whole, "optimizer/whole", tensors),
    }


def _cut_alike(state: Any, parameter: Tensorlike) -> Any:
    """Mark what is as long as this process's interval of a parameter under FSDP1: it is the same interval."""
    if not isinstance(parameter, Sharded):
        return state
    if isinstance(state, Mapping):
        return {key: _cut_alike(value, parameter) for key, value in state.items()}
    if isinstance(state, Tensor) and state.dim() and state.shape == parameter.local.shape:
        return parameter.over(state)
    return state


# ---------------------------------------------------------------------------------------------------- comparing


def optimizer_differences(
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    held_by_any: Collection[str],
) -> list[str]:
    """Return in what the optimizers of all processes are not the saved one."""
    if saved["class"] != type(optimizer).__qualname__:
        return [f"it is {saved['class']} in the checkpoint, {type(optimizer).__qualname__} here"]
    # Groups with equal options are as good as one: tensor parallelism has groups of its own for what it cuts.
    group_of = {
        name: json.dumps(group["options"], sort_keys=True) for group in saved["groups"] for name in group["parameters"]
    }
    held = "(held by the optimizer)"
    found = [f"{name} {held} is in the checkpoint only" for name in group_of if name not in held_by_any]
    found += [f"{name} {held} is not in the checkpoint" for name in held_by_any if name not in group_of]
    for members in group_members(optimizer, parameters):
        origins = {group_of[name]: name for name in reversed(members) if name in group_of}
        if len(origins) > 1:
            first, second, *_ = origins.values()
            found.append(f"{first} and {second} are in one group here, but were in two in the checkpoint")
    return found


def needed_tensors(
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    held: Mapping[str, Tensorlike],
) -> list[str]:
    """Return the tensors that this process will read."""
    mine = {name for members in group_members(optimizer, parameters) for name in members}
    states = [state for name, state in saved["parameters"].items() if name in mine and _has_state(held[name])]
    options = [group["options"] for group in saved["groups"] if mine & set(group["parameters"])]
    return tensor_names([states, options, saved["whole"]])


# ---------------------------------------------------------------------------------------------------- restoring


def restore_optimizer(
    saved: Mapping[str, Any],
    tensors: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    held: Mapping[str, Tensorlike],
) -> None:
    """Bring an optimizer into a saved state, as far as its own parameters go."""
    options_of = {name: group["options"] for group in saved["groups"] for name in group["parameters"]}
    packed = optimizer.state_dict()["param_groups"]
    numbers: dict[str, Any] = {}
    for group, members in zip(packed, group_members(optimizer, parameters), strict=True):
        numbers.update(zip(members, group["params"], strict=True))
        options = unpack(options_of[members[0]], tensors) if members else {}
        group.update({key: value for key, value in options.items() if key not in _IMPLEMENTATION})
    state = {
        numbers[name]: _loaded(value, tensors, held[name])
        for name, value in saved["parameters"].items()
        if name in numbers and _has_state(held[name])
    }
    whole = unpack(saved["whole"], tensors)
    optimizer.load_state_dict({"state": {**whole, **state}, "param_groups": packed})
    for name, number in numbers.items():
        if number in state:
            _keep_types(state[number], optimizer.state[parameters[name]])


def _has_state(parameter: Tensorlike) -> bool:
    """Say whether an optimizer has a state for it here: under FSDP1 a process may have no number of a parameter."""
    return not isinstance(parameter, Sharded) or parameter.local.numel() > 0


def hand_options_on(inner: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> None:
    """Give a ZeroRedundancyOptimizer the options of the one inside, which it overwrites with its own in each step."""
    if inner is not outer:
        for group, restored in zip(outer.param_groups, inner.param_groups, strict=True):
            group.update({key: value for key, value in restored.items() if key != "params"})


def _loaded(value: Any, tensors: Mapping[str, Any], parameter: Tensorlike) -> Any:
    """Return a parameter's state, each tensor cut and placed as the parameter is."""
    if not isinstance(value, dict):
        return unpack(value, tensors)
    if "$tensor" in value:
        return _loaded_tensor(value["$tensor"], tensors, parameter)
    if any(key.startswith("$") for key in value):
        return unpack(value, tensors)
    return {key: _loaded(item, tensors, parameter) for key, item in value.items()}


@torch.no_grad()
def _loaded_tensor(name: str, tensors: Mapping[str, Any], parameter: Tensorlike) -> Tensor:
    shape, dtype = _kind(name, tensors)
    if is_cut(parameter) and shape and shape == parameter.shape:
        if isinstance(parameter, Sharded):
            local = torch.empty_like(parameter.local, dtype=dtype)
            fill(tensors, name, parameter.over(local))
            return local
        moment = torch.empty_like(parameter.detach(), dtype=dtype)
        fill(tensors, name, moment)
        return moment
    whole: Tensor = tensors[name].clone()
    if not whole.dim():
        return whole  # where counters live is the optimizer's affair
    if isinstance(parameter, Sharded):
        return whole.to(parameter.local.device)
    if not is_cut(parameter):
        return whole.to(parameter.device)
    from torch.distributed.tensor import DTensor, Replicate

    spread: Any = parameter
    everywhere = [Replicate() for _ in range(spread.device_mesh.ndim)]
    return DTensor.from_local(whole.to(spread.device), spread.device_mesh, everywhere, run_check=False)


def _kind(name: str, tensors: Mapping[str, Any]) -> tuple[torch.Size, torch.dtype]:
    if isinstance(tensors, TensorReader):
        return tensors.shape(name), tensors.dtype(name)
    return tensors[name].shape, tensors[name].dtype


def _keep_types(saved: Mapping[str, Any], loaded: dict[str, Any]) -> None:
    """Undo torch's conversion of a state to its parameter's type: float32 moments of bfloat16 weights stay exact."""
    for key, value in saved.items():
        if isinstance(value, Tensor) and isinstance(loaded.get(key), Tensor) and loaded[key].dtype != value.dtype:
            loaded[key] = value.to(loaded[key].device)
