"""The cost of a candidate's pipeline, stage by stage: times, memory, transfers, a lower bound of its step; no torch.

Everything here is a sum. Only a simulation (`cornstarch.plan.predict`) knows where stages wait for one another, but no
simulated step is shorter than `PipelineCost.least`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cornstarch.errors import ConfigError
from cornstarch.plan.candidates import Candidate
from cornstarch.plan.communication import all_gather, all_reduce, reduce_scatter, send
from cornstarch.plan.cost import (
    COPIES_REACH,
    LayerCost,
    ModuleCost,
    ModuleSharding,
    Numbers,
    RankCost,
    RunCost,
    compute_rank_cost,
    count_gathered_bytes,
)
from cornstarch.plan.data_options import keeps_gathered
from cornstarch.plan.memory import GATHERED, Memory, combine_memory, stage_memory
from cornstarch.plan.plan import DataKind, explain_uncompiled
from cornstarch.plan.rank_order import GroupLinks, find_links
from cornstarch.plan.simulate import StepEnd
from cornstarch.plan.steady_state import count_chunks_after_warmup
from cornstarch.plan.step_bounds import find_least_passes, find_least_step

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster, Device


@dataclass(frozen=True)
class StageCost:
    """The cost of one stage: consecutive layers of a module, on one place."""

    module: str
    index: int
    place: int
    first: int
    last: int
    """One past its last layer."""
    trains: bool
    has_backward: bool
    after: int
    """Stages after it on the longest path to the end."""
    forward: float
    inputs: float
    weights: float
    kept: float
    """Bytes of a microbatch saved for its backward pass."""
    working: float
    """Bytes in use while it computes, beside the saved ones."""

    @property
    def backward(self) -> float:
        return self.inputs + self.weights

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


class CostModel:
    """The costs of a run on a cluster. Everything derived from them is cached: a search asks thousands of times."""

    def __init__(self, cost: RunCost, cluster: Cluster) -> None:
        self.cost, self.cluster = cost, cluster
        device = cluster.device
        # Most layers of a module differ in their names alone: the cost of each kind is computed once.
        short, rows = _find_kinds(cost)

        def build_rank_cost(sharding: ModuleSharding) -> RankCost:
            one, index = compute_rank_cost(short, sharding, device), rows[sharding.module]
            columns = {name: value[index] for name, value in vars(one).items() if name != "layers"}
            return RankCost(tuple([one.layers[row] for row in index]), **columns)

        self.rank_cost = lru_cache(maxsize=None)(build_rank_cost)
        self.trained = {one.name: np.array([layer.trained for layer in one.layers]) for one in cost.modules}
        """By module, which layers are trained."""
        self.passes: dict[tuple[object, ...], float] = {}
        """By sizes and further choices, the bounds of `PipelineCost.least_passes`."""
        self._memory: dict[tuple[object, ...], Memory] = {}
        self._ends: dict[tuple[object, ...], StepEnd] = {}

    # The two below do not depend on microbatches, so their keys leave out everything that changes with them.

    def memory(
        self,
        sharding: ModuleSharding,
        first: int,
        last: int,
        kind: DataKind,
        ranks: int,
        whole: bool,
        copies: int,
        keeps: bool,
    ) -> Memory:
        """Return the memory of some layers of a module."""
        cut = sharding.tp, sharding.ep, sharding.vocabulary
        key = (sharding.module, *cut, first, last, kind, ranks, whole, copies, keeps)
        if key not in self._memory:
            layers = self.rank_cost(sharding).layers[first:last]
            how = whole, copies, keeps, self.cost.gathered_itemsize, sharding.ep
            self._memory[key] = stage_memory(layers, kind, ranks, self.cost.state_bytes, *how)
        return self._memory[key]

    def step_end(
        self, sharding: ModuleSharding, first: int, last: int, kind: DataKind, ranks: int, copies: int, keeps: bool
    ) -> StepEnd:
        """Return the gradient reduction and optimizer of some layers of a module."""
        links = sharding.links
        over = (links.data, links.copies, links.overlaps, links.expert_data)
        cut = sharding.tp, sharding.ep, sharding.vocabulary
        key = (sharding.module, *cut, over, first, last, kind, ranks, copies, keeps)
        if key not in self._ends:
            layers, device = self.rank_cost(sharding).layers[first:last], self.cluster.device
            how = links, device, copies, keeps, self.cost.gathered_itemsize, sharding.ep
            self._ends[key] = compute_step_end(layers, kind, ranks, self.cost.state_bytes, *how)
        return self._ends[key]


def _find_kinds(cost: RunCost) -> tuple[RunCost, dict[str, NDArray[np.int64]]]:
    """Return a run with the first layer of each kind of a module, and by module, which kind each of its layers is.

    A kind is everything but the name, in each way that the module can be computed, and whether anything before the
    layer is trained.
    """
    ways = {name: one for name, one in vars(cost).items() if _are_modules(one)}
    rows: dict[str, NDArray[np.int64]] = {}
    short: dict[str, list[ModuleCost]] = {name: [] for name in ways}
    for number, module in enumerate(cost.modules):
        upstream, known, index, first = cost.has_trained_input(module.name), dict[tuple[object, ...], int](), [], []
        for at, layer in enumerate(module.layers):
            same = [vars(modules[number].layers[at]) for modules in ways.values()]
            key = (upstream, *[value for one in same for name, value in one.items() if name != "name"])
            if key not in known:
                known[key] = len(known)
                first.append(at)
            index.append(known[key])
            upstream = upstream or layer.trained
        rows[module.name] = np.array(index)
        for name, modules in ways.items():
            own = modules[number]
            short[name].append(replace(own, layers=tuple([own.layers[at] for at in first])))
    kept: dict[str, Any] = {name: tuple(modules) for name, modules in short.items()}
    return replace(cost, **kept), rows


def _are_modules(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(one, ModuleCost) for one in value)


def compute_step_end(
    layers: Sequence[LayerCost],
    kind: DataKind,
    ranks: int,
    states: int,
    links: GroupLinks,
    device: Device,
    copies: int = 1,
    keeps: bool = False,
    gathered_itemsize: int | None = None,
    ep: int = 1,
) -> StepEnd:
    """Return the gradient reduction and the optimizer of a stage's layers; `keeps`: and its only gather of a step.

    `ep`: the ranks that experts are shared out over: fewer ranks have the same ones.
    """
    trained = [layer for layer in layers if layer.num_trainable]
    own = [layer.experts for layer in layers if layer.experts is not None] if ep > 1 else []
    experts = _GroupBytes(
        sum(one.gradient_bytes for one in own),
        sum(one.trained_parameters for one in own),
        sum(count_gathered_bytes(one, gathered_itemsize) for one in own) if keeps else 0.0,
    )
    rest = _GroupBytes(
        sum(layer.gradient_bytes for layer in trained) - experts.gradients,
        sum(layer.num_trainable for layer in trained) - experts.numbers,
        (sum(count_gathered_bytes(layer, gathered_itemsize) for layer in layers) if keeps else 0.0) - experts.kept,
    )
    bandwidth = getattr(device, "bandwidth", None)
    touched = reduction = gather = 0.0
    for one, among, link in ((rest, ranks, links.data), (experts, ranks // ep, links.expert_data or links.data)):
        shards = among // copies
        # Gradients are read twice, for their norm and by the optimizer, which reads and writes parameters and states.
        touched += (4 * one.gradients + 2 * states * one.numbers) / (1 if kind == "ddp" else shards)
        if among == 1:
            continue
        summed = one.gradients, among if kind == "ddp" else shards, link
        reduction += (all_reduce if kind == "ddp" else reduce_scatter)(*summed) if one.gradients else 0.0
        if copies > 1 and links.copies is not None:  # hsdp reduces within each copy, then each shard over the copies
            reduction += all_reduce(one.gradients / shards, copies, links.copies) if one.gradients else 0.0
        sent = one.gradients if kind == "zero1" else one.kept
        gather += all_gather(sent, shards, link) if sent else 0.0
    optimizer = touched / (COPIES_REACH * bandwidth) if bandwidth else 0.0
    return StepEnd(reduction, len(trained), optimizer, gather, overlaps=links.overlaps)


class _GroupBytes(NamedTuple):
    """Sizes of parameters that the same ranks have."""

    gradients: float
    numbers: int
    kept: float
    """Bytes that are gathered once in a step."""


def check_candidate(candidate: Candidate, cost: RunCost, cluster: Cluster) -> None:
    """Raise ConfigError if a candidate does not suit a run or a cluster."""
    names = [name for name, _ in candidate.modules]
    expected = [module.name for module in cost.modules]
    if names != expected:
        raise ConfigError(f"The plan has the modules {', '.join(names)}; the costs are of {', '.join(expected)}.")
    if candidate.dp < 1 or candidate.microbatches < 1 or cost.batch % (candidate.dp * candidate.microbatches):
        raise ConfigError(
            f"A batch of {cost.batch:,} samples is not {candidate.dp:,} replicas × {candidate.microbatches:,} "
            "microbatches of the same size. Use numbers whose product divides it."
        )
    for name, plan in candidate.modules:
        layers, parts = len(cost.module(name).layers), plan.stages * plan.virtual_stages
        if parts > layers:
            raise ConfigError(f"{name} has {layers} layers, which cannot be split into {parts} parts.")
        sizes, ranks = cost.module(name).ep_sizes, candidate.dp * plan.cp // candidate.copies(cluster.per_node)
        if plan.ep > 1 and (plan.ep not in sizes or ranks % plan.ep):
            few = [str(size) for size in sizes if ranks % size == 0]
            raise ConfigError(
                f"modules.{name}.ep = {plan.ep}: its experts cannot be shared out so over {ranks:,} ranks. Use "
                f"{' or '.join(few)}."
            )
    if candidate.world > cluster.devices:
        raise ConfigError(f"The plan takes {candidate.world:,} ranks; the cluster has {cluster.devices:,}.")
    many = candidate.copies(cluster.per_node)
    if candidate.dp % many or (candidate.kind == "hsdp" and candidate.replicate is None and many == candidate.dp > 1):
        raise ConfigError(
            f"hsdp: {candidate.dp:,} replicas of {candidate.replica:,} ranks, on nodes of {cluster.per_node}, are not "
            f"{many:,} copies, each of several. Set the number of copies to a divisor of {candidate.dp:,}: "
            "data.replicate."
        )


class PipelineCost:
    """The stages of a candidate."""

    def __init__(self, candidate: Candidate, costs: CostModel) -> None:
        check_candidate(candidate, costs.cost, costs.cluster)
        self.candidate, self.costs = candidate, costs
        self.model_copies = candidate.copies(costs.cluster.per_node)
        self.links = find_links(candidate.spans, candidate.dp, costs.cluster, self.model_copies, candidate.expert_sizes)
        self.plans = dict(candidate.modules)
        is_sharded = candidate.is_pipeline and candidate.kind in GATHERED
        self.keeps = is_sharded and keeps_gathered(candidate.kind, None, is_pipeline=True)
        self.replicas: dict[str, int] = {}
        """By module, the ranks with the same layers: dp × cp, and more where its tp is less than that of its ranks."""
        self.shardings: dict[str, ModuleSharding] = {}
        samples = costs.cost.batch / (candidate.dp * candidate.microbatches) / costs.cost.samples
        for name, plan in self.plans.items():
            span = next(span for span in candidate.spans if name in span.modules)
            self.replicas[name] = candidate.dp * span.cp * (span.tp // plan.tp)
            flags = (plan.activation_checkpointing, plan.tp_sequence, plan.tp_vocabulary)
            # What a pipeline keeps gathered is gathered once, before the first pass of a step (`StepEnd.gather`).
            in_passes = candidate.kind in GATHERED and not self.keeps
            gathered = self.replicas[name] // self.model_copies if in_passes else 1, candidate.kind != "zero2"
            links = self.links.groups[name]
            compiled = explain_uncompiled(candidate.schedule if candidate.is_pipeline else None) is None
            how = *flags, *gathered, compiled, candidate.kind in GATHERED, plan.ep
            self.shardings[name] = ModuleSharding(name, plan.tp, plan.cp, samples, links, *how)
        self.rank_costs: dict[str, RankCost] = {name: costs.rank_cost(one) for name, one in self.shardings.items()}
        *self.encoders, self.last = self.plans
        given, inside = dict(candidate.starts), self.encoders if candidate.has_encoders_inside else []
        before = sum(float(self.rank_costs[name].total.sum()) for name in inside)
        self.starts: dict[str, tuple[int, ...]] = {}
        """By module, the first layer of each stage."""
        for name, plan in self.plans.items():
            cut = (plan.stages, plan.virtual_stages, before if name == self.last else 0.0)
            self.starts[name] = given[name] if name in given else self.rank_costs[name].cut(*cut)
        self.stages = {name: self._build_stages(name) for name in self.plans}

    def _build_stages(self, name: str) -> list[StageCost]:
        rank_cost, plan, starts = self.rank_costs[name], self.plans[name], self.starts[name]
        ends = (*starts[1:], len(rank_cost.layers))
        every = (rank_cost.forward, rank_cost.inputs, rank_cost.weights, rank_cost.kept)
        columns = [np.add.reduceat(column, starts).tolist() for column in every]
        columns.append(np.maximum.reduceat(rank_cost.working, starts).tolist())
        trained = np.logical_or.reduceat(self.costs.trained[name], starts).tolist()
        upstream = self.costs.cost.has_trained_input(name)
        inside = self.candidate.has_encoders_inside
        of_last = 0 if name == self.last or inside else len(self.starts[self.last])
        earlier = takewhile(lambda span: name not in span.modules, self.candidate.spans)
        first_place = sum(span.stages for span in earlier)
        stages = []
        rows = zip(starts, ends, trained, *columns, strict=True)
        for index, (first, last, trains, *costs) in enumerate(rows):
            upstream = upstream or trains
            after = len(starts) - 1 - index + of_last
            if inside and name != self.last:
                after = len(self.starts[self.last]) - 1
            place = first_place + index % plan.stages
            stages.append(StageCost(name, index, place, first, last, trains, upstream, after, *costs))
        return stages

    @cached_property
    def places(self) -> tuple[tuple[StageCost, ...], ...]:
        found: list[list[StageCost]] = [[] for _ in range(sum(span.stages for span in self.candidate.spans))]
        for stages in self.stages.values():
            for stage in stages:
                found[stage.place].append(stage)
        return tuple(map(tuple, found))

    @cached_property
    def transfers(self) -> dict[tuple[str, int], float]:
        """By stage, the seconds of sending its output to the next one; the gradient back takes as long."""
        found = {}
        for name, stages in self.stages.items():
            layers, links, many = self.rank_costs[name].layers, self.links.stages[name], self.plans[name].stages
            for stage in stages[:-1]:
                size = layers[stage.last - 1].output_bytes
                found[name, stage.index] = send(size, links[stage.index % many]) if many > 1 else 0.0
            feeds = name != self.last and not self.candidate.has_encoders_inside
            onward = self.links.to_language_model[name]
            found[name, stages[-1].index] = send(layers[-1].output_bytes, onward) if feeds else 0.0
        return found

    @cached_property
    def ends(self) -> tuple[StepEnd, ...]:
        """By place, gradient reduction, optimizer and gathering."""
        kind, many = self.candidate.kind, self.model_copies
        # Without a pipeline, sharded kinds reduce the gradients of every microbatch.
        every = kind not in ("ddp", "zero1") and not self.candidate.is_pipeline
        found = []
        for stages in self.places:
            total = StepEnd()
            for stage in stages:
                sharding, ranks = self.shardings[stage.module], self.replicas[stage.module]
                total += self.costs.step_end(sharding, stage.first, stage.last, kind, ranks, many, self.keeps)
            earlier = self.candidate.microbatches - 1 if every else 0
            hidden = min(total.reduction, sum(stage.backward for stage in stages)) if total.overlaps else 0.0
            slower = getattr(self.costs.cluster.device, "slowdown", 0.0) * (1 + earlier) * hidden
            found.append(replace(total, earlier=earlier, gather=total.gather + slower))
        return tuple(found)

    @cached_property
    def tails(self) -> tuple[float, ...]:
        """By place, the seconds after its last backward pass."""
        pairs = zip(self.ends, self.places, strict=True)
        return tuple(end.tail(sum(stage.backward for stage in stages)) for end, stages in pairs)

    def memory(self, place: int) -> Memory:
        """Return the memory of parameters, gradients and optimizer on the ranks of a place."""
        kind, whole = self.candidate.kind, self.candidate.is_pipeline and self.candidate.microbatches > 1
        found = []
        for stage in self.places[place]:
            sharding, ranks = self.shardings[stage.module], self.replicas[stage.module]
            how = kind, ranks, whole, self.model_copies, self.keeps
            found.append(self.costs.memory(sharding, stage.first, stage.last, *how))
        return combine_memory(found, self.keeps)

    def in_flight(self, stage: StageCost) -> int:
        """Return the microbatches in flight at a stage: exact for naive, gpipe and 1f1b, else a lower bound."""
        if not stage.has_backward:
            return 0
        last = self.plans[self.last]
        if self.candidate.schedule == "interleaved" and last.virtual_stages > 1 and stage.module == self.last:
            return count_chunks_after_warmup(last.stages, last.virtual_stages, self.candidate.microbatches)[stage.index]
        ahead = {"naive": 1, "gpipe": self.candidate.microbatches, "1f1b": stage.after + 1}
        return min(self.candidate.microbatches, ahead.get(self.candidate.schedule, 1))

    def activations(self, place: int, in_flight: dict[tuple[str, int], int] | None = None) -> int:
        """Return the peak bytes of activations at a place; `in_flight`: by module and index."""
        kept, stages = 0.0, self.places[place]
        for stage in stages:
            many = self.in_flight(stage) if in_flight is None else in_flight[stage.module, stage.index]
            kept += many * stage.kept
        # A lower bound of the memory at one moment has the least of what a stage may need beside.
        is_bound = in_flight is None and self.candidate.schedule == "interleaved"
        return round(kept + (min if is_bound else max)(stage.working for stage in stages))

    def single_pass_peak(self, place: int) -> int:
        """Return the peak of activations and gradients while the only microbatch of a step passes, layer by layer.

        Where recomputation saves little per layer, gradients grow faster than activations shrink.
        """
        stages = self.places[place]

        def concatenate(name: str) -> Numbers:
            return np.concatenate([getattr(self.rank_costs[s.module], name)[s.first : s.last] for s in stages])

        own = concatenate("gradients")
        fraction = self.memory(place).gradients / own.sum() if own.any() else 0.0  # sharded kinds keep a part
        made = fraction * (own + concatenate("shared"))
        after = made[::-1].cumsum()[::-1] - made
        has_backward = concatenate("inputs") + concatenate("weights") > 0
        return round(float((concatenate("kept").cumsum() + concatenate("working") + after * has_backward).max()))

    def peak(
        self, place: int, in_flight: dict[tuple[str, int], int] | None = None, activations: int | None = None
    ) -> int:
        """Return the peak bytes of a rank of a place; `in_flight`: as in `activations`, whose result may be given."""
        states = self.memory(place)
        activations = self.activations(place, in_flight) if activations is None else activations
        accumulated = self.candidate.microbatches > 1
        if not accumulated and not states.gradients_stay:
            activations = max(activations, self.single_pass_peak(place))
        return states.peak(activations, accumulated)

    @cached_property
    def least_peak(self) -> int:
        """A lower bound of the fullest rank's peak; exact for naive, gpipe and 1f1b."""
        return max(map(self.peak, range(len(self.places))))

    @cached_property
    def least_passes(self) -> float:
        """A lower bound of the time of all passes."""
        return find_least_passes(self)

    @cached_property
    def least(self) -> float:
        """A lower bound of the time of a step."""
        return find_least_step(self)
