"""The parameters, buffers and optimizer states of a model by the parameters' original names, in any layout.

A rank may have a whole parameter (alone, or with DDP around the model), a slice (FSDP2, HSDP, tensor parallelism: a
DTensor knows which), or an interval of its values (FSDP1, which flattens and concatenates parameters).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.reader import TensorReader
from cornstarch.checkpoint.shards import Box, Sharded, Tensorlike, is_sharded, local_shards
from cornstarch.checkpoint.state_values import flatten_values, list_tensors, unflatten_values
from cornstarch.compat import is_flattened
from cornstarch.errors import ConfigError
from cornstarch.kernels.master_weights import REMAINDER, find_master
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.parallel.flat_shards import ParameterShard, find_shard
from cornstarch.parallel.tensor import original_boxes
from cornstarch.pipeline.stages import ORIGINAL_NAMES

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_IMPLEMENTATION = {"foreach", "fused", "capturable", "param_names"}  # they choose a kernel, not the result

_SAVED_BEFORE = {"TritonAdamW": "AdamW"}  # names of classes in checkpoints of earlier versions

Parameters = Mapping[str, nn.Parameter]
Group = dict[str, Any]
"""The `parameters` of a group by name, and its flattened `options`."""


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without torch.compile, DDP and other wrappers."""
    return {_whole_name(model, name): parameter for name, parameter in model.named_parameters()}


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by their names without wrappers; a wrapped module takes the place of its wrapper."""
    return {_original_name(model, name) if name else "": module for name, module in model.named_modules()}


def _whole_name(model: nn.Module, name: str) -> str:
    """Return the name of a parameter in the whole model, without wrappers: a tied head is named like the embedding."""
    original = _original_name(model, name)
    return str(model.__dict__.get(ORIGINAL_NAMES, {}).get(original, original))


def _original_name(model: nn.Module, name: str) -> str:
    parts = name.split(".")
    root: nn.Module | None = model
    while root is not None and parts and parts[0] in _WRAPPERS | {"module"}:
        if parts[0] == "module" and not isinstance(root, DistributedDataParallel):
            break
        root = root._modules.get(parts[0])
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, buffer, whether it is in the model's state dict)."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        yield _original_name(model, name), buffer, name not in transient


def describe(tensor: Tensorlike) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def is_trained(parameter: Tensorlike) -> bool:
    return parameter.local.requires_grad if isinstance(parameter, Sharded) else parameter.requires_grad


def local_parameters(model: nn.Module) -> dict[str, Tensorlike]:
    """Return each parameter as a tensor, a DTensor or a `Sharded`. Call `reshard` first; collective under FSDP1."""
    coordinator = Coordinator.default()
    found: dict[str, Tensorlike] = {**named_parameters(model)}
    parameters = dict(model.named_parameters())
    for name, boxes in original_boxes(model).items():  # fused parameters that tensor parallelism reorders
        places = tuple(
            (Box(tuple(d.start for d in one.original), tuple(d.stop - d.start for d in one.original)), one.local)
            for one in boxes
        )
        found[_whole_name(model, name)] = Sharded(parameters[name].shape, parameters[name], boxes=places)
    units = _flat_units(model)
    stray = [name for name, parameter in found.items() if is_flattened(parameter) and name not in units]
    if stray and coordinator.size > 1:
        raise ConfigError(
            f"{stray[0]} is cut by an FSDP1 unit that is around this model. Give what `FullyShardedDataParallel` "
            "returned, not the model inside."
        )
    if not units or coordinator.size == 1:
        return found
    shapes = _whole_shapes(model, units)
    counts: dict[str, list[int]] = coordinator.reduce(
        lambda: {name: found[name].numel() for name in units},  # type: ignore[union-attr]
        lambda of_ranks: {name: [one[name] for one in of_ranks] for name in of_ranks[0]},
    )
    for name, unit in units.items():
        members = dist.get_process_group_ranks(unit.process_group)
        if any(counts[name][rank] != shapes[name].numel() for rank in members):  # else FSDP1 leaves it whole
            before = members[: members.index(coordinator.rank)]
            parameter = found[name]
            assert isinstance(parameter, Tensor)
            found[name] = Sharded(shapes[name], parameter, sum(counts[name][rank] for rank in before))
    return found


def _flat_units(model: nn.Module) -> dict[str, Any]:
    units = {f"{name}." if name else "": m for name, m in model.named_modules() if _is_flat_unit(m)}
    found: dict[str, Any] = {}
    for name, _ in model.named_parameters() if units else ():
        if "_flat_param" in name.split("."):
            raise ConfigError("A model under FSDP1 can be saved by its names only with use_orig_params=True.")
        prefixes = [prefix for prefix in units if name.startswith(prefix)]
        if prefixes:
            found[_whole_name(model, name)] = units[max(prefixes, key=len)]
    return found


def _is_flat_unit(module: nn.Module) -> bool:
    return type(module).__name__ == "FullyShardedDataParallel"


_shapes: WeakKeyDictionary[nn.Module, dict[str, torch.Size]] = WeakKeyDictionary()


def _whole_shapes(model: nn.Module, units: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Return the shapes of parameters without FSDP1, by gathering one unit at a time; the result is cached."""
    if model in _shapes:
        return _shapes[model]
    from torch.distributed.fsdp import FullyShardedDataParallel

    shapes: dict[str, torch.Size] = {}
    for unit in (module for module in model.modules() if _is_flat_unit(module)):  # the outermost first
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            whole = named_parameters(model)
            shapes.update({name: whole[name].shape for name, owner in units.items() if owner is unit})
    _shapes[model] = shapes
    return shapes


