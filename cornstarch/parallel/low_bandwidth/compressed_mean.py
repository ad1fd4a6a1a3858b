"""Compressed means over ranks, and the registry of compressions.

`CompressedMean` replaces a tensor by its mean over all ranks, bit for bit the same on each. With e for the error that a
rank remembers, x for its tensor, and C for encoding and decoding:

    a = x + e                        the value to send
    two ranks:   m = mean of C(a);   e = a - C(a)
    more ranks:  each rank reduces one part: p = (its own a + the others' C(a)) / N, and sends C(p) to all
                 m = all C(p);       e = a - C(a), and on its own part N (p - C(p))

Nothing is lost: m plus the mean of all e is the mean of all a.

A compression is a codec whose byte format `Compression.count_encoded_bytes` of the plan states the size of. To add one,
write its codec and call `register_compression`.

Shapes: R rows (one for each rank that gets something else), P numbers of a row, B blocks of K numbers, E bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.parallel.low_bandwidth.replicas import ByteAllToAll
from cornstarch.plan.data_options import REGISTERED, Compression

PIECE = 2**19  # numbers that are encoded at once while other pieces travel


class Codec(Protocol):
    """Turns rows of numbers into rows of bytes, and back."""

    def encode(self, rows_RP: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return rows of bytes, [R, E], all of the same length; P is a multiple of the block."""
        ...

    def decode(self, bytes_RE: Tensor, numbers: int) -> Tensor:
        """Return the numbers, [R, P], in float32."""
        ...


@dataclass(frozen=True)
class CompressionScheme:
    """How one kind of compression works."""

    build_codec: Callable[[Compression, torch.dtype], Codec]  # called with the settings and the dtype of the tensor
    select_indices: Callable[[Compression, int, torch.Generator], Tensor] | None = None
    """Returns the indices to send of so many numbers. The generator is seeded alike on all ranks."""
    build_ddp_sync: Callable[..., Any] | None = None
    """Called with (wrapped, settings, group): a DDP communication hook of its own instead of compressed means."""


SCHEMES: dict[str, CompressionScheme] = {}


def register_compression(
    name: str,
    build_codec: Callable[[Compression, torch.dtype], Codec],
    *,
    select_indices: Callable[[Compression, int, torch.Generator], Tensor] | None = None,
    build_ddp_sync: Callable[..., Any] | None = None,
) -> None:
    """Register a compression by the name that `parallel.data.compression.kind` has for it."""
    SCHEMES[name] = CompressionScheme(build_codec, select_indices, build_ddp_sync)
    REGISTERED["compression"].add(name)


class CastCodec:
    """Rounds numbers to another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, rows_RP: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return rows_RP.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, bytes_RE: Tensor, numbers: int) -> Tensor:
        return bytes_RE.view(self.dtype).float()


class TopKCodec:
    """Sends the largest numbers of each block: bfloat16 values, then their offsets within the block."""

    def __init__(self, how: Compression) -> None:
        self.block, self.kept = how.block, how.kept
        self.offset = torch.uint8 if how.offset_bytes == 1 else torch.int16

    def encode(self, rows_RP: Tensor, generator: torch.Generator | None = None) -> Tensor:
        blocks_BK = rows_RP.reshape(-1, self.block)
        offsets = blocks_BK.abs().topk(self.kept, dim=1, sorted=False).indices
        values = blocks_BK.gather(1, offsets).to(torch.bfloat16)
        # Not all devices compute with uint16; int16 has the same bits.
        return _join_bytes(len(rows_RP), values, offsets.to(self.offset))

    def decode(self, bytes_RE: Tensor, numbers: int) -> Tensor:
        first = numbers // self.block * self.kept * 2
        values = bytes_RE[:, :first].contiguous().view(torch.bfloat16).view(-1, self.kept)
        offsets = bytes_RE[:, first:].contiguous().view(self.offset).view(-1, self.kept).long()
        if self.offset is torch.int16:
            offsets = offsets & 0xFFFF
        found = torch.zeros(len(values), self.block, device=bytes_RE.device)
        return found.scatter_(1, offsets, values.float()).view(len(bytes_RE), numbers)


class IntegerCodec:
    """Rounds to 8 or 4 bits: the scale of each block, then levels from -127 to 127, or from -7 to 7."""

    def __init__(self, how: Compression) -> None:
        self.block, self.is_half, self.stochastic = how.block, how.bits == 4, how.stochastic
        self.most = 2 ** (how.bits - 1) - 1

    def encode(self, rows_RP: Tensor, generator: torch.Generator | None = None) -> Tensor:
        blocks_BK = rows_RP.reshape(-1, self.block)
        scales_B1 = blocks_BK.abs().amax(1, keepdim=True) / self.most
        levels = blocks_BK / scales_B1.clamp_min(torch.finfo(torch.float32).tiny)  # blocks of zeros have scale 0
        if self.stochastic:
            assert generator is not None
            levels = levels.add_(torch.rand(levels.shape, generator=generator, device=levels.device)).floor_()
        else:
            levels = levels.round_()
        packed = levels.clamp_(-self.most, self.most).to(torch.int8)
        if self.is_half:
            nibbles = packed.add_(8).view(torch.uint8)
            packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        return _join_bytes(len(rows_RP), scales_B1, packed)

    def decode(self, bytes_RE: Tensor, numbers: int) -> Tensor:
        scales_B1, packed = _split_scales(bytes_RE, numbers // self.block)
        if self.is_half:
            pairs = torch.stack([packed & 15, packed >> 4], dim=-1)
            levels = pairs.view(-1, self.block).to(torch.float32).sub_(8)
        else:
            levels = packed.view(torch.int8).view(-1, self.block).to(torch.float32)
        return levels.mul_(scales_B1).view(len(bytes_RE), numbers)


class SignCodec:
    """Sends one bit for each number: the mean magnitude of each block, then eight signs in a byte."""

    def __init__(self, how: Compression) -> None:
        self.block = how.block

    def encode(self, rows_RP: Tensor, generator: torch.Generator | None = None) -> Tensor:
        blocks_BK = rows_RP.reshape(-1, self.block)
        scales_B1 = blocks_BK.abs().mean(1, keepdim=True)
        signs = (blocks_BK >= 0).view(torch.uint8).view(-1, 8)
        packed = signs[:, 0].clone()
        for place in range(1, 8):
            packed |= signs[:, place] << place
        return _join_bytes(len(rows_RP), scales_B1, packed)

    def decode(self, bytes_RE: Tensor, numbers: int) -> Tensor:
        scales_B1, packed = _split_scales(bytes_RE, numbers // self.block)
        places = torch.arange(8, dtype=torch.uint8, device=packed.device)
        signs = (packed.reshape(-1, 1) >> places) & 1
        return (signs.view(-1, self.block).to(torch.float32) * 2 - 1).mul_(scales_B1).view(len(bytes_RE), numbers)


def _join_bytes(rows: int, *tensors: Tensor) -> Tensor:
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8).view(rows, -1) for tensor in tensors], dim=1)


def _split_scales(bytes_RE: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the scales of all rows, [R × B, 1], and the bytes behind them."""
    first = blocks * 4
    return bytes_RE[:, :first].contiguous().view(torch.float32).view(-1, 1), bytes_RE[:, first:].contiguous()


