"""One of the plans that could be run: sizes, replicas, microbatches; and which links its groups cross; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cornstarch.errors import ConfigError
from cornstarch.plan.passes import Links
from cornstarch.plan.placement import Placement, Ranks, Span, copies_in_nodes, nodes_of, place_spans
from cornstarch.plan.plan import DataKind, DataPlan, ModulePlan, Plan
from cornstarch.plan.plan import Ranks as Standing

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster, Link

Starts = tuple[tuple[str, tuple[int, ...]], ...]
"""By module, the first layer of each of its stages × virtual_stages parts."""


@dataclass(frozen=True)
class Choice:
    """A plan, how many replicas there are, and how many microbatches each of them does in a step."""

    modules: tuple[tuple[str, ModulePlan], ...]
    ranks: Standing
    """own, colocated, first_stage or shared."""
    kind: DataKind
    schedule: str
    dp: int
    microbatches: int
    starts: Starts = ()
    """Default: where the slowest stage is as fast as can be."""
    replicate: int | None = None
    """hsdp: how many copies there are. Default: as many as make each lie within a node."""

    @classmethod
    def of(cls, plan: Plan, dp: int, microbatches: int, starts: Mapping[str, tuple[int, ...]] | None = None) -> Choice:
        """Return a plan as one of the choices. What is said for one module alone about ZeRO is not predicted."""
        ranks = plan.ranks if plan.ranks != "auto" else "shared" if len(plan.sharing) == 1 else "own"
        cuts = tuple((name, tuple(first)) for name, first in (starts or {}).items())
        modules, data = tuple(plan.modules.items()), plan.data
        return cls(modules, ranks, data.kind, plan.schedule, dp, microbatches, cuts, data.replicate)

    @property
    def plan(self) -> Plan:
        """What `cornstarch train` takes."""
        return _plan(self.modules, self.kind, self.ranks, self.schedule, self.replicate)

    def copies(self, per_node: int) -> int:
        """Return how many copies of the model there are with hsdp, on nodes of so many ranks; 1 with other kinds."""
        if self.kind != "hsdp":
            return 1
        return self.replicate or copies_in_nodes(self.replica, self.dp, per_node)

    @cached_property
    def sharing(self) -> tuple[tuple[str, ...], ...]:
        """The modules, those together that stand on the same ranks; as in `Plan`."""
        *encoders, last = (name for name, _ in self.modules)
        if self.ranks in ("shared", "first_stage"):
            return ((*encoders, last),)
        if self.ranks == "colocated" and encoders:
            return tuple(encoders), (last,)
        return tuple((name,) for name, _ in self.modules)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What each set of modules takes of a replica."""
        sizes = dict(self.modules)
        first = tuple(sizes)[:-1] if self.ranks == "first_stage" else ()

        def largest(names: tuple[str, ...], axis: str) -> int:
            return max(getattr(sizes[name], axis) for name in names)

        return tuple(
            Span(names, largest(names, "stages"), largest(names, "cp"), largest(names, "tp"), first=first)
            for names in self.sharing
        )

    @property
    def replica(self) -> int:
        """The ranks of one replica."""
        return sum(span.ranks for span in self.spans)

    @property
    def world(self) -> int:
        """All ranks that are used."""
        return self.replica * self.dp

    @property
    def inside(self) -> bool:
        """Whether encoders run inside the last module's first stage."""
        return len(self.sharing) == 1 and len(self.modules) > 1

    @property
    def is_pipeline(self) -> bool:
        """Whether a replica has several sets of ranks that work one after the other."""
        return len(self.spans) > 1 or self.spans[0].stages > 1

    def describe(self) -> str:
        """Return the sizes on one line."""
        words = []
        for name, plan in self.modules:
            parts = f" of {plan.virtual_stages} parts" if plan.virtual_stages > 1 else ""
            said = [f"{plan.stages} stages{parts}"] if plan.stages > 1 else []
            said += [f"{axis} {size}" for axis, size in (("cp", plan.cp), ("tp", plan.tp)) if size > 1]
            said += ["checkpointing"] if plan.activation_checkpointing else []
            words.append(f"{name} {' × '.join(said) or 'one rank'}")
        where = {"own": "own ranks", "colocated": "encoders together", "first_stage": "encoders in the first stage"}
        words += [where.get(self.ranks, "shared ranks")] if len(self.modules) > 1 else []
        plural = "es" if self.microbatches > 1 else ""
        words += [f"dp {self.dp} ({self.kind})", f"{self.microbatches} microbatch{plural}"]
        return ", ".join([*words, *([self.schedule] if self.is_pipeline else [])])


