"""Shards of tensors: which part of a tensor a rank has, how shards fit together, and fingerprints of them.

A shard is a box: an offset and a size in each dim. Two layouts of a tensor are two partitions of it into boxes, and
resharding copies the intersections. torch's planners (`torch.distributed.checkpoint`) know the same boxes, but exchange
them as pickled plans. Nothing here needs a process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

FINGERPRINT_CHUNK = 2**22
"""Values that are widened to 64 bits at a time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part; None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self._pair, *other._pair, strict=True))
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that has the values of `outer`."""
        begins = [a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.sizes, strict=True))

    @property
    def _pair(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offsets, self.sizes

    def __str__(self) -> str:
        return f"[{','.join(f'{a}:{a + n}' for a, n in zip(*self._pair, strict=True))}]"


@dataclass(frozen=True)
class TensorShard:
    """A shard that is written to a file."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: torch.dtype
    box: Box
    load: Callable[[], Tensor]
    """Returns the values when they are written."""

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the whole tensor."""
        return self.box.sizes == self.shape

    @property
    def nbytes(self) -> int:
        """The size in a file."""
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Sharded:
    """A tensor of which this rank has a shard that the tensor itself does not describe.

    The shard is an interval of the flattened tensor, as in FSDP1; or several boxes, as tensor parallelism makes of
    fused parameters ([query; key; value] of some heads).
    """

    shape: torch.Size
    local: Tensor
    """The values of this rank: the very memory, in any shape; or a DTensor of it."""
    start: int = 0
    """The index of the first local value in the flattened tensor."""
    boxes: tuple[tuple[Box, tuple[slice, ...]], ...] | None = None
    """Instead of an interval: boxes of the whole tensor, each with its place in local memory."""

    @property
    def dtype(self) -> torch.dtype:
        """The data type."""
        return self.local.dtype

    @property
    def shards(self) -> list[tuple[Box, Tensor]]:
        """The local boxes with their values."""
        if self.boxes is not None:
            local: Any = self.local.detach()
            memory: Tensor = local.to_local() if hasattr(local, "to_local") else local
            return [(box, memory[place]) for box, place in self.boxes]
        flat = self.local.detach().reshape(-1)
        boxes = interval_boxes(self.shape, self.start, self.start + flat.numel())
        values = flat.split([box.numel for box in boxes]) if boxes else ()
        return [(box, value.view(box.sizes)) for box, value in zip(boxes, values, strict=True)]

    def with_local(self, local: Tensor) -> Sharded:
        """Return another tensor with the same sharding, such as an optimizer state of this parameter."""
        return Sharded(self.shape, local, self.start, self.boxes)


Tensorlike: TypeAlias = Tensor | Sharded


def local_shards(tensor: Tensorlike) -> list[tuple[Box, Tensor]]:
    """Return the shards of a tensor on this rank; the values are the tensor's own memory."""
    if isinstance(tensor, Sharded):
        return tensor.shards
    if not is_sharded(tensor):
        return [(Box.whole(tensor.shape), tensor.detach())]
    # The protocol of torch's own checkpoints: a DTensor knows its box for every placement on every mesh.
    distributed: Any = tensor.detach()
    local = distributed.to_local()
    [chunk] = distributed.__create_chunk_list__()
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    assert tuple(local.shape) == box.sizes, (tuple(local.shape), box)
    return [(box, local)] if box.numel or not tensor.numel() else []


def is_sharded(tensor: Tensorlike) -> bool:
    """Return whether ranks may have different shards of a tensor."""
    return isinstance(tensor, Sharded) or hasattr(tensor, "__create_chunk_list__")


def copy_shards(source: Tensorlike, target: Tensorlike) -> None:
    """Copy the local shards of `source`, which must contain those of `target`."""
    available = local_shards(source)
    for box, destination in local_shards(target):
        missing = box.numel
        for other, values in available:
            common = box.intersect(other)
            if common is not None:
                destination[common.slices_in(box)].copy_(values[common.slices_in(other)])
                missing -= common.numel
        assert missing == 0, f"{missing} of {box.numel} values are on other ranks"


def interval_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Return the boxes, in order, of the values `start` to `end` of a flattened tensor."""
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


def is_partition(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether boxes fill a tensor without overlap; they are cut along the first dim first."""
    if not shape:
        return len(boxes) == 1
    strips: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        strips.setdefault((box.offsets[0], box.sizes[0]), []).append(Box(box.offsets[1:], box.sizes[1:]))
    end = 0
    for (offset, size), rest in sorted(strips.items()):
        if offset != end or not is_partition(shape[1:], rest):
            return False
        end += size
    return end == shape[0]


# ---------------------------------------------------------------------------------------------------- fingerprints
#
# A fingerprint is the sum, modulo 2^64, of the bits of all values, each multiplied with a weight of its position. Sums
# of shards add up to that of the tensor, whatever the sharding. The weight of a position is the product of one odd
# number per dim: a shard needs as many numbers as it has rows and columns, not as it has values. Billions of values
# take a fraction of a second on a GPU.

ShardFingerprint = tuple[list[int], list[int], int]
"""The offsets and sizes of a box and the sum over its values, as JSON can hold them."""


def fingerprint(tensor: Tensor) -> str:
    """Return the fingerprint of a tensor that this rank has as a whole."""
    return _format_sum(_sum_box(Box.whole(tensor.shape), tensor.detach()))


def fingerprint_shards(tensor: Tensorlike) -> list[ShardFingerprint]:
    """Return the fingerprints of the local shards of a tensor."""
    return [(list(box.offsets), list(box.sizes), _sum_box(box, values)) for box, values in local_shards(tensor)]


def join_fingerprints(shards: Iterable[ShardFingerprint]) -> str:
    """Return the fingerprint of a tensor from those of all shards; replicated shards count once."""
    return _format_sum(sum({(*offsets, *sizes): total for offsets, sizes, total in shards}.values()))


def _format_sum(total: int) -> str:
    return f"{total % 2**64:016x}"


def _sum_box(box: Box, values: Tensor) -> int:
    if not values.numel():
        return 0
    if not values.ndim:
        return int(_view_bits(values.reshape(1)).sum())
    rows = max(1, FINGERPRINT_CHUNK * len(values) // values.numel())
    total = 0
    for start in range(0, len(values), rows):
        bits = _view_bits(values[start : start + rows])
        for dim in reversed(range(values.ndim)):
            offset = box.offsets[dim] + (start if dim == 0 else 0)
            bits = (bits * _position_weights(dim, offset, bits.shape[dim], bits.device)).sum(dim)
        total += int(bits)
    return total


def _view_bits(values: Tensor) -> Tensor:
    """Return the bits of values as 64-bit integers, in the same shape."""
    if values.is_complex():
        both = torch.view_as_real(values)
        return _view_bits(both[..., 0]) + 3 * _view_bits(both[..., 1])
    return values.contiguous().view(_INTEGERS[values.dtype.itemsize]).to(torch.int64)


def _position_weights(dim: int, offset: int, size: int, device: torch.device) -> Tensor:
    """Return a pseudo-random odd number for each index of a dim; the 64-bit integers overflow on purpose."""
    mixed = torch.arange(offset, offset + size, device=device) * 0x1E3779B97F4A7C15 + (dim + 1) * 0x2545F4914F6CDD1D
    for multiplier in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        mixed = (mixed ^ (mixed >> 29)) * multiplier
    return (mixed ^ (mixed >> 32)) | 1
