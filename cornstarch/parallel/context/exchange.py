"""Tensors between the ranks of context parallelism, with their gradients; shares may have any sizes.

Only operations that gloo and NCCL both have, under names that torch 2.11 to 2.15 share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.parallel.carriage import Carriage

Group = dist.ProcessGroup


def gather(tensor: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """Return what all ranks have, one behind the other along `dim`; gradients are summed over the ranks."""
    return _Gather.apply(tensor, dim, tuple(sizes), group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, sizes: tuple[int, ...], group: Group) -> Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        rows = tensor.movedim(dim, 0)
        longest = max(sizes)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=group)
        return torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradients[0].movedim(ctx.dim, 0).contiguous()
        own = ctx.sizes[dist.get_rank(ctx.group)]
        ranks = len(ctx.sizes)
        received = rows.new_empty(ranks * own, *rows.shape[1:])
        dist.all_to_all_single(received, rows, [own] * ranks, list(ctx.sizes), group=ctx.group)
        summed = received.unflatten(0, (ranks, own)).sum(0, dtype=torch.float32).to(rows.dtype)
        return summed.movedim(0, ctx.dim), None, None, None


def exchange(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group) -> list[Tensor]:
    """Send a piece to each rank; return the pieces received from each, whose shapes are known. Gradients go back."""
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    send = [piece.numel() for piece in pieces]
    receive = [torch.Size(shape).numel() for shape in shapes]
    received: Tensor = _Exchange.apply(flat, send, receive, group)
    return [part.view(*shape) for part, shape in zip(received.split(receive), shapes, strict=True)]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchanged(flat, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0].contiguous(), ctx.receive, ctx.send, ctx.group), None, None, None


def _exchanged(flat: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    received = flat.new_empty(sum(receive))
    dist.all_to_all_single(received, flat, receive, send, group=group)
    return received


def pass_on(tensor: Tensor, shape: Sequence[int], group: Group) -> Callable[[], Tensor]:
    """Begin to send a tensor to the next rank of the ring, and to receive one of `shape` from the one before.

    Returns what waits for the one received. Until then the next computation may run beside the transfer.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    carriage = Carriage.of(group, tensor.device)
    sent, received = carriage.outgoing(tensor), carriage.room(shape, tensor.dtype)
    after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, received, before, group)]
    )

    kept = [sent]  # until it is on its way

    def finish() -> Tensor:
        for work in works:
            work.wait()
        kept.clear()
        return carriage.arrived(received)

    return finish