@lru_cache(maxsize=4096)
def _plan(
    modules: tuple[tuple[str, ModulePlan], ...], kind: DataKind, ranks: Standing, schedule: str, replicate: int | None
) -> Plan:
    return Plan(dict(modules), DataPlan(kind, replicate), ranks, schedule)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ links


@dataclass(frozen=True)
class Crossing:
    """The links of a choice: of the groups of each module, and of what stages hand on."""

    links: Mapping[str, Links]
    stages: Mapping[str, tuple[Link, ...]]
    """By module, from each of its stages to the next, and from the last to the first."""
    meeting: Mapping[str, Link]
    """From an encoder's last stage to the first of the language model."""


@lru_cache(maxsize=8192)
def _placement(spans: tuple[Span, ...], dp: int, per_node: int) -> Placement:
    return place_spans(spans, dp, per_node)


@lru_cache(maxsize=8192)
def crossing(spans: tuple[Span, ...], dp: int, cluster: Cluster, copies: int = 1) -> Crossing:
    """Return the slowest link that any group of a kind crosses; copies: those of hsdp."""
    placement = _placement(spans, dp, cluster.per_node)
    replica = sum(span.ranks for span in spans)
    if replica * dp > cluster.devices:
        raise ConfigError(
            f"The plan takes {replica * dp:,} ranks ({dp:,} replicas of {replica:,}); the cluster has "
            f"{cluster.devices:,}."
        )
    links: dict[str, Links] = {}
    stages: dict[str, tuple[Link, ...]] = {}
    meeting: dict[str, Link] = {}
    placed = {span.modules: span for span in placement.spans}
    last = placed[spans[-1].modules]
    for span in placement.spans:
        starts = placement.starts(span)
        every = (starts[:, None] + np.arange(span.stages) * span.stage_ranks).reshape(-1)
        tensor = (every[:, None] + np.arange(span.cp) * span.tp).reshape(-1)
        data = (starts[:, None] + np.arange(span.cp) * span.tp).reshape(copies, -1)
        summed_over = _widest(cluster, data)
        one = Links(
            tp=_slowest(cluster, tensor, span.tp),
            cp=_slowest(cluster, every, span.stage_ranks),
            data=summed_over,
            copies=_widest(cluster, data.T) if copies > 1 else None,
            beside=not cluster.device.is_cpu or summed_over is not cluster.inside,
        )
        ends = (starts + span.ranks - span.stage_ranks, placement.starts(last))
        meets = _farthest(cluster, *ends) if span is not last else one.cp
        for name in span.modules:
            links[name], stages[name], meeting[name] = one, _between_stages(cluster, span, starts), meets
    return Crossing(links, stages, meeting)


def _between_stages(cluster: Cluster, span: Span, starts: Ranks) -> tuple[Link, ...]:
    """Return the slowest link from each stage to the next, in any replica; the last hands on to the first."""
    nodes = (starts[:, None] + np.arange(span.ranks)) // cluster.per_node
    nodes = nodes.reshape(len(starts), span.stages, span.stage_ranks)
    leaves = (nodes != np.roll(nodes, -1, axis=1)).any(axis=(0, 2))
    return tuple(cluster.between if out else cluster.inside for out in leaves)


def _widest(cluster: Cluster, groups: Ranks) -> Link:
    """Return the slowest link of some groups, one in each row: that of a group on the most nodes."""
    nodes = np.sort(groups // cluster.per_node, axis=1)
    worst = int((nodes[:, 1:] != nodes[:, :-1]).sum(axis=1).argmax())
    return cluster.link(groups[worst].tolist())


def _slowest(cluster: Cluster, starts: Ranks, size: int) -> Link:
    """Return the slowest link of runs of ranks."""
    worst = int(starts[int(nodes_of(starts, size, cluster.per_node).argmax())])
    return cluster.link(range(worst, worst + size))


def _farthest(cluster: Cluster, sources: Ranks, targets: Ranks) -> Link:
    """Return the slowest link between pairs of ranks."""
    nodes = np.abs(sources // cluster.per_node - targets // cluster.per_node)
    worst = int(nodes.argmax())
    return cluster.link((int(sources[worst]), int(targets[worst])))
