"""Search for the best plan of a run on a cluster, the best plans of other kinds, and why they lost; no torch.

The search is exact: best first, by lower bounds. Sizes come first, then microbatches and checkpointing, then the
schedule and data parallelism; only candidates that can still win are cut into stages and, finally, simulated.
Candidates that exceed a device's memory are never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, islice, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from cornstarch.errors import ConfigError
from cornstarch.plan import candidates
from cornstarch.plan.bounds import Bounds
from cornstarch.plan.candidates import Candidate, ParallelSizes, SearchSpace
from cornstarch.plan.cost import RunCost
from cornstarch.plan.pipeline_cost import CostModel, PipelineCost
from cornstarch.plan.plan import DataKind, Plan
from cornstarch.plan.predict import Prediction, explain_slower, predict
from cornstarch.plan.relaxed_sync import compare_relaxed, is_slow, restrict_to_replicas

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster

TOLERANCE = 0.002
"""A candidate that could be better by less than this fraction is skipped."""
RUNNERS_UP = 6
_ROUGH_TOLERANCE = 0.03  # of the smaller searches for runners-up
_MAX_REFINED, _NEAR = 3, 0.05  # how many of the best are refined, and how much slower than the best they may be
MOST_DEVICES = 8192
_MAX_SIZES = 200  # sizes of each rank mode that `can_fit` considers
_MAX_NEAREST = 8  # and `find_nearest_misses`
_PLAIN = ("1f1b", "gpipe")
_MOST_PASSES, _MOST_MOVED_PASSES = 20_000, 1_000
"""Microbatches × stages of the largest pipelines for which zero_bubble is tried, and layers are moved in it: its order
depends on every cost, so all of it is simulated."""
_VIRTUAL = (2, 3, 4)  # parts of the winner's last module on each place, with interleaving

Refused = dict[tuple[str, bool], tuple[int, Candidate]]
"""By what memory depends on most, the peak bytes and the candidate that comes nearest to fitting."""


@dataclass(frozen=True)
class RunnerUp:
    """The best of another kind."""

    prediction: Prediction
    reason: str
    """Why it lost."""


@dataclass(frozen=True)
class OwnPlan:
    """The plan that a config already has, predicted, for comparison with a search."""

    plan: Plan
    prediction: Prediction | None
    """None: it cannot be run on the cluster, or cannot be predicted."""
    trouble: str = ""
    """The reason."""


@dataclass(frozen=True)
class ScalingPoint:
    """The best plan on a cluster of another size."""

    cluster: Cluster
    best: Prediction | None
    """None: nothing fits."""
    efficiency: float | None
    """Samples per second of a device, relative to the smallest cluster on which anything fits."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: Prediction | None
    """None: nothing fits."""
    runners_up: tuple[RunnerUp, ...]
    """Each differs in kind from the best and from the others, fastest first."""
    refused: tuple[str, ...]
    """Candidates that may be as fast but do not fit, with the bytes that they need; where nothing fits, the nearest
    misses of each kind of data parallelism."""
    smallest: Cluster | None
    """Where nothing fits: the smallest cluster of the same devices on which something does."""
    tried: int
    """The number of simulated candidates."""
    relaxed: tuple[RunnerUp, ...] = ()
    """Between nodes that are far apart: faster plans that change the training, which is why they are not chosen."""
    used: str = ""
    """The devices that the best plan uses, if it leaves all of some kinds idle."""

    @property
    def message(self) -> str:
        """The result on one line."""
        if self.best is not None:
            return f"{self.best.candidate.describe()}: {self.best.step:.4g} s a step"
        if not self.refused:
            return "No plan can be run with what there is to choose from: no size divides the heads, or the batch."
        if self.smallest is None:
            return "No plan fits, on any cluster of these devices. The nearest: " + "; ".join(self.refused[:1])
        return f"No plan fits. The smallest cluster that would do: {self.smallest.name}."


