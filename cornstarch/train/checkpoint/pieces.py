"""Tensors of which a process has only a part: which part it is, and how parts fit together. No process group.

A part is a box: an offset and a size in each dim. Two layouts of the same tensor are two ways to fill it with boxes,
and what one of them needs of the other is where boxes meet. This is all that resharding takes; torch's planners
(`torch.distributed.checkpoint`) know the same boxes, but hand them around as pickled plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Box", "Piece", "Sharded", "Tensorlike", "copy_parts", "interval_boxes", "is_cut", "parts_of", "tile"]


@dataclass(frozen=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return math.prod(self.sizes)

    def meet(self, other: Box) -> Box | None:
        """Return what both have; None if that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self._pair, *other._pair, strict=True))
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return where it lies in a tensor that holds `outer`."""
        begins = [a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.sizes, strict=True))

    @property
    def _pair(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offsets, self.sizes

    def __str__(self) -> str:
        return f"[{','.join(f'{a}:{a + n}' for a, n in zip(*self._pair, strict=True))}]"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor as it goes into a file."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    box: Box
    load: Callable[[], Tensor]
    """Returns its numbers when they are written."""

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.box.sizes == self.shape

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Sharded:
    """A tensor of which this process has a part that the tensor itself does not tell.

    It is an interval of the numbers in their order, as FSDP1 cuts them; or boxes, as tensor parallelism cuts what is
    fused: [query; key; value] of some heads.
    """

    shape: torch.Size
    local: Tensor
    """This process's numbers: the very memory, in whatever shape it has; or a DTensor of it."""
    start: int = 0
    """Which number of the whole tensor the first one is."""
    boxes: tuple[tuple[Box, tuple[slice, ...]], ...] | None = None
    """Instead of an interval: boxes of the whole tensor, and where in memory they are."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers."""
        return self.local.dtype

    @property
    def parts(self) -> list[tuple[Box, Tensor]]:
        """The boxes that are here, with their numbers."""
        if self.boxes is not None:
            memory = _memory(self.local)
            return [(box, memory[place]) for box, place in self.boxes]
        flat = self.local.detach().reshape(-1)
        boxes = interval_boxes(self.shape, self.start, self.start + flat.numel())
        pieces = flat.split([box.numel for box in boxes]) if boxes else ()
        return [(box, piece.view(box.sizes)) for box, piece in zip(boxes, pieces, strict=True)]

    def over(self, local: Tensor) -> Sharded:
        """Return another tensor that is cut in the same way: a moment of this parameter."""
        return Sharded(self.shape, local, self.start, self.boxes)


def _memory(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


Tensorlike: TypeAlias = Tensor | Sharded


def parts_of(tensor: Tensorlike) -> list[tuple[Box, Tensor]]:
    """Return what this process has of a tensor; the numbers are the tensor's own memory."""
    if isinstance(tensor, Sharded):
        return tensor.parts
    if not is_cut(tensor):
        return [(Box.whole(tensor.shape), tensor.detach())]
    # What a DTensor tells torch's own checkpoints; it knows every placement on every mesh.
    distributed: Any = tensor.detach()
    local = distributed.to_local()
    [chunk] = distributed.__create_chunk_list__()
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    assert tuple(local.shape) == box.sizes, (tuple(local.shape), box)
    return [(box, local)] if box.numel or not tensor.numel() else []


def is_cut(tensor: Tensorlike) -> bool:
    """Say whether processes may have different parts of it."""
    return isinstance(tensor, Sharded) or hasattr(tensor, "__create_chunk_list__")


def copy_parts(source: Tensorlike, target: Tensorlike) -> None:
    """Copy what this process has of `source`, which must be all that it has of `target`."""
    available = parts_of(source)
    for box, destination in parts_of(target):
        missing = box.numel
        for other, numbers in available:
            common = box.meet(other)
            if common is not None:
                destination[common.within(box)].copy_(numbers[common.within(other)])
                missing -= common.numel
        assert missing == 0, f"{missing} of {box.numel} numbers are in other processes"


def interval_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Return the boxes, in order, that hold the numbers from `start` to `end` of a tensor laid out row by row."""
    if start >= end:
        return []
    if not shape:
        return [Box((), ())]
    boxes: list[Box] = []
    row = math.prod(shape[1:])
    while start < end:
        index, inside = divmod(start, row)
        rows = 0 if inside else (end - start) // row
        if rows:
            boxes.append(Box((index, *(0 for _ in shape[1:])), (rows, *shape[1:])))
            start += rows * row
        else:
            stop = min(end, (index + 1) * row)
            for rest in interval_boxes(shape[1:], inside, inside + stop - start):
                boxes.append(Box((index, *rest.offsets), (1, *rest.sizes)))
            start = stop
    return boxes


def tile(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Say whether boxes fill a tensor and none overlaps another; they are cut along the first dim first."""
    if not shape:
        return len(boxes) == 1
    strips: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        strips.setdefault((box.offsets[0], box.sizes[0]), []).append(Box(box.offsets[1:], box.sizes[1:]))
    end = 0
    for (offset, size), rest in sorted(strips.items()):
        if offset != end or not tile(shape[1:], rest):
            return False
        end += size
    return end == shape[0]
