"""Tensors that are cut: which part each rank has, and where that part lies in the original tensor.

A plain weight is cut into as many equal pieces as there are ranks. A fused one ([q; k; v] or [gate; up]) is made of
parts, and each rank has its piece of each part, one behind the other. A DTensor knows only plain cuts, so the fused
tensor that it describes is in *stored* order, rank by rank: [q0; k0; v0; q1; k1; v1]. What a checkpoint holds is in the
original order; `original_boxes` tells how one lies in the other, also when FSDP2 has cut the pieces once more.
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


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut."""

    dim: int
    parts: tuple[int, ...]
    """The sizes of what is fused along the dim; a single one for a plain weight, which need not divide evenly."""
    ranks: int

    def piece(self, tensor: Tensor, rank: int) -> Tensor:
        """Return what a rank has of a whole tensor in its original order."""
        steps = [-(-size // self.ranks) for size in self.parts]
        pieces = [
            part.narrow(self.dim, min(rank * step, size), min((rank + 1) * step, size) - min(rank * step, size))
            for part, size, step in zip(tensor.split(self.parts, self.dim), self.parts, steps, strict=True)
        ]
        # A copy even of a single piece: a view would keep the whole tensor in memory.
        return (
            torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (stored, original, length) of the runs that the stored interval from `start` to `stop` is made of."""
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


def distribute(module: nn.Module, name: str, cut: Cut, mesh: DeviceMesh) -> None:
    """Replace a whole parameter by a DTensor of which this process has its piece only; works on the meta device."""
    parameter = module._parameters[name]
    assert parameter is not None and parameter.shape[cut.dim] == sum(cut.parts), (name, cut)
    with torch.no_grad():
        local = cut.piece(parameter, mesh.get_local_rank())
    distributed = DTensor.from_local(
        local, mesh, [Shard(cut.dim)], run_check=False, shape=parameter.shape, stride=_strides(parameter.shape)
    )
    module._parameters[name] = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    # FSDP2 makes other parameters of these, so it is the module that remembers.
    module.__dict__.setdefault("cuts", {})[name] = cut


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def local_use(parameter: Any) -> Tensor:
    """Return what this rank has of a parameter, to compute with."""
    if not isinstance(parameter, DTensor):
        return parameter
    if not parameter.requires_grad:
        with torch.no_grad():
            return parameter.to_local()
    return parameter.to_local()


def is_cut(model: nn.Module) -> bool:
    """Whether `shard_tensors` has cut a model."""
    return any("cuts" in module.__dict__ for module in model.modules())


@contextmanager
def seen_whole(model: nn.Module) -> Iterator[None]:
    """Run a block that sees parameters that are cut as plain ones of their whole shape, which hold no numbers.

    For code that wraps layers by their sizes, as PEFT does. It may move modules, and must not change their parameters.
    """
    cut = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if name in module.__dict__.get("cuts", {}) and parameter is not None
    ]
    for module, name, parameter in cut:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        hollow = local.detach().new_zeros(()).expand(parameter.shape)  # one number, whatever the shape
        module._parameters[name] = nn.Parameter(hollow, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for module, name, parameter in cut:
            seen = module._parameters[name]
            assert seen is not None
            parameter.requires_grad_(seen.requires_grad)
            module._parameters[name] = parameter


# ---------------------------------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class Held:
    """A box of the original tensor, and where this process has it."""

    original: Slices
    local: Slices


def named_cuts(model: nn.Module) -> dict[str, Cut]:
    """Return how each parameter is cut that `shard_tensors` has cut, tied ones under their first name."""
    found: dict[str, Cut] = {}
    for prefix, module in model.named_modules():
        for name, cut in module.__dict__.get("cuts", {}).items():
            found[f"{prefix}.{name}" if prefix else name] = cut
    return {name: found[name] for name, _ in model.named_parameters() if name in found}


def original_boxes(model: nn.Module) -> dict[str, list[Held]]:
    """Return, for each parameter that `shard_tensors` has cut, the boxes of the original tensor that are here.

    It holds for the parameter, its gradient and an optimizer's moments, before and after `fully_shard`. A parameter
    that is not named lies as its DTensor says, or is whole.
    """
    parameters = dict(model.named_parameters())
    return {name: boxes_of(parameters[name], cut) for name, cut in named_cuts(model).items()}


def boxes_of(tensor: Any, cut: Cut | None) -> list[Held]:
    """Return what a process has of a DTensor; without a cut of ours, stored and original order are the same."""
    if cut is not None:
        return _held(*_stored_box(tensor), cut)
    chunks = tensor.__create_chunk_list__()
    return _held(tuple(chunks[0].offsets), tuple(chunks[0].sizes), None) if chunks else []


def _stored_box(tensor: DTensor) -> tuple[list[int], list[int]]:
    """Return the offsets and sizes of what a process has of a DTensor that we have cut, and FSDP2 perhaps once more.

    torch 2.13 does not know them where a dim that is cut unevenly, a vocabulary of 67 over 2 ranks, is sharded again:
    it shards the whole dim, FSDP2 shards each rank's piece.
    """
    begin, size = [0] * tensor.ndim, list(tensor.shape)
    mesh, coordinates = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    for axis in reversed(range(mesh.ndim)):  # the last axis is that of our cut
        placement: Any = tensor.placements[axis]
        if placement.is_replicate():
            continue
        step = -(-size[placement.dim] // mesh.size(axis))
        first = min(coordinates[axis] * step, size[placement.dim])
        begin[placement.dim] += first
        size[placement.dim] = min(step, size[placement.dim] - first)
    assert tuple(size) == tuple(tensor.to_local().shape), (size, tensor.to_local().shape, tensor.placements)
    return begin, size


def rank_boxes(cut: Cut, shape: Sequence[int], rank: int) -> tuple[tuple[int, ...], list[Held]]:
    """Return the shape of what a rank has of a whole tensor that is cut, and the boxes of it."""
    size = shape[cut.dim]
    step = -(-size // cut.ranks)
    begin, local = [0] * len(shape), list(shape)
    begin[cut.dim] = min(rank * step, size)
    local[cut.dim] = min(begin[cut.dim] + step, size) - begin[cut.dim]
    return tuple(local), _held(begin, local, cut)


def _held(begin: Sequence[int], size: Sequence[int], cut: Cut | None) -> list[Held]:
    """Return the boxes that an interval of the stored tensor is made of."""
    if not min((*size, 1)):
        return []
    there = [slice(first, first + count) for first, count in zip(begin, size, strict=True)]
    here = [slice(0, count) for count in size]
    if cut is None:
        return [Held(tuple(there), tuple(here))]
    boxes = []
    for stored, original, length in cut.runs(begin[cut.dim], begin[cut.dim] + size[cut.dim]):
        there[cut.dim] = slice(original, original + length)
        here[cut.dim] = slice(stored - begin[cut.dim], stored - begin[cut.dim] + length)
        boxes.append(Held(tuple(there), tuple(here)))
    return boxes


def full_tensors(model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return tensors whole and in their original order; all processes must call it.

    Args:
        model: The model.
        tensors: What lies as the parameters of these names do: their gradients, say. The parameters, if left out.
    """
    cuts, parameters = named_cuts(model), dict(model.named_parameters())
    given = parameters if tensors is None else tensors
    with torch.no_grad():
        return {name: _whole(tensor, cuts.get(name), parameters.get(name)) for name, tensor in given.items()}


def _whole(tensor: Tensor, cut: Cut | None, parameter: Tensor | None) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    # What torch computes may name an equal mesh of groups that have ended; the parameter's is the one in use.
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else tensor.device_mesh
    local = tensor.to_local()
    whole = torch.zeros(tensor.shape, dtype=local.dtype, device=local.device)
    for box in boxes_of(tensor, cut):
        whole[box.original] = local[box.local]
    # Everyone has zeros where others have numbers; adding bytes to zeros changes none of them.
    flat = whole.view(-1).view(torch.uint8)
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # FSDP2 over a cut has a kind of its own, which is no `Shard`
            dist.all_reduce(flat, group=mesh.get_group(axis))
    return whole


def load_full_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Copy whole tensors in their original order into the parameters of a model that `shard_tensors` has cut.

    What is not cut, or cut by FSDP2 alone, is left to others. `tensors` may hold anything that can be sliced: tensors,
    or slices of a safetensors file, of which only what this process has is read.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, boxes in original_boxes(model).items():
            local: Any = parameters[name].detach()
            for box in boxes:
                local.to_local()[box.local].copy_(tensors[name][box.original])


__all__ = ["Cut", "Held", "full_tensors", "is_cut", "load_full_tensors", "original_boxes", "seen_whole"]
