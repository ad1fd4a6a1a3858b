"""Lower bounds of time and memory that prune the search, and whether anything fits at all; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product
from typing import TYPE_CHECKING

from cornstarch.plan.candidates import (
    MOST_STAGES,
    Candidate,
    ParallelSizes,
    SearchSpace,
    complete_sizes,
    enumerate_sizes,
    list_checkpointing,
    list_microbatches,
    list_rank_modes,
)
from cornstarch.plan.cluster import format_cluster_name
from cornstarch.plan.cost import ModuleSharding, RankCost, RunCost
from cornstarch.plan.pipeline_cost import CostModel, PipelineCost
from cornstarch.plan.placement import GroupLinks

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.plan import DataKind

MOST_DEVICES = 8192
_MAX_SIZES = 200  # sizes of each rank mode that `can_fit` considers
_MAX_NEAREST = 8  # and `find_nearest_misses`


class Bounds:
    """Lower bounds for the candidates of one run on one cluster."""

    def __init__(self, costs: CostModel, space: SearchSpace) -> None:
        self.costs, self.space, self.cost = costs, space, costs.cost
        self._rank_cost = lru_cache(maxsize=None)(self._compute_rank_cost)
        whole = self.cost.batch / self.cost.samples
        self.work = {
            (module.name, tp, cp): sum(self._rank_cost(number, (tp, cp, 1), whole, False).sums)
            for number, module in enumerate(self.cost.modules)
            for tp in module.tp_sizes
            for cp in module.cp_sizes
            if tp * cp <= costs.cluster.devices
        }
        """By module, tp and cp, the seconds of all samples of a step on one stage, in one microbatch."""
        self.states = [self._count_state_bytes(number) for number in range(len(self.cost.modules))]

    def _count_state_bytes(self, number: int) -> tuple[float, float, float]:
        """Return the bytes of a module's parameters, gradients and optimizer states."""
        layers = self.cost.modules[number].layers
        parameters = sum(layer.parameter_bytes for layer in layers)
        gradients = sum(layer.gradient_bytes for layer in layers)
        return parameters, gradients, self.cost.state_bytes * sum(layer.num_trainable for layer in layers)

    def lower_bound_sizes(self, sizes: ParallelSizes) -> float:
        """Return the time of a step if the ranks of each module were always busy."""
        times = []
        for group in sizes.groups:
            whole = sum(self.work[sizes.names[n], *sizes.sizes[n][:2]] for n in group)
            times.append(whole / (sizes.sizes[group[-1]][2] * sizes.dp))
        return max(times)

    def fits(self, sizes: ParallelSizes, kind: DataKind) -> bool:
        """Return whether parameters, gradients and states could fit if they were even over the stages."""
        usable = self.costs.cluster.device.usable
        for group in sizes.groups:
            total = 0.0
            for number in group:
                tp, cp, _ = sizes.sizes[number]
                parameters, gradients, states = self.states[number]
                shards = sizes.dp * cp / (sizes.copies if kind == "hsdp" else 1)
                if kind == "zero1":
                    states /= shards
                elif kind != "ddp":
                    parameters, gradients, states = parameters / shards, gradients / shards, states / shards
                total += (parameters + gradients + states) / tp
            if total / sizes.sizes[group[-1]][2] > usable:
                return False
        return True

    def lower_bound_microbatches(self, sizes: ParallelSizes, checkpointing: tuple[bool, ...], many: int) -> float:
        """Return a bound for a number of microbatches M, and what is checkpointed.

        A stage s of K cannot finish before one microbatch has passed the stages before it, forward and backward, and it
        has done its own work w for all: P + M w. However the work T is cut, the largest of these is at least
        T / (1 - (1 - 1/M)^K). Interleaved and zero-bubble schedules fill gaps, so for them only M T / K is certain.
        """
        samples = self.cost.batch / (sizes.dp * many) / self.cost.samples
        found = [self._rank_cost(n, sizes.sizes[n], samples, again) for n, again in enumerate(checkpointing)]
        totals = [sum(one.sums) for one in found]
        bound = 0.0
        for group in sizes.groups:
            stages = sizes.sizes[group[-1]][2]
            slowest_layer = max(float(found[number].total.max()) for number in group)
            bound = max(bound, many * max(sum(totals[number] for number in group) / stages, slowest_layer))
        stages = sizes.sizes[-1][2]
        interleaves = stages > 1 and many % stages == 0
        only_plain = "zero_bubble" not in self.space.schedules and not interleaves
        if not set(self.space.schedules) <= {"1f1b", "gpipe", "naive"} and not only_plain:
            return bound
        last = sizes.groups[-1]
        whole = sum(totals[number] for number in last)
        ahead = max((totals[number] for number in range(len(totals) - 1) if number not in last), default=0.0)
        return max(bound, ahead + whole / (1 - (1 - 1 / many) ** stages))

    def _compute_rank_cost(self, number: int, sizes: tuple[int, int, int], samples: float, again: bool) -> RankCost:
        """Return a module's costs if its ranks were as close together as possible."""
        tp, cp, _ = sizes
        cluster = self.costs.cluster
        links = GroupLinks(cluster.link(range(tp)), cluster.link(range(tp * cp)), cluster.inside)
        flags = (again, self.space.tp_sequence and tp > 1, self.space.tp_vocabulary and tp > 1)
        return self.costs.rank_cost(ModuleSharding(self.cost.modules[number].name, tp, cp, samples, links, *flags))


