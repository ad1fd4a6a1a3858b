"""A choice taken apart into the parts of its pipeline: what each costs, holds and hands on; and a bound of its step.

Everything here follows from sums. How long a step really takes, where parts wait for one another, only a simulation
tells (`cornstarch.plan.predict`); but no simulation ends before `Assembly.least`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cornstarch.errors import ConfigError
from cornstarch.plan.choice import Choice, Crossing, crossing
from cornstarch.plan.communication import send
from cornstarch.plan.cost import RunCost
from cornstarch.plan.holding import GATHERED, held, step_end, together
from cornstarch.plan.memory import Memory
from cornstarch.plan.passes import Numbers, Passes, PassTable, Way
from cornstarch.plan.plan import DataKind, ModulePlan
from cornstarch.plan.simulate import StepEnd

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster


@dataclass(frozen=True)
class Part:
    """Some consecutive layers of a module, on one place."""

    module: str
    index: int
    place: int
    first: int
    last: int
    """One behind its last layer."""
    trains: bool
    wants: bool
    """Whether it has a backward pass at all."""
    behind: int
    """Parts behind it on the longest way to the end."""
    forward: float
    inputs: float
    weights: float
    kept: float
    """Bytes of a microbatch that wait for its backward pass."""
    working: float
    """Bytes that are there while it computes, beside."""

    @property
    def backward(self) -> float:
        """The time of its whole backward pass."""
        return self.inputs + self.weights

    @property
    def total(self) -> float:
        """The time of a microbatch."""
        return self.forward + self.inputs + self.weights


class Costs:
    """A run's costs on a cluster's device, with what has been worked out from them."""

    def __init__(self, cost: RunCost, cluster: Cluster) -> None:
        self.cost, self.cluster = cost, cluster
        self.passes = PassTable(cost, cluster.device).find
        self._memory: dict[tuple[object, ...], Memory] = {}
        self._ends: dict[tuple[object, ...], StepEnd] = {}

    def way(self, choice: Choice, name: str, plan: ModulePlan, found: Crossing) -> Way:
        """Return how the layers of a module are computed."""
        samples = self.cost.batch / (choice.dp * choice.microbatches) / self.cost.samples
        shards = copies(choice, name, plan) // choice.copies(self.cluster.per_node)
        gathered = shards if choice.kind in GATHERED else 1
        return Way.of(name, plan, samples, found.links[name], gathered, choice.kind != "zero2")

    def held(self, way: Way, first: int, last: int, kind: DataKind, ranks: int, whole: bool, copies: int) -> Memory:
        """Return what some layers of a module hold, which does not depend on microbatches; worked out once."""
        key = (way.module, way.tp, way.vocabulary, first, last, kind, ranks, whole, copies)
        if key not in self._memory:
            layers = self.passes(way).layers[first:last]
            self._memory[key] = held(layers, kind, ranks, self.cost.state_bytes, whole, copies)
        return self._memory[key]

    def step_end(self, way: Way, first: int, last: int, kind: DataKind, ranks: int, copies: int) -> StepEnd:
        """Return what some layers of a module add to a step, which does not depend on microbatches either."""
        links = way.links
        over = (links.data, links.copies, links.beside)
        key = (way.module, way.tp, way.vocabulary, over, first, last, kind, ranks, copies)
        if key not in self._ends:
            layers, device = self.passes(way).layers[first:last], self.cluster.device
            self._ends[key] = step_end(layers, kind, ranks, self.cost.state_bytes, links, device, copies)
        return self._ends[key]


def copies(choice: Choice, name: str, plan: ModulePlan) -> int:
    """Return how many ranks hold the same layers: dp × cp, and more where a module is cut less than its ranks are."""
    span = next(span for span in choice.spans if name in span.modules)
    return choice.dp * span.cp * (span.tp // plan.tp)


def check(choice: Choice, cost: RunCost, cluster: Cluster) -> None:
    """Raise ConfigError if a choice is none for this run."""
    names = [name for name, _ in choice.modules]
    expected = [module.name for module in cost.modules]
    if names != expected:
        raise ConfigError(f"The plan has the modules {', '.join(names)}; the costs are of {', '.join(expected)}.")
    portions = choice.dp * choice.microbatches
    if choice.dp < 1 or choice.microbatches < 1 or cost.batch % portions:
        raise ConfigError(
            f"A batch of {cost.batch:,} samples is not {choice.dp:,} replicas × {choice.microbatches:,} microbatches "
            "of the same size. Use numbers whose product divides it."
        )
    for name, plan in choice.modules:
        if plan.stages * plan.virtual_stages > len(cost.module(name).layers):
            raise ConfigError(
                f"{name} has {len(cost.module(name).layers)} layers, which cannot be cut into "
                f"{plan.stages * plan.virtual_stages} parts."
            )
    if choice.world > cluster.devices:
        raise ConfigError(f"The plan takes {choice.world:,} ranks; the cluster has {cluster.devices:,}.")
    many = choice.copies(cluster.per_node)
    if choice.dp % many or (choice.kind == "hsdp" and choice.replicate is None and many == choice.dp > 1):
        raise ConfigError(
            f"hsdp: {choice.dp:,} replicas of {choice.replica:,} ranks, on nodes of {cluster.per_node}, are not "
            f"{many:,} copies, each of several. Say how many copies there are, in a number that divides {choice.dp:,}: "
            "data.replicate."
        )


class Assembly:
    """The parts of a choice."""

    def __init__(self, choice: Choice, costs: Costs) -> None:
        check(choice, costs.cost, costs.cluster)
        self.choice, self.costs = choice, costs
        self.model_copies = choice.copies(costs.cluster.per_node)
        self.crossing = crossing(choice.spans, choice.dp, costs.cluster, self.model_copies)
        self.ways = {name: costs.way(choice, name, plan, self.crossing) for name, plan in choice.modules}
        self.passes: dict[str, Passes] = {name: costs.passes(way) for name, way in self.ways.items()}
        self.plans = dict(choice.modules)
        self.copies = {name: copies(choice, name, plan) for name, plan in choice.modules}
        *self.encoders, self.last = self.plans
        self.starts = self._starts()
        self.parts = {name: self._parts(name) for name in self.plans}

    def _starts(self) -> dict[str, tuple[int, ...]]:
        """Return where modules are cut."""
        given = dict(self.choice.starts)
        inside = sum(float(self.passes[name].total.sum()) for name in self.encoders) if self.choice.inside else 0.0
        return {
            name: given[name]
            if name in given
            else self.passes[name].cut(plan.stages, plan.virtual_stages, inside if name == self.last else 0.0)
            for name, plan in self.plans.items()
        }

    def _parts(self, name: str) -> list[Part]:
        found = self.passes[name]
        plan, starts = self.plans[name], self.starts[name]
        ends = (*starts[1:], len(found.layers))
        upstream = self.costs.cost.trained_before(name)
        behind = 0 if name == self.last or self.choice.inside else len(self.starts[self.last])
        parts = []
        for index, (first, last) in enumerate(zip(starts, ends, strict=True)):
            trains = any(layer.trained for layer in found.layers[first:last])
            upstream = upstream or trains
            rest = len(starts) - 1 - index + behind
            if self.choice.inside and name != self.last:
                rest = len(self.starts[self.last]) - 1
            forward, inputs, weights = (
                float(column[first:last].sum()) for column in (found.forward, found.inputs, found.weights)
            )
            place = self._first_place(name) + index % plan.stages
            kept, working = float(found.kept[first:last].sum()), float(found.working[first:last].max())
            costs = (forward, inputs, weights, kept, working)
            parts.append(Part(name, index, place, first, last, trains, upstream, rest, *costs))
        return parts

    def _first_place(self, name: str) -> int:
        start = 0
        for span in self.choice.spans:
            if name in span.modules:
                return start
            start += span.stages
        raise AssertionError(name)

    # ---------------------------------------------------------------------------------------- places

    @cached_property
    def places(self) -> tuple[tuple[Part, ...], ...]:
        """The parts of each place."""
        found: list[list[Part]] = [[] for _ in range(sum(span.stages for span in self.choice.spans))]
        for parts in self.parts.values():
            for part in parts:
                found[part.place].append(part)
        return tuple(map(tuple, found))

    @cached_property
    def transfers(self) -> dict[tuple[str, int], float]:
        """By part, the time until the part behind it has what it hands on; as long as that of the gradient back."""
        found = {}
        for name, parts in self.parts.items():
            layers, links, stages = self.passes[name].layers, self.crossing.stages[name], self.plans[name].stages
            for part in parts[:-1]:
                size = layers[part.last - 1].output_bytes
                found[name, part.index] = send(size, links[part.index % stages]) if stages > 1 else 0.0
            meets = name != self.last and not self.choice.inside
            found[name, parts[-1].index] = send(layers[-1].output_bytes, self.crossing.meeting[name]) if meets else 0.0
        return found

    @cached_property
    def ends(self) -> tuple[StepEnd, ...]:
        """What each place adds to a step besides passes: sums that are not hidden, the optimizer, gathering.

        Without a pipeline, sharded kinds sum the gradients of every microbatch.
        """
        sharded = self.choice.kind not in ("ddp", "zero1") and not self.choice.is_pipeline
        found = []
        for parts in self.places:
            total = StepEnd()
            for part in parts:
                ranks, way = self.copies[part.module], self.ways[part.module]
                kind, many = self.choice.kind, self.model_copies
                total += self.costs.step_end(way, part.first, part.last, kind, ranks, many)
            found.append(replace(total, earlier=self.choice.microbatches - 1 if sharded else 0))
        return tuple(found)

    @cached_property
    def tails(self) -> tuple[float, ...]:
        """By place, what follows its last backward pass."""
        pairs = zip(self.ends, self.places, strict=True)
        return tuple(end.tail(sum(part.backward for part in parts)) for end, parts in pairs)

    # ---------------------------------------------------------------------------------------- memory

    def memory(self, place: int) -> Memory:
        """Return what lasts on the ranks of a place."""
        whole = self.choice.is_pipeline and self.choice.microbatches > 1
        return together(
            self.costs.held(
                self.ways[part.module],
                part.first,
                part.last,
                self.choice.kind,
                self.copies[part.module],
                whole,
                self.model_copies,
            )
            for part in self.places[place]
        )

    def in_flight(self, part: Part) -> int:
        """Return how many microbatches a part holds at once: exactly with naive, gpipe and 1f1b, else at least."""
        if not part.wants:
            return 0
        ahead = {"naive": 1, "gpipe": self.choice.microbatches, "1f1b": part.behind + 1}
        return min(self.choice.microbatches, ahead.get(self.choice.schedule, 1))

    def activations(self, place: int, in_flight: dict[tuple[str, int], int] | None = None) -> int:
        """Return the most bytes of activations at a place; `in_flight`: by module and index."""
        kept = working = 0.0
        for part in self.places[place]:
            many = self.in_flight(part) if in_flight is None else in_flight[part.module, part.index]
            kept += many * part.kept
            working = max(working, part.working)
        return round(kept + working)

    def passing(self, place: int) -> int:
        """Return the most bytes of activations and gradients together, while the only microbatch of a step passes.

        Backward, layer by layer, activations go and gradients come. Where layers keep little, because they are computed
        again, more comes than goes: then the first layers have least room.
        """
        parts = self.places[place]

        def of_all(name: str) -> Numbers:
            return np.concatenate([getattr(self.passes[part.module], name)[part.first : part.last] for part in parts])

        own = of_all("gradients")
        share = self.memory(place).gradients / own.sum() if own.any() else 0.0  # sharded kinds keep a part
        made = share * (own + of_all("shared"))
        behind = made[::-1].cumsum()[::-1] - made
        has_backward = of_all("inputs") + of_all("weights") > 0
        return round(float((of_all("kept").cumsum() + of_all("working") + behind * has_backward).max()))

    def peak(self, place: int, in_flight: dict[tuple[str, int], int] | None = None) -> int:
        """Return the most bytes that a rank of a place has; `in_flight`: as in `activations`."""
        states, activations = self.memory(place), self.activations(place, in_flight)
        accumulated = self.choice.microbatches > 1
        if not accumulated and not states.gradients_stay:
            activations = max(activations, self.passing(place))
        return states.peak(activations, accumulated)

    @cached_property
    def least_peak(self) -> int:
        """The most bytes that any rank has, at least; exactly with naive, gpipe and 1f1b."""
        return max(map(self.peak, range(len(self.places))))

    # ---------------------------------------------------------------------------------------- bound

    @cached_property
    def least(self) -> float:
        """A time that no step of this choice undercuts.

        Before a place begins, a microbatch has come to it; then it does its work for all; then the last microbatch goes
        on to the end, or the place sums its gradients. With zero_bubble, gradients of weights may be made up for at the
        end, so only the others are counted before the last microbatch leaves.
        """
        heads, after = self._ways_through()
        many, split = self.choice.microbatches, self.choice.schedule == "zero_bubble"
        bounds = []
        for place, parts in enumerate(self.places):
            head = min(heads[part.module, part.index] for part in parts)
            tail = min(after[part.module, part.index] for part in parts)
            work = many * sum(part.total for part in parts)
            needed = many * sum(part.forward + part.inputs for part in parts) if split else work
            bounds += [head + needed + tail, head + work + self.tails[place]]
        return max(bounds)

    def _ways_through(self) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
        """Return, by part, how long a microbatch takes at least to come to it, and from its end to the step's."""
        split, lag = self.choice.schedule == "zero_bubble", self.transfers
        heads: dict[tuple[str, int], float] = {}
        after: dict[tuple[str, int], float] = {}
        start = back = 0.0  # at the language model's first part
        inside = self.choice.inside
        for name in (*self.encoders, self.last):
            head, tail = (start, back) if name == self.last else (0.0, 0.0)
            for part in self.parts[name]:
                heads[name, part.index], after[name, part.index] = head, tail
                away = lag[name, part.index]
                head += part.forward + away
                tail = away + tail + (part.inputs if split else part.backward) if part.wants else 0.0
            if name != self.last and not inside:
                start, back = max(start, head), max(back, tail)
        if inside:  # part of the first stage
            for name in self.encoders:
                heads[name, 0], after[name, 0] = 0.0, 0.0
        way_back = after[self.last, self.parts[self.last][-1].index] + self.parts[self.last][-1].inputs
        onward = sum(part.forward + lag[self.last, part.index] for part in self.parts[self.last]) + way_back
        for name in self.encoders:
            rest = onward
            for part in reversed(self.parts[name]):
                rest += lag[name, part.index]
                if not part.wants and not inside:
                    after[name, part.index] = rest
                rest += part.forward
        return heads, after
