"""What a schedule takes: when each action begins and ends, how long a step is, how long places wait; no torch.

timeline = simulate(make_schedule(StageGraph.chain(4), microbatches=8))
timeline.step, timeline.bubble       # 33.0, 0.2727...
print(as_text(timeline))

The runtime carries out the same schedule; what is simulated is what is run, but for the costs, which are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cornstarch.schedule.actions import Schedule
from cornstarch.schedule.kinds import COMPUTE, Kind
from cornstarch.schedule.policies import in_flight
from cornstarch.schedule.timing import makespan, times

MOST_COLUMNS = 400


class Event(NamedTuple):
    """One action of a place, in time."""

    place: int
    stage: int
    microbatch: int
    kind: Kind
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    """By place, in their order; computations only."""
    step: float
    """The time of the whole step, in the unit of the costs."""

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each place computes."""
        return tuple(sum(event.end - event.start for event in own) for own in self.events)

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


def simulate(schedule: Schedule, transfer: float = 0) -> Timeline:
    """Return when every action begins and ends, if all take what the graph says they cost.

    transfer: the time of every transfer between two places, during which both may compute.
    """
    spans = times(schedule.graph, schedule.actions, transfer)
    events = tuple(
        tuple(
            Event(place, action.stage, action.microbatch, action.kind, start, end)
            for action, (start, end) in zip(actions, own, strict=True)
            if action.kind in COMPUTE
        )
        for place, (actions, own) in enumerate(zip(schedule.actions, spans, strict=True))
    )
    return Timeline(schedule, events, makespan(spans))


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
