"""Which boxes of which stored tensors a rank reads for its shards of a model's parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cornstarch.compat import Destination
from cornstarch.parallel.tensor.placement import ShardBox, ShardSpec, Slices, local_boxes, rank_boxes


class FullReadRequired(Exception):
    """A model must be read in full before it is sharded; the text says why."""


class LazyShard:
    """The local shard of a parameter; it is read when the loader indexes it with `...`.

    Args:
        shape: The shape of the shard.
        boxes: The stored tensor of each box, its slices there, and its slices in the shard.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[tuple[Any, Slices, Any]]) -> None:
        self._shape, self._boxes = tuple(shape), boxes

    def __getitem__(self, index: Any) -> Tensor:
        """Return the shard in memory of its own: safetensors returns views of the file."""
        assert index is Ellipsis
        shard: Tensor | None = None
        for source, there, here in self._boxes:
            part = source[there]
            shard = part.new_empty(self._shape) if shard is None else shard
            shard[here] = part
        assert shard is not None
        return shard


class _LazyTensor:
    """A stored tensor that this rank reads in full."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getitem__(self, index: Any) -> Tensor:
        return self._source[index].clone(memory_format=torch.contiguous_format)


class ShardReadPlan:
    """What is read of each file for one model.

    Args:
        sources: The stored tensors by name.
        going: Where the loader puts each stored tensor.
        held: The DTensors among the parameters by name, and their shard specs.
        kept: The names of the parameters that this rank has.
        ties: Tied parameters, and those that they are tied to.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        going: Mapping[str, Destination],
        held: Mapping[str, tuple[DTensor, ShardSpec | None]],
        kept: set[str],
        ties: Mapping[str, str],
    ) -> None:
        self._sources, self._going, self._held, self._kept, self._ties = sources, going, held, kept, ties
        self.merged: dict[str, list[str]] = {}
        """The sharded parameters that the loader puts together from several stored tensors, and which."""
        for key, destination in going.items():
            if destination.steps and destination.steps[0][0] != "Chunk" and destination.names[0] in held:
                self.merged.setdefault(destination.names[0], []).append(key)

    def build_shards(self, itself: Mapping[str, Destination]) -> dict[str, Any]:
        """Return the tensors that the loader is given, by stored name.

        Args:
            itself: Where the loader would put a tensor that is stored under the name of a parameter in `merged`.
        """
        shards: dict[str, Any] = {}
        for name, keys in self.merged.items():
            # Merged here, and given to the loader as if the parameter had been stored under its own name.
            if itself.get(name) != Destination((name,)):
                raise FullReadRequired(f"{name} cannot be loaded under its own name")
            shards[name] = self._merge(name, keys)
        merged = {key for keys in self.merged.values() for key in keys}
        for key in self._sources.keys() - merged:
            shards |= self._build_single(key)
        return shards

    def _build_single(self, key: str) -> dict[str, Any]:
        """Return the shard of a stored tensor, by its own name or that of a parameter that is tied to it."""
        source, destination = self._sources[key], self._going.get(key)
        if destination is None or self._kept.issuperset(destination.names):
            return {key: self._build_shard(source, destination)}
        if self._kept.intersection(destination.names):
            raise FullReadRequired(f"{destination.names[0]} is stored together with what is not here")
        if destination.steps:
            return {}
        # The parameter itself is on another rank, but one that is tied to it may be here (a head on the last stage).
        tied = [name for name, origin in self._ties.items() if origin == destination.names[0] and name in self._kept]
        return {name: self._build_shard(source, Destination((name,))) for name in tied[:1]}

    def _build_shard(self, source: Any, destination: Destination | None) -> LazyShard | _LazyTensor:
        if destination is None or not any(name in self._held for name in destination.names):
            return _LazyTensor(source)
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
            done = " and ".join(step for step, _ in destination.steps)
            raise FullReadRequired(
                f"{destination.names[0]} is made of what is stored by {done}, which may need all of it"
            )
        mesh = self._held[destination.names[0]][0].device_mesh
        if mesh.ndim > 1:
            raise FullReadRequired(f"{destination.names[0]} is cut along several axes")
        return rank_boxes(spec, stored, mesh.get_local_rank())

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
    """Return how to shard a stored tensor so that the loader makes the parameters' shards of its shards.

    None if that is not known.

    Args:
        destination: Where the loader puts it, and by which steps.
        specs: The shard specs of the parameters that it goes to.
        shape: The stored shape.
    """
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
        case (("Chunk", int(dim)),):  # equal parameters, which must be sharded alike
            if any(other != spec for other in specs):
                found = None
            elif dim != spec.dim:
                found = spec
            else:
                found = ShardSpec(dim, spec.parts * len(specs), spec.ranks) if len(spec.parts) == 1 else None
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
