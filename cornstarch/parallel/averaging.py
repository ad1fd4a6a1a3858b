"""Gradients averaged over processes once per step, where they were added up over many passes before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.parallel.data import local_value

_BUCKET = 25 * 1024 * 1024  # bytes that are sent together


@torch.no_grad()
def average_gradients(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_mb: float | Literal["auto"] | None = None
) -> None:
    """Replace the gradients of parameters, the same in all processes of a group, by their mean.

    A parameter without a gradient counts as zeros beside others that have one; where none has one it stays without.
    Nothing is computed meanwhile, so that a size that suits the link (`auto`) has nothing to gain.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or dist.get_world_size(group) == 1:
        return
    limit = _BUCKET if bucket_mb is None or bucket_mb == "auto" else int(bucket_mb * 1024 * 1024)
    begun = [_begin(bucket, group) for bucket in _buckets(trained, limit)]
    for bucket, flat, work in begun:
        work.wait()
        _hand_out(bucket, flat, dist.get_world_size(group))


def _buckets(parameters: Sequence[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one type and device that are sent together, the last of the model first."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for same in kinds.values():
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in same:
            if bucket and size + local_value(parameter).nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += local_value(parameter).nbytes
        yield bucket


def _begin(bucket: list[nn.Parameter], group: dist.ProcessGroup) -> tuple[list[nn.Parameter], Tensor, dist.Work]:
    """Begin to add up gradients, and behind them how many processes have each."""
    device, dtype = local_value(bucket[0]).device, bucket[0].dtype
    has = torch.tensor([parameter.grad is not None for parameter in bucket], dtype=dtype, device=device)
    parts = [
        torch.zeros(local_value(p).numel(), dtype=dtype, device=device)
        if p.grad is None
        else local_value(p.grad).reshape(-1)
        for p in bucket
    ]
    flat = torch.cat([*parts, has])
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None
    return bucket, flat, work


def _hand_out(bucket: list[nn.Parameter], flat: Tensor, processes: int) -> None:
    sizes = [local_value(parameter).numel() for parameter in bucket]
    *parts, has = flat.split([*sizes, len(bucket)])
    for parameter, part, count in zip(bucket, parts, has.tolist(), strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local_value(parameter.grad).copy_(part.div_(processes).view_as(local_value(parameter)))


__all__ = ["average_gradients"]
