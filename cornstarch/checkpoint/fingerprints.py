"""Fingerprints of tensors, from any shards of them.

A fingerprint is the sum, modulo 2^64, of the bits of all values, each multiplied with a weight of its position. Sums of
shards add up to that of the tensor, whatever the sharding. The weight of a position is the product of one odd number
per dim: a shard needs as many numbers as it has rows and columns, not as it has values. Billions of values take a
fraction of a second on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cornstarch.checkpoint.shards import Box, Tensorlike, local_shards

FINGERPRINT_CHUNK = 2**22
"""Values that are widened to 64 bits at a time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

ShardFingerprint = tuple[list[int], list[int], int]
"""The offsets and sizes of a box and the sum over its values, as JSON can hold them."""


def fingerprint_shards(tensor: Tensorlike) -> list[ShardFingerprint]:
    """Return the fingerprints of the local shards of a tensor."""
    return [(list(box.offsets), list(box.sizes), _sum_box(box, values)) for box, values in local_shards(tensor)]


def join_fingerprints(shards: Iterable[ShardFingerprint]) -> str:
    """Return the fingerprint of a tensor from those of all shards; replicated shards count once."""
    total = sum({(*offsets, *sizes): total for offsets, sizes, total in shards}.values())
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
