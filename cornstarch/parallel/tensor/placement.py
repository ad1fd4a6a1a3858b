"""Sharded parameters: which part each rank has, and where that part lies in the original tensor.

A plain weight is divided into as many equal pieces as there are ranks. A fused one ([q; k; v] or [gate; up]) consists
of parts, and each rank has its piece of each part, one behind the other. A DTensor knows only plain shards, so the
fused tensor that it describes is in *stored* order, rank by rank: [q0; k0; v0; q1; k1; v1]. Checkpoints are in the
original order; `original_boxes` tells how one lies in the other, also when FSDP2 has sharded the pieces once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

Slices = tuple[slice, ...]
_SPECS = "shard_specs"


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is sharded."""

    dim: int
    parts: tuple[int, ...]
    """The sizes of what is fused along the dim; a single one for a plain weight, which need not divide evenly."""
    ranks: int

    def take_shard(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a rank's shard of a full tensor in its original order."""
        steps = [-(-size // self.ranks) for size in self.parts]
        pieces = [
            part.narrow(self.dim, min(rank * step, size), min((rank + 1) * step, size) - min(rank * step, size))
            for part, size, step in zip(tensor.split(self.parts, self.dim), self.parts, steps, strict=True)
        ]
        # A copy even of a single piece: a view would keep the full tensor in memory.
        return (
            torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (stored, original, length) of the runs in the stored interval from `start` to `stop`."""
        if len(self.parts) == 1:
            yield start, start, stop - start
            return
        local = sum(self.parts) // self.ranks
        for rank in range(self.ranks):
            stored, original = rank * local, 0
            for part in self.parts:
                length = part // self.ranks
                first, last = max(start, stored), min(stop, stored + length)
                if first < last:
                    yield first, original + rank * length + first - stored, last - first
                stored, original = stored + length, original + part


def shard_parameter(module: nn.Module, name: str, spec: ShardSpec, mesh: DeviceMesh) -> None:
    """Replace a full parameter by a DTensor of which this rank has its shard only; works on the meta device."""
    parameter = module._parameters[name]
    assert parameter is not None and parameter.shape[spec.dim] == sum(spec.parts), (name, spec)
    with torch.no_grad():
        local = spec.take_shard(parameter, mesh.get_local_rank())
    strides = torch.empty(parameter.shape, device="meta").stride()
    distributed = DTensor.from_local(
        local, mesh, [Shard(spec.dim)], run_check=False, shape=parameter.shape, stride=strides
    )
    module._parameters[name] = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    # FSDP2 replaces parameters by others, so the module remembers, not the parameter.
    module.__dict__.setdefault(_SPECS, {})[name] = spec


def get_shard_specs(module: nn.Module) -> dict[str, ShardSpec]:
    """Return how the parameters of this very module are sharded, by name."""
    return module.__dict__.get(_SPECS, {})


def to_local_parameter(parameter: Any) -> Tensor:
    """Return the local shard of a parameter, to compute with."""
    if not isinstance(parameter, DTensor):
        return parameter
    if not parameter.requires_grad:
        with torch.no_grad():
            return parameter.to_local()
    return parameter.to_local()


def is_sharded(model: nn.Module) -> bool:
    """Return whether `shard_tensors` has sharded a model."""
    return any(_SPECS in module.__dict__ for module in model.modules())


@contextmanager
def use_full_shapes(model: nn.Module) -> Iterator[None]:
    """Run a block that sees sharded parameters as plain ones of their full shape, without values.

    For code that wraps layers by their sizes, as PEFT does. It may move modules, and must not change parameters.
    """
    sharded = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if name in get_shard_specs(module) and parameter is not None
    ]
    for module, name, parameter in sharded:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        placeholder = local.detach().new_zeros(()).expand(parameter.shape)  # one number, whatever the shape
        module._parameters[name] = nn.Parameter(placeholder, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for module, name, parameter in sharded:
            seen = module._parameters[name]
            assert seen is not None
            parameter.requires_grad_(seen.requires_grad)
            module._parameters[name] = parameter


# ---------------------------------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class ShardBox:
    """A box of the original tensor, and where it is in the local shard."""

    original: Slices
    local: Slices


def find_shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """Return how each parameter that `shard_tensors` has sharded is sharded, tied ones under their first name."""
    found: dict[str, ShardSpec] = {}
    for prefix, module in model.named_modules():
        for name, spec in get_shard_specs(module).items():
            found[f"{prefix}.{name}" if prefix else name] = spec
    return {name: found[name] for name, _ in model.named_parameters() if name in found}


def original_boxes(model: nn.Module) -> dict[str, list[ShardBox]]:
    """Return, for each parameter that `shard_tensors` has sharded, the local boxes of the original tensor.

    It holds for the parameter, its gradient and an optimizer's moments, before and after `fully_shard`. A parameter
    that is not named lies as its DTensor says, or is not sharded.
    """
    parameters = dict(model.named_parameters())
    return {name: local_boxes(parameters[name], spec) for name, spec in find_shard_specs(model).items()}


def local_boxes(tensor: Any, spec: ShardSpec | None) -> list[ShardBox]:
    """Return the local boxes of a DTensor; without a spec of ours, stored and original order are the same."""
    if spec is not None:
        return _split_into_boxes(*_find_stored_box(tensor), spec)
    chunks = tensor.__create_chunk_list__()
    return _split_into_boxes(tuple(chunks[0].offsets), tuple(chunks[0].sizes), None) if chunks else []


def _find_stored_box(tensor: DTensor) -> tuple[list[int], list[int]]:
    """Return the offsets and sizes of the local shard of a DTensor of ours, which FSDP2 may have sharded once more.

    torch 2.13 does not know them where a dim that is sharded unevenly, a vocabulary of 67 over 2 ranks, is sharded
    again: it shards the full dim, FSDP2 shards each rank's piece.
    """
    begin, size = [0] * tensor.ndim, list(tensor.shape)
    mesh, coordinates = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    for axis in reversed(range(mesh.ndim)):  # the last axis is that of tensor parallelism, which was first
        placement: Any = tensor.placements[axis]
        if placement.is_replicate():
            continue
        step = -(-size[placement.dim] // mesh.size(axis))
        first = min(coordinates[axis] * step, size[placement.dim])
        begin[placement.dim] += first
        size[placement.dim] = min(step, size[placement.dim] - first)
    assert tuple(size) == tuple(tensor.to_local().shape), (size, tensor.to_local().shape, tensor.placements)
    return begin, size


def rank_boxes(spec: ShardSpec, shape: Sequence[int], rank: int) -> tuple[tuple[int, ...], list[ShardBox]]:
    """Return the shape of a rank's shard of a full tensor, and its boxes."""
    size = shape[spec.dim]
    step = -(-size // spec.ranks)
    begin, local = [0] * len(shape), list(shape)
    begin[spec.dim] = min(rank * step, size)
    local[spec.dim] = min(begin[spec.dim] + step, size) - begin[spec.dim]
    return tuple(local), _split_into_boxes(begin, local, spec)


def _split_into_boxes(begin: Sequence[int], size: Sequence[int], spec: ShardSpec | None) -> list[ShardBox]:
    if not min((*size, 1)):
        return []
    there = [slice(first, first + count) for first, count in zip(begin, size, strict=True)]
    here = [slice(0, count) for count in size]
    if spec is None:
        return [ShardBox(tuple(there), tuple(here))]
    boxes = []
    for stored, original, length in spec.runs(begin[spec.dim], begin[spec.dim] + size[spec.dim]):
        there[spec.dim] = slice(original, original + length)
        here[spec.dim] = slice(stored - begin[spec.dim], stored - begin[spec.dim] + length)
        boxes.append(ShardBox(tuple(there), tuple(here)))
    return boxes


def gather_full_tensors(model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return full tensors in their original order; all ranks must call it.

    Args:
        model: The model.
        tensors: Tensors that lie as the parameters of these names do, such as gradients. Default: the parameters.
    """
    specs, parameters = find_shard_specs(model), dict(model.named_parameters())
    given = parameters if tensors is None else tensors
    with torch.no_grad():
        return {name: _gather_full(tensor, specs.get(name), parameters.get(name)) for name, tensor in given.items()}


def _gather_full(tensor: Tensor, spec: ShardSpec | None, parameter: Tensor | None) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    # Tensors that torch computes may name an equal mesh of groups that have ended; the parameter's is the one in use.
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else tensor.device_mesh
    local = tensor.to_local()
    whole = torch.zeros(tensor.shape, dtype=local.dtype, device=local.device)
    for box in local_boxes(tensor, spec):
        whole[box.original] = local[box.local]
    # Each number is on one rank and zero on the others. Added as bytes, it stays the same bit for bit.
    flat = whole.view(-1).view(torch.uint8)
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # FSDP2 over a shard has a placement of its own, which is not a `Shard`
            dist.all_reduce(flat, group=mesh.get_group(axis))
    return whole


def load_full_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Copy full tensors in their original order into the parameters that `shard_tensors` has sharded.

    Other parameters are left alone. `tensors` may hold anything that can be sliced: tensors, or slices of a safetensors
    file, of which only the local boxes are read.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, boxes in original_boxes(model).items():
            local: Any = parameters[name].detach()
            for box in boxes:
                local.to_local()[box.local].copy_(tensors[name][box.original])
