"""Which plans there are to choose from: every combination of sizes, and what is left to decide for each; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cornstarch.plan.choice import Choice
from cornstarch.plan.cost import ModuleCost, RunCost
from cornstarch.plan.placement import copies_in_nodes
from cornstarch.plan.plan import DataKind, ModulePlan
from cornstarch.plan.plan import Ranks as Standing

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster

Sizes = tuple[int, int, int]
"""tp, cp, stages."""
Work = Mapping[tuple[str, int, int], float]
SMALL = 8
"""Up to this, every number of stages is tried; above, those that divide the layers, and powers of two."""
MOST_STAGES = 64


@dataclass(frozen=True)
class Space:
    """What the search may choose."""

    ranks: tuple[Standing, ...] = ("own", "colocated", "first_stage")
    """Where encoders stand."""
    kinds: tuple[DataKind, ...] = ("ddp", "zero1", "zero2", "zero3", "hsdp")
    """hsdp: only where there are several copies, each of several replicas in a node."""
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    """gpipe and zero_bubble, too, where they are named; with several schedules, the winner is tried with the latter."""
    virtual: tuple[int, ...] = (2,)
    """Parts of the last module at each of its places, with `interleaved`. The winner is tried with more."""
    checkpointing: tuple[bool, ...] = (False, True)
    microbatches: tuple[int, ...] | None = None
    """Default: whatever divides the batch."""
    least_tp: int = 1
    """Of the last module; so are the next two."""
    least_stages: int = 1
    most_stages: int = MOST_STAGES
    tp_sequence: bool = False
    tp_vocabulary: bool = False


@dataclass(frozen=True)
class Shape:
    """The sizes of all modules, and where they stand; how many replicas then fit."""

    names: tuple[str, ...]
    sizes: tuple[Sizes, ...]
    ranks: Standing
    dp: int
    copies: int = 1
    """Those of hsdp, each sharded over the replicas of a node; 1: it makes no sense here."""

    @cached_property
    def spans(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Which modules stand together, by number, and on how many ranks of a replica."""
        every = range(len(self.names))
        if self.ranks in ("shared", "first_stage"):
            groups = [tuple(every)]
        elif self.ranks == "colocated":
            groups = [tuple(every)[:-1], (every[-1],)]
        else:
            groups = [(number,) for number in every]
        return tuple((group, _ranks(self.sizes[group[-1]])) for group in groups)


def _ranks(sizes: Sizes) -> int:
    return sizes[0] * sizes[1] * sizes[2]


# ------------------------------------------------------------------------------------------------ shapes