def search(
    cost: RunCost, cluster: Cluster, space: SearchSpace | None = None, runners_up: int = RUNNERS_UP, polish: bool = True
) -> SearchResult:
    """Return the fastest plan of a space that fits into memory, and the best ones, up to `runners_up`, of other kinds.

    Devices that no replica fits on are left idle. `polish`: whether to try the winner with other schedules, and with
    single layers moved to the next stage.
    """
    space, costs = space or SearchSpace(), CostModel(cost, cluster)
    best_first = _BestFirstSearch(costs, space)
    best = best_first.run() if can_fit(costs, space) else None
    usable = cluster.device.usable
    if best is None:
        refused = tuple(_explain_refusal(one, peak, usable) for peak, one in find_nearest_misses(costs, space))
        return SearchResult(None, (), refused, find_smallest_cluster(cost, cluster, space), best_first.tried)
    others = [*best_first.seen, *_search_alternatives(costs, space, best)] if runners_up else []
    if polish:
        best = _polish(best, best_first.seen, costs, space)
    refused = tuple(_explain_refusal(one, peak, usable) for peak, one in best_first.refused.values())
    kept = {_kind_of(best): best}
    for one in sorted(others, key=lambda one: one.step):
        kept.setdefault(_kind_of(one), one)
    losers = [RunnerUp(one, explain_slower(one, best, cluster)) for one in [*kept.values()][1 : runners_up + 1]]
    relaxed = tuple(_list_relaxed(best, costs, space)) if runners_up and is_slow(cluster) else ()
    return SearchResult(best, tuple(losers), refused, None, best_first.tried, relaxed)


def _list_relaxed(best: Prediction, costs: CostModel, space: SearchSpace) -> Iterator[RunnerUp]:
    cost, only = restrict_to_replicas(costs.cost, space)
    base = _BestFirstSearch(CostModel(cost, costs.cluster), only, _ROUGH_TOLERANCE).run()
    if base is not None:
        yield from (RunnerUp(*one) for one in compare_relaxed(base, best, cost, costs.cluster))


def _explain_refusal(candidate: Candidate, peak: int, usable: int) -> str:
    return f"{candidate.describe()}: needs {peak / 2**30:.1f} GiB on a rank, and {usable / 2**30:.1f} are usable"


def can_fit(costs: CostModel, space: SearchSpace) -> bool:
    """Return whether any candidate fits; of very many sizes, those that need least memory are tried."""
    bounds, usable = Bounds(costs, space), costs.cluster.device.usable
    return any(
        bounds.fits(sizes, candidate.kind) and PipelineCost(candidate, costs).least_peak <= usable
        for sizes, candidate in _list_smallest(costs, space, bounds, _MAX_SIZES, checkpointed_first=True)
    )


def find_nearest_misses(costs: CostModel, space: SearchSpace) -> list[tuple[int, Candidate]]:
    """Return the candidates that come nearest to fitting, with their peak bytes: the smallest of each kind."""
    found: Refused = {}
    for _, candidate in _list_smallest(costs, space, Bounds(costs, space), _MAX_NEAREST):
        _keep_smallest(found, PipelineCost(candidate, costs).least_peak, candidate)
    return sorted(found.values(), key=lambda one: one[0])


def _keep_smallest(found: Refused, peak: int, candidate: Candidate) -> None:
    """Remember the candidate of its kind that came nearest to fitting."""
    key = candidate.memory_key
    if key not in found or peak < found[key][0]:
        found[key] = peak, candidate


def _list_smallest(
    costs: CostModel, space: SearchSpace, bounds: Bounds, most: int, checkpointed_first: bool = False
) -> Iterator[tuple[ParallelSizes, Candidate]]:
    """Yield the candidates that need least memory of each rank mode, up to `most` sizes of two orders."""
    cost = costs.cost
    order = -1 if checkpointed_first else 1
    size = {module.name: sum(states) for module, states in zip(cost.modules, bounds.states, strict=True)}
    per_rank = {(name, tp, cp): size[name] / (tp * cp) for name, tp, cp in bounds.work}
    for ranks in candidates.list_rank_modes(cost, space):
        one = replace(space, ranks=(ranks,))
        for work in (None, per_rank):  # the largest replicas, then the fewest bytes on a rank
            for sizes in islice(candidates.enumerate_sizes(cost, costs.cluster, one, work), most):
                # The fewest and the most microbatches: one needs no memory for earlier gradients, many are small.
                many = candidates.list_microbatches(sizes, cost, space)
                few = dict.fromkeys((*many[-1:], *many[:1]))
                # The most ranks for experts need least memory.
                shared = candidates.list_expert_sizes(sizes, cost, space)[::-1]
                again = candidates.list_checkpointing(cost, space)[::order]
                for number, checkpointing, cut in product(few, again, shared):
                    for candidate in candidates.complete_sizes(cut, checkpointing, number, cost, space):
                        yield cut, candidate


