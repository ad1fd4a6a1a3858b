"""The exchanges of tensor parallelism, each with the exchange that its gradient needs.

An activation is either whole, the same on every rank, or cut, a different part on each. Between the two there are four
ways, in pairs: the gradient of one is the other.

    copy_in      whole -> each rank's own use of it        gradients are added up
    add_up       each rank's share of a sum -> whole       the gradient is whole already
    join         cut along a dim -> whole                  each rank takes its part of the gradient
    take_part    whole -> cut along a dim                  parts of the gradient are joined
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], context.group), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        context.group, context.dim = group, dim
        return _joined(x, group, dim)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _part(gradients[0], context.group, context.dim), None, None


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        context.group, context.dim = group, dim
        return _part(x, group, dim)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _joined(gradients[0], context.group, context.dim), None, None


def copy_in(x: Tensor, group: Group) -> Tensor:
    """Return `x`, whose uses differ from rank to rank: their gradients are added up."""
    return _CopyIn.apply(x, group) if x.requires_grad and torch.is_grad_enabled() else x


def add_up(x: Tensor, group: Group) -> Tensor:
    """Return the sum of what all ranks have."""
    return _AddUp.apply(x, group)


def join(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Return the equal parts that ranks have, one behind the other along a dim."""
    return _Join.apply(x, group, dim)


def take_part(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Return this rank's part of a tensor that all ranks have, cut evenly along a dim."""
    return _TakePart.apply(x, group, dim)


def _sum(x: Tensor, group: Group) -> Tensor:
    # A tensor that others may still read must not be changed; gradients and outputs of kernels may be views of such.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _joined(x: Tensor, group: Group, dim: int) -> Tensor:
    mine = x.contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, dim)


def _part(x: Tensor, group: Group, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


__all__ = ["add_up", "copy_in", "join", "take_part"]
