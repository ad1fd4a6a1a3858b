"""Collectives as operators of torch: one node in a compiled graph, the same call outside of one.

`torch.distributed` writes into tensors that its caller gives it, through a process group, which is an object that torch
cannot trace. Here a group is named by a text, results are new tensors, and torch knows their shapes, so a layer is
compiled as a whole with its collectives in it. `sum_` alone works in place: the caller hands it a copy, and the
compiler leaves out that copy wherever nobody reads the original any more.

Activations are full, the same on every rank, or sharded. Of the four ways between, the gradient of one is another.

    copy_to_ranks        full -> each rank's own use of it         gradients are summed
    reduce_from_ranks    each rank's partial sum -> full           the gradient is full already
    gather_from_ranks    sharded along a dim -> full               each rank takes its part of the gradient
    scatter_to_ranks     full -> sharded along a dim               parts of the gradient are gathered
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.parallel.distributed import Collective, all_gather

_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class RankGroup:
    """The ranks of a collective, as texts and numbers that a compiled graph may contain."""

    name: str
    index: int
    count: int
    process_group: dist.ProcessGroup = field(repr=False)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RankGroup:
        """Return the ranks of a process group, which operators find by its name from now on."""
        _groups[group.group_name] = group
        return cls(group.group_name, group.rank(), group.size(), group)

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


# ------------------------------------------------------------------------------------------------ operators

_library = torch.library.Library("cornstarch_ranks", "DEF")


def _define(schema: str, run: Callable[..., Any], infer: Callable[..., Any]) -> Any:
    """Define an operator; `infer` returns a tensor of the result's shape. Gradients are the callers' concern."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cornstarch_ranks::{name}", infer, lib=_library)
    return getattr(torch.ops.cornstarch_ranks, name).default


def _infer_shape(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _sum_in_place(x: Tensor, group: str) -> None:
    dist.all_reduce(x, group=_groups[group])


def _reduce_scatter(x: Tensor, group: str, ranks: int, dim: int) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(ranks, dim)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=_groups[group])
    return own


