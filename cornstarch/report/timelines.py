"""timeline.json as data: a pipelined step as it was, and as it was predicted; and as a trace for other programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cornstarch.report.values import entries, mapping, number, text

TIMELINE, TRACE = "timeline.json", "trace.json"

# By what an action is called in a schedule.
KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
WAIT, BUBBLE, AFTER = "transfer wait", "bubble", "sums and optimizer"


@dataclass(frozen=True)
class Bar:
    """What a place does for a while."""

    kind: str
    """One of the values of `KINDS`, or `WAIT`."""
    letter: str
    stage: int
    microbatch: int
    start: float
    end: float

    @property
    def lasts(self) -> float:
        """How long, in seconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Picture:
    """One step."""

    seconds: float
    bubble: float
    """The share of the time of all places together in which they do not compute."""
    bubbles: tuple[float, ...]
    """Of each place."""
    transfers: tuple[float, ...]
    """The seconds in which each place waits for what another one had made already."""
    rows: tuple[tuple[Bar, ...], ...]
    """By place, in their order."""


@dataclass(frozen=True)
class Compared:
    """A step as it was and as it was predicted."""

    step: int
    began: float
    real: Picture
    predicted: Picture

    @property
    def difference(self) -> float:
        """How much longer it took than predicted, as a share of the prediction."""
        return self.real.seconds / self.predicted.seconds - 1 if self.predicted.seconds else 0.0


@dataclass(frozen=True)
class Timelines:
    """The recorded steps of a pipelined run."""

    schedule: str
    microbatches: int
    places: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    stages: tuple[str, ...]
    steps: tuple[Compared, ...]


def read_timelines(data: Mapping[str, Any]) -> Timelines:
    """Read what timeline.json holds; raise ValueError if it is something else."""
    places = [mapping(place) for place in entries(data.get("places"))]
    read = Timelines(
        text(data.get("schedule")),
        int(number(data.get("microbatches")) or 0),
        tuple(text(place.get("name")) for place in places),
        tuple(tuple(int(_finite(rank)) for rank in entries(place.get("ranks"))) for place in places),
        tuple(text(stage) for stage in entries(data.get("stages"))),
        tuple(_compared(mapping(step), len(places)) for step in entries(data.get("steps"))),
    )
    if not read.places or not read.steps:
        raise ValueError("it has no places, or no steps")
    return read


def _compared(step: Mapping[str, Any], places: int) -> Compared:
    real, predicted = (_picture(mapping(step.get(name)), places) for name in ("real", "predicted"))
    return Compared(int(_finite(step.get("step"))), _finite(step.get("began")), real, predicted)


def _picture(picture: Mapping[str, Any], places: int) -> Picture:
    bubbles, transfers = (tuple(map(_finite, entries(picture.get(key)))) for key in ("bubbles", "transfers"))
    rows = tuple(tuple(_bars(entries(row))) for row in entries(picture.get("events")))
    if not len(bubbles) == len(transfers) == len(rows) == places:
        raise ValueError(f"a step has {len(rows)} rows for {places} places")
    return Picture(_finite(picture.get("seconds")), _finite(picture.get("bubble")), bubbles, transfers, rows)


def _bars(events: Sequence[Any]) -> Iterator[Bar]:
    """Yield computations, and before them what was waited for a transfer; the rest of a wait is bubble."""
    for event in events:
        letter, stage, microbatch, begin, end, waited, transfer = entries(event)
        at, until = _finite(begin) + _finite(waited), _finite(end)
        where = text(letter), int(_finite(stage)), int(_finite(microbatch))
        if _finite(transfer) > 0:
            yield Bar(WAIT, *where, at - _finite(transfer), at)
        yield Bar(KINDS[text(letter)], *where, at, max(at, until))


def _finite(value: object) -> float:
    known = number(value)
    if known is None or not math.isfinite(known):
        raise ValueError(f"{value!r} is no number")
    return known


def chrome_trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what timeline.json holds as chrome://tracing and Perfetto read it: a process for each place."""
    read = read_timelines(data)
    clock = min(step.began for step in read.steps)
    found: list[dict[str, Any]] = []
    for place, name in enumerate(read.places):
        found.append(_said("process_name", place, 0, f"place {place}: {name}"))
        for stage in sorted({bar.stage for step in read.steps for bar in step.real.rows[place]}):
            found.append(_said("thread_name", place, stage, f"stage {stage}: {read.stages[stage]}"))
    for step in read.steps:
        for place, row in enumerate(step.real.rows):
            found += [_event(bar, place, step, step.began - clock) for bar in row]
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"schedule": read.schedule}}


def _said(what: str, place: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": place, "tid": thread, "args": {"name": name}}


def _event(bar: Bar, place: int, step: Compared, offset: float) -> dict[str, Any]:
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


__all__ = ["AFTER", "BUBBLE", "KINDS", "TIMELINE", "TRACE", "WAIT", "Bar", "Compared", "Picture", "Timelines",
           "chrome_trace", "read_timelines"]  # fmt: skip
