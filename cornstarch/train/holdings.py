"""What of a model a process holds, by the names that everything has in the model itself.

A process may have a whole parameter (alone, or with DDP around the model), a slice (FSDP2, HSDP, tensor parallelism: a
DTensor says which), or an interval of its numbers (FSDP1, which strings parameters together and cuts the string).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cornstarch.compat import is_flattened
from cornstarch.errors import ConfigError
from cornstarch.parallel.tensor import original_boxes
from cornstarch.pipeline.naming import whole_names
from cornstarch.train.checkpoint.pieces import Box, Sharded, Tensorlike, copy_parts
from cornstarch.train.checkpoint.ranks import Ranks
from cornstarch.train.checkpoint.reading import TensorReader

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that they have without torch.compile, DDP and other wrappers."""
    return {_whole_name(model, name): parameter for name, parameter in model.named_parameters()}


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by the names that they have without wrappers; of a wrapper and what is inside, the inside."""
    return {_original_name(model, name) if name else "": module for name, module in model.named_modules()}


def _whole_name(model: nn.Module, name: str) -> str:
    """Return the name of a parameter in the whole model, without wrappers: a tied head of a stage is the embedding."""
    original = _original_name(model, name)
    return whole_names(model).get(original, original)


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
    """Yield (name, buffer, whether it belongs to the model's state dict)."""
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        yield _original_name(model, name), buffer, name not in passing


def describe(tensor: Tensorlike) -> str:
    """Return the type and the shape of a tensor, whole."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def is_trained(parameter: Tensorlike) -> bool:
    """Say whether it takes gradients."""
    return parameter.local.requires_grad if isinstance(parameter, Sharded) else parameter.requires_grad


def fill(tensors: Mapping[str, Any], name: str, target: Tensorlike) -> None:
    """Copy a saved tensor, or the part that this process holds, into a tensor."""
    if isinstance(tensors, TensorReader):
        tensors.copy_into(name, target)
        return
    if tensors[name].shape != target.shape:  # else a single number would fill the whole target
        raise ConfigError(
            f"{name} has the shape {list(tensors[name].shape)} in the checkpoint, {list(target.shape)} here."
        )
    with torch.no_grad():
        copy_parts(tensors[name], target)


# ---------------------------------------------------------------------------------------------------- parameters


def held_parameters(model: nn.Module, ranks: Ranks) -> dict[str, Tensorlike]:
    """Return what this process holds of each parameter. Under FSDP1 all processes have to ask together."""
    found: dict[str, Tensorlike] = {**named_parameters(model), **_rearranged(model)}
    units = _flat_units(model)
    stray = [name for name, parameter in found.items() if is_flattened(parameter) and name not in units]
    if stray and ranks.size > 1:
        raise ConfigError(
            f"{stray[0]} is cut by an FSDP1 unit that is around this model. Give what `FullyShardedDataParallel` "
            "returned, not the model inside."
        )
    if not units or ranks.size == 1:
        return found
    shapes = _whole_shapes(model, units)
    counts = _counts(found, units, ranks)
    if any(_all_have_all(counts[name], units[name], shapes[name]) for name in units):
        # Unsharded: an evaluation leaves the outermost unit as it used it. Gathering it once more ends with freeing it.
        shapes = _whole_shapes(model, units, again=True)
        counts = _counts(found, units, ranks)
    for name, unit in units.items():
        if not _all_have_all(counts[name], unit, shapes[name]):
            members = dist.get_process_group_ranks(unit.process_group)
            before = [rank for rank in members if members.index(rank) < members.index(ranks.rank)]
            parameter = found[name]
            assert isinstance(parameter, Tensor)
            found[name] = Sharded(shapes[name], parameter, sum(counts[name][rank] for rank in before))
    return found


def _rearranged(model: nn.Module) -> dict[str, Sharded]:
    """Return the parameters that tensor parallelism keeps in another order than their own."""
    parameters = dict(model.named_parameters())
    found: dict[str, Sharded] = {}
    for name, held in original_boxes(model).items():
        boxes = tuple((_box(one.original), one.local) for one in held)
        found[_whole_name(model, name)] = Sharded(parameters[name].shape, parameters[name], boxes=boxes)
    return found


def _box(place: tuple[slice, ...]) -> Box:
    return Box(tuple(one.start for one in place), tuple(one.stop - one.start for one in place))


def _flat_units(model: nn.Module) -> dict[str, Any]:
    """Return the FSDP1 unit that each parameter belongs to."""
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
    """Return the shapes that parameters have without FSDP1, gathering one unit at a time, and once only."""
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


def _counts(parameters: Mapping[str, Tensorlike], names: Iterable[str], ranks: Ranks) -> dict[str, list[int]]:
    """Return how many numbers of each parameter each process has."""

    def work() -> dict[str, int]:
        return {name: parameters[name].numel() for name in names}  # type: ignore[union-attr]

    def join(counts: list[dict[str, int]]) -> dict[str, list[int]]:
        return {name: [one[name] for one in counts] for name in counts[0]}

    found: dict[str, list[int]] = ranks.reduced(work, join)
    return found


def _all_have_all(counts: list[int], unit: Any, shape: torch.Size) -> bool:
    return all(counts[rank] == shape.numel() for rank in dist.get_process_group_ranks(unit.process_group))