sum_ = _define(
    "sum_(Tensor(a!) x, str group) -> ()",
    _sum_in_place,
    lambda x, group: None,
)
"""Replace a contiguous tensor by the sum over all ranks."""
gather = _define(
    "gather(Tensor x, str group, int ranks, int dim) -> Tensor",
    lambda x, group, ranks, dim: torch.cat(all_gather(x.contiguous(), _groups[group]), dim),
    lambda x, group, ranks, dim: _infer_shape(x, dim, x.shape[dim] * ranks),
)
"""Return the tensors of all ranks, which have one shape, concatenated along a dim."""
reduce_scatter = _define(
    "reduce_scatter(Tensor x, str group, int ranks, int dim) -> Tensor",
    _reduce_scatter,
    lambda x, group, ranks, dim: _infer_shape(x, dim, x.shape[dim] // ranks),
)
"""Return this rank's part, along a dim that the ranks divide evenly, of the sum over all ranks."""


# ------------------------------------------------------------------------------------------------ with gradients


def copy_to_ranks(x: Tensor, group: RankGroup) -> Tensor:
    """Return `x`, which ranks use differently: gradients are summed over ranks."""
    return _run(x, "same", "sum", group) if x.requires_grad and torch.is_grad_enabled() else x


def reduce_from_ranks(x: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over all ranks."""
    return _run(x, "sum", "same", group)


def gather_from_ranks(x: Tensor, group: RankGroup, dim: int = -1) -> Tensor:
    """Return the equal parts of all ranks, concatenated along a dim."""
    return _run(x, "gather", "part", group, dim)


def scatter_to_ranks(x: Tensor, group: RankGroup, dim: int = -1) -> Tensor:
    """Return this rank's part of a full tensor, divided evenly along a dim."""
    return _run(x, "part", "gather", group, dim)


# Numbers of tokens as the shapes of tensors without content, beside the modules: the compiler takes plain numbers, and
# shapes of what modules have, for constants, and would compile layers again for each number of tokens.
_lengths: dict[int, Tensor] = {}
_keys = itertools.count()


class SequenceShards:
    """How tokens, of activations [..., tokens, channels], are sharded; the modules of one model share it."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.total = 0  # tokens of the current forward pass
        self._key = next(_keys)

    @property
    def length(self) -> int:
        """Tokens of the current layer; another number while layers are recomputed in the backward pass."""
        return _lengths[self._key].shape[0]

    @length.setter
    def length(self, tokens: int) -> None:
        # Both, although one follows from the other: by a rounded quotient, the compiler could not tell that two
        # activations have equally many tokens for every length, and would make a graph for one length.
        _lengths[self._key] = torch.empty(tokens, -(-tokens // self.group.size()), 0)

    @property
    def own(self) -> int:
        """Tokens of each rank, padding included."""
        return _lengths[self._key].shape[1]

    def scatter(self, full: Tensor) -> Tensor:
        """Return this rank's tokens of an activation that all ranks have."""
        return _run(full, "own_tokens", "all_tokens", self.group, full.shape[-2], self.own)

    def gather(self, own: Tensor) -> Tensor:
        """Return all tokens, for uses that are the same on all ranks: each takes its part of the gradient."""
        return _run(own, "all_tokens", "own_tokens", self.group, self.length, self.own)

    def gather_for_region(self, own: Tensor) -> Tensor:
        """Return all tokens, for uses that differ between ranks: gradients are summed."""
        return _run(own, "all_tokens", "sum_own_tokens", self.group, self.length, self.own)

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """Return this rank's tokens of the sum over all ranks."""
        return _run(partial, "sum_own_tokens", "all_tokens", self.group, partial.shape[-2], self.own)


def _run(x: Tensor, forward: str, backward: str, group: RankGroup, number: int = 0, own: int = 0) -> Tensor:
    return _run_steps(x, (forward, backward), group.name, group.index, group.count, number, own)


@torch.compiler.allow_in_graph
def _run_steps(x: Tensor, steps: tuple[str, str], group: str, rank: int, ranks: int, number: int, own: int) -> Tensor:
    # As one call in the graph: torch then follows the autograd function into its backward pass by itself. When dynamo
    # (torch 2.11) compiles such a function, it takes the results of operators without gradients for constants.
    forward, backward = (_STEPS[name] for name in steps)
    result: Tensor = Collective.apply(x, forward, backward, group, rank, ranks, number, own)
    return result


def _keep(x: Tensor, group: str, rank: int, ranks: int, number: int, own: int = 0) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: str, rank: int, ranks: int, number: int, own: int = 0) -> Tensor:
    # In a copy: gradients and outputs of kernels may be views of tensors that others still read.
    total = x.clone(memory_format=torch.contiguous_format)
    sum_(total, group)
    return total


def _gather(x: Tensor, group: str, rank: int, ranks: int, dim: int, own: int = 0) -> Tensor:
    return gather(x, group, ranks, dim)


def _take_part(x: Tensor, group: str, rank: int, ranks: int, dim: int, own: int = 0) -> Tensor:
    return x.chunk(ranks, dim)[rank].contiguous()


def _pad_tokens(x: Tensor, short: int) -> Tensor:
    if isinstance(short, int) and not short:  # in a graph for any number of tokens, it is no plain int
        return x
    return nn.functional.pad(x, (0, 0, 0, short))


def _take_tokens(x: Tensor, group: str, rank: int, ranks: int, length: int, own: int) -> Tensor:
    return _pad_tokens(x, ranks * own - length).narrow(-2, rank * own, own).contiguous()


def _gather_tokens(x: Tensor, group: str, rank: int, ranks: int, length: int, own: int) -> Tensor:
    return gather(x, group, ranks, -2).narrow(-2, 0, length).contiguous()  # without the padding


def _sum_tokens(x: Tensor, group: str, rank: int, ranks: int, length: int, own: int) -> Tensor:
    return reduce_scatter(_pad_tokens(x, ranks * own - length), group, ranks, -2)


_STEPS: dict[str, Callable[..., Tensor]] = {
    "same": _keep,
    "sum": _sum,
    "gather": _gather,
    "part": _take_part,
    "own_tokens": _take_tokens,
    "all_tokens": _gather_tokens,
    "sum_own_tokens": _sum_tokens,
}
