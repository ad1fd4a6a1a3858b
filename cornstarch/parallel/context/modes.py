"""Two ways to attend over cut rows that bring whole rows to every rank: some heads, or heads chunk by chunk.

Shape letters: B rows, H heads, s tokens of this rank, S tokens of all ranks, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cornstarch.attention.context import CutMask, Scoring, attend_here
from cornstarch.errors import ConfigError
from cornstarch.parallel.context.exchange import Group, exchange, gather

_CHUNKS = 4  # in how many portions of heads keys and values are gathered: fewer bytes at a time


class GatherAttention:
    """Every rank gathers all keys and values, some heads at a time, and attends with its own queries."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(
        self, scoring: Scoring, mask: CutMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend with the queries of this rank: [B, s, H, D]."""
        cut = mask.cut
        rendered = mask.between((cut.rank,), cut.everyone)
        groups = query.shape[1] // key.shape[1]
        attended = []
        for heads in portions(key.shape[1], min(_CHUNKS, key.shape[1])):
            queries = slice(heads.start * groups, heads.stop * groups)
            both = torch.cat([key[:, heads], value[:, heads]], dim=-1)
            keys, values = gather(both, 2, cut.sizes, self.group).split([key.shape[-1], value.shape[-1]], dim=-1)
            own_sinks = None if sinks is None else sinks[queries]
            attended.append(attend_here(scoring, query[:, queries], keys, values, rendered, own_sinks))
        return torch.cat(attended, dim=2)


class HeadsAttention:
    """Every rank gets the whole rows of some heads (DeepSpeed Ulysses): all-to-all before and after attention.

    Heads need not divide: ranks may have different numbers of them. A head of keys that several ranks need is sent to
    each of them.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(
        self, scoring: Scoring, mask: CutMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend with the queries of this rank: [B, s, H, D]."""
        cut = mask.cut
        ranks, heads = len(cut.shares), query.shape[1]
        if heads < ranks:
            raise ConfigError(too_few_heads(heads, ranks))
        asking = portions(heads, ranks)
        groups = heads // key.shape[1]
        asked = [slice(one.start // groups, (one.stop - 1) // groups + 1) for one in asking]
        mine = asking[cut.rank]
        queries = self._rows(query, asking, cut.sizes, cut.rank)
        keys = self._repeated(self._rows(key, asked, cut.sizes, cut.rank), mine, groups)
        values = self._repeated(self._rows(value, asked, cut.sizes, cut.rank), mine, groups)
        rendered = mask.between(cut.everyone, cut.everyone)
        own_sinks = None if sinks is None else sinks[mine]
        attended_BShD = attend_here(scoring, queries, keys, values, rendered, own_sinks)
        rows, own, width = attended_BShD.shape[0], cut.sizes[cut.rank], attended_BShD.shape[3]
        shapes = [(rows, own, one.stop - one.start, width) for one in asking]
        return torch.cat(exchange(attended_BShD.split(cut.sizes, dim=1), shapes, self.group), dim=2)

    def _rows(self, states: Tensor, heads: Sequence[slice], sizes: list[int], rank: int) -> Tensor:
        """Turn [B, H, s, D], all heads of some tokens, into [B, h, S, D], some heads of all tokens."""
        count = heads[rank].stop - heads[rank].start
        shapes = [(states.shape[0], count, size, states.shape[3]) for size in sizes]
        return torch.cat(exchange([states[:, one] for one in heads], shapes, self.group), dim=2)

    def _repeated(self, states: Tensor, queries: slice, groups: int) -> Tensor:
        """Give each query's head its own where they are not shared evenly."""
        first = queries.start // groups
        owners = [head // groups - first for head in range(queries.start, queries.stop)]
        times = len(owners) // states.shape[1]
        if owners == [head // times for head in range(times * states.shape[1])]:
            return states
        return states[:, owners]


def portions(count: int, parts: int) -> list[slice]:
    """Cut `count` heads into parts that are as even as can be."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]


def too_few_heads(heads: int, ranks: int) -> str:
    """Say what is wrong."""
    return (
        f"all_to_all gives each rank whole heads, and a layer has {heads} for {ranks} ranks. "
        f"Use cp = {heads} or less, or the mode ring_attn or gather, which leave heads whole."
    )
