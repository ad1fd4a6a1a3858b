"""Simulate a schedule: when each action starts and ends, and how long places wait; no torch.

The runtime executes the same schedule; only the costs are given. Gradient reduction over replicas and the optimizer,
which follow the passes, are given by place (`StepEnd`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cornstarch.schedule.actions import COMPUTE, Kind, Schedule, TransferTimes, compute_times, makespan
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.policies import count_in_flight, pause_garbage_collection

MOST_COLUMNS = 400


class SimulatedAction(NamedTuple):
    """One action of a place, in time."""

    place: int
    stage: int
    microbatch: int
    kind: Kind
    start: float
    end: float


class Interval(NamedTuple):
    """Work of a place other than its passes."""

    name: str
    """"sums": gradient reduction over replicas; "optimizer"; "gather": all-gather of new parameters."""
    start: float
    end: float


@dataclass(frozen=True)
class StepEnd:
    """Work of a place, or of one of its stages, after the passes of a step, in the unit of the costs."""

    reduction: float = 0.0
    """Reducing the gradients of a microbatch over the replicas."""
    buckets: int = 0
    """Layers with gradients, each reduced by itself."""
    optimizer: float = 0.0
    gather: float = 0.0
    """Gathering the new parameters: with zero1, or with shards that a pipeline gathers once in a step."""
    earlier: int = 0
    """Microbatches before the last whose gradients are reduced, too, each during the next one."""
    overlaps: bool = True
    """Whether the reduction overlaps with passes; else it follows them."""

    def __add__(self, other: StepEnd) -> StepEnd:
        return StepEnd(
            self.reduction + other.reduction,
            self.buckets + other.buckets,
            self.optimizer + other.optimizer,
            self.gather + other.gather,
            max(self.earlier, other.earlier),
            self.overlaps and other.overlaps,
        )

    def get_exposed_seconds(self, backward: float) -> float:
        """Return the time of the reduction after the last backward pass, which takes `backward`."""
        if not self.buckets:
            return 0.0
        if not self.overlaps:
            return (1 + self.earlier) * self.reduction
        # The first of n buckets can start after 1/n of the pass, the last one only when the pass is over.
        late = max(self.reduction / self.buckets, self.reduction - backward * (1 - 1 / self.buckets))
        return late + self.earlier * max(0.0, self.reduction - backward)

    def tail(self, backward: float) -> float:
        return self.get_exposed_seconds(backward) + self.optimizer + self.gather

    def other_work(self, end: float, backward: float) -> Iterator[Interval]:
        """Yield the intervals of a place whose last pass ends at `end`."""
        done = end + self.get_exposed_seconds(backward)
        if self.reduction:
            hidden = backward * (1 - 1 / self.buckets) if self.buckets and self.overlaps else 0.0
            yield Interval("sums", max(0.0, end - hidden), done)
        for name, lasts in (("optimizer", self.optimizer), ("gather", self.gather)):
            if lasts:
                yield Interval(name, done, done + lasts)
            done += lasts


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    schedule: Schedule
    events: tuple[tuple[SimulatedAction, ...], ...]
    """By place, in their order; computations only."""
    step: float
    """The time of the whole step, in the unit of the costs."""
    ends: tuple[StepEnd, ...] = ()
    """By place, the work after the passes; empty: none."""

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The computing time of each place: its passes and its optimizer."""
        passes = tuple(sum(event.end - event.start for event in own) for own in self.events)
        return tuple(p + end.optimizer for p, end in zip(passes, self.ends, strict=True)) if self.ends else passes

    @cached_property
    def other_work(self) -> tuple[tuple[Interval, ...], ...]:
        """By place, its work other than passes; the reduction overlaps with the last backward pass."""
        ends = self.ends or [StepEnd()] * len(self.events)
        return tuple(
            tuple(end.other_work(own[-1].end if own else 0.0, last_backward(self.schedule.graph, place)))
            for place, (own, end) in enumerate(zip(self.events, ends, strict=True))
        )

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """The fraction of the step in which each place waits."""
        return tuple((self.step - busy) / self.step if self.step else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The fraction of all places' time in which they wait: (K - 1) / (M + K - 1) with K equal stages and 1f1b."""
        whole = self.step * len(self.events)
        return (whole - sum(self.busy)) / whole if whole else 0.0

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """By stage, the largest number of microbatches whose activations are saved at once."""
        return tuple(count_in_flight(self.schedule))


def last_backward(graph: StageGraph, place: int) -> float:
    """Return the time of one microbatch's backward pass at a place."""
    nodes = [graph.nodes[stage] for stage in graph.at(place) if graph.wants_gradient(stage)]
    return sum(node.backward_input + node.backward_weight for node in nodes)


def simulate(schedule: Schedule, transfer: TransferTimes = 0, ends: Sequence[StepEnd] = ()) -> Timeline:
    """Return when every action starts and ends, given the costs in the graph.

    Args:
        schedule: The actions of every place.
        transfer: The time of every transfer between two places, during which both may compute; or by edge.
        ends: By place, the work after its passes. A step ends when the last place has finished it.
    """
    with pause_garbage_collection():
        spans = compute_times(schedule.graph, schedule.actions, transfer)
        events = tuple(
            tuple(
                SimulatedAction(place, stage, microbatch, kind, start, end)
                for (kind, stage, microbatch, _), (start, end) in zip(actions, own, strict=True)
                if kind in COMPUTE
            )
            for place, (actions, own) in enumerate(zip(schedule.actions, spans, strict=True))
        )
    if not ends:
        return Timeline(schedule, events, makespan(spans))
    done = [
        (own[-1].end if own else 0.0) + end.tail(last_backward(schedule.graph, place))
        for place, (own, end) in enumerate(zip(events, ends, strict=True))
    ]
    return Timeline(schedule, events, max(done), tuple(ends))


def as_text(timeline: Timeline, unit: float | None = None) -> str:
    """Return a timeline as text: a row for each place, a column for each unit of time.

    `F3` is the forward of microbatch 3, `B3` its backward, `I3` and `W3` its gradients of inputs and of weights; `-`
    continues the action before it, `.` waits. If a place has several stages, `F3@1` is stage 1 of the graph.

    unit: the time of a column. Default: that of the shortest action.
    """
    events = [event for own in timeline.events for event in own]
    lengths = [event.end - event.start for event in events if event.end > event.start]
    unit = unit or min(lengths, default=1.0)
    columns = round(timeline.step / unit)
    if columns > MOST_COLUMNS:
        return f"{columns:,} columns would be too many to draw; the step takes {timeline.step:g}."
    graph = timeline.schedule.graph
    labels = {
        event: f"{event.kind}{event.microbatch}" + (f"@{event.stage}" if len(graph.at(event.place)) > 1 else "")
        for event in events
    }
    width = max((len(label) for label in labels.values()), default=1) + 1
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
