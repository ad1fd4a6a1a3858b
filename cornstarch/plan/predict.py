"""Predict a step of a plan on a cluster, its time and its memory, from the costs of layers; no torch.

The pipeline is simulated with the same lists of actions that the runtime executes. A transfer between two places takes
as long as their link needs. After the last backward pass of a place follow: the rest of the gradient reduction over the
replicas, which overlaps with that backward pass layer by layer (`StepEnd.get_exposed_seconds`); the optimizer; the
all-gather of the new parameters, with zero1 or where a pipeline keeps shards gathered. Gradients of earlier
microbatches are accumulated locally; but sharded kinds (zero2, zero3) without a pipeline reduce those of every
microbatch, so as not to store them whole. A step ends when the last place is done; where samples differ in size, the
replica with the largest samples counts (`RunCost.straggler`), and of all devices the slowest (`Device.spread`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cornstarch.errors import ConfigError
from cornstarch.plan.candidates import Candidate
from cornstarch.plan.cost import RunCost
from cornstarch.plan.memory import Memory
from cornstarch.plan.pipeline_cost import CostModel, PipelineCost
from cornstarch.plan.prediction_error import estimate_error
from cornstarch.plan.rank_order import find_links
from cornstarch.plan.simulate import Timeline
from cornstarch.plan.stage_graph import stage_graph
from cornstarch.plan.steady_state import PipelineRun

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster


@dataclass(frozen=True)
class PlaceMemory:
    """The peak bytes of each rank of one place in a step."""

    place: int
    holds: str
    """Its stages, in words."""
    states: Memory
    """Parameters, gradients, optimizer states."""
    activations: int
    peak: int


@dataclass(frozen=True)
class TimeBreakdown:
    """Where the time of the busiest place goes, in seconds of a step."""

    compute: float
    recompute: float
    """Activation checkpointing."""
    tensor: float
    """All-reduces over tensor-parallel ranks."""
    context: float
    """Keys and values between context-parallel ranks."""
    gather: float
    """Waiting for sharded parameters."""
    data: float
    """Gradient reduction, as far as the backward pass does not hide it."""
    optimizer: float
    wait: float
    """For other stages."""
    uneven: float = 0.0
    """For the replica with the largest samples."""
    slowest: float = 0.0
    """For the slowest device: equal devices differ (`Device.spread`)."""
    exchange: float = 0.0
    """Tokens between the ranks that share experts out."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """A predicted step of a candidate."""

    candidate: Candidate
    step: float
    """Seconds."""
    samples_per_second: float
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilization, over all devices of the cluster; None: unknown."""
    memory: tuple[PlaceMemory, ...]
    """By place of the pipeline; all ranks of a place have the same."""
    limit: int
    """The usable bytes of a device."""
    breakdown: TimeBreakdown
    starts: Mapping[str, tuple[int, ...]]
    """By module, the first layer of each part."""
    layers: Mapping[str, int]
    """By module, the number of its layers."""
    run: PipelineRun
    """A step of one replica, as it is simulated."""
    error: float | None = None
    """The error bar of the step, as a fraction of it; None: the cluster was not calibrated."""

    @property
    def timeline(self) -> Timeline:
        """When every action of this step starts and ends."""
        return self.run.timeline

    @property
    def peak(self) -> int:
        return max(place.peak for place in self.memory)

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """What is wrong or slow: missing memory, and everything that takes more than 5 % of the step."""
        reasons = []
        if not self.fits:
            full = max(self.memory, key=lambda place: place.peak)
            reasons.append(
                f"does not fit: {full.holds} needs {full.peak / 2**30:.1f} GiB, {self.limit / 2**30:.1f} are usable"
            )
        words = {
            "tensor": "sums over tensor-parallel ranks take",
            "context": "exchanging keys and values takes",
            "exchange": "sending tokens to experts and back takes",
            "gather": "waiting for sharded parameters takes",
            "data": "summing gradients over replicas, beyond what backward hides, takes",
            "recompute": "computing activations again takes",
            "wait": "waiting for other stages takes",
            "optimizer": "the optimizer takes",
            "uneven": "waiting for the replica with the largest samples takes",
            "slowest": "waiting for the slowest device takes",
        }
        parts = sorted(((getattr(self.breakdown, name) / self.step, name) for name in words), reverse=True)
        return (*reasons, *(f"{words[name]} {part:.0%} of the step" for part, name in parts if part >= 0.05))


