"""timeline.json as data: pipelined steps as recorded and as predicted, and as a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cornstarch.report.json_values import as_finite, as_list, as_mapping, as_number, as_text

TIMELINE, TRACE = "timeline.json", "trace.json"

# By the letter of an action in a schedule.
KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
WAIT, BUBBLE, AFTER = "transfer wait", "bubble", "sums and optimizer"


@dataclass(frozen=True)
class TimelineBar:
    """One action of a place, or a wait."""

    kind: str
    """One of the values of `KINDS`, or `WAIT`."""
    letter: str
    stage: int
    microbatch: int
    start: float
    end: float

    @property
    def lasts(self) -> float:
        """The duration in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class StepTimeline:
    """One step of all places."""

    seconds: float
    bubble: float
    """The fraction of the time of all places in which they do not compute."""
    bubbles: tuple[float, ...]
    """The bubble of each place."""
    transfers: tuple[float, ...]
    """The seconds in which each place waits for an output that another one has finished already."""
    rows: tuple[tuple[TimelineBar, ...], ...]
    """The bars of each place, in the order of time."""


@dataclass(frozen=True)
class StepComparison:
    """A step as recorded and as predicted."""

    step: int
    began: float
    real: StepTimeline
    predicted: StepTimeline

    @property
    def difference(self) -> float:
        """How much longer the step took than predicted, as a fraction of the prediction."""
        return self.real.seconds / self.predicted.seconds - 1 if self.predicted.seconds else 0.0


@dataclass(frozen=True)
class PipelineTimelines:
    """The recorded steps of a pipelined run."""

    schedule: str
    microbatches: int
    places: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    stages: tuple[str, ...]
    steps: tuple[StepComparison, ...]


def read_timelines(data: Mapping[str, Any]) -> PipelineTimelines:
    """Read the content of timeline.json; raise ValueError if it is malformed."""
    places = [as_mapping(place) for place in as_list(data.get("places"))]
    timelines = PipelineTimelines(
        as_text(data.get("schedule")),
        int(as_number(data.get("microbatches")) or 0),
        tuple(as_text(place.get("name")) for place in places),
        tuple(tuple(int(as_finite(rank)) for rank in as_list(place.get("ranks"))) for place in places),
        tuple(as_text(stage) for stage in as_list(data.get("stages"))),
        tuple(_read_comparison(as_mapping(step), len(places)) for step in as_list(data.get("steps"))),
    )
    if not timelines.places or not timelines.steps:
        raise ValueError("the file has no places or no steps")
    return timelines


def _read_comparison(step: Mapping[str, Any], places: int) -> StepComparison:
    real, predicted = (_read_step(as_mapping(step.get(name)), places) for name in ("real", "predicted"))
    return StepComparison(int(as_finite(step.get("step"))), as_finite(step.get("began")), real, predicted)


def _read_step(step: Mapping[str, Any], places: int) -> StepTimeline:
    bubbles, transfers = (tuple(map(as_finite, as_list(step.get(key)))) for key in ("bubbles", "transfers"))
    rows = tuple(tuple(_read_bars(as_list(row))) for row in as_list(step.get("events")))
    if not len(bubbles) == len(transfers) == len(rows) == places:
        raise ValueError(f"a step has {len(rows)} rows for {places} places")
    return StepTimeline(as_finite(step.get("seconds")), as_finite(step.get("bubble")), bubbles, transfers, rows)


def _read_bars(events: Sequence[Any]) -> Iterator[TimelineBar]:
    """Yield computations, each with the wait for its transfer before it; the rest of a wait is bubble."""
    for event in events:
        letter, stage, microbatch, begin, end, waited, transfer = as_list(event)
        at, until = as_finite(begin) + as_finite(waited), as_finite(end)
        where = as_text(letter), int(as_finite(stage)), int(as_finite(microbatch))
        if as_finite(transfer) > 0:
            yield TimelineBar(WAIT, *where, at - as_finite(transfer), at)
        yield TimelineBar(KINDS[as_text(letter)], *where, at, max(at, until))


def chrome_trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the content of timeline.json to the format of chrome://tracing and Perfetto: a process for each place."""
    timelines = read_timelines(data)
    clock = min(step.began for step in timelines.steps)
    events: list[dict[str, Any]] = []
    for place, name in enumerate(timelines.places):
        events.append(_build_name_event("process_name", place, 0, f"place {place}: {name}"))
        for stage in sorted({bar.stage for step in timelines.steps for bar in step.real.rows[place]}):
            events.append(_build_name_event("thread_name", place, stage, f"stage {stage}: {timelines.stages[stage]}"))
    for step in timelines.steps:
        for place, row in enumerate(step.real.rows):
            events += [_build_bar_event(bar, place, step, step.began - clock) for bar in row]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": timelines.schedule}}


def _build_name_event(what: str, place: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": place, "tid": thread, "args": {"name": name}}


def _build_bar_event(bar: TimelineBar, place: int, step: StepComparison, offset: float) -> dict[str, Any]:
    name = f"{bar.letter}{bar.microbatch}"
    return {
        "name": f"wait for {name}" if bar.kind == WAIT else name,
        "cat": bar.kind,
        "ph": "X",
        "ts": round((offset + bar.start) * 1e6, 3),
        "dur": round(bar.lasts * 1e6, 3),
        "pid": place,
        "tid": bar.stage,
        "args": {"step": step.step, "microbatch": bar.microbatch, "kind": bar.kind},
    }