def find_smallest_cluster(cost: RunCost, cluster: Cluster, space: SearchSpace) -> Cluster | None:
    """Return the smallest cluster of the same devices and links on which anything fits; None: none up to a limit."""

    def try_size(nodes: int, per_node: int) -> Cluster | None:
        one = cluster.resize(nodes, per_node)
        return one if can_fit(CostModel(cost, one), space) else None

    largest = [max(m.tp_sizes) * max(m.cp_sizes) * min(candidates.MOST_STAGES, len(m.layers)) for m in cost.modules]
    most = min(MOST_DEVICES, cost.batch * sum(largest))  # more would be idle
    per_node = nodes = 1  # sizes are doubled until something fits, within a node first
    while per_node < cluster.per_node:
        if found := try_size(1, per_node):
            return found
        per_node *= 2
    while (found := try_size(nodes, cluster.per_node)) is None:
        nodes *= 2
        if (nodes - 1) * cluster.per_node >= most:
            return None
    low, high = nodes // 2, nodes  # low does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if better := try_size(middle, cluster.per_node):
            found, high = better, middle
        else:
            low = middle
    return found


class _Microbatches(NamedTuple):
    sizes: ParallelSizes
    checkpointing: tuple[bool, ...]
    """By module."""
    microbatches: int


_Scheduled = tuple[_Microbatches, tuple[str, int]]
"""With a schedule, and its parts of the last module on each place."""


