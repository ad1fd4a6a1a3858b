"""Fingerprints of tensors: every value counts, and how a tensor is sharded does not matter.

A fingerprint is the sum, modulo 2^64, of all values' bits, each multiplied with a weight that depends on its position.
A sum can be put together from those of shards. The weight of a position is the product of one odd number per dim, so
that a shard needs as many numbers as it has rows and columns, not as it has values. Billions of values take a fraction
of a second on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cornstarch.train.checkpoint.pieces import Box, Tensorlike, parts_of

_AT_ONCE = 2**22  # values that are widened to 64 bits at a time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Part = tuple[list[int], list[int], int]
"""Offsets and sizes of a box, and the sum over its values; JSON can hold it."""


def fingerprint(tensor: Tensor) -> str:
    """Return the fingerprint of a tensor that this process has whole."""
    return _digits(_box_sum(Box.whole(tensor.shape), tensor.detach()))


def partial_fingerprints(tensor: Tensorlike) -> list[Part]:
    """Return the fingerprints of the boxes of a sharded tensor that this process has."""
    return [(list(box.offsets), list(box.sizes), _box_sum(box, numbers)) for box, numbers in parts_of(tensor)]


def join_fingerprints(parts: Iterable[Part]) -> str:
    """Return the fingerprint of a tensor from those of all boxes; a box that several processes have counts once."""
    return _digits(sum({(*offsets, *sizes): total for offsets, sizes, total in parts}.values()))


def _digits(total: int) -> str:
    return f"{total % 2**64:016x}"


def _box_sum(box: Box, numbers: Tensor) -> int:
    if not numbers.numel():
        return 0
    if not numbers.ndim:
        return int(_bits(numbers.reshape(1)).sum())
    rows = max(1, _AT_ONCE * len(numbers) // numbers.numel())
    total = 0
    for start in range(0, len(numbers), rows):
        bits = _bits(numbers[start : start + rows])
        for dim in reversed(range(numbers.ndim)):
            offset = box.offsets[dim] + (start if dim == 0 else 0)
            bits = (bits * _weights(dim, offset, bits.shape[dim], bits.device)).sum(dim)
        total += int(bits)
    return total


def _bits(numbers: Tensor) -> Tensor:
    """Return the bits of values as integers of 64 bits, in the same shape."""
    if numbers.is_complex():
        both = torch.view_as_real(numbers)
        return _bits(both[..., 0]) + 3 * _bits(both[..., 1])
    return numbers.contiguous().view(_INTEGERS[numbers.dtype.itemsize]).to(torch.int64)


def _weights(dim: int, offset: int, size: int, device: torch.device) -> Tensor:
    """Return an odd number for each index of a dim, as good as random; integers of 64 bits overflow on purpose."""
    mixed = torch.arange(offset, offset + size, device=device) * 0x1E3779B97F4A7C15 + (dim + 1) * 0x2545F4914F6CDD1D
    for multiplier in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        mixed = (mixed ^ (mixed >> 29)) * multiplier
    return (mixed ^ (mixed >> 32)) | 1


__all__ = ["Part", "fingerprint", "join_fingerprints", "partial_fingerprints"]