def group_members(optimizer: Optimizer, parameters: Parameters) -> list[list[str]]:
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


class NamedOptimizer:
    """An optimizer by the names of a model's parameters; of a ZeroRedundancyOptimizer, the inner one."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        inner = getattr(optimizer, "optim", None)
        self.outer, self.optimizer = optimizer, inner if isinstance(inner, Optimizer) else optimizer
        self.parameters, self.local = named_parameters(model), local_parameters(model)
        """The parameters by name, as the optimizer has them; and as the model has them."""
        self.stepped = dict(self.local)
        """What the optimizer has states of: with ZeRO-1 a shard of what the model has."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for parameter in (one for group in self.optimizer.param_groups for one in group["params"]):
            if (shard := find_shard(parameter)) is not None and (name := names.get(id(shard.whole))) is not None:
                self.parameters[name], self.stepped[name] = shard.stepped, _cut_interval(self.local[name], shard)
        # A weight in bf16 is saved as its float32 master, as if it had been trained in float32.
        masters = {name: find_master(self.optimizer, one) for name, one in self.parameters.items()}
        self.local |= {name: master for name, master in masters.items() if master is not None}

    @property
    def _class_name(self) -> str:
        kind = type(self.optimizer)
        return str(getattr(kind, "saved_as", kind.__qualname__))

    @cached_property
    def members(self) -> list[list[str]]:
        return group_members(self.optimizer, self.parameters)

    def flatten_groups(self, tensors: dict[str, Tensorlike]) -> list[Group]:
        """Return the groups of this rank; options that are tensors are put into `tensors`."""
        groups = [
            {"parameters": names, "options": {key: value for key, value in group.items() if key != "params"}}
            for names, group in zip(self.members, self.optimizer.state_dict()["param_groups"], strict=True)
        ]
        return list(flatten_values(groups, "optimizer/groups", tensors))

    def flatten(self, groups: list[Group], tensors: dict[str, Tensorlike]) -> dict[str, Any]:
        """Return the state with the groups of all ranks and the states of this one; tensors are put into `tensors`."""
        state_dict = self.optimizer.state_dict()
        names = {
            number: name
            for group, members in zip(state_dict["param_groups"], self.members, strict=True)
            for number, name in zip(group["params"], members, strict=True)
        }
        states, whole = {}, {}
        for key, value in state_dict["state"].items():
            if key in names:
                own = {name: one for name, one in value.items() if name != REMAINDER}
                if own:
                    states[names[key]] = _shard_alike(own, self.stepped[names[key]])
            else:
                whole[key] = value
        return {
            "class": self._class_name,
            "groups": groups,
            "parameters": flatten_values(states, "optimizer/parameters", tensors),
            "whole": flatten_values(whole, "optimizer/whole", tensors),
        }

    def find_differences(self, saved: Mapping[str, Any], optimized: Collection[str]) -> list[str]:
        """Return how a saved optimizer differs from those of all ranks, which have the parameters `optimized`."""
        if _SAVED_BEFORE.get(saved["class"], saved["class"]) != self._class_name:
            return [f"it is {saved['class']} in the checkpoint, {self._class_name} here"]
        # Groups with equal options count as one: tensor parallelism has separate groups for sharded parameters.
        group_of = {
            name: json.dumps(group["options"], sort_keys=True)
            for group in saved["groups"]
            for name in group["parameters"]
        }
        found = [f"{name} (in the optimizer) is in the checkpoint only" for name in group_of if name not in optimized]
        found += [f"{name} (in the optimizer) is not in the checkpoint" for name in optimized if name not in group_of]
        for members in self.members:
            origins = {group_of[name]: name for name in reversed(members) if name in group_of}
            if len(origins) > 1:
                first, second, *_ = origins.values()
                found.append(f"{first} and {second} are in one group here, but were in two in the checkpoint")
        return found

    def _own_states(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved states of this rank's parameters; under FSDP1 it may have no value of some of them."""
        empty = {name for name, one in self.stepped.items() if isinstance(one, Sharded) and not one.local.numel()}
        own = {name for members in self.members for name in members} - empty
        return {name: state for name, state in saved["parameters"].items() if name in own}

    def list_needed_tensors(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the tensors that this rank will read."""
        mine = {name for members in self.members for name in members}
        options = [group["options"] for group in saved["groups"] if mine & set(group["parameters"])]
        return list_tensors([list(self._own_states(saved).values()), options, saved["whole"]])

    def restore(self, saved: Mapping[str, Any], tensors: TensorReader) -> None:
        """Load the saved state of this rank's parameters."""
        options_of = {name: group["options"] for group in saved["groups"] for name in group["parameters"]}
        groups = self.optimizer.state_dict()["param_groups"]
        numbers: dict[str, Any] = {}
        for group, members in zip(groups, self.members, strict=True):
            numbers.update(zip(members, group["params"], strict=True))
            options = unflatten_values(options_of[members[0]], tensors) if members else {}
            group.update({key: value for key, value in options.items() if key not in _IMPLEMENTATION})
        state = {name: _load_state(one, tensors, self.stepped[name]) for name, one in self._own_states(saved).items()}
        by_number = {numbers[name]: one for name, one in state.items()}
        whole = unflatten_values(saved["whole"], tensors)
        self.optimizer.load_state_dict({"state": {**whole, **by_number}, "param_groups": groups})
        # torch converts states to the parameter's dtype; float32 moments of bfloat16 weights must stay exact.
        for name, values in state.items():
            loaded = self.optimizer.state[self.parameters[name]]
            for key, value in values.items():
                there = loaded.get(key)
                if isinstance(value, Tensor) and isinstance(there, Tensor) and there.dtype != value.dtype:
                    loaded[key] = value.to(there.device)
        if self.optimizer is not self.outer:  # it overwrites the options of the inner one in each step
            for group, restored in zip(self.outer.param_groups, self.optimizer.param_groups, strict=True):
                group.update({key: value for key, value in restored.items() if key != "params"})


def _cut_interval(local: Tensorlike, shard: ParameterShard) -> Sharded:
    """Return the part of a parameter that ZeRO-1 gives to this rank, of what tensor parallelism has left here."""
    if not is_sharded(local):
        return Sharded(torch.Size(local.shape), shard.stepped, shard.start)
    boxes = local.boxes if isinstance(local, Sharded) else None
    if boxes is None:
        found = local_shards(local)
        boxes = tuple((box, tuple(slice(0, size) for size in box.sizes)) for box, _ in found)
    with torch.no_grad():
        memory = to_local_tensor(shard.whole).shape
    return Sharded(torch.Size(local.shape), shard.stepped, shard.start, boxes, memory)


def _shard_alike(state: Any, parameter: Tensorlike) -> Any:
    """Mark state tensors of the local shape of a `Sharded` parameter: they have the same sharding."""
    if not isinstance(parameter, Sharded):
        return state
    if isinstance(state, Mapping):
        return {key: _shard_alike(value, parameter) for key, value in state.items()}
    if isinstance(state, Tensor) and state.dim() and state.shape == parameter.local.shape:
        return parameter.with_local(state)
    return state


def _load_state(value: Any, tensors: TensorReader, parameter: Tensorlike) -> Any:
    """Return the state of a parameter, each tensor sharded and placed like the parameter."""
    if not isinstance(value, dict):
        return unflatten_values(value, tensors)
    if "$tensor" in value:
        return _load_tensor(value["$tensor"], tensors, parameter)
    if any(key.startswith("$") for key in value):
        return unflatten_values(value, tensors)
    return {key: _load_state(item, tensors, parameter) for key, item in value.items()}


@torch.no_grad()
def _load_tensor(name: str, tensors: TensorReader, parameter: Tensorlike) -> Tensor:
    shape = tensors.shape(name)
    if is_sharded(parameter) and shape and shape == parameter.shape:
        like: Any = parameter.local if isinstance(parameter, Sharded) else parameter.detach()
        state = torch.empty_like(like, dtype=tensors.dtype(name))
        tensors.copy_into(name, parameter.with_local(state) if isinstance(parameter, Sharded) else state)
        return state
    whole = tensors[name].clone()
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
