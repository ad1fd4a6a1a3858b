"""Candidate plans: sizes, replicas and microbatches of one; and the space of all that a search considers; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cornstarch.plan.cost import ModuleCost, RunCost
from cornstarch.plan.data_options import REPLICATED, SPLIT_BACKWARD
from cornstarch.plan.data_options import RankPlacement as RankMode
from cornstarch.plan.plan import DataKind, DataPlan, ModulePlan, Plan, group_by_ranks
from cornstarch.plan.rank_order import Span, build_spans, copies_in_nodes

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster

Starts = tuple[tuple[str, tuple[int, ...]], ...]
"""By module, the first layer of each of its stages × virtual_stages parts."""
Sizes = tuple[int, int, int]
"""tp, cp, stages."""
Work = Mapping[tuple[str, int, int], float]
SMALL = 8
"""Up to this, every number of stages is tried; above, divisors of the number of layers, and powers of two."""
MOST_STAGES = 64


@dataclass(frozen=True)
class Candidate:
    """A plan with its number of replicas, and the microbatches of each in a step."""

    modules: tuple[tuple[str, ModulePlan], ...]
    ranks: RankMode
    """own, colocated, first_stage or shared."""
    kind: DataKind
    schedule: str
    dp: int
    microbatches: int
    starts: Starts = ()
    """Default: the cut with the fastest slowest stage."""
    replicate: int | None = None
    """hsdp: the number of copies. Default: one per node, where a replica is smaller."""

    @classmethod
    def of(
        cls, plan: Plan, dp: int, microbatches: int, starts: Mapping[str, tuple[int, ...]] | None = None
    ) -> Candidate:
        """Build from a plan. A ZeRO stage of a single module is ignored."""
        ranks = plan.ranks if plan.ranks != "auto" else "shared" if len(plan.sharing) == 1 else "own"
        cuts = tuple((name, tuple(first)) for name, first in (starts or {}).items())
        modules, data = tuple(plan.modules.items()), plan.data
        return cls(modules, ranks, data.kind, plan.schedule, dp, microbatches, cuts, data.replicate)

    @property
    def plan(self) -> Plan:
        return _build_plan(self.modules, self.kind, self.ranks, self.schedule, self.replicate)

    def copies(self, per_node: int) -> int:
        """Return the copies of the model with hsdp, on nodes of this many ranks; 1 with other kinds."""
        return (self.replicate or copies_in_nodes(self.replica, self.dp, per_node)) if self.kind == "hsdp" else 1

    @cached_property
    def sharing(self) -> tuple[tuple[str, ...], ...]:
        """The modules, grouped by the ranks that they are on."""
        return group_by_ranks([name for name, _ in self.modules], self.ranks)

    @cached_property
    def expert_sizes(self) -> tuple[tuple[str, int], ...]:
        """The ep of the modules that share their experts out."""
        return tuple((name, plan.ep) for name, plan in self.modules if plan.ep > 1)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The ranks of each group of modules in a replica."""
        return build_spans(dict(self.modules), self.sharing, self.ranks)

    @property
    def replica(self) -> int:
        return sum(span.ranks for span in self.spans)

    @property
    def world(self) -> int:
        return self.replica * self.dp

    @property
    def has_encoders_inside(self) -> bool:
        """Whether encoders run inside the last module's first stage."""
        return len(self.sharing) == 1 and len(self.modules) > 1

    @property
    def memory_key(self) -> tuple[str, bool]:
        """What memory depends on most: the data parallelism, and whether anything is checkpointed."""
        return self.kind, any(plan.activation_checkpointing for _, plan in self.modules)

    @property
    def is_pipeline(self) -> bool:
        """Whether a replica has several places that work one after the other."""
        return len(self.spans) > 1 or self.spans[0].stages > 1

    def describe(self) -> str:
        """Return the sizes on one line."""
        words = []
        for name, plan in self.modules:
            parts = f" of {plan.virtual_stages} parts" if plan.virtual_stages > 1 else ""
            sizes = [f"{plan.stages} stages{parts}"] if plan.stages > 1 else []
            axes = ("cp", plan.cp), ("tp", plan.tp), ("ep", plan.ep)
            sizes += [f"{axis} {size}" for axis, size in axes if size > 1]
            sizes += ["checkpointing"] if plan.activation_checkpointing else []
            words.append(f"{name} {' × '.join(sizes) or 'one rank'}")
        where = {"own": "own ranks", "colocated": "encoders together", "first_stage": "encoders in the first stage"}
        words += [where.get(self.ranks, "shared ranks")] if len(self.modules) > 1 else []
        plural = "es" if self.microbatches > 1 else ""
        words += [f"dp {self.dp} ({self.kind})", f"{self.microbatches} microbatch{plural}"]
        return ", ".join([*words, *([self.schedule] if self.is_pipeline else [])])


