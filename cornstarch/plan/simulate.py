"""What a schedule takes: when each action begins and ends, how long places wait, what they hold when; no torch.

timeline = simulate(make_schedule(StageGraph.chain(4), microbatches=8))
timeline.step, timeline.bubble       # 33.0, 0.2727...
timeline.levels(kept=[2**20] * 4)    # by place: when its activations change, and to how many bytes
print(as_text(timeline))

The runtime carries out the same schedule; what is simulated is what is run, but for the costs, which are given. What
comes beside the passes, summing gradients over replicas and the optimizer, is told by place (`StepEnd`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cornstarch.schedule.actions import Schedule
from cornstarch.schedule.kinds import COMPUTE, Kind
from cornstarch.schedule.policies import in_flight, without_collection
from cornstarch.schedule.timing import Transfers, makespan, times

MOST_COLUMNS = 400


class Event(NamedTuple):
    """One action of a place, in time."""

    place: int
    stage: int
    microbatch: int
    kind: Kind
    start: float
    end: float


class Stretch(NamedTuple):
    """Something that a place does beside its passes."""

    name: str
    """"sums": adding up gradients over replicas; "optimizer"; "gather": collecting new parameters (zero1)."""
    start: float
    end: float


class Level(NamedTuple):
    """What a place holds from a moment on."""

    time: float
    bytes: float


@dataclass(frozen=True)
class StepEnd:
    """What a place, or a part of one, adds to a step besides its passes, in the unit of the costs."""

    reduced: float = 0.0
    """Summing the gradients of a microbatch over the replicas."""
    buckets: int = 0
    """Layers with gradients: portions in which they are summed."""
    optimizer: float = 0.0
    after: float = 0.0
    """zero1: gathering the new parameters."""
    earlier: int = 0
    """Microbatches before the last whose gradients are summed, too, each while the next one is computed."""
    beside: bool = True
    """Whether sums go on while passes are computed; else they come after them."""

    def __add__(self, other: StepEnd) -> StepEnd:
        return StepEnd(
            self.reduced + other.reduced,
            self.buckets + other.buckets,
            self.optimizer + other.optimizer,
            self.after + other.after,
            max(self.earlier, other.earlier),
            self.beside and other.beside,
        )

    def exposed(self, backward: float) -> float:
        """Return what of the sums is left when the last backward pass, which takes so long, ends.

        The gradients of a layer are summed as soon as they are there, while those of the layer before are computed.
        The first portion can start after 1/n of the pass, the last one only when the pass is over.
        """
        if not self.buckets:
            return 0.0
        if not self.beside:
            return (1 + self.earlier) * self.reduced
        late = max(self.reduced / self.buckets, self.reduced - backward * (1 - 1 / self.buckets))
        return late + self.earlier * max(0.0, self.reduced - backward)

    def tail(self, backward: float) -> float:
        """Return what follows the last backward pass."""
        return self.exposed(backward) + self.optimizer + self.after

    def stretches(self, end: float, backward: float) -> Iterator[Stretch]:
        """Yield what a place does beside its passes, the last of which ends at `end`."""
        done = end + self.exposed(backward)
        if self.reduced:
            hidden = backward * (1 - 1 / self.buckets) if self.buckets and self.beside else 0.0
            yield Stretch("sums", max(0.0, end - hidden), done)
        for name, lasts in (("optimizer", self.optimizer), ("gather", self.after)):
            if lasts:
                yield Stretch(name, done, done + lasts)
            done += lasts


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    """By place, in their order; computations only."""
    step: float
    """The time of the whole step, in the unit of the costs."""
    ends: tuple[StepEnd, ...] = ()
    """By place, what comes beside the passes; none: nothing."""

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each place computes: its passes, and its optimizer."""
        passes = tuple(sum(event.end - event.start for event in own) for own in self.events)
        return tuple(p + end.optimizer for p, end in zip(passes, self.ends, strict=True)) if self.ends else passes

    @cached_property
    def stretches(self) -> tuple[tuple[Stretch, ...], ...]:
        """By place, what it does beside its passes; sums overlap with the last backward pass."""
        return tuple(
            tuple(end.stretches(own[-1].end if own else 0.0, last_backward(self.schedule, place)))
            for place, (own, end) in enumerate(
                zip(self.events, self.ends or [StepEnd()] * len(self.events), strict=True)
            )
        )

    def levels(self, kept: Sequence[float], working: Sequence[float] | None = None) -> tuple[tuple[Level, ...], ...]:
        """Return, by place, how many bytes of activations it holds, from each moment on at which that changes.

        What is kept is there from the beginning of a forward pass to the end of its backward pass.

        Args:
            kept: By stage, the bytes of a microbatch that wait for its backward pass.
            working: By stage, the bytes that are there while it computes, beside.
        """
        return tuple(self._levels(own, kept, working or [0.0] * len(kept)) for own in self.events)

    def _levels(self, own: Sequence[Event], kept: Sequence[float], working: Sequence[float]) -> tuple[Level, ...]:
        graph, held = self.schedule.graph, 0.0
        found = [Level(0.0, 0.0)]
        for event in own:
            backward = graph.backward(event.stage)
            if event.kind is Kind.F and backward != "none":
                held += kept[event.stage]
            found.append(Level(event.start, held + working[event.stage]))
            if event.kind in (Kind.B, Kind.W) or (event.kind is Kind.I and backward == "input"):
                held -= kept[event.stage]
            found.append(Level(event.end, held))
        pairs = zip(found, [*found[1:], None], strict=True)  # of several at a moment the last one counts
        return tuple(level for level, then in pairs if then is None or then.time > level.time)

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the step in which each place waits."""
        return tuple((self.step - busy) / self.step if self.step else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of the time of all places together in which they wait.

        With K equal stages and M microbatches it is (K - 1) / (M + K - 1) under gpipe and 1f1b.
        """
        whole = self.step * len(self.events)
        return (whole - sum(self.busy)) / whole if whole else 0.0

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """By stage, the largest number of microbatches whose activations are held at once."""
        return tuple(in_flight(self.schedule))


