"""Which boxes of which stored tensors a process reads, to have its pieces of a model's parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cornstarch.compat import Destination
from cornstarch.parallel.tensor.order import Cut, Held, Slices, boxes_of, rank_boxes


class ReadWhole(Exception):
    """A model must be read whole before it is cut; the text says why."""


class Piece:
    """What this process has of a parameter; it is read when the loader asks for it."""

    def __init__(self, shape: Sequence[int], boxes: Sequence[tuple[Any, Slices, Any]]) -> None:
        self._shape, self._boxes = tuple(shape), boxes
        """Of each: the stored tensor, what of it is read, and where that belongs."""

    def __getitem__(self, index: Any) -> Tensor:
        """Return it, in memory of its own: what safetensors gives is a view of the file."""
        assert index is Ellipsis
        made: Tensor | None = None
        for source, there, here in self._boxes:
            part = source[there]
            made = part.new_empty(self._shape) if made is None else made
            made[here] = part
        assert made is not None
        return made


class _Whole:
    """A stored tensor that this process has all of."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getitem__(self, index: Any) -> Tensor:
        """Return it, in memory of its own."""
        return self._source[index].clone(memory_format=torch.contiguous_format)


class ReadingPlan:
    """What is read of each file for one model."""

    def __init__(
        self,
        sources: Mapping[str, Any],
        going: Mapping[str, Destination],
        held: Mapping[str, tuple[DTensor, Cut | None]],
        kept: set[str],
        ties: Mapping[str, str],
    ) -> None:
        self._sources, self._going, self._held, self._kept, self._ties = sources, going, held, kept, ties
        self.joined: dict[str, list[str]] = {}
        """The parameters with parts here that are put together of several stored tensors, and of which."""
        for key, destination in going.items():
            if destination.steps and destination.steps[0][0] != "Chunk" and destination.names[0] in held:
                self.joined.setdefault(destination.names[0], []).append(key)

    def pieces(self, itself: Mapping[str, Destination]) -> dict[str, Any]:
        """Return what the loader is given, by stored name.

        Args:
            itself: Where the loader would put a tensor that is stored under the name of a parameter in `joined`.
        """
        made: dict[str, Any] = {}
        for name, keys in self.joined.items():
            if itself.get(name) != Destination((name,)):
                raise ReadWhole(f"{name} cannot be loaded under its own name")
            made[name] = self._assembled(name, keys)
        joined = {key for keys in self.joined.values() for key in keys}
        for key in self._sources.keys() - joined:
            made |= self._single(key)
        return made

    def _single(self, key: str) -> dict[str, Any]:
        """Return the piece of a stored tensor under its own name, or that of a parameter that is tied to its own."""
        source, destination = self._sources[key], self._going.get(key)
        if destination is None or self._kept.issuperset(destination.names):
            return {key: self._piece(source, destination)}
        if self._kept.intersection(destination.names):
            raise ReadWhole(f"{destination.names[0]} is stored together with what is not here")
        if destination.steps:
            return {}
        tied = [name for name, origin in self._ties.items() if origin == destination.names[0] and name in self._kept]
        return {name: self._piece(source, Destination((name,))) for name in tied[:1]}

    def _piece(self, source: Any, destination: Destination | None) -> Piece | _Whole:
        if destination is None or not any(name in self._held for name in destination.names):
            return _Whole(source)
        if destination.steps:
            shape, boxes = self._boxes_of_source(source, destination)
        else:
            parameter, cut = self._held[destination.names[0]]
            shape, boxes = tuple(parameter.to_local().shape), boxes_of(parameter, cut)
        if not boxes:  # a rank without words
            nothing = (slice(0, 0),) * len(shape)
            return Piece(shape, [(source, nothing, nothing)])
        return Piece(shape, [(source, box.original, box.local) for box in boxes])

    def _boxes_of_source(self, source: Any, destination: Destination) -> tuple[tuple[int, ...], list[Held]]:
        """Return what of a stored tensor that is not simply a parameter is read: a shape, and boxes."""
        stored = source.get_shape()
        cuts = [self._held[name][1] if name in self._held else None for name in destination.names]
        cut = stored_cut(destination, cuts, stored)
        if cut is None:
            done = " and ".join(step for step, _ in destination.steps)
            raise ReadWhole(f"{destination.names[0]} is made of what is stored by {done}, which may need all of it")
        mesh = self._held[destination.names[0]][0].device_mesh
        if mesh.ndim > 1:
            raise ReadWhole(f"{destination.names[0]} is cut along several axes")
        return rank_boxes(cut, stored, mesh.get_local_rank())

    def _assembled(self, name: str, keys: Sequence[str]) -> Piece:
        """Return a parameter of several stored tensors, each read into its place: nothing is there twice."""
        steps = self._going[keys[0]].steps
        stacked = int(steps[0][0] == "MergeModulelist")
        along = steps[-1][1] if steps[-1][0] == "Concatenate" else None
        shape = tuple(self._held[name][0].to_local().shape)
        boxes, filled, start = [], 0, 0
        for kind in range(self._going[keys[0]].sources):
            # They stay in the order in which the loader meets them.
            size: tuple[int, ...] = ()
            for number, key in enumerate(key for key in keys if self._going[key].source == kind):
                source = self._sources[key]
                start += size[along] if along is not None and size and not stacked else 0
                size, own = self._boxes_of_source(source, self._going[key])
                for box in own:
                    here: list[Any] = list(box.local)
                    if along is not None:
                        inside = here[along - stacked]
                        here[along - stacked] = slice(start + inside.start, start + inside.stop)
                    boxes.append((source, box.original, (number, *here) if stacked else tuple(here)))
                filled += math.prod(size)
            start += size[along - stacked] if along is not None and size else 0
        if filled != math.prod(shape):
            raise ReadWhole(f"{name} is not stored as a whole")
        return Piece(shape, boxes)


