"""Times and bytes that no choice of some sizes undercuts: what lets the search leave most of them out; no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from cornstarch.plan.assembly import Costs
from cornstarch.plan.passes import Links, Passes, Way
from cornstarch.plan.space import Shape, Space

if TYPE_CHECKING:
    from cornstarch.plan.plan import DataKind


class Bounds:
    """Bounds for the choices of one run on one cluster."""

    def __init__(self, costs: Costs, space: Space) -> None:
        self.costs, self.space, self.cost = costs, space, costs.cost
        self._passes = lru_cache(maxsize=None)(self._find)
        self.work = {
            (module.name, tp, cp): self._least_work(number, tp, cp)
            for number, module in enumerate(self.cost.modules)
            for tp in module.tp_sizes
            for cp in module.cp_sizes
            if tp * cp <= costs.cluster.devices
        }
        self.states = [self._states(number) for number in range(len(self.cost.modules))]

    def _least_work(self, number: int, tp: int, cp: int) -> float:
        """Return the seconds of all samples of a step on one stage of such a size, in one go."""
        return sum(self._passes(number, (tp, cp, 1), self.cost.batch / self.cost.samples, False).sums)

    def _states(self, number: int) -> tuple[float, float, float]:
        """Return the bytes of a module's parameters, gradients and optimizer states."""
        layers = self.cost.modules[number].layers
        parameters = sum(layer.parameter_bytes for layer in layers)
        trained = [layer for layer in layers if layer.changing]
        gradients = sum(layer.parameter_bytes * layer.changing / layer.parameters for layer in trained)
        return parameters, gradients, self.cost.state_bytes * sum(layer.changing for layer in trained)

    def of_shape(self, shape: Shape) -> float:
        """Return the time of a step if the ranks of each module were always busy."""
        times = []
        for group, _ in shape.spans:
            whole = sum(self.work[shape.names[n], *shape.sizes[n][:2]] for n in group)
            times.append(whole / (shape.sizes[group[-1]][2] * shape.dp))
        return max(times)

    def fits(self, shape: Shape, kind: DataKind) -> bool:
        """Say whether what lasts could fit, if it were spread evenly over the stages."""
        usable = self.costs.cluster.device.usable
        for group, _ in shape.spans:
            total = 0.0
            for number in group:
                tp, cp, _ = shape.sizes[number]
                parameters, gradients, states = self.states[number]
                copies = shape.dp * cp / (shape.copies if kind == "hsdp" else 1)
                if kind == "zero1":
                    states /= copies
                elif kind != "ddp":
                    parameters, gradients, states = parameters / copies, gradients / copies, states / copies
                total += (parameters + gradients + states) / tp
            if total / shape.sizes[group[-1]][2] > usable:
                return False
        return True

    def of_microbatches(self, shape: Shape, again: tuple[bool, ...], many: int) -> float:
        """Return a bound for a number of microbatches M, and what is computed again.

        A stage s of K cannot be done before one microbatch went through the stages before it, forward and backward, and
        it did its own work w of all: P + M w. Whatever the cut of the work T, the largest of these is at least
        T / (1 - (1 - 1/M)^K). Interleaved and zero-bubble schedules fill gaps, so for them only M T / K is sure.
        """
        samples = self.cost.batch / (shape.dp * many) / self.cost.samples
        found = [self._passes(number, shape.sizes[number], samples, one) for number, one in enumerate(again)]
        totals = [sum(one.sums) for one in found]
        bound = 0.0
        for group, _ in shape.spans:
            stages = shape.sizes[group[-1]][2]
            dearest = max(float(found[number].total.max()) for number in group)
            bound = max(bound, many * max(sum(totals[number] for number in group) / stages, dearest))
        if not set(self.space.schedules) <= {"1f1b", "gpipe", "naive"} and not self._plain(shape, many):
            return bound
        last = shape.spans[-1][0]
        whole = sum(totals[number] for number in last)
        stages = shape.sizes[-1][2]
        ahead = max((totals[number] for number in range(len(totals) - 1) if number not in last), default=0.0)
        return max(bound, ahead + whole / (1 - (1 - 1 / many) ** stages))

    def _plain(self, shape: Shape, many: int) -> bool:
        """Say whether only plain schedules are possible."""
        stages = shape.sizes[-1][2]
        return "zero_bubble" not in self.space.schedules and (stages == 1 or many % stages != 0)

    def _find(self, number: int, sizes: tuple[int, int, int], samples: float, again: bool) -> Passes:
        """Return a module's passes, if its ranks lay as close together as they can."""
        tp, cp, _ = sizes
        cluster = self.costs.cluster
        links = Links(cluster.link(range(tp)), cluster.link(range(tp * cp)), cluster.inside)
        sequence, vocabulary = self.space.tp_sequence and tp > 1, self.space.tp_vocabulary and tp > 1
        name = self.cost.modules[number].name
        return self.costs.passes(Way(name, tp, cp, samples, links, again, sequence, vocabulary))