def select_random_indices(how: Compression, numbers: int, generator: torch.Generator) -> Tensor:
    """Return the indices that randomk sends: one of every `cell` numbers, the same for the same generator state."""
    starts = torch.arange(0, numbers, how.cell, device=generator.device)
    within = torch.randint(how.cell, (len(starts),), generator=generator, device=generator.device)
    picked = starts + within
    picked[-1] = starts[-1] + within[-1] % (numbers - starts[-1])  # the last cell may be short
    return picked


register_compression("none", lambda how, dtype: CastCodec(dtype))
register_compression("bf16", lambda how, dtype: CastCodec(torch.bfloat16))
register_compression("fp16", lambda how, dtype: CastCodec(torch.float16))
register_compression("topk", lambda how, dtype: TopKCodec(how))
register_compression("randomk", lambda how, dtype: CastCodec(dtype), select_indices=select_random_indices)
register_compression("quantize", lambda how, dtype: SignCodec(how) if how.bits == 1 else IntegerCodec(how))


class CompressedMean:
    """Computes compressed means of flat tensors over a group, in which a thread of its own must be alone."""

    def __init__(self, how: Compression, group: dist.ProcessGroup) -> None:
        self.how, self.group = how, group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.bytes_sent = 0  # by this rank since the beginning

    @torch.no_grad()
    def __call__(self, flat: Tensor, memory: Tensor | None, step: int, place: int = 0, scale: float = 1.0) -> int:
        """Replace a flat tensor by its mean over all ranks, and return the bytes sent; all ranks keep the same order.

        `memory` is the error that was not sent yet, in float32, changed in place. The number of reductions of this
        tensor (`step`) and its index in a step (`place`) seed random numbers. The loss scale is not in `memory`.
        """
        before = self.bytes_sent
        if self.ranks > 1 and (self.how.kind == "none" or step < self.how.warmup):
            dist.all_reduce(flat, group=self.group)
            flat.div_(self.ranks)
            self.bytes_sent += Compression().count_sent_bytes(flat.numel(), flat.element_size(), self.ranks)
        elif self.ranks > 1:
            self._reduce_compressed(flat, memory, step, place, scale)
        return self.bytes_sent - before

    def _reduce_compressed(self, flat: Tensor, memory: Tensor | None, step: int, place: int, scale: float) -> None:
        wanted = flat.float() if memory is None else torch.add(flat, memory, alpha=scale)
        reduce_values = partial(self._reduce_values, dtype=flat.dtype, step=step, place=place)
        if select := SCHEMES[self.how.kind].select_indices:
            picked = select(self.how, len(wanted), self._generator(wanted.device, step, place, on_all_ranks=True))
            # Without error feedback, values are scaled up so that the mean is right in expectation.
            values = wanted[picked] if memory is not None else wanted[picked] * self.how.cell
            mean, error = torch.zeros_like(wanted), wanted
            mean[picked], error[picked] = reduce_values(values)
        else:
            mean, error = reduce_values(wanted)
        flat.copy_(mean)
        if memory is not None:
            memory.copy_(error)
            if scale != 1.0:  # gradients that overflow in fp16: the step is skipped, and must leave no trace
                memory.div_(scale).nan_to_num_(0.0, 0.0, 0.0)

    def _reduce_values(self, wanted: Tensor, dtype: torch.dtype, step: int, place: int) -> tuple[Tensor, Tensor]:
        """Return the mean over ranks, and the error of this rank."""
        codec = SCHEMES[self.how.kind].build_codec(self.how, dtype)
        generator = self._generator(wanted.device, step, place)
        numbers = len(wanted)
        if self.how.uses_all_gather(self.ranks):
            rows_1P = _pad_rows(wanted, 1, self.how.shard_size(numbers, 1))
            return self._gather_mean(rows_1P, codec, generator)[:numbers], rows_1P[0, :numbers]
        rows_RP = _pad_rows(wanted, self.ranks, self.how.shard_size(numbers, self.ranks))
        sent = codec.encode(rows_RP, generator)
        received = codec.decode(self._all_to_all(sent), rows_RP.shape[1])
        received[self.rank] = rows_RP[self.rank]
        part = received.mean(0)
        # The padding has no sign of its own; a codec of signs would make numbers of it.
        part[max(0, numbers - self.rank * len(part)) :] = 0
        mean_RP = codec.decode(self._all_gather(codec.encode(part[None], generator)), rows_RP.shape[1])
        error = rows_RP - codec.decode(sent, rows_RP.shape[1])
        error[self.rank] = (part - mean_RP[self.rank]) * self.ranks
        return mean_RP.view(-1)[:numbers], error.view(-1)[:numbers]

    def _gather_mean(self, rows_1P: Tensor, codec: Codec, generator: torch.Generator) -> Tensor:
        """Return the mean of what all ranks send to all, and leave the error of this rank in the row."""
        if rows_1P.device.type != "cpu":
            decoded = codec.decode(self._all_gather(codec.encode(rows_1P, generator)), rows_1P.shape[1])
            rows_1P.sub_(decoded[self.rank])
            return decoded.mean(0)
        # Each piece is encoded while those before it travel, and decoded while those behind it do. All receives are
        # posted first, because gloo starts to send only when the other side is ready.
        size = self.how.shard_size(PIECE, 1)
        pieces = rows_1P[0].split(size)
        transfers = [ByteAllToAll(self.group, self.how.count_encoded_bytes(len(piece))) for piece in pieces]
        for transfer, piece in zip(transfers, pieces, strict=True):
            encoded_1E = codec.encode(piece[None], generator)
            transfer.send(encoded_1E.expand(self.ranks, -1))
            self.bytes_sent += (self.ranks - 1) * encoded_1E.numel()
        mean = torch.empty_like(rows_1P[0])
        for transfer, piece, mean_of_piece in zip(transfers, pieces, mean.split(size), strict=True):
            decoded = codec.decode(transfer.wait(), len(piece))
            torch.mean(decoded, 0, out=mean_of_piece)
            piece.sub_(decoded[self.rank])
        return mean

    def _generator(self, device: torch.device, step: int, place: int, on_all_ranks: bool = False) -> torch.Generator:
        seed = combine_seeds(self.how.seed, step, place, 0 if on_all_ranks else self.rank + 1)
        return torch.Generator(device).manual_seed(seed)

    def _all_gather(self, own_1E: Tensor) -> Tensor:
        """Return the bytes of all ranks, [R, E]."""
        if own_1E.device.type == "cpu":
            return self._all_to_all(own_1E.expand(self.ranks, -1))
        found = own_1E.new_empty(self.ranks, own_1E.shape[1])
        dist.all_gather_into_tensor(found, own_1E.contiguous(), group=self.group)
        self.bytes_sent += (self.ranks - 1) * own_1E.numel()
        return found

    def _all_to_all(self, rows_RE: Tensor) -> Tensor:
        """Return what each rank has in the row of this one, [R, E]."""
        self.bytes_sent += (self.ranks - 1) * rows_RE.shape[1]
        if rows_RE.device.type == "cpu":
            transfer = ByteAllToAll(self.group, rows_RE.shape[1])
            transfer.send(rows_RE)
            return transfer.wait()
        found = torch.empty_like(rows_RE)
        dist.all_to_all_single(found, rows_RE.contiguous(), group=self.group)
        return found


def _pad_rows(flat: Tensor, rows: int, numbers: int) -> Tensor:
    missing = rows * numbers - len(flat)
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(rows, numbers)


def combine_seeds(*parts: int) -> int:
    """Return one seed for several numbers: the compression's own, the step, the place, the rank from 1 or 0 for all."""
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 0x9E3779B9) % (2**63)
    return seed
