"""The mean of what each process has, sent compressed; every process gets the same, bit for bit.

With e for what a process remembers, x for what it has and C for encoding and decoding again:

    a = x + e                            what it would like to send
    two processes:   m = mean of C(a);   e = a - C(a)
    more:            each brings together one part: p = (its own a + the others' C(a)) / N, and sends C(p) to all
                     m = the parts C(p);  e = a - C(a), and on its own part N (p - C(p))

So nothing is lost: m plus the mean of all e is the mean of all a.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.parallel.exchange.compress import Codec, chosen, codec_of
from cornstarch.parallel.exchange.messages import Deal
from cornstarch.plan.exchange import Compression

_PIECE = 2**19
"""Numbers that are encoded at once where others travel meanwhile."""


class CompressedMean:
    """Means over the processes of a group, of one flat tensor after the other; all must ask in the same order.

    Args:
        how: What is sent.
        group: The processes. Nothing else may be sent in it meanwhile, if this runs in a thread of its own.
    """

    def __init__(self, how: Compression, group: dist.ProcessGroup) -> None:
        self.how, self.group = how, group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.bytes_sent = 0
        """By this process, since it was made."""

    @torch.no_grad()
    def __call__(self, flat: Tensor, memory: Tensor | None, step: int, place: int = 0, scale: float = 1.0) -> int:
        """Replace a flat tensor by its mean over all processes, and return the bytes that this one has sent.

        Args:
            flat: What this process has.
            memory: What it has not sent yet, in float32, or None; changed in place.
            step: How often the same has been exchanged before; chance depends on it.
            place: Which of several tensors of a step it is; chance depends on it, too.
            scale: What `flat` has been multiplied by, and memory has not: that of a gradient scaler.
        """
        before = self.bytes_sent
        if self.ranks > 1 and (self.how.kind == "none" or step < self.how.warmup):
            self._whole(flat)
        elif self.ranks > 1:
            self._compressed(flat, memory, step, place, scale)
        return self.bytes_sent - before

    def _compressed(self, flat: Tensor, memory: Tensor | None, step: int, place: int, scale: float) -> None:
        wanted = flat.float() if memory is None else torch.add(flat, memory, alpha=scale)
        if self.how.kind == "randomk":
            mean, left = self._chosen(flat, wanted, memory is not None, step, place)
        else:
            mean, left = self._exchanged(wanted, codec_dtype=flat.dtype, step=step, place=place)
        flat.copy_(mean)
        if memory is not None:
            memory.copy_(left)
            if scale != 1.0:  # gradients that are too large for fp16: the step is left out, and must leave no trace
                memory.div_(scale).nan_to_num_(0.0, 0.0, 0.0)

    def _whole(self, flat: Tensor) -> None:
        dist.all_reduce(flat, group=self.group)
        flat.div_(self.ranks)
        self.bytes_sent += Compression().sent(flat.numel(), flat.element_size(), self.ranks)

    def _chosen(self, flat: Tensor, wanted: Tensor, remembers: bool, step: int, place: int) -> tuple[Tensor, Tensor]:
        picked = chosen(self.how, len(wanted), self._chance(wanted.device, step, place, everywhere=True))
        values = wanted[picked] if remembers else wanted[picked] * self.how.cell  # right on average
        mean_of_values, left_of_values = self._exchanged(values, codec_dtype=flat.dtype, step=step, place=place)
        mean = torch.zeros_like(wanted)
        mean[picked] = mean_of_values
        wanted[picked] = left_of_values
        return mean, wanted

    def _exchanged(self, wanted: Tensor, codec_dtype: torch.dtype, step: int, place: int) -> tuple[Tensor, Tensor]:
        """Return the mean of what all want to send, and what this process is left with."""
        codec = codec_of(self.how, codec_dtype)
        chance = self._chance(wanted.device, step, place)
        numbers = len(wanted)
        if self.how.gathers(self.ranks):
            rows_1P = _padded(wanted, 1, self.how.part(numbers, 1))
            return self._told(rows_1P, codec, chance)[:numbers], rows_1P[0, :numbers]
        rows_RP = _padded(wanted, self.ranks, self.how.part(numbers, self.ranks))
        sent = codec.encode(rows_RP, chance)
        heard = codec.decode(self._dealt(sent), rows_RP.shape[1])
        heard[self.rank] = rows_RP[self.rank]
        part = heard.mean(0)
        part[max(0, numbers - self.rank * len(part)) :] = 0  # behind the end there is nothing, whatever its sign
        mean_RP = codec.decode(self._gathered(codec.encode(part[None], chance)), rows_RP.shape[1])
        left = rows_RP - codec.decode(sent, rows_RP.shape[1])
        left[self.rank] = (part - mean_RP[self.rank]) * self.ranks
        return mean_RP.view(-1)[:numbers], left.view(-1)[:numbers]

    def _told(self, rows_1P: Tensor, codec: Codec, chance: torch.Generator) -> Tensor:
        """Return the mean of what all tell one another, and leave in the row what this process could not tell."""
        if rows_1P.device.type != "cpu":
            said = codec.decode(self._gathered(codec.encode(rows_1P, chance)), rows_1P.shape[1])
            rows_1P.sub_(said[self.rank])
            return said.mean(0)
        # A piece is encoded while those before it travel, and decoded while those behind it do.
        size = self.how.part(_PIECE, 1)
        pieces = rows_1P[0].split(size)
        deals = [Deal(self.group, self.how.encoded(len(piece))) for piece in pieces]
        for deal, piece in zip(deals, pieces, strict=True):
            self._send(deal, codec.encode(piece[None], chance).expand(self.ranks, -1))
        mean = torch.empty_like(rows_1P[0])
        for deal, piece, mean_of_piece in zip(deals, pieces, mean.split(size), strict=True):
            said = codec.decode(deal.wait(), len(piece))
            torch.mean(said, 0, out=mean_of_piece)
            piece.sub_(said[self.rank])
        return mean

    def _chance(self, device: torch.device, step: int, place: int, everywhere: bool = False) -> torch.Generator:
        who = 0 if everywhere else self.rank + 1
        parts = (self.how.seed, step, place, who)
        return torch.Generator(device).manual_seed(seed_of(*parts))

    def _gathered(self, own_1E: Tensor) -> Tensor:
        """Return the bytes of all processes, [R, E]."""
        if own_1E.device.type == "cpu":
            return self._dealt(own_1E.expand(self.ranks, -1))
        found = own_1E.new_empty(self.ranks, own_1E.shape[1])
        dist.all_gather_into_tensor(found, own_1E.contiguous(), group=self.group)
        self.bytes_sent += (self.ranks - 1) * own_1E.numel()
        return found

    def _dealt(self, rows_RE: Tensor) -> Tensor:
        """Return what each process has in the row of this one, [R, E]."""
        if rows_RE.device.type == "cpu":
            deal = Deal(self.group, rows_RE.shape[1])
            self._send(deal, rows_RE)
            return deal.wait()
        found = torch.empty_like(rows_RE)
        dist.all_to_all_single(found, rows_RE.contiguous(), group=self.group)
        self.bytes_sent += (self.ranks - 1) * rows_RE.shape[1]
        return found

    def _send(self, deal: Deal, rows_RE: Tensor) -> None:
        deal.send(rows_RE)
        self.bytes_sent += (self.ranks - 1) * rows_RE.shape[1]


def _padded(flat: Tensor, rows: int, numbers: int) -> Tensor:
    """Return a flat tensor as rows, zeros behind it."""
    missing = rows * numbers - len(flat)
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(rows, numbers)


def seed_of(*parts: int) -> int:
    """Return one seed for several numbers: a compression's own, the step, the place, the rank from 1 or 0 for all."""
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 0x9E3779B9) % (2**63)
    return seed


__all__ = ["CompressedMean", "seed_of"]