class _BestFirstSearch:
    """An entry of the heap is a bound, a number, and sizes, or sizes with more and more of the other choices.

    The order of the choices: microbatches and checkpointing, the schedule, the kind of data parallelism.
    """

    def __init__(self, costs: CostModel, space: SearchSpace, tolerance: float = TOLERANCE) -> None:
        self.costs, self.space, self.tolerance = costs, space, tolerance
        self.bounds = Bounds(costs, space)
        self.tp_options = candidates.find_tp_options(costs.cost, space)
        self.numbers = count()  # ties of bounds must not compare entries
        self.seen: list[Prediction] = []
        self.refused: Refused = {}
        self.tried = 0

    def run(self) -> Prediction | None:
        """Return the fastest candidate that fits; None if none does."""
        best: Prediction | None = None
        # Small spaces first: their best prunes most of the larger ones.
        for ranks in candidates.list_rank_modes(self.costs.cost, self.space):
            best = self._search_space(replace(self.space, ranks=(ranks,)), best)
        return best

    def _search_space(self, space: SearchSpace, best: Prediction | None) -> Prediction | None:
        limit = self._limit(best)
        every = candidates.enumerate_sizes(self.costs.cost, self.costs.cluster, space, self.bounds.work, limit)
        coming = next(every, None)  # sizes are ordered by their bounds, and generated when their turn comes
        heap: list[tuple[float, int, Any]] = []
        while heap or coming is not None:
            while coming is not None and (not heap or self.bounds.lower_bound_sizes(coming) <= heap[0][0]):
                heappush(heap, (self.bounds.lower_bound_sizes(coming), next(self.numbers), coming))
                coming = next(every, None)
            bound, _, entry = heappop(heap)
            if bound >= limit:
                break
            if isinstance(entry, Candidate):
                self.tried += 1
                one = predict(entry, self.costs, self.costs.cluster)
                if one.fits:
                    self.seen.append(one)
                    best = one if best is None or one.step < best.step else best
                    limit = self._limit(best)
                else:
                    _keep_smallest(self.refused, one.peak, entry)
                continue
            for below, inner in self._expand(entry, limit):
                if max(bound, below) < limit:
                    heappush(heap, (max(bound, below), next(self.numbers), inner))
        return best

    def _limit(self, best: Prediction | None) -> float:
        return float("inf") if best is None else best.step * (1 - self.tolerance)

    def _expand(self, entry: Any, limit: float) -> Iterator[tuple[float, Any]]:
        """Yield the entries with one choice more, each with its bound."""
        cost, space = self.costs.cost, self.space
        if isinstance(entry, ParallelSizes):
            slow = self._find_slowest(entry)
            for cut in candidates.list_expert_sizes(entry, cost, space):
                if not any(self.bounds.fits(cut, kind) for kind in candidates.list_kinds(cut, space)):
                    continue
                for many in candidates.list_microbatches(cut, cost, space):
                    for checkpointing in candidates.list_checkpointing(cost, space):
                        choices = _Microbatches(cut, checkpointing, many)
                        bound = slow * self.bounds.lower_bound_microbatches(*choices, is_plain=False)
                        if bound < limit and self.bounds.fits_activations(cut, checkpointing, many, is_plain=False):
                            yield bound, choices
        elif isinstance(entry, _Microbatches):
            yield from self._choose_schedule(entry, limit)
        else:
            yield from self._choose_kind(entry[0], entry[1], limit)

    def _choose_schedule(self, entry: _Microbatches, limit: float) -> Iterator[tuple[float, _Scheduled]]:
        """Yield the entries with each schedule, each with a bound of its passes for the cut of its layers."""
        sizes, checkpointing, many = entry
        slow = self._find_slowest(sizes)
        for schedule in candidates.list_schedules(sizes, many, self.costs.cost, self.space):
            kinds = candidates.list_runnable_kinds(sizes, checkpointing, schedule[0], self.space)
            kinds, is_plain = [kind for kind in kinds if self.bounds.fits(sizes, kind)], schedule[0] in _PLAIN
            if not kinds or (is_plain and not self.bounds.fits_activations(*entry, is_plain=True)):
                continue
            bound = slow * self.bounds.lower_bound_microbatches(*entry, is_plain=True) if is_plain else 0.0
            if bound < limit:
                yield max(bound, slow * self._find_least_passes(entry, schedule)), (entry, schedule)

    def _find_slowest(self, sizes: ParallelSizes) -> float:
        """Return how much longer a step takes because the slowest of its devices counts."""
        ranks = sizes.dp * sum(prod(sizes.sizes[group[-1]]) for group in sizes.groups)
        return self.costs.cluster.device.find_slowest(ranks)

    def _find_least_passes(self, entry: _Microbatches, schedule: tuple[str, int]) -> float:
        """Return a lower bound of the time of all passes, by the cut of the layers; computed once for all searches."""
        key = (entry, schedule, self.space.tp_sequence, self.space.tp_vocabulary, self.space.kinds)
        if key not in self.costs.passes:
            # No kind of data parallelism has faster passes than replicas of everything: nothing is gathered in them.
            least = self._find_passes_of(entry, schedule, "ddp")
            if self.costs.cost.gathered and not set(self.space.kinds) <= {"ddp", "zero1"}:
                # Sharded kinds compute layers in another way, which may be faster; a pipeline can keep all gathered.
                is_pipeline = max(stages for _, _, stages in entry.sizes.sizes) > 1 or len(entry.sizes.groups) > 1
                least = min(least, self._find_passes_of(entry, schedule, "zero2")) if is_pipeline else 0.0
            self.costs.passes[key] = least
        return self.costs.passes[key]

    def _find_passes_of(self, entry: _Microbatches, schedule: tuple[str, int], kind: DataKind) -> float:
        candidate = candidates.build_candidate(*entry, schedule, kind, self.tp_options)
        return PipelineCost(candidate, self.costs).least_passes

    def _choose_kind(
        self, entry: _Microbatches, schedule: tuple[str, int], limit: float
    ) -> Iterator[tuple[float, Candidate]]:
        """Yield the candidates with each kind of data parallelism, each with its bound."""
        slow = self._find_slowest(entry.sizes)
        for kind in candidates.list_runnable_kinds(entry.sizes, entry.checkpointing, schedule[0], self.space):
            if self.bounds.fits(entry.sizes, kind) and slow * self.bounds.lower_bound_kind(*entry, kind) < limit:
                candidate = candidates.build_candidate(*entry, schedule, kind, self.tp_options)
                pipeline = PipelineCost(candidate, self.costs)
                least = slow * pipeline.least
                if least >= limit:
                    continue
                if pipeline.least_peak <= self.costs.cluster.device.usable:
                    yield least, candidate
                else:
                    _keep_smallest(self.refused, pipeline.least_peak, candidate)


