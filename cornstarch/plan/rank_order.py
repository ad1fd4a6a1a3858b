"""The order of ranks, and the links that groups of ranks cross; arithmetic only, no torch.

A *span* is one module's part of a replica: `stages × cp × tp` consecutive ranks, tp innermost, so that the ranks of a
tensor-parallel group are always consecutive. Modules on the same ranks are one span. The spans of a replica are
consecutive, and so are replicas; but several replicas may be placed *together*: the same span of each, then the next
span of each. With spans of 24, 2 and 1 ranks and nodes of 8, consecutive replicas would shift against the nodes by 3
each; 8 together fill 27 nodes exactly, and no group is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster, Link
    from cornstarch.plan.plan import ModulePlan

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """The ranks of one module, or of all modules on the same ranks, in every replica."""

    modules: tuple[str, ...]
    stages: int
    cp: int
    tp: int
    before: int = 0
    """Ranks of other spans before it in a replica."""
    first: tuple[str, ...] = ()
    """The modules that only the first stage has."""

    def modules_at(self, stage: int) -> tuple[str, ...]:
        """Return the modules of a stage."""
        return self.modules if stage == 0 or not self.first else tuple(m for m in self.modules if m not in self.first)

    def stages_of(self, module: str) -> int:
        """Return the number of stages of a module."""
        return 1 if module in self.first else self.stages

    @property
    def stage_ranks(self) -> int:
        return self.cp * self.tp

    @property
    def ranks(self) -> int:
        return self.stages * self.cp * self.tp


def build_spans(modules: Mapping[str, ModulePlan], sharing: Sequence[tuple[str, ...]], ranks: str) -> tuple[Span, ...]:
    """Return the span of each group of modules on the same ranks: the largest sizes of each."""
    first, spans = tuple(modules)[:-1] if ranks == "first_stage" else (), []
    for names in sharing:
        stages, cp, tp = (max(getattr(modules[name], axis) for name in names) for axis in ("stages", "cp", "tp"))
        spans.append(Span(names, stages, cp, tp, first=first))
    return tuple(spans)


@dataclass(frozen=True)
class Placement:
    """The order of all ranks."""

    spans: tuple[Span, ...]
    """In the order of their ranks."""
    dp: int
    """Replicas."""
    together: int
    """Replicas that are placed together; the last group may have fewer."""

    @property
    def replica(self) -> int:
        return sum(span.ranks for span in self.spans)

    def starts(self, span: Span, replicas: Ranks | None = None) -> Ranks:
        """Return the first rank of a span in each of these replicas. Default: in every replica."""
        replicas = np.arange(self.dp, dtype=np.int64) if replicas is None else replicas
        first = replicas // self.together * self.together  # of the replicas placed together
        many = np.minimum(self.together, self.dp - first)
        return first * self.replica + many * span.before + (replicas - first) * span.ranks

    def start(self, span: Span, dp: int) -> int:
        return int(self.starts(span, np.array(dp)))

    def locate(self, rank: int) -> tuple[Span, int, int]:
        """Return the span and replica of a rank, and its offset among the span's ranks there."""
        first = rank // (self.together * self.replica) * self.together
        many = min(self.together, self.dp - first)
        inside = rank - first * self.replica
        span = next(span for span in reversed(self.spans) if many * span.before <= inside)
        replica, offset = divmod(inside - many * span.before, span.ranks)
        return span, first + replica, offset


def place_spans(spans: Sequence[Span], dp: int, ranks_per_node: int) -> Placement:
    """Return the order of ranks in which the fewest groups cross nodes: tp, then cp, then stages, then replicas."""
    found = []  # the simplest first: modules in the plan's order, one replica after the other
    replica = sum(span.ranks for span in spans)
    fill_nodes = ranks_per_node // gcd(replica, ranks_per_node)  # this many replicas end where a node ends
    # With the largest stages first, sizes that divide one another are all aligned.
    largest_first = sorted(spans, key=lambda span: -span.stage_ranks)
    for together in dict.fromkeys([1, min(fill_nodes, dp), dp]):
        for order in (spans, largest_first):
            before = np.cumsum([0, *(span.ranks for span in order)]).tolist()
            placed = tuple(replace(span, before=before[index]) for index, span in enumerate(order))
            found.append(Placement(placed, dp, together))
    return min(found, key=lambda placement: crossings(placement, ranks_per_node))


