"""The state of an optimizer by parameter name, independent of how it is sharded over ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.checkpoint.flatten import flatten_values, list_tensors, unflatten_values
from cornstarch.checkpoint.named_shards import describe, fill
from cornstarch.checkpoint.reader import TensorReader
from cornstarch.checkpoint.shards import Sharded, Tensorlike, is_sharded
from cornstarch.errors import ConfigError

_IMPLEMENTATION = {"foreach", "fused", "capturable", "param_names"}  # they choose a kernel, not the result

Group = dict[str, Any]
"""The `parameters` of a group by name, and its flattened `options`."""


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has the states: inside of torch's ZeroRedundancyOptimizer there is an ordinary one."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def group_members(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"The optimizer has a parameter ({describe(parameter)}) that is not one of the model's "
                    f"{len(names)}. Make the optimizer from the model that is trained."
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def flatten_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: dict[str, Tensorlike]
) -> list[Group]:
    """Return the groups of this rank; options that are tensors are put into `tensors`."""
    members = group_members(optimizer, parameters)
    groups = [
        {"parameters": names, "options": {key: value for key, value in group.items() if key != "params"}}
        for names, group in zip(members, optimizer.state_dict()["param_groups"], strict=True)
    ]
    flat: list[Group] = flatten_values(groups, "optimizer/groups", tensors)
    return flat


def merge_groups(of_ranks: Sequence[list[Group]]) -> list[Group]:
    """Return the groups of all ranks as one list: groups with equal options are one group, sharded over ranks."""
    if all(groups == of_ranks[0] for groups in of_ranks):
        return of_ranks[0]
    merged: dict[str, Group] = {}
    for group in (group for groups in of_ranks for group in groups):
        options = group["options"]
        if list_tensors(options):
            raise ConfigError(
                "The optimizers of the ranks have different parameters, and an option is a tensor "
                f"({list_tensors(options)[0]}), which cannot be assigned to one of them. Give it as a number."
            )
        known = merged.setdefault(json.dumps(options, sort_keys=True), {"parameters": [], "options": options})
        known["parameters"] += [name for name in group["parameters"] if name not in known["parameters"]]
    return list(merged.values())


def flatten_states(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    local: Mapping[str, Tensorlike],
    tensors: dict[str, Tensorlike],
) -> dict[str, Any]:
    """Return the states of this rank by parameter; tensors are put into `tensors`."""
    state_dict = optimizer.state_dict()
    names = {
        number: name
        for group, members in zip(state_dict["param_groups"], group_members(optimizer, parameters), strict=True)
        for number, name in zip(group["params"], members, strict=True)
    }
    states, whole = {}, {}
    for key, value in state_dict["state"].items():
        if key in names:
            states[names[key]] = _shard_alike(value, local[names[key]])
        else:
            whole[key] = value
    return {
        "parameters": flatten_values(states, "optimizer/parameters", tensors),
        "whole": flatten_values(whole, "optimizer/whole", tensors),
    }


def _shard_alike(state: Any, parameter: Tensorlike) -> Any:
    """Mark state tensors of the local shape of a `Sharded` parameter: they have the same sharding."""
    if not isinstance(parameter, Sharded):
        return state
    if isinstance(state, Mapping):
        return {key: _shard_alike(value, parameter) for key, value in state.items()}
    if isinstance(state, Tensor) and state.dim() and state.shape == parameter.local.shape:
        return parameter.with_local(state)
    return state


def optimizer_differences(
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    optimized: Collection[str],
) -> list[str]:
    """Return how the saved optimizer differs from those of all ranks, which have the parameters `optimized`."""
    if saved["class"] != type(optimizer).__qualname__:
        return [f"it is {saved['class']} in the checkpoint, {type(optimizer).__qualname__} here"]
    # Groups with equal options count as one: tensor parallelism has separate groups for sharded parameters.
    group_of = {
        name: json.dumps(group["options"], sort_keys=True) for group in saved["groups"] for name in group["parameters"]
    }
    found = [f"{name} (in the optimizer) is in the checkpoint only" for name in group_of if name not in optimized]
    found += [f"{name} (in the optimizer) is not in the checkpoint" for name in optimized if name not in group_of]
    for members in group_members(optimizer, parameters):
        origins = {group_of[name]: name for name in reversed(members) if name in group_of}
        if len(origins) > 1:
            first, second, *_ = origins.values()
            found.append(f"{first} and {second} are in one group here, but were in two in the checkpoint")
    return found


def list_needed_tensors(
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    local: Mapping[str, Tensorlike],
) -> list[str]:
    """Return the tensors that this rank will read."""
    mine = {name for members in group_members(optimizer, parameters) for name in members}
    states = [state for name, state in saved["parameters"].items() if name in mine and _has_state(local[name])]
    options = [group["options"] for group in saved["groups"] if mine & set(group["parameters"])]
    return list_tensors([states, options, saved["whole"]])


def restore_optimizer(
    saved: Mapping[str, Any],
    tensors: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    local: Mapping[str, Tensorlike],
) -> None:
    """Load the saved state of an optimizer's own parameters."""
    options_of = {name: group["options"] for group in saved["groups"] for name in group["parameters"]}
    groups = optimizer.state_dict()["param_groups"]
    numbers: dict[str, Any] = {}
    for group, members in zip(groups, group_members(optimizer, parameters), strict=True):
        numbers.update(zip(members, group["params"], strict=True))
        options = unflatten_values(options_of[members[0]], tensors) if members else {}
        group.update({key: value for key, value in options.items() if key not in _IMPLEMENTATION})
    state = {
        numbers[name]: _load_state(value, tensors, local[name])
        for name, value in saved["parameters"].items()
        if name in numbers and _has_state(local[name])
    }
    whole = unflatten_values(saved["whole"], tensors)
    optimizer.load_state_dict({"state": {**whole, **state}, "param_groups": groups})
    for name, number in numbers.items():
        if number in state:
            _keep_dtypes(state[number], optimizer.state[parameters[name]])