@lru_cache(maxsize=4096)
def _build_plan(
    modules: tuple[tuple[str, ModulePlan], ...], kind: DataKind, ranks: RankMode, schedule: str, replicate: int | None
) -> Plan:
    return Plan(dict(modules), DataPlan(kind, replicate), ranks, schedule)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SearchSpace:
    """What a search may choose from."""

    ranks: tuple[RankMode, ...] = ("own", "colocated", "first_stage")
    """Where encoders run."""
    kinds: tuple[DataKind, ...] = ("ddp", "zero1", "zero2", "zero3", "hsdp")
    """hsdp: only where there are several copies, each of several replicas in a node."""
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    """gpipe and zero_bubble are optional; with several schedules, the winner is also tried with zero_bubble."""
    virtual: tuple[int, ...] = (2,)
    """Parts of the last module on each of its places, with `interleaved`. The winner is tried with more."""
    checkpointing: tuple[bool, ...] = (False, True)
    microbatches: tuple[int, ...] | None = None
    """Default: every divisor of the batch."""
    least_tp: int = 1
    """Of the last module; so are the next two."""
    least_stages: int = 1
    most_stages: int = MOST_STAGES
    tp_sequence: bool = True
    """Whether activations between layers are sharded, too, wherever tp shards a module that can be sharded so: the
    same bytes are sent, and less is kept."""
    tp_vocabulary: bool = True
    """Whether embeddings and head are sharded, too: the head is computed once, not by every rank."""
    ep_sizes: tuple[int, ...] | None = None
    """Of modules with experts. Default: every size that divides them."""


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes of all modules, where they run, and the number of replicas that fit."""

    names: tuple[str, ...]
    sizes: tuple[Sizes, ...]
    ranks: RankMode
    dp: int
    copies: int = 1
    """Copies of hsdp, each sharded over the replicas of a node; 1: hsdp does not apply."""
    eps: tuple[int, ...] = ()
    """By module, the ranks that its experts are shared out over; (): not chosen yet, or none."""

    def get_ep(self, number: int) -> int:
        return self.eps[number] if self.eps else 1

    @property
    def expert_sizes(self) -> tuple[tuple[str, int], ...]:
        """The ep of the modules that share their experts out."""
        return tuple((name, ep) for name, ep in zip(self.names, self.eps, strict=False) if ep > 1)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The modules, by number, grouped by the ranks that they are on."""
        return group_by_ranks(range(len(self.names)), self.ranks)