def _search_alternatives(costs: CostModel, space: SearchSpace, best: Prediction) -> Iterator[Prediction]:
    """Yield the approximate best of other kinds: encoders on other ranks, more tp, no pipeline, everything sharded."""
    candidate, last = best.candidate, costs.cost.modules[-1]
    tp, stages = candidate.modules[-1][1].tp, candidate.modules[-1][1].stages
    here = "first_stage" if candidate.ranks == "shared" else candidate.ranks
    spaces = [replace(space, ranks=(ranks,)) for ranks in space.ranks if ranks != here and len(candidate.modules) > 1]
    spaces += [replace(space, least_tp=size) for size in sorted(size for size in last.tp_sizes if size > tp)[:1]]
    spaces += [replace(space, most_stages=1)] if stages > 1 else [replace(space, least_stages=2)]
    if len(last.ep_sizes) > 1:
        others = last.ep_sizes[1:] if candidate.modules[-1][1].ep == 1 else (1,)
        spaces.append(replace(space, ep_sizes=tuple(others)))
    kinds: tuple[DataKind, ...] = ("ddp", "zero3")
    spaces += [replace(space, kinds=(kind,)) for kind in kinds if kind in space.kinds and kind != candidate.kind]
    for one in spaces:
        if (found := _BestFirstSearch(costs, one, _ROUGH_TOLERANCE).run()) is not None:
            yield found


def _kind_of(prediction: Prediction) -> tuple[Any, ...]:
    """Return the properties in which plans of different kinds differ."""
    candidate = prediction.candidate
    last = candidate.modules[-1][1]
    sharded = candidate.kind in ("zero2", "zero3", "hsdp")
    return candidate.ranks, last.tp, last.stages > 1, last.cp > 1, last.ep > 1, sharded


def _polish(best: Prediction, seen: list[Prediction], costs: CostModel, space: SearchSpace) -> Prediction:
    """Return the best prediction after trying other schedules, and moving single layers while that helps."""
    others = [one for candidate in _reschedule(best.candidate, space) if (one := _predict_fitting(candidate, costs))]
    # Layers are also moved in the few that are nearly as good: the best before need not be the best after.
    near = {one.candidate: one for one in (best, *others, *seen) if one.step <= best.step * (1 + _NEAR)}
    few = sorted(near.values(), key=lambda one: one.step)[:_MAX_REFINED]
    return min((_move_layers(one, costs) for one in few), key=lambda one: one.step)


def _reschedule(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """Yield a candidate with other schedules that can run it, with the best cut for each."""
    *before, (name, last) = candidate.modules
    again = any(plan.activation_checkpointing or plan.ep > 1 for _, plan in candidate.modules)
    several = len(space.schedules) > 1 or "zero_bubble" in space.schedules
    is_short = candidate.microbatches * last.stages <= _MOST_PASSES
    if several and candidate.is_pipeline and not again and candidate.kind in ("ddp", "zero1") and is_short:
        modules = (*before, (name, replace(last, virtual_stages=1)))
        yield replace(candidate, modules=modules, schedule="zero_bubble", starts=())
    if "interleaved" in space.schedules and last.stages > 1 and candidate.microbatches % last.stages == 0:
        for virtual in _VIRTUAL:
            modules = (*before, (name, replace(last, virtual_stages=virtual)))
            yield replace(candidate, modules=modules, schedule="interleaved", starts=())


def _move_layers(best: Prediction, costs: CostModel) -> Prediction:
    """Return a prediction after moving single layers between stages of the last module while that helps."""
    name, last = best.candidate.modules[-1]
    if best.candidate.schedule == "zero_bubble" and best.candidate.microbatches * last.stages > _MOST_MOVED_PASSES:
        return best
    while True:
        before, starts = best, best.starts[name]
        ends = (*starts[1:], best.layers[name])
        for index in range(1, len(starts)):
            for moved in (starts[index] - 1, starts[index] + 1):
                if starts[index - 1] < moved < ends[index]:
                    cut = {**before.starts, name: (*starts[:index], moved, *starts[index + 1 :])}
                    one = _predict_fitting(replace(best.candidate, starts=tuple(cut.items())), costs)
                    best = one if one is not None and one.step < best.step else best
        if best.step >= before.step * (1 - 1e-6):
            return best


def _predict_fitting(candidate: Candidate, costs: CostModel) -> Prediction | None:
    """Return the prediction of a candidate; None if it cannot be run, or does not fit."""
    try:
        one = predict(candidate, costs, costs.cluster)
    except ConfigError:
        return None
    return one if one.fits else None
