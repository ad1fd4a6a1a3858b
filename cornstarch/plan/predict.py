"""What a step of a plan takes and holds on a cluster: a prediction, from the costs of layers; no torch.

    found = predict(Choice.of(plan, dp=2, microbatches=8), cost, Cluster.parse("2x8xH100"))
    found.step, found.tokens_per_second, found.mfu, found.fits

The pipeline is simulated with the same lists of actions that the runtime carries out. Between two places something
takes as long as the link between them needs for it. After a place's last backward
pass come, in turn: what is left of summing gradients over the replicas, which goes on during the last backward pass,
layer by layer (`StepEnd.exposed`); the optimizer; with zero1, gathering the new parameters. Gradients of earlier
microbatches are added up locally and not sent; but sharded kinds (zero2, zero3) without a pipeline sum those of every
microbatch, so as not to hold them whole. A step ends when the last place is done; where samples differ in size, that
of the replica with the largest (`RunCost.straggler`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cornstarch.errors import ConfigError
from cornstarch.plan.assembly import Assembly, Costs
from cornstarch.plan.choice import Choice
from cornstarch.plan.cost import RunCost
from cornstarch.plan.memory import Memory
from cornstarch.plan.simulate import Level, Timeline, simulate
from cornstarch.plan.stages import stage_graph
from cornstarch.schedule.kinds import Kind
from cornstarch.schedule.policies import make_schedule

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster


@dataclass(frozen=True)
class PlaceMemory:
    """The bytes of each rank of one place at the fullest moment of a step."""

    place: int
    holds: str
    """Its stages, in words."""
    states: Memory
    """What lasts: parameters, gradients, the optimizer's states."""
    activations: int
    peak: int


@dataclass(frozen=True)
class Shares:
    """Where the time of the busiest place goes, in seconds of a step."""

    compute: float
    recompute: float
    """Computing activations again."""
    tensor: float
    """Sums over tensor-parallel ranks."""
    context: float
    """Keys and values between context-parallel ranks."""
    gather: float
    """Waiting for sharded parameters."""
    data: float
    """Summing gradients, as far as the backward pass does not hide it."""
    optimizer: float
    wait: float
    """For other stages."""
    uneven: float = 0.0
    """For the replica whose samples are the largest."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """A step of a choice."""

    choice: Choice
    step: float
    """Seconds."""
    samples_per_second: float
    tokens_per_second: float
    mfu: float | None
    """The operations that the model needs, of those that all devices of the cluster could do; None: not known."""
    memory: tuple[PlaceMemory, ...]
    """By place of the pipeline; all its ranks have the same."""
    limit: int
    """The usable bytes of a device."""
    shares: Shares
    starts: Mapping[str, tuple[int, ...]]
    """By module, the first layer of each part."""
    layers: Mapping[str, int]
    """By module, how many there are."""
    timeline: Timeline
    """A step of one replica."""
    kept: tuple[float, ...]
    """By stage of the timeline, the bytes of a microbatch that wait for its backward pass."""
    working: tuple[float, ...]
    """By stage of the timeline, the bytes that are there while it computes, beside."""

    @property
    def peak(self) -> int:
        """The bytes of the fullest rank."""
        return max(place.peak for place in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return self.peak <= self.limit

    @cached_property
    def memory_over_time(self) -> tuple[tuple[Level, ...], ...]:
        """By place, what each of its ranks holds, from each moment on at which that changes.

        Gradients are there from the end of the first backward pass, or all the time, if DDP's buckets hold them. The
        fullest moment is at most `peak`, which does not look at when the stages of a place are fullest.
        """
        found = []
        for memory, levels in zip(self.memory, self.timeline.levels(self.kept, self.working), strict=True):
            own = self.timeline.events[memory.place]
            first = next((event.end for event in own if event.kind is not Kind.F), self.step)
            states = memory.states
            before = states.peak() - (0 if states.gradients_stay else states.gradients)
            found.append(
                tuple(Level(time, (before if time < first else states.peak()) + held) for time, held in levels)
            )
        return tuple(found)

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """What is wrong, or slow, in plain words: memory that is missing, and where more than 5 % of the step goes."""
        said = []
        if not self.fits:
            full = max(self.memory, key=lambda place: place.peak)
            said.append(
                f"does not fit: {full.holds} needs {full.peak / 2**30:.1f} GiB, {self.limit / 2**30:.1f} are usable"
            )
        words = {
            "tensor": "sums over tensor-parallel ranks take",
            "context": "exchanging keys and values takes",
            "gather": "waiting for sharded parameters takes",
            "data": "summing gradients over replicas, beyond what backward hides, takes",
            "recompute": "computing activations again takes",
            "wait": "waiting for other stages takes",
            "optimizer": "the optimizer takes",
            "uneven": "waiting for the replica with the largest samples takes",
        }
        shares = sorted(((getattr(self.shares, name) / self.step, name) for name in words), reverse=True)
        return (*said, *(f"{words[name]} {share:.0%} of the step" for share, name in shares if share >= 0.05))


def predict(choice: Choice, cost: RunCost | Costs, cluster: Cluster) -> Prediction:
    """Return what a step of a choice takes, and what its ranks hold, whether that fits or not.

    Raises ConfigError if it cannot be run at all: batches that do not divide, more ranks than devices.

    Args:
        choice: The plan, its replicas and its microbatches.
        cost: Of the run; `Costs` where many are predicted, so that nothing is worked out twice.
        cluster: The machines.
    """
    costs = cost if isinstance(cost, Costs) else Costs(cost, cluster)
    assembly = Assembly(choice, costs)
    timeline = _timeline(assembly)
    shares = _shares(assembly, timeline.step)
    late = (costs.cost.straggling(choice.dp) - 1) * (timeline.step - shares.data - shares.optimizer)
    shares, step = replace(shares, uneven=late), timeline.step + late
    samples = costs.cost.batch / step if step else float("inf")
    kept, working = _held(assembly, timeline)
    return Prediction(
        choice=choice,
        step=step,
        samples_per_second=samples,
        tokens_per_second=samples * costs.cost.tokens,
        mfu=_mfu(costs, samples),
        memory=_memory(assembly, timeline),
        limit=costs.cluster.device.usable,
        shares=shares,
        starts=assembly.starts,
        layers={name: len(one.layers) for name, one in assembly.passes.items()},
        timeline=timeline,
        kept=kept,
        working=working,
    )


def _timeline(assembly: Assembly) -> Timeline:
    """Simulate the pipeline."""
    choice = assembly.choice
    trains = {name: [part.trains for part in parts] for name, parts in assembly.parts.items()}
    times = {
        name: [(part.forward, part.inputs, part.weights) for part in parts] for name, parts in assembly.parts.items()
    }
    graph = stage_graph(choice.plan, trains, times)
    nodes = graph.nodes
    transfers = {edge: assembly.transfers[nodes[edge[0]].module, nodes[edge[0]].index] for edge in graph.edges}
    return simulate(make_schedule(graph, choice.microbatches, choice.schedule), transfers, assembly.ends)


def _held(assembly: Assembly, timeline: Timeline) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the bytes that each stage of a timeline keeps of a microbatch, and works with."""
    inside = [assembly.parts[name][0] for name in assembly.encoders] if assembly.choice.inside else []
    stages = []
    for node in timeline.schedule.graph.nodes:
        own = assembly.parts[node.module][node.index]
        stages.append([own, *(inside if node.index == 0 else [])])
    return tuple(sum(p.kept for p in parts) for parts in stages), tuple(
        max(p.working for p in parts) for parts in stages
    )