def enumerate_sizes(
    cost: RunCost, cluster: Cluster, space: SearchSpace, work: Work | None = None, limit: float = float("inf")
) -> Iterator[ParallelSizes]:
    """Yield every combination of sizes whose replica fits into the cluster, the largest replicas first.

    With `work` (`Bounds.work`) the fastest come first, without those whose ranks, always busy, would need `limit` s.
    """
    names = tuple(module.name for module in cost.modules)
    for ranks in list_rank_modes(cost, space):
        encoders, lasts, taken = _combine_sizes(cost, cluster, space, ranks)
        if not encoders or not lasts:
            continue
        replicas = taken[:, None] + np.array([prod(sizes) for sizes in lasts])[None, :]
        largest = np.array([_largest_divisor(cost.batch, most) for most in range(cluster.devices + 1)])
        dp = largest[np.where(replicas <= cluster.devices, cluster.devices // replicas, 0)]
        if ranks == "first_stage":
            dp = dp * np.eye(len(lasts), dtype=np.int64)  # encoders have the sizes of their language model
        wanted, key = dp > 0, -replicas.astype(np.float64)
        if work is not None:
            key = _busiest_place(names, encoders, lasts, ranks, work) / np.maximum(dp, 1)
            wanted &= key < limit
        rows, columns = np.nonzero(wanted)
        order = np.argsort(key[rows, columns], kind="stable")
        for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
            mode = "shared" if ranks == "first_stage" and lasts[column][2] == 1 else ranks
            many, replica = int(dp[row, column]), int(replicas[row, column])
            copies = copies_in_nodes(replica, many, cluster.per_node)
            yield ParallelSizes(names, (*encoders[row], lasts[column]), mode, many, copies if copies < many else 1)


def _busiest_place(
    names: tuple[str, ...], encoders: list[tuple[Sizes, ...]], lasts: list[Sizes], ranks: RankMode, work: Work
) -> NDArray[np.float64]:
    """Return the seconds of all samples on the busiest place of one replica, for all combinations."""
    *before, last = names
    combine = max if ranks == "own" else sum
    own = [[work[name, *sizes[:2]] / sizes[2] for name, sizes in zip(before, one, strict=True)] for one in encoders]
    end = np.array([work[last, tp, cp] / stages for tp, cp, stages in lasts])
    combined = np.array([combine(group) if group else 0.0 for group in own])
    if ranks == "first_stage":
        stages = np.array([sizes[2] for sizes in lasts])
        return end[None, :] + combined[:, None] / stages[None, :]
    return np.maximum(combined[:, None], end[None, :])


def list_rank_modes(cost: RunCost, space: SearchSpace) -> list[RankMode]:
    """Return where encoders may run, the mode with the fewest combinations first."""
    if not cost.encoders:
        return ["first_stage"]
    wanted = {"first_stage" if ranks == "shared" else ranks for ranks in space.ranks}
    order: tuple[RankMode, ...] = ("first_stage", "colocated", "own")
    return [ranks for ranks in order if ranks in wanted and (ranks != "colocated" or len(cost.encoders) > 1)]


def _combine_sizes(
    cost: RunCost, cluster: Cluster, space: SearchSpace, ranks: RankMode
) -> tuple[list[tuple[Sizes, ...]], list[Sizes], NDArray[np.int64]]:
    """Return the sizes of the encoders together, those of the last module, and the ranks that the encoders take."""
    *encoders, last = cost.modules
    lasts = _list_module_sizes(last, cluster.devices)
    lasts = [s for s in lasts if s[0] >= space.least_tp and space.least_stages <= s[2] <= space.most_stages]
    if ranks == "first_stage":  # encoders have the sizes of the last module's first stage: one combination for each
        lasts = [s for s in lasts if all(s[0] in one.tp_sizes and s[1] in one.cp_sizes for one in encoders)]
        return [((tp, cp, 1),) * len(encoders) for tp, cp, _ in lasts], lasts, np.zeros(len(lasts), dtype=np.int64)
    options = [_list_module_sizes(module, cluster.devices) for module in encoders]
    groups = list(product(*options))
    if ranks == "colocated":
        groups = [(sizes,) * len(encoders) for sizes in sorted(set.intersection(*map(set, options)))]
    elif len(encoders) > 2:  # too many to try all: encoders get the same tp and cp
        groups = [group for group in groups if len({sizes[:2] for sizes in group}) == 1]
    taken = [prod(group[0]) if ranks == "colocated" else sum(map(prod, group)) for group in groups]
    return groups, lasts, np.array(taken, dtype=np.int64)


def _list_module_sizes(module: ModuleCost, world: int) -> list[Sizes]:
    layers = len(module.layers)
    most = min(layers, MOST_STAGES)
    counts = [n for n in range(1, most + 1) if n <= SMALL or layers % n == 0 or n & (n - 1) == 0]
    every = product(module.tp_sizes, module.cp_sizes, counts)
    return [(tp, cp, stages) for tp, cp, stages in every if tp * cp * stages <= world]


@lru_cache(maxsize=65536)
def _largest_divisor(number: int, most: int) -> int:
    return next((n for n in range(min(number, most), 0, -1) if number % n == 0), 0)


def list_microbatches(sizes: ParallelSizes, cost: RunCost, space: SearchSpace) -> list[int]:
    """Return the numbers of microbatches that a replica's part of the batch can be split into."""
    each = cost.batch // sizes.dp
    return [n for n in space.microbatches or range(1, each + 1) if each % n == 0]


def list_checkpointing(cost: RunCost, space: SearchSpace) -> list[tuple[bool, ...]]:
    """Return, by module, what is checkpointed: nothing, the last module, or everything with a backward pass."""
    trained = tuple(module.trained for module in cost.encoders)
    nothing = (False,) * len(cost.modules)
    found = [nothing] if False in space.checkpointing else []
    if True in space.checkpointing:
        found += [(*nothing[1:], True), (*trained, True)]
    return list(dict.fromkeys(found))


def list_kinds(sizes: ParallelSizes, space: SearchSpace) -> list[DataKind]:
    """Return the kinds of data parallelism that differ; only the first where there is no data parallelism."""
    found = [kind for kind in space.kinds if kind != "hsdp" or (sizes.copies > 1 and _divides_copies(sizes))]
    return found[:1] if max(sizes.dp * cp for _, cp, _ in sizes.sizes) == 1 else found


def _divides_copies(sizes: ParallelSizes) -> bool:
    """Return whether ep divides the ranks of a copy of hsdp."""
    shards = [sizes.dp * cp // sizes.copies for _, cp, _ in sizes.sizes]
    return all(ranks % sizes.get_ep(number) == 0 for number, ranks in enumerate(shards))


def list_expert_sizes(sizes: ParallelSizes, cost: RunCost, space: SearchSpace) -> list[ParallelSizes]:
    """Return these sizes with every ep of the modules that have experts; ep divides the ranks with other tokens."""
    options = []
    for module, (_, cp, _) in zip(cost.modules, sizes.sizes, strict=True):
        wanted = [ep for ep in module.ep_sizes if space.ep_sizes is None or ep in space.ep_sizes]
        own = wanted if len(module.ep_sizes) > 1 else [1]
        options.append([ep for ep in own if sizes.dp * cp % ep == 0])
    if options == [[1]] * len(options):
        return [sizes]
    return [replace(sizes, eps=eps) for eps in product(*options)]


def list_tp_options(module: ModuleCost, tp: int, space: SearchSpace) -> tuple[bool, bool]:
    """Return whether tp shards the activations between layers of a module, too, and its vocabulary."""
    has_vocabulary = any(layer.tp_cuts == "vocabulary" for layer in module.layers)
    return space.tp_sequence and tp > 1 and module.tp_sequence, space.tp_vocabulary and tp > 1 and has_vocabulary


@lru_cache(maxsize=65536)
def _build_module_plan(
    sizes: Sizes, virtual: int, checkpointing: bool, options: tuple[bool, bool], ep: int
) -> ModulePlan:
    tp, cp, stages = sizes
    return ModulePlan(
        tp=tp, cp=cp, stages=stages, virtual_stages=virtual, activation_checkpointing=checkpointing,
        tp_sequence=options[0] and ep == 1, tp_vocabulary=options[1], ep=ep,
    )  # fmt: skip


def find_tp_options(cost: RunCost, space: SearchSpace) -> dict[str, tuple[tuple[bool, bool], tuple[bool, bool]]]:
    """Return by module what `list_tp_options` says without tp, and with it."""
    return {one.name: (list_tp_options(one, 1, space), list_tp_options(one, 2, space)) for one in cost.modules}


def list_schedules(sizes: ParallelSizes, microbatches: int, cost: RunCost, space: SearchSpace) -> list[tuple[str, int]]:
    """Return the schedules that can run these sizes, each with the parts of the last module on each of its places."""
    stages = sizes.sizes[-1][2]
    if len(sizes.groups) == 1 and stages == 1:
        return [("1f1b", 1)]
    schedules = [(schedule, 1) for schedule in space.schedules if schedule != "interleaved"]
    if sizes.expert_sizes:
        schedules = [one for one in schedules if one[0] not in SPLIT_BACKWARD]
    if "interleaved" in space.schedules and stages > 1 and microbatches % stages == 0:
        most = len(cost.modules[-1].layers) // stages
        schedules += [("interleaved", virtual) for virtual in space.virtual if virtual <= most]
    return schedules


def build_candidate(
    sizes: ParallelSizes,
    checkpointing: tuple[bool, ...],
    microbatches: int,
    schedule: tuple[str, int],
    kind: DataKind,
    options: Mapping[str, tuple[tuple[bool, bool], tuple[bool, bool]]],
) -> Candidate:
    """Return one candidate.

    Args:
        sizes: The sizes of all modules.
        checkpointing: By module.
        microbatches: Of each replica.
        schedule: With its parts, as in `list_schedules`.
        kind: Of data parallelism.
        options: By module, those of `list_tp_options` without tp, and with it.
    """
    parts = [1] * (len(sizes.names) - 1) + [schedule[1]]
    modules = tuple(
        (name, _build_module_plan(own, many, one, options[name][own[0] > 1], sizes.get_ep(number)))
        for number, (name, own, many, one) in enumerate(
            zip(sizes.names, sizes.sizes, parts, checkpointing, strict=True)
        )
    )
    return Candidate(modules, sizes.ranks, kind, schedule[0], sizes.dp, microbatches)


def list_runnable_kinds(
    sizes: ParallelSizes, checkpointing: tuple[bool, ...], schedule: str, space: SearchSpace
) -> list[DataKind]:
    """Return the kinds of data parallelism that differ and can run a schedule."""
    has_tp = any(tp > 1 for tp, _, _ in sizes.sizes)
    kinds = [kind for kind in list_kinds(sizes, space) if not (has_tp and kind == "fsdp1")]
    if schedule in SPLIT_BACKWARD:
        return [kind for kind in kinds if kind in REPLICATED and not any(checkpointing)]
    return kinds


def complete_sizes(
    sizes: ParallelSizes, checkpointing: tuple[bool, ...], microbatches: int, cost: RunCost, space: SearchSpace
) -> Iterator[Candidate]:
    """Yield the candidates that differ only in schedule and data parallelism, and can be run."""
    options = find_tp_options(cost, space)
    for schedule in list_schedules(sizes, microbatches, cost, space):
        for kind in list_runnable_kinds(sizes, checkpointing, schedule[0], space):
            yield build_candidate(sizes, checkpointing, microbatches, schedule, kind, options)