def stored_cut(destination: Destination, cuts: Sequence[Cut | None], shape: Sequence[int]) -> Cut | None:
    """Return how a stored tensor is cut, so that its pieces come to the parameters' pieces; None if that is not known.

    Args:
        destination: What is made of it.
        cuts: How each of the parameters that it goes to is cut.
        shape: Its own.
    """
    cut = cuts[0]
    if cut is None:
        return None
    match destination.steps:
        case (("MergeModulelist", 0),):  # stored one by one, and stacked
            found: Cut | None = Cut(cut.dim - 1, cut.parts, cut.ranks)
        case (("MergeModulelist", 0), ("Concatenate", int(dim))):
            found = _joined(destination, cut, dim, 1)
        case (("Concatenate", int(dim)),):
            found = _joined(destination, cut, dim, 0)
        case (("Chunk", int(dim)),):
            found = _chunked(dim, cuts)
        case _:
            return None
    fits = found is not None and found.dim >= 0 and sum(found.parts) == shape[found.dim]
    return found if fits else None


def _joined(destination: Destination, cut: Cut, dim: int, stacked: int) -> Cut | None:
    """Return how tensors are cut that are put one behind the other along a dim of the parameter."""
    if dim < stacked:
        return None
    if dim != cut.dim:
        return Cut(cut.dim - stacked, cut.parts, cut.ranks)
    if len(cut.parts) != destination.sources:
        return None
    return Cut(cut.dim - stacked, (cut.parts[destination.source],), cut.ranks)


def _chunked(dim: int, cuts: Sequence[Cut | None]) -> Cut | None:
    """Return how a tensor is cut that is taken apart into equal parameters, which are all cut alike."""
    cut = cuts[0]
    assert cut is not None
    if any(other != cut for other in cuts):
        return None
    if dim != cut.dim:
        return cut
    return Cut(dim, cut.parts * len(cuts), cut.ranks) if len(cut.parts) == 1 else None


__all__ = ["Piece", "ReadWhole", "ReadingPlan", "stored_cut"]
