"""Lower bounds of the time of a step, for many candidates at once: what a search rules out without cutting layers.

No torch.
"""

from __future__ import annotations

from functools import lru_cache

from cornstarch.plan.candidates import (
    ParallelSizes,
    SearchSpace,
    build_candidate,
    find_tp_options,
    list_tp_options,
)
from cornstarch.plan.communication import all_gather, all_reduce, reduce_scatter
from cornstarch.plan.cost import ModuleSharding, RankCost
from cornstarch.plan.memory import GATHERED
from cornstarch.plan.pipeline_cost import CostModel
from cornstarch.plan.plan import DataKind
from cornstarch.plan.rank_order import GroupLinks, find_links


class Bounds:
    """Lower bounds for the candidates of one run on one cluster."""

    def __init__(self, costs: CostModel, space: SearchSpace) -> None:
        self.costs, self.space, self.cost = costs, space, costs.cost
        self._rank_cost = lru_cache(maxsize=None)(self._compute_rank_cost)
        self._reduce = lru_cache(maxsize=None)(self._compute_sums)
        self._ways = (False, True) if self.cost.gathered else (False,)  # sharded kinds may compute layers otherwise
        self._options = find_tp_options(costs.cost, space)
        whole = self.cost.batch / self.cost.samples
        self.work = {
            (module.name, tp, cp): min(
                sum(self._rank_cost(number, (tp, cp, 1), whole, False, way, ep).sums)
                for way in self._ways
                for ep in module.ep_sizes
                if ep == 1 or tp * ep <= costs.cluster.devices
            )
            for number, module in enumerate(self.cost.modules)
            for tp in module.tp_sizes
            for cp in module.cp_sizes
            if tp * cp <= costs.cluster.devices
        }
        """By module, tp and cp, the seconds of all samples of a step on one stage, in one microbatch."""
        self.states = [
            (
                float(sum(layer.parameter_bytes for layer in module.layers)),
                float(sum(layer.gradient_bytes for layer in module.layers)),
                float(self.cost.state_bytes * sum(layer.num_trainable for layer in module.layers)),
            )
            for module in self.cost.modules
        ]
        """By module, the bytes of its parameters, gradients and optimizer states."""
        experts = [[one.experts for one in module.layers if one.experts is not None] for module in self.cost.modules]
        self._experts = [
            (
                float(sum(one.parameter_bytes for one in own)),
                float(sum(one.gradient_bytes for one in own)),
                float(self.cost.state_bytes * sum(one.trained_parameters for one in own)),
            )
            for own in experts
        ]

    def _count_states(self, number: int, ep: int) -> tuple[float, ...]:
        """Return the bytes of a module's parameters, gradients and states of which a rank has all but its shards."""
        pairs = zip(self.states[number], self._experts[number], strict=True)
        return tuple(whole - experts * (1 - 1 / ep) for whole, experts in pairs)

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
                # Sharded fully, experts / ep over ranks / ep is as much as experts over all ranks.
                is_whole = kind in ("ddp", "zero1")
                parameters, gradients, states = self._count_states(number, sizes.get_ep(number) if is_whole else 1)
                shards = sizes.dp * cp / (sizes.copies if kind == "hsdp" else 1)
                if kind == "zero1":
                    states = self.states[number][2] / shards
                elif kind != "ddp":
                    parameters, gradients, states = parameters / shards, gradients / shards, states / shards
                total += (parameters + gradients + states) / tp
            if total / sizes.sizes[group[-1]][2] > usable:
                return False
        return True

    def fits_activations(
        self, sizes: ParallelSizes, checkpointing: tuple[bool, ...], many: int, is_plain: bool
    ) -> bool:
        """Return whether activations, parameters and states, fully sharded, could fit, however the layers are cut.

        Place p of K keeps its part a_p of the activations A of min(M, K - p) microbatches with a plain schedule, so the
        fullest one has at least A / H, where H is the sum of 1 / min(M, K - p); with any, at least A / K.
        """
        return any(self._fits_way(sizes, checkpointing, many, is_plain, way) for way in self._ways)

    def _fits_way(
        self, sizes: ParallelSizes, checkpointing: tuple[bool, ...], many: int, is_plain: bool, way: bool
    ) -> bool:
        usable = self.costs.cluster.device.usable
        samples = self.cost.batch / (sizes.dp * many) / self.cost.samples
        for group in sizes.groups:
            stages, states, kept = sizes.sizes[group[-1]][2], 0.0, 0.0
            for number in group:
                tp, cp, _ = sizes.sizes[number]
                parameters, _, optimizer = self.states[number]  # gradients may come when activations have gone
                states += (parameters + optimizer) / (tp * sizes.dp * cp)
                kept += self._find_rank_cost(sizes, number, samples, checkpointing[number], way).all_kept
            shares = sum(1 / min(many, depth) for depth in range(1, stages + 1)) if is_plain else stages
            if max(kept / shares, (kept + states) / stages) > usable:
                return False
        return True

    def lower_bound_microbatches(
        self,
        sizes: ParallelSizes,
        checkpointing: tuple[bool, ...],
        many: int,
        is_plain: bool,
    ) -> float:
        """Return a bound for a number of microbatches M, and what is checkpointed; `is_plain`: of plain schedules.

        A stage s of K cannot finish before one microbatch has passed the stages before it, forward and backward, and it
        has done its own work w for all: P + M w. However the work T is cut, the largest of these is at least
        T / (1 - (1 - 1/M)^K). Interleaved and zero-bubble schedules fill gaps, so for them only M T / K is certain.
        """
        return min(self._compute_way_bound(sizes, checkpointing, many, is_plain, way) for way in self._ways)

    def _compute_way_bound(
        self, sizes: ParallelSizes, checkpointing: tuple[bool, ...], many: int, is_plain: bool, way: bool
    ) -> float:
        samples = self.cost.batch / (sizes.dp * many) / self.cost.samples
        found = [self._find_rank_cost(sizes, n, samples, again, way) for n, again in enumerate(checkpointing)]
        totals = [sum(one.sums) for one in found]
        bound = 0.0
        for group in sizes.groups:
            stages = sizes.sizes[group[-1]][2]
            slowest_layer = max(found[number].slowest for number in group)
            bound = max(bound, many * max(sum(totals[number] for number in group) / stages, slowest_layer))
        if not is_plain:
            return bound
        stages, last = sizes.sizes[-1][2], sizes.groups[-1]
        whole = sum(totals[number] for number in last)
        ahead = max((totals[number] for number in range(len(totals) - 1) if number not in last), default=0.0)
        return max(bound, ahead + whole / (1 - (1 - 1 / many) ** stages))

    def lower_bound_kind(
        self, sizes: ParallelSizes, checkpointing: tuple[bool, ...], many: int, kind: DataKind
    ) -> float:
        """Return a bound for a kind of data parallelism.

        It is the mean over places of their passes, and of what the reduction of their gradients takes longer than the
        backward pass that may hide it.
        """
        samples, bound, way = self.cost.batch / (sizes.dp * many) / self.cost.samples, 0.0, kind in GATHERED
        found = [self._find_rank_cost(sizes, n, samples, again, way) for n, again in enumerate(checkpointing)]
        for group, (reduction, gather) in zip(sizes.groups, self._reduce(sizes, kind), strict=True):
            hidden = sum(sum(found[number].sums[1:]) for number in group)
            work = many * sum(sum(found[number].sums) for number in group)
            late = work + max(0.0, reduction - hidden) + gather
            bound = max(bound, late / sizes.sizes[group[-1]][2])
        return bound

    def _compute_sums(self, sizes: ParallelSizes, kind: DataKind) -> tuple[tuple[float, float], ...]:
        """Return, by group of modules, the least seconds of reducing its gradients, and of gathering parameters."""
        copies = sizes.copies if kind == "hsdp" else 1
        candidate = build_candidate(sizes, (False,) * len(sizes.names), 1, ("1f1b", 1), "ddp", self._options)
        links = find_links(candidate.spans, sizes.dp, self.costs.cluster, copies, sizes.expert_sizes).groups
        found = []
        for group in sizes.groups:
            reduction = gather = 0.0
            for number in group:
                (tp, cp, _), own, ep = sizes.sizes[number], links[sizes.names[number]], sizes.get_ep(number)
                experts = self._experts[number][1] / tp if ep > 1 else 0.0
                parts = (
                    (self.states[number][1] / tp - experts, sizes.dp * cp, own.data),
                    (experts / ep, sizes.dp * cp // ep, own.expert_data or own.data),
                )
                for gradients, ranks, link in parts:
                    if not gradients:
                        continue
                    if kind == "ddp":
                        reduction += all_reduce(gradients, ranks, link)
                        continue
                    reduction += reduce_scatter(gradients, ranks // copies, link)
                    if copies > 1 and own.copies is not None:
                        reduction += all_reduce(gradients * copies / ranks, copies, own.copies)
                    gather += all_gather(gradients, ranks, link) if kind == "zero1" else 0.0
            found.append((reduction, gather))
        return tuple(found)

    def _find_rank_cost(self, sizes: ParallelSizes, number: int, samples: float, again: bool, way: bool) -> RankCost:
        return self._rank_cost(number, sizes.sizes[number], samples, again, way, sizes.get_ep(number))

    def _compute_rank_cost(
        self, number: int, sizes: tuple[int, int, int], samples: float, again: bool, way: bool, ep: int
    ) -> RankCost:
        """Return a module's costs if its ranks were as close as possible; `way`: as sharded kinds compute it."""
        tp, cp, _ = sizes
        cluster = self.costs.cluster
        # Of groups that do not fill nodes, it depends on where they begin how fast they are.
        fills = tp * ep % cluster.per_node == 0
        experts = cluster.link(range(0, tp * ep, tp)) if fills else cluster.inside
        links = GroupLinks(cluster.link(range(tp)), cluster.link(range(tp * cp)), cluster.inside, experts=experts)
        module = self.cost.modules[number]
        sequence, vocabulary = list_tp_options(module, tp, self.space)
        flags = again, sequence and ep == 1, vocabulary
        return self.costs.rank_cost(ModuleSharding(module.name, tp, cp, samples, links, *flags, gathered=way, ep=ep))
