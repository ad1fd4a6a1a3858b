"""The collectives of tensor and sequence parallelism, each with the one that its gradient needs.

An activation is either full, the same on every rank, or sharded, a different part on each. Between the two there are
four ways, in pairs: the gradient of one is the other.

    copy_to_ranks        full -> each rank's own use of it         gradients are summed
    reduce_from_ranks    each rank's partial sum -> full           the gradient is full already
    gather_from_ranks    sharded along a dim -> full               each rank takes its part of the gradient
    scatter_to_ranks     full -> sharded along a dim               parts of the gradient are gathered

`SequenceShards` has the same along tokens, for sequence parallelism; lengths that do not divide are padded with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Group = dist.ProcessGroup


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], context.group), None


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        context.group, context.dim = group, dim
        return _gather(x, group, dim)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _part(gradients[0], context.group, context.dim), None, None


class _ScatterToRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        context.group, context.dim = group, dim
        return _part(x, group, dim)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradients[0], context.group, context.dim), None, None


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Return `x`, which ranks use differently: gradients are summed over ranks."""
    return _CopyToRanks.apply(x, group) if x.requires_grad and torch.is_grad_enabled() else x


def reduce_from_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum over all ranks."""
    return _ReduceFromRanks.apply(x, group)


def gather_from_ranks(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Return the equal parts of all ranks, concatenated along a dim."""
    return _GatherFromRanks.apply(x, group, dim)


def scatter_to_ranks(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Return this rank's part of a full tensor, divided evenly along a dim."""
    return _ScatterToRanks.apply(x, group, dim)


def _sum(x: Tensor, group: Group) -> Tensor:
    # In a copy: gradients and outputs of kernels may be views of tensors that others still read.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(x: Tensor, group: Group, dim: int) -> Tensor:
    mine = x.contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, dim)


def _part(x: Tensor, group: Group, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


# ------------------------------------------------------------------------------------------------ along tokens


class SequenceShards:
    """How tokens are sharded; the modules of one model share it. Activations are [..., tokens, channels]."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.total = 0
        """Tokens of the current forward pass."""
        self.length = 0
        """Tokens of the current layer; another number while layers are recomputed in the backward pass."""

    def scatter(self, full: Tensor) -> Tensor:
        """Return this rank's tokens of an activation that all ranks have."""
        return _ScatterTokens.apply(full, self.group)

    def gather(self, own: Tensor) -> Tensor:
        """Return all tokens, for uses that are the same on all ranks: each takes its part of the gradient."""
        return _GatherTokens.apply(own, self.group, self.length, False)

    def gather_for_region(self, own: Tensor) -> Tensor:
        """Return all tokens, for uses that differ between ranks: gradients are summed."""
        return _GatherTokens.apply(own, self.group, self.length, True)

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """Return this rank's tokens of the sum over all ranks."""
        return _ReduceScatterTokens.apply(partial, self.group)


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group, context.length = group, x.shape[-2]
        return _own_tokens(x, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_tokens(gradients[0], context.group, context.length), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group, length: int, sums: bool) -> Tensor:
        context.group, context.sums = group, sums
        return _all_tokens(x, group, length)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back = _sum_own_tokens if context.sums else _own_tokens
        return back(gradients[0], context.group), None, None, None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group, context.length = group, x.shape[-2]
        return _sum_own_tokens(x, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_tokens(gradients[0], context.group, context.length), None


def _pad_tokens(x: Tensor, ranks: int) -> Tensor:
    short = -x.shape[-2] % ranks
    return nn.functional.pad(x, (0, 0, 0, short)) if short else x


def _own_tokens(x: Tensor, group: Group) -> Tensor:
    return _part(_pad_tokens(x, group.size()), group, x.ndim - 2)


def _all_tokens(x: Tensor, group: Group, length: int) -> Tensor:
    return _gather(x, group, x.ndim - 2).narrow(x.ndim - 2, 0, length).contiguous()  # without the padding


def _sum_own_tokens(x: Tensor, group: Group) -> Tensor:
    parts = [part.contiguous() for part in _pad_tokens(x, group.size()).chunk(group.size(), x.ndim - 2)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own