def _memory(assembly: Assembly, timeline: Timeline) -> tuple[PlaceMemory, ...]:
    nodes = timeline.schedule.graph.nodes
    held = {(node.module, node.index): many for node, many in zip(nodes, timeline.in_flight, strict=True)}
    if assembly.choice.inside:
        held |= {(name, 0): held[assembly.last, 0] for name in assembly.encoders}
    found = []
    for place, parts in enumerate(assembly.places):
        states, activations = assembly.memory(place), assembly.activations(place, held)
        words = " + ".join(f"{part.module} {part.index}" for part in parts)
        found.append(PlaceMemory(place, words, states, activations, assembly.peak(place, held)))
    return tuple(found)


def _shares(assembly: Assembly, step: float) -> Shares:
    """Return where the time of the busiest place goes."""
    many = assembly.choice.microbatches
    work = [many * sum(part.total for part in parts) for parts in assembly.places]
    busy = [one + tail for one, tail in zip(work, assembly.tails, strict=True)]
    place = max(range(len(busy)), key=busy.__getitem__)
    sums = dict.fromkeys(("tensor", "context", "gather", "again", "total"), 0.0)
    for part in assembly.places[place]:
        for name in sums:
            sums[name] += many * float(getattr(assembly.passes[part.module], name)[part.first : part.last].sum())
    optimizer = assembly.ends[place].optimizer
    return Shares(
        compute=sums["total"] - sums["tensor"] - sums["context"] - sums["gather"] - sums["again"],
        recompute=sums["again"],
        tensor=sums["tensor"],
        context=sums["context"],
        gather=sums["gather"],
        data=assembly.tails[place] - optimizer,
        optimizer=optimizer,
        wait=max(0.0, step - busy[place]),
    )


def _mfu(costs: Costs, samples_per_second: float) -> float | None:
    if not costs.cost.flops:
        return None
    try:
        peak = costs.cluster.device.flops_of(costs.cost.precision)
    except ConfigError:  # not known
        return None
    return samples_per_second * costs.cost.flops / (peak * costs.cluster.devices)