def shapes(
    cost: RunCost, cluster: Cluster, space: Space, work: Work | None = None, limit: float = float("inf")
) -> Iterator[Shape]:
    """Yield every combination of sizes whose replica fits into the cluster, each once; the largest replicas first.

    Args:
        cost: Of the run.
        cluster: The machines.
        space: What may be chosen.
        work: By module, tp and cp, the seconds of all samples of a step on one stage. With it, a combination whose
            ranks, always busy, would need `limit` or more is left out, and those that would need least come first.
        limit: Seconds of a step.
    """
    names = tuple(module.name for module in cost.modules)
    for ranks in standings(cost, space):
        encoders, lasts, taken = _combinations(cost, cluster, space, ranks)
        if not encoders or not lasts:
            continue
        replicas = taken[:, None] + np.array([_ranks(sizes) for sizes in lasts])[None, :]
        largest = np.array([_largest_divisor(cost.batch, most) for most in range(cluster.devices + 1)])
        dp = largest[np.where(replicas <= cluster.devices, cluster.devices // replicas, 0)]
        if ranks == "first_stage":
            dp = dp * np.eye(len(lasts), dtype=np.int64)  # encoders have the sizes of their language model
        wanted, key = dp > 0, -replicas.astype(np.float64)
        if work is not None:
            key = _busy(names, encoders, lasts, ranks, work) / np.maximum(dp, 1)
            wanted &= key < limit
        rows, columns = np.nonzero(wanted)
        order = np.argsort(key[rows, columns], kind="stable")
        for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
            standing = "shared" if ranks == "first_stage" and lasts[column][2] == 1 else ranks
            many, replica = int(dp[row, column]), int(replicas[row, column])
            copies = copies_in_nodes(replica, many, cluster.per_node)
            yield Shape(names, (*encoders[row], lasts[column]), standing, many, copies if copies < many else 1)


def _busy(
    names: tuple[str, ...], encoders: list[tuple[Sizes, ...]], lasts: list[Sizes], ranks: Standing, work: Work
) -> NDArray[np.float64]:
    """Return the seconds of all samples on the busiest place of one replica, for all combinations."""
    *before, last = names
    own = [
        [work[name, tp, cp] / stages for name, (tp, cp, stages) in zip(before, group, strict=True)]
        for group in encoders
    ]
    end = np.array([work[last, tp, cp] / stages for tp, cp, stages in lasts])
    together = np.array([(max if ranks == "own" else sum)(group) if group else 0.0 for group in own])
    if ranks == "first_stage":
        stages = np.array([sizes[2] for sizes in lasts])
        return end[None, :] + together[:, None] / stages[None, :]
    return np.maximum(together[:, None], end[None, :])


def standings(cost: RunCost, space: Space) -> list[Standing]:
    """Return where encoders may stand; what has the fewest combinations first."""
    if not cost.encoders:
        return ["first_stage"]
    wanted = {"first_stage" if ranks == "shared" else ranks for ranks in space.ranks}
    order: tuple[Standing, ...] = ("first_stage", "colocated", "own")
    return [ranks for ranks in order if ranks in wanted and (ranks != "colocated" or len(cost.encoders) > 1)]


def _combinations(
    cost: RunCost, cluster: Cluster, space: Space, ranks: Standing
) -> tuple[list[tuple[Sizes, ...]], list[Sizes], NDArray[np.int64]]:
    """Return the sizes of the encoders together, those of the last module, and the ranks that the encoders take.

    With `first_stage` the encoders have the sizes of the last module's first stage: one combination for each.
    """
    world = cluster.devices
    *encoders, last = cost.modules
    lasts = [
        sizes
        for sizes in _module_sizes(last, world)
        if sizes[0] >= space.least_tp and space.least_stages <= sizes[2] <= space.most_stages
    ]
    if ranks == "first_stage":
        lasts = [
            (tp, cp, stages)
            for tp, cp, stages in lasts
            if all(tp in module.tp_sizes and cp in module.cp_sizes for module in encoders)
        ]
        return [((tp, cp, 1),) * len(encoders) for tp, cp, _ in lasts], lasts, np.zeros(len(lasts), dtype=np.int64)
    choices = [_module_sizes(module, world) for module in encoders]
    groups = list(product(*choices))
    if ranks == "colocated":
        groups = [(sizes,) * len(encoders) for sizes in sorted(set.intersection(*map(set, choices)))]
    elif len(encoders) > 2:  # too many to try all: encoders have the same tp and cp
        groups = [group for group in groups if len({sizes[:2] for sizes in group}) == 1]
    taken = [_ranks(group[0]) if ranks == "colocated" else sum(map(_ranks, group)) for group in groups]
    return groups, lasts, np.array(taken, dtype=np.int64)


def _module_sizes(module: ModuleCost, world: int) -> list[Sizes]:
    counts = _stage_counts(len(module.layers))
    every = product(module.tp_sizes, module.cp_sizes, counts)
    return [(tp, cp, stages) for tp, cp, stages in every if tp * cp * stages <= world]


def _stage_counts(layers: int) -> list[int]:
    most = min(layers, MOST_STAGES)
    return [n for n in range(1, most + 1) if n <= SMALL or layers % n == 0 or n & (n - 1) == 0]


@lru_cache(maxsize=65536)
def _largest_divisor(number: int, most: int) -> int:
    return next((n for n in range(min(number, most), 0, -1) if number % n == 0), 0)


# ------------------------------------------------------------------------------------------------ what is left


def portions(shape: Shape, cost: RunCost, space: Space) -> list[int]:
    """Return the numbers of microbatches that a replica's share of the batch can be cut into."""
    each = cost.batch // shape.dp
    return [n for n in space.microbatches or range(1, each + 1) if each % n == 0]


def checkpointings(cost: RunCost, space: Space) -> list[tuple[bool, ...]]:
    """Return, by module, what is computed again: nothing, the last module, or everything that has a backward pass."""
    trained = tuple(module.trained for module in cost.encoders)
    nothing = (False,) * len(cost.modules)
    found = [nothing] if False in space.checkpointing else []
    if True in space.checkpointing:
        found += [(*nothing[1:], True), (*trained, True)]
    return list(dict.fromkeys(found))


def orders(shape: Shape, microbatches: int, cost: RunCost, space: Space) -> list[tuple[str, int]]:
    """Return schedules, each with the parts of the last module at each of its places."""
    stages = shape.sizes[-1][2]
    if len(shape.spans) == 1 and stages == 1:
        return [("1f1b", 1)]
    found = [(schedule, 1) for schedule in space.schedules if schedule != "interleaved"]
    if "interleaved" in space.schedules and stages > 1 and microbatches % stages == 0:
        most = len(cost.modules[-1].layers) // stages
        found += [("interleaved", virtual) for virtual in space.virtual if virtual <= most]
    return found


def kinds(shape: Shape, space: Space) -> list[DataKind]:
    """Return the kinds of data parallelism that differ: none where there is only one copy."""
    copies = max(shape.dp * cp for _, cp, _ in shape.sizes)
    found = [kind for kind in space.kinds if kind != "hsdp" or shape.copies > 1]
    return found[:1] if copies == 1 else found


def runs(schedule: str, kind: DataKind, again: tuple[bool, ...], shape: Shape) -> bool:
    """Say whether a combination can be carried out; `cornstarch.plan.layout.unexecutable` says why not."""
    if kind in ("zero1", "fsdp1") and any(tp > 1 for tp, _, _ in shape.sizes):
        return False
    return schedule not in ("zero_bubble", "auto") or (kind in ("ddp", "zero1") and not any(again))


@lru_cache(maxsize=65536)
def _module_plan(sizes: Sizes, virtual: int, again: bool, sequence: bool, vocabulary: bool) -> ModulePlan:
    tp, cp, stages = sizes
    return ModulePlan(
        tp=tp, cp=cp, stages=stages, virtual_stages=virtual, activation_checkpointing=again,
        tp_sequence=sequence and tp > 1, tp_vocabulary=vocabulary and tp > 1,
    )  # fmt: skip


def choice_of(
    shape: Shape, again: tuple[bool, ...], microbatches: int, kind: DataKind, order: tuple[str, int], space: Space
) -> Choice:
    """Return the choice that a shape and what is left to decide make."""
    schedule, virtual = order
    parts = [1] * (len(shape.names) - 1) + [virtual]
    modules = tuple(
        (name, _module_plan(sizes, many, one, space.tp_sequence, space.tp_vocabulary))
        for name, sizes, many, one in zip(shape.names, shape.sizes, parts, again, strict=True)
    )
    return Choice(modules, shape.ranks, kind, schedule, shape.dp, microbatches)


def choices(cost: RunCost, cluster: Cluster, space: Space | None = None) -> Iterator[Choice]:
    """Yield everything that there is to choose from, one by one."""
    space = space or Space()
    for shape in shapes(cost, cluster, space):
        for microbatches in portions(shape, cost, space):
            for again in checkpointings(cost, space):
                yield from leaves(shape, again, microbatches, cost, space)


def leaves(shape: Shape, again: tuple[bool, ...], microbatches: int, cost: RunCost, space: Space) -> Iterator[Choice]:
    """Yield the choices that differ in schedule and data parallelism only."""
    for order in orders(shape, microbatches, cost, space):
        for kind in kinds(shape, space):
            if runs(order[0], kind, again, shape):
                yield choice_of(shape, again, microbatches, kind, order, space)