def last_backward(schedule: Schedule, place: int) -> float:
    """Return how long the backward pass of one microbatch takes at a place."""
    graph = schedule.graph
    nodes = [graph.nodes[stage] for stage in graph.at(place) if graph.wants_gradient(stage)]
    return sum(node.backward_input + node.backward_weight for node in nodes)


def simulate(schedule: Schedule, transfer: Transfers = 0, ends: Sequence[StepEnd] = ()) -> Timeline:
    """Return when every action begins and ends, if all take what the graph says they cost.

    Args:
        schedule: What every place does.
        transfer: The time of every transfer between two places, during which both may compute; or by edge.
        ends: By place, what comes beside its passes. A step ends when the last place is done with that.
    """
    with without_collection():
        spans = times(schedule.graph, schedule.actions, transfer)
        events = tuple(
            tuple(
                [
                    Event(place, stage, microbatch, kind, start, end)
                    for (kind, stage, microbatch, _), (start, end) in zip(actions, own, strict=True)
                    if kind in COMPUTE
                ]
            )
            for place, (actions, own) in enumerate(zip(schedule.actions, spans, strict=True))
        )
    if not ends:
        return Timeline(schedule, events, makespan(spans))
    done = [
        (own[-1].end if own else 0.0) + end.tail(last_backward(schedule, place))
        for place, (own, end) in enumerate(zip(events, ends, strict=True))
    ]
    return Timeline(schedule, events, max(done), tuple(ends))


def as_text(timeline: Timeline, unit: float | None = None) -> str:
    """Return a timeline as a picture: a row for each place, a column for each unit of time.

    `F3` is the forward of microbatch 3, `B3` its backward, `I3` and `W3` its gradients of inputs and of weights; `-`
    goes on with what is before it, `.` waits. Where a place holds several stages, `F3@1` says which: stages are
    numbered as in the graph.

    unit: the time of a column. Default: that of the shortest action.
    """
    events = [event for own in timeline.events for event in own]
    lengths = [event.end - event.start for event in events if event.end > event.start]
    unit = unit or min(lengths, default=1.0)
    columns = round(timeline.step / unit)
    if columns > MOST_COLUMNS:
        return f"{columns:,} columns would be too many to draw; the step takes {timeline.step:g}."
    labels = {event: _label(timeline, event) for event in events}
    width = max((len(label) for label in labels.values()), default=1) + 1
    graph = timeline.schedule.graph
    names = [" + ".join(str(graph.nodes[stage]) for stage in graph.at(place)) for place in range(graph.places)]
    lines = []
    for name, own in zip(names, timeline.events, strict=True):
        cells = [f"{'.':<{width}}"] * columns
        for event in own:
            first, last = round(event.start / unit), round(event.end / unit)
            fill = "-" if last - first > 1 else " "
            drawn = f"{labels[event]:{fill}<{(last - first) * width - 1}} " if last > first else ""
            cells[first:last] = [drawn[at : at + width] for at in range(0, len(drawn), width)]
        lines.append(f"{name:{max(map(len, names))}}  {''.join(cells)}".rstrip())
    return "\n".join(lines)


def _label(timeline: Timeline, event: Event) -> str:
    several = len(timeline.schedule.graph.at(event.place)) > 1
    return f"{event.kind}{event.microbatch}" + (f"@{event.stage}" if several else "")