# ------------------------------------------------------------------------------------------------ what fits


def can_fit(costs: CostModel, space: SearchSpace) -> bool:
    """Return whether any candidate fits.

    For all sizes, the fewest and the most microbatches are tried: one needs no memory for earlier gradients, many are
    small. Of very many sizes, those with the largest replicas, or the fewest bytes per rank, are tried.
    """
    bounds, usable = Bounds(costs, space), costs.cluster.device.usable
    return any(
        bounds.fits(sizes, candidate.kind) and PipelineCost(candidate, costs).least_peak <= usable
        for sizes, candidate in _list_smallest(costs, space, bounds, _MAX_SIZES, checkpointed_first=True)
    )


def find_nearest_misses(costs: CostModel, space: SearchSpace) -> list[tuple[int, Candidate]]:
    """Return the candidates that come nearest to fitting, with their peak bytes: the smallest of each kind."""
    found: dict[tuple[str, bool], tuple[int, Candidate]] = {}
    for _, candidate in _list_smallest(costs, space, Bounds(costs, space), _MAX_NEAREST):
        key, peak = candidate.memory_key, PipelineCost(candidate, costs).least_peak
        if key not in found or peak < found[key][0]:
            found[key] = peak, candidate
    return sorted(found.values(), key=lambda one: one[0])


def _list_smallest(
    costs: CostModel, space: SearchSpace, bounds: Bounds, most: int, checkpointed_first: bool = False
) -> Iterator[tuple[ParallelSizes, Candidate]]:
    """Yield the candidates that need least memory of each rank mode, up to `most` sizes of two orders."""
    cost = costs.cost
    order = -1 if checkpointed_first else 1
    size = {module.name: sum(states) for module, states in zip(cost.modules, bounds.states, strict=True)}
    per_rank = {(name, tp, cp): size[name] / (tp * cp) for name, tp, cp in bounds.work}
    for ranks in list_rank_modes(cost, space):
        one = replace(space, ranks=(ranks,))
        for work in (None, per_rank):  # the largest replicas, then the fewest bytes on a rank
            for sizes in islice(enumerate_sizes(cost, costs.cluster, one, work), most):
                many = list_microbatches(sizes, cost, space)
                few = dict.fromkeys((*many[-1:], *many[:1]))
                for count, checkpointing in product(few, list_checkpointing(cost, space)[::order]):
                    for candidate in complete_sizes(sizes, checkpointing, count, cost, space):
                        yield sizes, candidate


def find_smallest_cluster(cost: RunCost, cluster: Cluster, space: SearchSpace) -> Cluster | None:
    """Return the smallest cluster of the same devices and links on which anything fits; None: none up to a limit.

    Sizes are doubled until something fits, within a node first; then the number of nodes is found by bisection.
    """

    def try_size(nodes: int, per_node: int) -> Cluster | None:
        name = format_cluster_name(cluster.device, nodes, per_node)
        one = replace(cluster, nodes=nodes, per_node=per_node, name=name)
        return one if can_fit(CostModel(cost, one), space) else None

    largest = [max(m.tp_sizes) * max(m.cp_sizes) * min(MOST_STAGES, len(m.layers)) for m in cost.modules]
    most = min(MOST_DEVICES, cost.batch * sum(largest))  # more would be idle
    per_node = 1
    while per_node < cluster.per_node:
        if found := try_size(1, per_node):
            return found
        per_node *= 2
    nodes = 1
    while (nodes - 1) * cluster.per_node < most:
        if found := try_size(nodes, cluster.per_node):
            low, high = nodes // 2, nodes  # low does not fit
            while high - low > 1:
                middle = (low + high) // 2
                if better := try_size(middle, cluster.per_node):
                    found, high = better, middle
                else:
                    low = middle
            return found
        nodes *= 2
    return None