def predict(candidate: Candidate, cost: RunCost | CostModel, cluster: Cluster) -> Prediction:
    """Return the time and memory of a step of a candidate, whether it fits or not.

    Raises ConfigError if it cannot be run at all: batches that do not divide, more ranks than devices. A `CostModel`
    avoids recomputation where many candidates are predicted.
    """
    costs = cost if isinstance(cost, CostModel) else CostModel(cost, cluster)
    return predict_pipeline(PipelineCost(candidate, costs))


def predict_pipeline(pipeline: PipelineCost) -> Prediction:
    """Return the time and memory of a step of a candidate whose costs are known, as `predict` does."""
    candidate, costs = pipeline.candidate, pipeline.costs
    trains = {name: [stage.trains for stage in stages] for name, stages in pipeline.stages.items()}
    times = {name: [(s.forward, s.inputs, s.weights) for s in stages] for name, stages in pipeline.stages.items()}
    graph = stage_graph(candidate.plan, trains, times)
    senders = {edge: graph.nodes[edge[0]] for edge in graph.edges}
    transfers = {edge: pipeline.transfers[node.module, node.index] for edge, node in senders.items()}
    run = PipelineRun(graph, candidate.microbatches, candidate.schedule, transfers, pipeline.ends)
    breakdown = _break_down(pipeline, run.step)
    late = (costs.cost.straggler_factor(candidate.dp) - 1) * (run.step - breakdown.data - breakdown.optimizer)
    slow = (costs.cluster.device.find_slowest(candidate.world) - 1) * (run.step + late)
    breakdown, step = replace(breakdown, uneven=late, slowest=slow), run.step + late + slow
    samples = costs.cost.batch / step if step else float("inf")
    try:
        peak = costs.cluster.device.flops_of(costs.cost.precision)
    except ConfigError:  # unknown
        peak = None
    return Prediction(
        candidate=candidate,
        step=step,
        samples_per_second=samples,
        tokens_per_second=samples * costs.cost.tokens,
        mfu=samples * costs.cost.flops / (peak * costs.cluster.devices) if peak and costs.cost.flops else None,
        memory=_list_memory(pipeline, run),
        limit=costs.cluster.device.usable,
        breakdown=breakdown,
        starts=pipeline.starts,
        layers={name: len(one.layers) for name, one in pipeline.rank_costs.items()},
        run=run,
        error=estimate_error(breakdown, costs.cluster, costs.cost.is_measured),
    )


def _list_memory(pipeline: PipelineCost, run: PipelineRun) -> tuple[PlaceMemory, ...]:
    nodes = run.graph.nodes
    in_flight = {(node.module, node.index): many for node, many in zip(nodes, run.in_flight, strict=True)}
    if pipeline.candidate.has_encoders_inside:
        in_flight |= {(name, 0): in_flight[pipeline.last, 0] for name in pipeline.encoders}
    found = []
    for place, stages in enumerate(pipeline.places):
        states, activations = pipeline.memory(place), pipeline.activations(place, in_flight)
        if len(stages) > 1 and not pipeline.candidate.has_encoders_inside:
            activations = min(activations, _find_fullest_moment(pipeline, run, place))
        words = " + ".join(f"{stage.module} {stage.index}" for stage in stages)
        found.append(PlaceMemory(place, words, states, activations, pipeline.peak(place, in_flight, activations)))
    return tuple(found)


