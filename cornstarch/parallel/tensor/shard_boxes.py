"""Sharded parameters: which part each rank has, where it lies in the original tensor, and what is read of stored ones.

A plain weight is divided into as many equal pieces as there are ranks. A fused one ([q; k; v] or [gate; up]) consists
of parts, and each rank has its piece of each part, one behind the other. A DTensor knows only plain shards, so the
fused tensor that it describes is in *stored* order, rank by rank: [q0; k0; v0; q1; k1; v1]. Checkpoints are in the
original order; `original_boxes` tells how one lies in the other, also when FSDP2 has sharded the pieces once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cornstarch.compat import Destination
from cornstarch.parallel.distributed import to_local_tensor

Slices = tuple[slice, ...]
_SPECS = "shard_specs"


@dataclass(frozen=True)
class ShardSpec:
    """How a parameter is sharded."""

    dim: int
    parts: tuple[int, ...]
    """The sizes of what is fused along the dim; a single one for a plain weight, which need not divide evenly."""
    ranks: int

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


def shard_interval(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return where a rank's shard of `size` entries begins and ends; the last ranks may have fewer, or none."""
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def shard_parameter(module: nn.Module, name: str, spec: ShardSpec, mesh: DeviceMesh) -> None:
    """Replace a full parameter by a DTensor of which this rank has its shard only; works on the meta device."""
    parameter = module._parameters[name]
    assert parameter is not None and parameter.shape[spec.dim] == sum(spec.parts), (name, spec)
    pieces = []
    for part, size in zip(parameter.detach().split(spec.parts, spec.dim), spec.parts, strict=True):
        begin, end = shard_interval(size, spec.ranks, mesh.get_local_rank())
        pieces.append(part.narrow(spec.dim, begin, end - begin))
    # A copy even of a single piece: a view would keep the full tensor in memory.
    local = torch.cat(pieces, spec.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
    sizes: dict[str, Any] = {"shape": parameter.shape, "stride": torch.empty(parameter.shape, device="meta").stride()}
    distributed = DTensor.from_local(local, mesh, [Shard(spec.dim)], run_check=False, **sizes)
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
    """Run a block, such as PEFT's, that sees sharded parameters as plain ones of their full shape, without values.

    It may move modules, and must not change parameters.
    """
    sharded = [
        (m, n, p) for m in model.modules() for n in get_shard_specs(m) if (p := m._parameters.get(n)) is not None
    ]
    for module, name, parameter in sharded:
        local = to_local_tensor(parameter)
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

    It holds for the parameter, its gradient and an optimizer's moments, before and after `fully_shard`.
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

    torch 2.13 does not know them where an unevenly sharded dim (67 words over 2 ranks) is sharded again.
    """
    begin, size = [0] * tensor.ndim, list(tensor.shape)
    mesh, coordinates = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    for axis in reversed(range(mesh.ndim)):  # the last axis is that of tensor parallelism, which was first
        placement: Any = tensor.placements[axis]
        if placement.is_replicate():
            continue
        first, last = shard_interval(size[placement.dim], mesh.size(axis), coordinates[axis])
        begin[placement.dim] += first
        size[placement.dim] = last - first
    assert tuple(size) == tuple(tensor.to_local().shape), (size, tensor.to_local().shape, tensor.placements)
    return begin, size


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


@torch.no_grad()
def gather_full_tensors(model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return full tensors in their original order; all ranks must call it.

    `tensors` lie as the parameters of these names do, as gradients do. Default: the parameters themselves.
    """
    specs, parameters = find_shard_specs(model), dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for name, tensor in (parameters if tensors is None else tensors).items():
        if not isinstance(tensor, DTensor):
            found[name] = tensor.detach()
            continue
        # Tensors that torch computes may name an equal mesh of groups that have ended; the parameter's is in use.
        parameter = parameters.get(name)
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else tensor.device_mesh
        local = tensor.to_local()
        found[name] = whole = torch.zeros(tensor.shape, dtype=local.dtype, device=local.device)
        for box in local_boxes(tensor, specs.get(name)):
            whole[box.original] = local[box.local]
        # Each number is on one rank and zero on the others. Added as bytes, it stays the same bit for bit.
        flat = whole.view(-1).view(torch.uint8)
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate():  # FSDP2 over a shard has a placement of its own, which is not a `Shard`
                dist.all_reduce(flat, group=mesh.get_group(axis))
    return found


@torch.no_grad()
def load_full_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Copy full tensors in their original order into the parameters that `shard_tensors` has sharded.

    `tensors` may hold slices of a safetensors file, too, of which only the local boxes are read.
    """
    parameters = dict(model.named_parameters())
    for name, boxes in original_boxes(model).items():
        local = to_local_tensor(parameters[name].detach())
        for box in boxes:
            local[box.local].copy_(tensors[name][box.original])


class FullReadRequired(Exception):
    """A model must be read in full before it is sharded; the text says why."""


@dataclass(frozen=True, eq=False)
class LazyShard:
    """The local shard of a parameter; it is read when the loader indexes it with `...`."""

    shape: Sequence[int]
    boxes: Sequence[tuple[Any, Any, Any]]  # a stored tensor, the slices to read of it, and where they are in the shard

    def __getitem__(self, index: Any) -> Tensor:
        """Return the shard in memory of its own: safetensors returns views of the file."""
        assert index is Ellipsis
        shard: Tensor | None = None
        for source, there, here in self.boxes:
            part = source[there]
            shard = part.new_empty(self.shape) if shard is None else shard
            shard[here] = part
        assert shard is not None
        return shard


class ShardReadPlan:
    """What is read of each file for one model."""

    def __init__(
        self,
        sources: Mapping[str, Any],  # stored tensors by name
        going: Mapping[str, Destination],  # where the loader puts each
        held: Mapping[str, tuple[DTensor, ShardSpec | None]],  # the DTensors among the parameters
        kept: set[str],  # the names of this rank's parameters
        ties: Mapping[str, str],  # tied parameters, with those that they are tied to
    ) -> None:
        self._sources, self._going, self._held, self._kept, self._ties = sources, going, held, kept, ties
        self.merged: dict[str, list[str]] = {}
        """The sharded parameters that the loader puts together from several stored tensors, and which."""
        for key, destination in going.items():
            if destination.steps and destination.steps[0][0] != "Chunk" and destination.names[0] in held:
                self.merged.setdefault(destination.names[0], []).append(key)

    def build_shards(self, itself: Mapping[str, Destination]) -> dict[str, Any]:
        """Return the tensors for the loader by stored name; `itself`: where it puts those named as in `merged`."""
        shards: dict[str, Any] = {}
        for name, keys in self.merged.items():
            # Merged here, and given to the loader as if the parameter had been stored under its own name.
            if itself.get(name) != Destination((name,)):
                raise FullReadRequired(f"{name} cannot be loaded under its own name")
            shards[name] = self._merge(name, keys)
        merged = {key for keys in self.merged.values() for key in keys}
        for key in self._sources.keys() - merged:
            source, to = self._sources[key], self._going.get(key)
            if to is None or self._kept.issuperset(to.names):
                shards[key] = self._build_shard(source, to)
            elif self._kept.intersection(to.names):
                raise FullReadRequired(f"{to.names[0]} is stored together with what is not here")
            elif not to.steps:
                # The parameter is on another rank, but one that is tied to it may be here (a head on the last stage).
                tied = [name for name, origin in self._ties.items() if origin == to.names[0] and name in self._kept]
                shards |= {name: self._build_shard(source, Destination((name,))) for name in tied[:1]}
        return shards

    def _build_shard(self, source: Any, destination: Destination | None) -> LazyShard:
        if destination is None or not any(name in self._held for name in destination.names):
            return LazyShard(source.get_shape(), [(source, ..., ...)])
        if destination.steps:
            shape, boxes = self._find_source_boxes(source, destination)
        else:
            parameter, spec = self._held[destination.names[0]]
            shape, boxes = tuple(parameter.to_local().shape), local_boxes(parameter, spec)
        if not boxes:  # a rank without a part of the vocabulary
            nothing = (slice(0, 0),) * len(shape)
            return LazyShard(shape, [(source, nothing, nothing)])
        return LazyShard(shape, [(source, box.original, box.local) for box in boxes])

    def _find_source_boxes(self, source: Any, destination: Destination) -> tuple[tuple[int, ...], list[ShardBox]]:
        """Return the shape and the boxes to read of a stored tensor that the loader transforms."""
        stored = source.get_shape()
        specs = [self._held[name][1] if name in self._held else None for name in destination.names]
        spec = find_stored_sharding(destination, specs, stored)
        if spec is None:
            name, done = destination.names[0], " and ".join(step for step, _ in destination.steps)
            raise FullReadRequired(f"{name} is made of what is stored by {done}, which may need all of it")
        mesh = self._held[destination.names[0]][0].device_mesh
        if mesh.ndim > 1:
            raise FullReadRequired(f"{destination.names[0]} is cut along several axes")
        begin, size = [0] * len(stored), list(stored)
        begin[spec.dim], end = shard_interval(stored[spec.dim], spec.ranks, mesh.get_local_rank())
        size[spec.dim] = end - begin[spec.dim]
        return tuple(size), _split_into_boxes(begin, size, spec)

    def _merge(self, name: str, keys: Sequence[str]) -> LazyShard:
        """Return a shard of several stored tensors, each read into its place, so that nothing is in memory twice."""
        steps = self._going[keys[0]].steps
        stacked = int(steps[0][0] == "MergeModulelist")
        along = steps[-1][1] if steps[-1][0] == "Concatenate" else None
        shape = tuple(self._held[name][0].to_local().shape)
        boxes, filled, start = [], 0, 0
        for kind in range(self._going[keys[0]].sources):
            # The order is that in which the loader meets them.
            size: tuple[int, ...] = ()
            for number, key in enumerate(key for key in keys if self._going[key].source == kind):
                source = self._sources[key]
                start += size[along] if along is not None and size and not stacked else 0
                size, own = self._find_source_boxes(source, self._going[key])
                for box in own:
                    here: list[Any] = list(box.local)
                    if along is not None:
                        inside = here[along - stacked]
                        here[along - stacked] = slice(start + inside.start, start + inside.stop)
                    boxes.append((source, box.original, (number, *here) if stacked else tuple(here)))
                filled += math.prod(size)
            start += size[along - stacked] if along is not None and size else 0
        if filled != math.prod(shape):
            raise FullReadRequired(f"{name} is not stored as a whole")
        return LazyShard(shape, boxes)


def find_stored_sharding(
    destination: Destination, specs: Sequence[ShardSpec | None], shape: Sequence[int]
) -> ShardSpec | None:
    """Return how to shard a stored tensor so that the loader makes the parameters' shards of its shards, if known."""
    spec = specs[0]
    if spec is None:
        return None
    match destination.steps:
        case (("MergeModulelist", 0),):  # stored one by one, and stacked
            found: ShardSpec | None = ShardSpec(spec.dim - 1, spec.parts, spec.ranks)
        case (("MergeModulelist", 0), ("Concatenate", int(dim))):
            found = _shard_concatenated(destination, spec, dim, 1)
        case (("Concatenate", int(dim)),):
            found = _shard_concatenated(destination, spec, dim, 0)
        # Equal parameters, which must be sharded alike.
        case (("Chunk", int(dim)),) if set(specs) == {spec} and (dim != spec.dim or len(spec.parts) == 1):
            found = spec if dim != spec.dim else ShardSpec(dim, spec.parts * len(specs), spec.ranks)
        case _:
            return None
    fits = found is not None and found.dim >= 0 and sum(found.parts) == shape[found.dim]
    return found if fits else None


def _shard_concatenated(destination: Destination, spec: ShardSpec, dim: int, stacked: int) -> ShardSpec | None:
    if dim < stacked:
        return None
    if dim != spec.dim:
        return ShardSpec(spec.dim - stacked, spec.parts, spec.ranks)
    if len(spec.parts) != destination.sources:
        return None
    return ShardSpec(spec.dim - stacked, (spec.parts[destination.source],), spec.ranks)
