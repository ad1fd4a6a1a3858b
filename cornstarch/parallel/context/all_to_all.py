"""Collectives of context parallelism with gradients; ranks may have tensors of different sizes.

Only operations that gloo and NCCL both have, under names that torch 2.11 to 2.15 share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.parallel.distributed import TensorTransport

Group = dist.ProcessGroup


def gather_varying(tensor: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """Return the tensors of all ranks, concatenated along `dim`; gradients are summed over the ranks."""
    return _Gather.apply(tensor, dim, tuple(sizes), group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, sizes: tuple[int, ...], group: Group) -> Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        rows = tensor.movedim(dim, 0)
        # gloo's all_gather needs equal shapes.
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=group)
        return torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # All-to-all and a local sum instead of reduce_scatter, which needs equal shapes; the sum is in float32.
        rows = gradients[0].movedim(ctx.dim, 0).contiguous()
        own = ctx.sizes[dist.get_rank(ctx.group)]
        ranks = len(ctx.sizes)
        received = rows.new_empty(ranks * own, *rows.shape[1:])
        dist.all_to_all_single(received, rows, [own] * ranks, list(ctx.sizes), group=ctx.group)
        summed = received.unflatten(0, (ranks, own)).sum(0, dtype=torch.float32).to(rows.dtype)
        return summed.movedim(0, ctx.dim), None, None, None


def all_to_all(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group) -> list[Tensor]:
    """Send a piece to each rank, and return the pieces received, whose shapes are known; differentiable."""
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    send = [piece.numel() for piece in pieces]
    receive = [torch.Size(shape).numel() for shape in shapes]
    received: Tensor = _AllToAll.apply(flat, send, receive, group)
    return [part.view(*shape) for part, shape in zip(received.split(receive), shapes, strict=True)]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        received = flat.new_empty(sum(receive))
        dist.all_to_all_single(received, flat, receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back = gradients[0].new_empty(sum(ctx.send))
        dist.all_to_all_single(back, gradients[0].contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return back, None, None, None


def pass_to_next_rank(tensor: Tensor, shape: Sequence[int], group: Group) -> Callable[[], Tensor]:
    """Begin to send a tensor to the next rank of the ring, and to receive one of `shape` from the one before.

    The returned function waits for the received tensor. Computation until then overlaps with the transfer.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    transport = TensorTransport.of(group, tensor.device)
    sent, received = transport.prepare_send(tensor), transport.allocate_receive(shape, tensor.dtype)
    after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    # In one batch: with NCCL, separate sends and receives around a ring would wait for one another.
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, received, before, group)]
    )

    in_flight = [sent]  # its memory must not be used again before it is sent

    def wait() -> Tensor:
        for work in works:
            work.wait()
        in_flight.clear()
        return transport.finish_receive(received)

    return wait