def crossings(placement: Placement, ranks_per_node: int) -> tuple[int, int, int, int]:
    """Return the avoidable node crossings: of tp groups, stages (cp groups), modules (pp), whole replicas."""
    tp = cp = pp = 0
    every = [placement.starts(span) for span in placement.spans]
    for span, starts in zip(placement.spans, every, strict=True):
        tp += count_extra_nodes(group_starts(starts, span.stages * span.cp, span.tp), span.tp, ranks_per_node)
        cp += count_extra_nodes(group_starts(starts, span.stages, span.stage_ranks), span.stage_ranks, ranks_per_node)
        pp += count_extra_nodes(starts, span.ranks, ranks_per_node)
    lowest = np.min(every, axis=0)
    highest = np.max([starts + span.ranks - 1 for span, starts in zip(placement.spans, every, strict=True)], axis=0)
    return tp, cp, pp, int((highest // ranks_per_node - lowest // ranks_per_node).sum())


def copies_in_nodes(replica: int, dp: int, ranks_per_node: int) -> int:
    """Return the copies of a model if each is sharded over the replicas, of `replica` ranks each, of one node."""
    return dp // gcd(dp, max(1, ranks_per_node // replica))


def group_starts(starts: Ranks, groups: int, size: int) -> Ranks:
    """Return the first ranks of `groups` consecutive groups of `size`, from each of `starts`."""
    return (starts[:, None] + np.arange(groups, dtype=np.int64) * size).reshape(-1)


def nodes_of(starts: Ranks, size: int, ranks_per_node: int) -> Ranks:
    """Return the number of nodes of each run of `size` ranks."""
    return (starts + size - 1) // ranks_per_node - starts // ranks_per_node + 1


def count_extra_nodes(starts: Ranks, size: int, ranks_per_node: int) -> int:
    """Return the number of nodes beyond the minimum, over all runs of `size` ranks."""
    return int((nodes_of(starts, size, ranks_per_node) + -size // ranks_per_node).sum())


@dataclass(frozen=True)
class GroupLinks:
    """The slowest links of a module's groups."""

    tp: Link
    cp: Link
    data: Link
    """Of the ranks with the same parameters; with hsdp, of one copy."""
    copies: Link | None = None
    """hsdp: between the ranks with the same shard of each copy."""
    experts: Link | None = None
    """ep: between the ranks that have all experts together."""
    expert_data: Link | None = None
    """ep: of the ranks with the same experts; with hsdp, of one copy."""
    overlaps: bool = True
    """Whether gradients and parameters move over `data` while ranks compute; else one follows the other."""


@dataclass(frozen=True)
class PipelineLinks:
    """The links of all groups of each module, and between stages."""

    groups: Mapping[str, GroupLinks]
    stages: Mapping[str, tuple[Link, ...]]
    """By module, from each of its stages to the next, and from the last to the first."""
    to_language_model: Mapping[str, Link]
    """From an encoder's last stage to the first stage of the language model."""


_place_spans_once = lru_cache(maxsize=8192)(place_spans)


@lru_cache(maxsize=8192)
def find_links(
    spans: tuple[Span, ...], dp: int, cluster: Cluster, copies: int = 1, experts: tuple[tuple[str, int], ...] = ()
) -> PipelineLinks:
    """Return the slowest link that any group of each kind crosses.

    Args:
        spans: The ranks of modules in a replica.
        dp: Replicas.
        cluster: What they are on.
        copies: Those of hsdp.
        experts: The ep of modules that have any, by name.
    """
    placement = _place_spans_once(spans, dp, cluster.per_node)
    groups: dict[str, GroupLinks] = {}
    stages: dict[str, tuple[Link, ...]] = {}
    to_language_model: dict[str, Link] = {}
    last = next(span for span in placement.spans if span.modules == spans[-1].modules)
    for span in placement.spans:
        starts = placement.starts(span)
        every = group_starts(starts, span.stages, span.stage_ranks)
        tensor, data = group_starts(every, span.cp, span.tp), group_starts(starts, span.cp, span.tp).reshape(copies, -1)
        data_link = _slowest_of_groups(cluster, data)
        one = GroupLinks(
            tp=_slowest_of_runs(cluster, tensor, span.tp),
            cp=_slowest_of_runs(cluster, every, span.stage_ranks),
            data=data_link,
            copies=_slowest_of_groups(cluster, data.T) if copies > 1 else None,
            # The cores of one machine move messages themselves, so they cannot compute meanwhile.
            overlaps=not cluster.device.is_cpu or data_link is not cluster.inside,
        )
        onward = one.cp
        if span is not last:
            sources, targets = starts + span.ranks - span.stage_ranks, placement.starts(last)
            farthest = int(np.abs(sources // cluster.per_node - targets // cluster.per_node).argmax())
            onward = cluster.link((int(sources[farthest]), int(targets[farthest])))
        # The slowest link from each stage to the next in any replica, and from the last to the first.
        nodes = (starts[:, None] + np.arange(span.ranks)) // cluster.per_node
        nodes = nodes.reshape(len(starts), span.stages, span.stage_ranks)
        leaves = (nodes != np.roll(nodes, -1, axis=1)).any(axis=(0, 2))
        between = tuple(cluster.between if out else cluster.inside for out in leaves)
        for name in span.modules:
            groups[name], stages[name], to_language_model[name] = one, between, onward
            ep = dict(experts).get(name, 1)
            if ep > 1:  # the innermost of the ranks that have tokens of their own
                cut = data.reshape(-1, ep)
                same = cut.reshape(copies, -1, ep).transpose(0, 2, 1).reshape(copies * ep, -1)
                links = _slowest_of_groups(cluster, cut), _slowest_of_groups(cluster, same)
                groups[name] = replace(one, experts=links[0], expert_data=links[1])
    return PipelineLinks(groups, stages, to_language_model)


def _slowest_of_groups(cluster: Cluster, groups: Ranks) -> Link:
    """Return the link of the group on the most nodes; each row is a group."""
    nodes = np.sort(groups // cluster.per_node, axis=1)
    worst = int((nodes[:, 1:] != nodes[:, :-1]).sum(axis=1).argmax())
    return cluster.link(groups[worst].tolist())


def _slowest_of_runs(cluster: Cluster, starts: Ranks, size: int) -> Link:
    worst = int(starts[int(nodes_of(starts, size, cluster.per_node).argmax())])
    return cluster.link(range(worst, worst + size))
