"""The parameters and buffers of a model by their original names, and the shards of them that a rank has.

A rank may have a whole parameter (alone, or with DDP around the model), a slice (FSDP2, HSDP, tensor parallelism: a
DTensor knows which), or an interval of its values (FSDP1, which flattens and concatenates parameters).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.reader import TensorReader
from cornstarch.checkpoint.shards import Box, Sharded, Tensorlike, copy_shards
from cornstarch.compat import is_flattened
from cornstarch.errors import ConfigError
from cornstarch.parallel.tensor import original_boxes
from cornstarch.pipeline.stages import get_original_names

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without torch.compile, DDP and other wrappers."""
    return {_whole_name(model, name): parameter for name, parameter in model.named_parameters()}


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by their names without wrappers; a wrapped module takes the place of its wrapper."""
    return {_original_name(model, name) if name else "": module for name, module in model.named_modules()}


def _whole_name(model: nn.Module, name: str) -> str:
    """Return the name of a parameter in the whole model, without wrappers: a tied head is named like the embedding."""
    original = _original_name(model, name)
    return get_original_names(model).get(original, original)


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
    """Return the dtype and the whole shape of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def is_trained(parameter: Tensorlike) -> bool:
    """Return whether a parameter takes gradients."""
    return parameter.local.requires_grad if isinstance(parameter, Sharded) else parameter.requires_grad


def fill(tensors: Mapping[str, Any], name: str, target: Tensorlike) -> None:
    """Copy a saved tensor into a tensor, or into its local shards."""
    if isinstance(tensors, TensorReader):
        tensors.copy_into(name, target)
        return
    if tensors[name].shape != target.shape:  # else a single number would be broadcast
        raise ConfigError(
            f"{name} has the shape {list(tensors[name].shape)} in the checkpoint, {list(target.shape)} here."
        )
    with torch.no_grad():
        copy_shards(tensors[name], target)


# ---------------------------------------------------------------------------------------------------- local shards


def local_parameters(model: nn.Module) -> dict[str, Tensorlike]:
    """Return each parameter as a whole tensor, a DTensor or a `Sharded`. Under FSDP1 the call is collective."""
    coordinator = Coordinator.default()
    found: dict[str, Tensorlike] = {**named_parameters(model)}
    parameters = dict(model.named_parameters())
    for name, boxes in original_boxes(model).items():  # fused parameters that tensor parallelism reorders
        places = tuple((_slices_to_box(one.original), one.local) for one in boxes)
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
    counts = _count_values(found, units, coordinator)
    if any(_is_unsharded(counts[name], units[name], shapes[name]) for name in units):
        # An evaluation leaves the outermost unit unsharded. Gathering it once more ends with resharding it.
        shapes = _whole_shapes(model, units, again=True)
        counts = _count_values(found, units, coordinator)
    for name, unit in units.items():
        if not _is_unsharded(counts[name], unit, shapes[name]):
            members = dist.get_process_group_ranks(unit.process_group)
            before = members[: members.index(coordinator.rank)]
            parameter = found[name]
            assert isinstance(parameter, Tensor)
            found[name] = Sharded(shapes[name], parameter, sum(counts[name][rank] for rank in before))
    return found


def _slices_to_box(place: tuple[slice, ...]) -> Box:
    return Box(tuple(one.start for one in place), tuple(one.stop - one.start for one in place))


def _flat_units(model: nn.Module) -> dict[str, Any]:
    """Return the FSDP1 unit of each parameter."""
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


def _whole_shapes(model: nn.Module, units: Mapping[str, Any], again: bool = False) -> dict[str, torch.Size]:
    """Return the shapes of parameters without FSDP1, by gathering one unit at a time; the result is cached."""
    if model in _shapes and not again:
        return _shapes[model]
    from torch.distributed.fsdp import FullyShardedDataParallel

    shapes: dict[str, torch.Size] = {}
    for unit in (module for module in model.modules() if _is_flat_unit(module)):  # the outermost first
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            whole = named_parameters(model)
            shapes.update({name: whole[name].shape for name, owner in units.items() if owner is unit})
    _shapes[model] = shapes
    return shapes


def _count_values(
    parameters: Mapping[str, Tensorlike], names: Iterable[str], coordinator: Coordinator
) -> dict[str, list[int]]:
    """Return the number of values of each parameter on each rank."""
    found: dict[str, list[int]] = coordinator.reduce(
        lambda: {name: parameters[name].numel() for name in names},  # type: ignore[union-attr]
        lambda counts: {name: [one[name] for one in counts] for name in counts[0]},
    )
    return found


def _is_unsharded(counts: list[int], unit: Any, shape: torch.Size) -> bool:
    return all(counts[rank] == shape.numel() for rank in dist.get_process_group_ranks(unit.process_group))
