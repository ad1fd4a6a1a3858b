"""The best plan for a run on a cluster, the best ones of other kinds, and why each of them lost; no torch.

    found = search(cost, Cluster.parse("2x8xH100"))
    found.best.choice.plan, found.best.step
    found.runners_up[0].reason

The search is exact: best first, by bounds. Sizes come first, then microbatches and what is computed again, then the
schedule and data parallelism; only what could still win is cut into stages and, at last, simulated. What does not fit
into the memory of a device is never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

from cornstarch.errors import ConfigError
from cornstarch.plan.assembly import Assembly, Costs
from cornstarch.plan.bounds import Bounds
from cornstarch.plan.choice import Choice
from cornstarch.plan.cost import RunCost
from cornstarch.plan.plan import DataKind
from cornstarch.plan.predict import Prediction, predict
from cornstarch.plan.reasons import refusal, why_slower
from cornstarch.plan.smallest import can_fit, nearest, smallest_cluster
from cornstarch.plan.space import Shape, Space, checkpointings, kinds, leaves, portions, shapes, standings

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster

TOLERANCE = 0.002
"""A choice that could be better by less than this share is not looked at."""
RUNNERS_UP = 6
_ROUGHLY = 0.03  # the tolerance of the smaller searches for runners-up
_REFINED, _NEAR = 3, 0.05  # how many of the best are refined, and how much slower than the best they may be
_PARTS = (2, 3, 4)  # of the winner's last module at each place, with interleaving


@dataclass(frozen=True)
class RunnerUp:
    """The best of another kind."""

    prediction: Prediction
    reason: str
    """Why it lost, in plain words."""


@dataclass(frozen=True)
class Found:
    """What a search found."""

    best: Prediction | None
    """None: nothing fits."""
    runners_up: tuple[RunnerUp, ...]
    """Each differs in kind from the best and from the others, fastest first."""
    refused: tuple[str, ...]
    """What would have been as fast, but does not fit, with the bytes that it needs; where nothing fits, what comes
    nearest to it, of each kind of data parallelism."""
    smallest: Cluster | None
    """Where nothing fits: the smallest cluster of the same devices that would do."""
    tried: int
    """How many choices were simulated."""

    @property
    def message(self) -> str:
        """Return what was found on one line."""
        if self.best is not None:
            return f"{self.best.choice.describe()}: {self.best.step:.4g} s a step"
        if not self.refused:
            return "No plan can be run with what there is to choose from: no size divides the heads, or the batch."
        if self.smallest is None:
            return "No plan fits, on any cluster of these devices. The nearest: " + "; ".join(self.refused[:1])
        return f"No plan fits. The smallest cluster that would do: {self.smallest.name}."


def search(
    cost: RunCost, cluster: Cluster, space: Space | None = None, runners_up: int = RUNNERS_UP, polish: bool = True
) -> Found:
    """Return the fastest plan whose memory fits, and the best ones of other kinds.

    Args:
        cost: Of the run.
        cluster: The machines; devices that no replica fits on are left idle.
        space: What may be chosen. Default: everything that can be run.
        runners_up: How many, at most.
        polish: Whether the winner is tried with other schedules, and with single layers moved to the next stage.
    """
    space, costs = space or Space(), Costs(cost, cluster)
    hunt = _Hunt(costs, space)
    best = hunt.best() if can_fit(costs, space) else None
    if best is None:
        refused = tuple(refusal(choice, peak, cluster.device.usable) for peak, choice in nearest(costs, space))
        return Found(None, (), refused, smallest_cluster(cost, cluster, space), hunt.tried)
    others = [*hunt.seen, *_alternatives(costs, space, best)] if runners_up else []
    if polish:
        best = polished(best, hunt.seen, costs, space)
    return Found(best, _distinct(best, others, cluster, runners_up), hunt.refusals(), None, hunt.tried)


# ------------------------------------------------------------------------------------------------ best first


class _Hunt:
    """A best-first search.

    An entry of the heap is a bound, a number, and a shape, a shape with microbatches, or the assembly of a choice.
    """

    def __init__(self, costs: Costs, space: Space, tolerance: float = TOLERANCE) -> None:
        self.costs, self.space, self.tolerance = costs, space, tolerance
        self.bounds = Bounds(costs, space)
        self.again = checkpointings(costs.cost, space)
        self.numbers = count()
        self.seen: list[Prediction] = []
        self.refused: dict[tuple[str, bool], tuple[int, Choice]] = {}
        self.tried = 0

    def best(self) -> Prediction | None:
        """Return the fastest choice that fits; None if none does."""
        best: Prediction | None = None
        for ranks in standings(self.costs.cost, self.space):  # what is found first spares much of what follows
            best = self._best_of(replace(self.space, ranks=(ranks,)), best)
        return best

    def _best_of(self, space: Space, best: Prediction | None) -> Prediction | None:
        limit = self._limit(best)
        every = shapes(self.costs.cost, self.costs.cluster, space, self.bounds.work, limit)
        coming = next(every, None)  # shapes come by their bounds, and are made when their turn comes
        heap: list[tuple[float, int, Any]] = []
        while heap or coming is not None:
            while coming is not None and (not heap or self.bounds.of_shape(coming) <= heap[0][0]):
                heappush(heap, (self.bounds.of_shape(coming), next(self.numbers), coming))
                coming = next(every, None)
            bound, _, entry = heappop(heap)
            if bound >= limit:
                break
            if isinstance(entry, Assembly):
                best = self._simulated(entry, best)
                limit = self._limit(best)
                continue
            for below, one in self._opened(entry, limit):
                if max(bound, below) < limit:
                    heappush(heap, (max(bound, below), next(self.numbers), one))
        return best

    def _limit(self, best: Prediction | None) -> float:
        """Return the bound from which on nothing is looked at."""
        return float("inf") if best is None else best.step * (1 - self.tolerance)

    def _opened(self, entry: Any, limit: float) -> Iterator[tuple[float, Any]]:
        """Yield what a shape, or a shape with microbatches, consists of, each with its bound."""
        if isinstance(entry, Shape):
            if any(self.bounds.fits(entry, kind) for kind in kinds(entry, self.space)):
                for many in portions(entry, self.costs.cost, self.space):
                    for again in self.again:
                        yield self.bounds.of_microbatches(entry, again, many), (entry, again, many)
            return
        shape, again, many = entry
        for choice in leaves(shape, again, many, self.costs.cost, self.space):
            if self.bounds.fits(shape, choice.kind):
                assembly = Assembly(choice, self.costs)
                if assembly.least >= limit:
                    continue
                if assembly.least_peak <= self.costs.cluster.device.usable:
                    yield assembly.least, assembly
                else:
                    self._refuse(assembly.least_peak, choice)

    def _simulated(self, assembly: Assembly, best: Prediction | None) -> Prediction | None:
        self.tried += 1
        one = predict(assembly.choice, self.costs, self.costs.cluster)
        if not one.fits:
            self._refuse(one.peak, assembly.choice)
            return best
        self.seen.append(one)
        return one if best is None or one.step < best.step else best

    def _refuse(self, peak: int, choice: Choice) -> None:
        """Remember the choice of its kind that came nearest to fitting."""
        key = (choice.kind, any(plan.activation_checkpointing for _, plan in choice.modules))
        if key not in self.refused or peak < self.refused[key][0]:
            self.refused[key] = peak, choice

    def refusals(self) -> tuple[str, ...]:
        """Return what did not fit, in words."""
        usable = self.costs.cluster.device.usable
        return tuple(refusal(choice, peak, usable) for peak, choice in self.refused.values())


# ------------------------------------------------------------------------------------------------ runners-up


def _alternatives(costs: Costs, space: Space, best: Prediction) -> Iterator[Prediction]:
    """Yield about the best of other kinds: encoders elsewhere, more tp, no pipeline, everything sharded."""
    choice, last = best.choice, costs.cost.modules[-1]
    tp, stages = choice.modules[-1][1].tp, choice.modules[-1][1].stages
    here = "first_stage" if choice.ranks == "shared" else choice.ranks
    spaces = [replace(space, ranks=(ranks,)) for ranks in space.ranks if ranks != here and len(choice.modules) > 1]
    spaces += [replace(space, least_tp=size) for size in sorted(size for size in last.tp_sizes if size > tp)[:1]]
    spaces += [replace(space, most_stages=1)] if stages > 1 else [replace(space, least_stages=2)]
    sharing: tuple[DataKind, ...] = ("ddp", "zero3")
    spaces += [replace(space, kinds=(kind,)) for kind in sharing if kind in space.kinds and kind != choice.kind]
    for one in spaces:
        found = _Hunt(costs, one, _ROUGHLY).best()
        if found is not None:
            yield found


def _kind(prediction: Prediction) -> tuple[Any, ...]:
    """Return what makes plans differ in kind."""
    choice = prediction.choice
    last = choice.modules[-1][1]
    return choice.ranks, last.tp, last.stages > 1, last.cp > 1, choice.kind in ("zero2", "zero3", "hsdp")


def _distinct(best: Prediction, others: list[Prediction], cluster: Cluster, most: int) -> tuple[RunnerUp, ...]:
    kept = {_kind(best): best}
    for one in sorted(others, key=lambda one: one.step):
        kept.setdefault(_kind(one), one)
    return tuple(RunnerUp(one, why_slower(one, best, cluster)) for one in [*kept.values()][1 : most + 1])


# ------------------------------------------------------------------------------------------------ finer


def polished(best: Prediction, seen: list[Prediction], costs: Costs, space: Space) -> Prediction:
    """Return the best prediction after trying other schedules, and moving single layers as long as that helps.

    Layers are moved in the few that are nearly as good, too: the best before need not be the best after.
    """
    others = [one for choice in _reordered(best.choice, space) if (one := _fitting(choice, costs)) is not None]
    near = {one.choice: one for one in (best, *others, *seen) if one.step <= best.step * (1 + _NEAR)}
    few = sorted(near.values(), key=lambda one: one.step)[:_REFINED]
    return min((_refined(one, costs) for one in few), key=lambda one: one.step)


def _refined(best: Prediction, costs: Costs) -> Prediction:
    """Return a prediction after moving single layers as long as that helps."""
    while True:
        before = best.step
        for starts in _moved(best):
            one = _fitting(replace(best.choice, starts=tuple(starts.items())), costs)
            best = one if one is not None and one.step < best.step else best
        if best.step >= before * (1 - 1e-6):
            return best


def _reordered(choice: Choice, space: Space) -> Iterator[Choice]:
    """Yield a choice with other schedules with which it could be carried out, cut where that is best for them."""
    *before, (name, last) = choice.modules
    again = any(plan.activation_checkpointing for _, plan in choice.modules)
    several = len(space.schedules) > 1 or "zero_bubble" in space.schedules
    if several and choice.is_pipeline and not again and choice.kind in ("ddp", "zero1"):
        modules = (*before, (name, replace(last, virtual_stages=1)))
        yield replace(choice, modules=modules, schedule="zero_bubble", starts=())
    if "interleaved" in space.schedules and last.stages > 1 and choice.microbatches % last.stages == 0:
        for virtual in _PARTS:
            modules = (*before, (name, replace(last, virtual_stages=virtual)))
            yield replace(choice, modules=modules, schedule="interleaved", starts=())


def _fitting(choice: Choice, costs: Costs) -> Prediction | None:
    """Return the prediction of a choice; None if it cannot be run, or does not fit."""
    try:
        one = predict(choice, costs, costs.cluster)
    except ConfigError:
        return None
    return one if one.fits else None


def _moved(best: Prediction) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield cuts in which one stage of the last module begins a layer earlier, or later."""
    name = best.choice.modules[-1][0]
    starts = best.starts[name]
    ends = (*starts[1:], best.layers[name])
    for index in range(1, len(starts)):
        for moved in (starts[index] - 1, starts[index] + 1):
            if starts[index - 1] < moved < ends[index]:
                yield {**best.starts, name: (*starts[:index], moved, *starts[index + 1 :])}
