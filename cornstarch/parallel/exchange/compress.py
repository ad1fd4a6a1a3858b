"""Numbers made smaller for the wire: whole buckets at once, in the formats whose bytes `Compression.encoded` states.

Shapes: R rows (one for each rank that is sent something else), P numbers of a row, B blocks of K numbers, E bytes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cornstarch.plan.exchange import Compression

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Codec(Protocol):
    """Turns rows of numbers into rows of bytes, and back."""

    def encode(self, rows_RP: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Return rows of bytes, [R, E], all equally long; P is a multiple of the block."""
        ...

    def decode(self, bytes_RE: Tensor, numbers: int) -> Tensor:
        """Return what rows of bytes say, [R, P], in float32."""
        ...


def codec_of(how: Compression, dtype: torch.dtype = torch.float32) -> Codec:
    """Return what encodes as a compression says; numbers that are not made smaller travel as `dtype`."""
    match how.kind:
        case "topk":
            return Largest(how)
        case "quantize" if how.bits == 1:
            return Signs(how)
        case "quantize":
            return Levels(how)
        case _:
            return Cast(_CASTS.get(how.kind, dtype))


class Cast:
    """Numbers of another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, rows_RP: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Return the bytes of the rounded numbers."""
        return rows_RP.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, bytes_RE: Tensor, numbers: int) -> Tensor:
        """Return the numbers."""
        return bytes_RE.view(self.dtype).float()


class Largest:
    """The largest numbers of each block: bfloat16 values, then where in their block they stand."""

    def __init__(self, how: Compression) -> None:
        self.block, self.kept = how.block, how.kept
        self.offset = torch.uint8 if how.offset_bytes == 1 else torch.int16

    def encode(self, rows_RP: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Return values and offsets."""
        rows = len(rows_RP)
        blocks_BK = rows_RP.reshape(-1, self.block)
        offsets = blocks_BK.abs().topk(self.kept, dim=1, sorted=False).indices
        values = blocks_BK.gather(1, offsets).to(torch.bfloat16)
        # 16 bits without a sign cannot be computed with everywhere: those of a signed number are the same.
        packed = offsets.to(self.offset)
        return torch.cat([_bytes(values, rows), _bytes(packed, rows)], dim=1)

    def decode(self, bytes_RE: Tensor, numbers: int) -> Tensor:
        """Return the values in their places, zeros around them."""
        blocks = numbers // self.block
        first = blocks * self.kept * 2
        values = bytes_RE[:, :first].contiguous().view(torch.bfloat16).view(-1, self.kept)
        offsets = bytes_RE[:, first:].contiguous().view(self.offset).view(-1, self.kept).long()
        if self.offset is torch.int16:
            offsets = offsets & 0xFFFF
        found = torch.zeros(len(values), self.block, device=bytes_RE.device)
        return found.scatter_(1, offsets, values.float()).view(len(bytes_RE), numbers)


class Levels:
    """Whole numbers of 8 or 4 bits: each block's scale, then levels from -127 to 127, or from -7 to 7."""

    def __init__(self, how: Compression) -> None:
        self.block, self.is_half, self.stochastic = how.block, how.bits == 4, how.stochastic
        self.most = 2 ** (how.bits - 1) - 1

    def encode(self, rows_RP: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Return scales and levels."""
        rows = len(rows_RP)
        blocks_BK = rows_RP.reshape(-1, self.block)
        scales_B1 = blocks_BK.abs().amax(1, keepdim=True) / self.most
        levels = blocks_BK / scales_B1.clamp_min(torch.finfo(torch.float32).tiny)
        if self.stochastic:
            assert chance is not None
            levels = levels.add_(torch.rand(levels.shape, generator=chance, device=levels.device)).floor_()
        else:
            levels = levels.round_()
        packed = levels.clamp_(-self.most, self.most).to(torch.int8)
        if self.is_half:
            nibbles = packed.add_(8).view(torch.uint8)
            packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        return torch.cat([_bytes(scales_B1, rows), _bytes(packed, rows)], dim=1)

    def decode(self, bytes_RE: Tensor, numbers: int) -> Tensor:
        """Return levels times scales."""
        scales_B1, packed = _split(bytes_RE, numbers // self.block)
        if self.is_half:
            pairs = torch.stack([packed & 15, packed >> 4], dim=-1)
            levels = pairs.view(-1, self.block).to(torch.float32).sub_(8)
        else:
            levels = packed.view(torch.int8).view(-1, self.block).to(torch.float32)
        return levels.mul_(scales_B1).view(len(bytes_RE), numbers)


class Signs:
    """One bit for each number: each block's mean size, then eight signs in a byte."""

    def __init__(self, how: Compression) -> None:
        self.block = how.block

    def encode(self, rows_RP: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Return scales and signs."""
        rows = len(rows_RP)
        blocks_BK = rows_RP.reshape(-1, self.block)
        scales_B1 = blocks_BK.abs().mean(1, keepdim=True)
        signs = (blocks_BK >= 0).view(torch.uint8).view(-1, 8)
        packed = signs[:, 0].clone()
        for place in range(1, 8):
            packed |= signs[:, place] << place
        return torch.cat([_bytes(scales_B1, rows), _bytes(packed, rows)], dim=1)

    def decode(self, bytes_RE: Tensor, numbers: int) -> Tensor:
        """Return the mean size with the sign of each number."""
        scales_B1, packed = _split(bytes_RE, numbers // self.block)
        places = torch.arange(8, dtype=torch.uint8, device=packed.device)
        signs = (packed.reshape(-1, 1) >> places) & 1
        return (signs.view(-1, self.block).to(torch.float32) * 2 - 1).mul_(scales_B1).view(len(bytes_RE), numbers)


def _bytes(tensor: Tensor, rows: int) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).view(rows, -1)


def _split(bytes_RE: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the scales of all rows, [R × B, 1], and the bytes behind them."""
    first = blocks * 4
    return bytes_RE[:, :first].contiguous().view(torch.float32).view(-1, 1), bytes_RE[:, first:].contiguous()


def chosen(how: Compression, numbers: int, chance: torch.Generator) -> Tensor:
    """Return which numbers randomk sends: one of every `cell`; who has the same `chance` gets the same."""
    starts = torch.arange(0, numbers, how.cell, device=chance.device)
    within = torch.randint(how.cell, (len(starts),), generator=chance, device=chance.device)
    picked = starts + within
    # The last cell may be short.
    picked[-1] = starts[-1] + within[-1] % (numbers - starts[-1])
    return picked


__all__ = ["Codec", "chosen", "codec_of"]