def _has_state(parameter: Tensorlike) -> bool:
    """Return whether a parameter has an optimizer state here: under FSDP1 a rank may have no value of it."""
    return not isinstance(parameter, Sharded) or parameter.local.numel() > 0


def copy_options(inner: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> None:
    """Copy options to a ZeroRedundancyOptimizer, which overwrites those of its inner optimizer in each step."""
    if inner is not outer:
        for group, restored in zip(outer.param_groups, inner.param_groups, strict=True):
            group.update({key: value for key, value in restored.items() if key != "params"})


def _load_state(value: Any, tensors: Mapping[str, Any], parameter: Tensorlike) -> Any:
    """Return the state of a parameter, each tensor sharded and placed like the parameter."""
    if not isinstance(value, dict):
        return unflatten_values(value, tensors)
    if "$tensor" in value:
        return _load_tensor(value["$tensor"], tensors, parameter)
    if any(key.startswith("$") for key in value):
        return unflatten_values(value, tensors)
    return {key: _load_state(item, tensors, parameter) for key, item in value.items()}


@torch.no_grad()
def _load_tensor(name: str, tensors: Mapping[str, Any], parameter: Tensorlike) -> Tensor:
    if isinstance(tensors, TensorReader):
        shape, dtype = tensors.shape(name), tensors.dtype(name)
    else:
        shape, dtype = tensors[name].shape, tensors[name].dtype
    if is_sharded(parameter) and shape and shape == parameter.shape:
        like = parameter.local if isinstance(parameter, Sharded) else parameter.detach()
        state = torch.empty_like(like, dtype=dtype)
        fill(tensors, name, parameter.with_local(state) if isinstance(parameter, Sharded) else state)
        return state
    whole: Tensor = tensors[name].clone()
    if not whole.dim():
        return whole  # the optimizer decides where counters live
    if isinstance(parameter, Sharded):
        return whole.to(parameter.local.device)
    if not is_sharded(parameter):
        return whole.to(parameter.device)
    from torch.distributed.tensor import DTensor, Replicate

    distributed: Any = parameter
    placements = [Replicate() for _ in range(distributed.device_mesh.ndim)]
    return DTensor.from_local(whole.to(distributed.device), distributed.device_mesh, placements, run_check=False)


def _keep_dtypes(saved: Mapping[str, Any], loaded: dict[str, Any]) -> None:
    """Undo torch's conversion of states to the parameter's dtype: float32 moments of bfloat16 weights stay exact."""
    for key, value in saved.items():
        if isinstance(value, Tensor) and isinstance(loaded.get(key), Tensor) and loaded[key].dtype != value.dtype:
            loaded[key] = value.to(loaded[key].device)
