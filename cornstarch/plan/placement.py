"""Where the ranks of a plan stand: an order of ranks that keeps what talks most inside a node; pure arithmetic.

A *span* is what one module takes of a replica: `stages × cp × tp` consecutive ranks, tp innermost, so that the ranks of
a tensor-parallel group always follow one another. Modules that share their ranks are one span. The spans of a replica
follow one another, and so do replicas; but several replicas may stand *together*: the same span of each, then the next
span of each. With spans of 24, 2 and 1 ranks and nodes of 8, replicas one by one would shift against the nodes by 3
each; 8 together fill 27 nodes exactly, and no group is torn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """The ranks that one module, or all modules that share their ranks, takes of every replica."""

    modules: tuple[str, ...]
    stages: int
    cp: int
    tp: int
    before: int = 0
    """Ranks of other spans that stand before it in a replica."""
    first: tuple[str, ...] = ()
    """Those of the modules that the first stage alone holds."""

    def held(self, stage: int) -> tuple[str, ...]:
        """Return the modules that a stage holds."""
        return self.modules if stage == 0 or not self.first else tuple(m for m in self.modules if m not in self.first)

    def stages_of(self, module: str) -> int:
        """Return the number of stages that hold a module."""
        return 1 if module in self.first else self.stages

    @property
    def stage_ranks(self) -> int:
        """The ranks of one stage of one replica."""
        return self.cp * self.tp

    @property
    def ranks(self) -> int:
        """The ranks of one replica."""
        return self.stages * self.cp * self.tp


@dataclass(frozen=True)
class Placement:
    """The order of all ranks."""

    spans: tuple[Span, ...]
    """In the order of their ranks."""
    dp: int
    """Replicas."""
    together: int
    """Replicas that stand together; the last ones may be fewer."""

    @property
    def replica(self) -> int:
        """The ranks of one replica."""
        return sum(span.ranks for span in self.spans)

    def starts(self, span: Span) -> Ranks:
        """Return the first rank of a span in every replica."""
        replicas = np.arange(self.dp, dtype=np.int64)
        first = replicas // self.together * self.together  # of those that stand together
        many = np.minimum(self.together, self.dp - first)
        return first * self.replica + many * span.before + (replicas - first) * span.ranks

    def start(self, span: Span, dp: int) -> int:
        """Return the first rank of a span in one replica."""
        first = dp // self.together * self.together
        many = min(self.together, self.dp - first)
        return first * self.replica + many * span.before + (dp - first) * span.ranks

    def locate(self, rank: int) -> tuple[Span, int, int]:
        """Return the span and replica that a rank belongs to, and its place among the span's ranks there."""
        first = rank // (self.together * self.replica) * self.together
        many = min(self.together, self.dp - first)
        inside = rank - first * self.replica
        span = next(span for span in reversed(self.spans) if many * span.before <= inside)
        replica, offset = divmod(inside - many * span.before, span.ranks)
        return span, first + replica, offset


def place_spans(spans: Sequence[Span], dp: int, ranks_per_node: int) -> Placement:
    """Return the order of ranks in which the fewest groups cross nodes: tp first, then cp, then stages, then replicas.

    Among equals the simplest wins: modules in the plan's order, one replica after the other.
    """
    return min(_candidates(spans, dp, ranks_per_node), key=lambda placement: crossings(placement, ranks_per_node))


def _candidates(spans: Sequence[Span], dp: int, ranks_per_node: int) -> Iterator[Placement]:
    """Yield a handful of orders, the simplest first.

    Spans whose stages are largest come first in the second order: sizes that divide one another are then all aligned.
    """
    replica = sum(span.ranks for span in spans)
    fill_nodes = ranks_per_node // gcd(replica, ranks_per_node)  # so many replicas end where a node ends
    largest_first = sorted(spans, key=lambda span: -span.stage_ranks)
    for together in dict.fromkeys([1, min(fill_nodes, dp), dp]):
        for order in (spans, largest_first):
            yield Placement(_behind_one_another(order), dp, together)


def _behind_one_another(spans: Sequence[Span]) -> tuple[Span, ...]:
    before = np.cumsum([0, *(span.ranks for span in spans)]).tolist()
    return tuple(replace(span, before=before[index]) for index, span in enumerate(spans))


def crossings(placement: Placement, ranks_per_node: int) -> tuple[int, int, int, int]:
    """Return how often groups cross nodes beyond need: tp groups, stages (cp groups), modules (pp), whole replicas."""
    tp = cp = pp = 0
    lowest = np.full(placement.dp, np.iinfo(np.int64).max)
    highest = np.zeros(placement.dp, dtype=np.int64)
    for span in placement.spans:
        starts = placement.starts(span)
        tp += beyond_need(group_starts(starts, span.stages * span.cp, span.tp), span.tp, ranks_per_node)
        cp += beyond_need(group_starts(starts, span.stages, span.stage_ranks), span.stage_ranks, ranks_per_node)
        pp += beyond_need(starts, span.ranks, ranks_per_node)
        np.minimum(lowest, starts, out=lowest)
        np.maximum(highest, starts + span.ranks - 1, out=highest)
    return tp, cp, pp, int((highest // ranks_per_node - lowest // ranks_per_node).sum())


def copies_in_nodes(replica: int, dp: int, ranks_per_node: int) -> int:
    """Return how many copies of a model there are if the shards of each are as many replicas as lie in one node.

    replica: the ranks of one of `dp` replicas. One that fills a node, or is larger, is a copy by itself.
    """
    return dp // gcd(dp, max(1, ranks_per_node // replica))


def group_starts(starts: Ranks, groups: int, size: int) -> Ranks:
    """Return the first ranks of `groups` groups of `size` that follow one another, from each of `starts`."""
    return (starts[:, None] + np.arange(groups, dtype=np.int64) * size).reshape(-1)


def nodes_of(starts: Ranks, size: int, ranks_per_node: int) -> Ranks:
    """Return on how many nodes each run of `size` ranks lies."""
    return (starts + size - 1) // ranks_per_node - starts // ranks_per_node + 1


def beyond_need(starts: Ranks, size: int, ranks_per_node: int) -> int:
    """Return on how many nodes more than needed runs of `size` ranks lie, all together."""
    return int((nodes_of(starts, size, ranks_per_node) + -size // ranks_per_node).sum())
