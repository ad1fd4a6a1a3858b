"""How attention runs over rows whose tokens are sharded: the registry of modes, and the two that gather whole rows.

To add a mode, write a class that is built with the process group and called as `ContextParallelMode` says, and register
it by the name that `parallel.<module>.cp_mode` has for it.

Shape letters: B rows, H heads, s tokens of this rank, S tokens of all ranks, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cornstarch.attention.interface import ScoreOptions, ShardedMask, attend_locally
from cornstarch.errors import ConfigError
from cornstarch.parallel.context.all_to_all import Group, all_to_all, gather_varying
from cornstarch.plan.kinds import REGISTERED

_CHUNKS = 4  # keys and values are gathered in this many groups of heads, so that less memory is in use at a time


class ContextParallelMode(Protocol):
    """Attends from the tokens of this rank to those of all ranks."""

    def __call__(
        self, scoring: ScoreOptions, mask: ShardedMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Return the output [B, s, H, D] for this rank's queries, keys and values [B, H, s, D]."""
        ...


_MODES: dict[str, Callable[[Group], ContextParallelMode]] = {}


def register_context_parallel_mode(name: str, build: Callable[[Group], ContextParallelMode]) -> None:
    """Register a mode; `build` is called with the process group of the ranks that share a row."""
    _MODES[name] = build
    REGISTERED["cp_mode"].add(name)


def build_context_parallel_mode(name: str, group: Group) -> ContextParallelMode:
    """Return a registered mode for a process group."""
    return _MODES[name](group)


def list_context_parallel_modes() -> list[str]:
    """Return the names of all registered modes, sorted."""
    return sorted(_MODES)


class GatherAttention:
    """Every rank gathers all keys and values, some heads at a time, and attends with its own queries."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(
        self, scoring: ScoreOptions, mask: ShardedMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend with the queries of this rank: [B, s, H, D]."""
        cut = mask.sharding
        rendered = mask.render((cut.rank,), cut.all_ranks)
        groups = query.shape[1] // key.shape[1]
        attended = []
        for heads in split_evenly(key.shape[1], min(_CHUNKS, key.shape[1])):
            queries = slice(heads.start * groups, heads.stop * groups)
            both = torch.cat([key[:, heads], value[:, heads]], dim=-1)
            gathered = gather_varying(both, 2, cut.sizes, self.group)
            keys, values = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
            own_sinks = None if sinks is None else sinks[queries]
            attended.append(attend_locally(scoring, query[:, queries], keys, values, rendered, own_sinks))
        return torch.cat(attended, dim=2)


class AllToAllAttention:
    """Every rank gets the whole rows of some heads (DeepSpeed Ulysses): all-to-all before and after attention.

    Heads need not divide: ranks may have different numbers of them. A key head that several ranks need is sent to each
    of them.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(
        self, scoring: ScoreOptions, mask: ShardedMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend with the queries of this rank: [B, s, H, D]."""
        cut = mask.sharding
        ranks, heads = len(cut.rank_positions), query.shape[1]
        if heads < ranks:
            raise ConfigError(describe_too_few_heads(heads, ranks))
        query_heads = split_evenly(heads, ranks)
        groups = heads // key.shape[1]
        key_heads = [slice(one.start // groups, (one.stop - 1) // groups + 1) for one in query_heads]
        mine = query_heads[cut.rank]
        queries = self._gather_rows(query, query_heads, cut.sizes, cut.rank)
        keys = _repeat_heads(self._gather_rows(key, key_heads, cut.sizes, cut.rank), mine, groups)
        values = _repeat_heads(self._gather_rows(value, key_heads, cut.sizes, cut.rank), mine, groups)
        rendered = mask.render(cut.all_ranks, cut.all_ranks)
        own_sinks = None if sinks is None else sinks[mine]
        attended_BShD = attend_locally(scoring, queries, keys, values, rendered, own_sinks)
        rows, own, width = attended_BShD.shape[0], cut.sizes[cut.rank], attended_BShD.shape[3]
        shapes = [(rows, own, one.stop - one.start, width) for one in query_heads]
        return torch.cat(all_to_all(attended_BShD.split(cut.sizes, dim=1), shapes, self.group), dim=2)

    def _gather_rows(self, states: Tensor, heads: Sequence[slice], sizes: list[int], rank: int) -> Tensor:
        """Turn [B, H, s, D], all heads of some tokens, into [B, h, S, D], some heads of all tokens."""
        count = heads[rank].stop - heads[rank].start
        shapes = [(states.shape[0], count, size, states.shape[3]) for size in sizes]
        return torch.cat(all_to_all([states[:, one] for one in heads], shapes, self.group), dim=2)


def _repeat_heads(states: Tensor, queries: slice, groups: int) -> Tensor:
    """Repeat key or value heads for each query head, where query heads do not share them evenly."""
    first = queries.start // groups
    owners = [head // groups - first for head in range(queries.start, queries.stop)]
    times = len(owners) // states.shape[1]
    if owners == [head // times for head in range(times * states.shape[1])]:
        return states
    return states[:, owners]


def split_evenly(count: int, parts: int) -> list[slice]:
    """Split `count` heads into parts that are as even as possible."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]


def describe_too_few_heads(heads: int, ranks: int) -> str:
    """Return the error text for fewer heads than ranks."""
    return (
        f"all_to_all gives each rank whole heads, and a layer has {heads} for {ranks} ranks. "
        f"Use cp = {heads} or less, or the mode ring_attn or gather, which leave heads whole."
    )


register_context_parallel_mode("gather", GatherAttention)
register_context_parallel_mode("all_to_all", AllToAllAttention)