def _find_fullest_moment(pipeline: PipelineCost, run: PipelineRun, place: int) -> int:
    """Return the most bytes of activations at once on a place with several stages, which are not full together."""
    nodes, size, most = run.graph.nodes, 0.0, 0.0
    for number, is_forward in run.list_passes(place):
        stage = pipeline.stages[nodes[number].module][nodes[number].index]  # `kept` is 0 where nothing goes back
        size += stage.kept if is_forward else 0.0
        most = max(most, size + stage.working)
        size -= 0.0 if is_forward else stage.kept
    return round(most)


def _break_down(pipeline: PipelineCost, step: float) -> TimeBreakdown:
    many = pipeline.candidate.microbatches
    work = [many * sum(stage.total for stage in stages) for stages in pipeline.places]
    busy = [one + tail for one, tail in zip(work, pipeline.tails, strict=True)]
    place = max(range(len(busy)), key=busy.__getitem__)
    sums = dict.fromkeys(("total", "again", "tensor", "context", "gather", "exchange"), 0.0)
    for stage in pipeline.places[place]:
        for name in sums:
            column = getattr(pipeline.rank_costs[stage.module], name)
            sums[name] += many * float(column[stage.first : stage.last].sum())
    total, again, tensor, context, gather, exchange = sums.values()
    compute, optimizer = total - tensor - context - gather - again - exchange, pipeline.ends[place].optimizer
    data, wait = pipeline.tails[place] - optimizer, max(0.0, step - busy[place])
    return TimeBreakdown(compute, again, tensor, context, gather, data, optimizer, wait, exchange=exchange)


def explain_slower(one: Prediction, best: Prediction, cluster: Cluster) -> str:
    """Return why a plan is slower than the best: the part of the step that takes most more time than there."""
    slower, candidate = one.step / best.step - 1, one.candidate
    if slower < 0.0005:
        return f"as fast as the best ({candidate.describe()})"
    here, there = vars(one.breakdown), vars(best.breakdown)
    name = max(here, key=lambda name: here[name] - there[name])
    part = here[name] / one.step
    last_name, last = candidate.modules[-1]
    link = find_links(candidate.spans, candidate.dp, cluster).groups[last_name].tp
    where = " crosses nodes" if last.tp > 1 and cluster.nodes > 1 and link != cluster.inside else ""
    stages = " + ".join(str(span.stages) for span in candidate.spans)
    used, most = candidate.world, best.candidate.world
    load = f"it uses {used} ranks, where the best uses {most}" if used < most else "the work is less even"
    texts = {
        "tensor": f"tp = {last.tp} of {last_name}{where}: its all-reduce takes {part:.0%} of the step",
        "context": f"cp = {last.cp} of {last_name}: exchanging keys and values takes {part:.0%} of the step",
        "exchange": f"ep = {last.ep} of {last_name}: sending tokens to experts takes {part:.0%} of the step",
        "gather": f"{candidate.kind}: waiting for sharded parameters takes {part:.0%} of the step",
        "data": f"dp = {candidate.dp}: summing gradients beyond what backward hides takes {part:.0%} of the step",
        "recompute": f"activation checkpointing: computing again takes {part:.0%} of the step",
        "optimizer": f"{candidate.kind}: the optimizer takes {part:.0%} of the step",
        "uneven": f"dp = {candidate.dp}: the replica with the largest samples is waited for, {part:.0%} of the step",
        "slowest": f"the slowest of {candidate.world:,} ranks is waited for, {part:.0%} of the step",
        "wait": f"waiting for other stages takes {part:.0%} of the step: {stages} stages, "
        f"{candidate.microbatches} microbatches",
        "compute": f"its busiest ranks compute for {part:.0%} of the step: {load}",
    }
    return f"+{slower:.1%}: {texts[name]} (best: {there[name] / best.step:.0%})"
