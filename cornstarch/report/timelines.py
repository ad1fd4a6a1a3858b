"""Pipelined steps as recorded and as predicted: timeline.json as data, as Gantt charts, and as a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from markupsafe import Markup

from cornstarch.report.charts import Axis, build_linear_axis, draw_ticks
from cornstarch.report.html import Table, build_element, join_html
from cornstarch.report.json_values import as_finite, as_list, as_mapping, as_number, as_text
from cornstarch.report.number_format import format_duration, format_number, format_percent, pluralize

TIMELINE, TRACE = "timeline.json", "trace.json"

# By the letter of an action in a schedule.
KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
WAIT, BUBBLE, AFTER = "transfer wait", "bubble", "sums and optimizer"

_WIDTH = 1000  # of a drawing, in its own units
_ROW, _BAR = 20, 16
_MAX_BARS = 3000  # of one drawing that have a text of their own
_MAX_PLACES = 64
_LETTER = 0.022  # the width of a digit as a fraction of the drawing's, on a narrow screen
_CSS = {**{kind: letter.lower() for letter, kind in KINDS.items()}, WAIT: "t", AFTER: "o", BUBBLE: "n"}


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
    comparisons = []
    for step in map(as_mapping, as_list(data.get("steps"))):
        real, predicted = (_read_step(as_mapping(step.get(name)), len(places)) for name in ("real", "predicted"))
        began = as_finite(step.get("began"))
        comparisons.append(StepComparison(int(as_finite(step.get("step"))), began, real, predicted))
    timelines = PipelineTimelines(
        as_text(data.get("schedule")),
        int(as_number(data.get("microbatches")) or 0),
        tuple(as_text(place.get("name")) for place in places),
        tuple(tuple(int(as_finite(rank)) for rank in as_list(place.get("ranks"))) for place in places),
        tuple(as_text(stage) for stage in as_list(data.get("stages"))),
        tuple(comparisons),
    )
    if not timelines.places or not timelines.steps:
        raise ValueError("the file has no places or no steps")
    return timelines


def _read_step(step: Mapping[str, Any], places: int) -> StepTimeline:
    bubbles, transfers = (tuple(map(as_finite, as_list(step.get(key)))) for key in ("bubbles", "transfers"))
    rows = []
    for events in map(as_list, as_list(step.get("events"))):
        row: list[TimelineBar] = []
        for letter, stage, microbatch, *times in map(as_list, events):
            begin, end, waited, transfer = map(as_finite, times)
            at, where = begin + waited, (as_text(letter), int(as_finite(stage)), int(as_finite(microbatch)))
            if transfer > 0:  # a wait for a transfer is a bar; the rest of a wait is bubble
                row.append(TimelineBar(WAIT, *where, at - transfer, at))
            row.append(TimelineBar(KINDS[as_text(letter)], *where, at, max(at, end)))
        rows.append(tuple(row))
    if not len(bubbles) == len(transfers) == len(rows) == places:
        raise ValueError(f"a step has {len(rows)} rows for {places} places")
    return StepTimeline(as_finite(step.get("seconds")), as_finite(step.get("bubble")), bubbles, transfers, tuple(rows))


def chrome_trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the content of timeline.json to the format of chrome://tracing and Perfetto: a process for each place."""
    timelines = read_timelines(data)
    events: list[dict[str, Any]] = []

    def add_name(what: str, place: int, thread: int, name: str) -> None:
        events.append({"name": what, "ph": "M", "pid": place, "tid": thread, "args": {"name": name}})

    for place, name in enumerate(timelines.places):
        add_name("process_name", place, 0, f"place {place}: {name}")
        for stage in sorted({bar.stage for step in timelines.steps for bar in step.real.rows[place]}):
            add_name("thread_name", place, stage, f"stage {stage}: {timelines.stages[stage]}")
    clock = min(step.began for step in timelines.steps)
    for step in timelines.steps:
        for place, row in enumerate(step.real.rows):
            for bar in row:
                name = f"{bar.letter}{bar.microbatch}"
                event = {
                    "name": f"wait for {name}" if bar.kind == WAIT else name,
                    "cat": bar.kind,
                    "ph": "X",
                    "ts": round((step.began - clock + bar.start) * 1e6, 3),
                    "dur": round(bar.lasts * 1e6, 3),
                    "pid": place,
                    "tid": bar.stage,
                    "args": {"step": step.step, "microbatch": bar.microbatch, "kind": bar.kind},
                }
                events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": timelines.schedule}}


def build_pipeline_view(timelines: PipelineTimelines | None) -> dict[str, Any] | None:
    """Return the page's section of recorded steps; None if the run has no pipeline."""
    if timelines is None:
        return None
    *earlier, last = (_build_step(timelines, step) for step in timelines.steps)
    lead = (
        f"{pluralize(len(timelines.places), 'place')} with the schedule {timelines.schedule[:40]} and "
        f"{pluralize(timelines.microbatches, 'microbatch', 'microbatches')}. The prediction is a simulation of the "
        "same schedule with the mean costs of that step, and transfers that take no time."
    )
    return {"lead": lead, "last": last, "earlier": earlier[::-1]}


def _build_step(timelines: PipelineTimelines, step: StepComparison) -> dict[str, Any]:
    real, predicted = step.real, step.predicted
    difference = real.seconds / predicted.seconds - 1 if predicted.seconds else 0.0
    longer = f"{format_percent(abs(difference))} {'longer' if difference >= 0 else 'shorter'}"
    rows = []
    for place, name in enumerate(timelines.places):
        ranks, transfer = timelines.ranks[place], real.transfers[place] / real.seconds if real.seconds else 0.0
        shown = ", ".join(map(str, ranks[:8])) + (f", … ({len(ranks):,})" if len(ranks) > 8 else "")
        fractions = map(format_percent, (predicted.bubbles[place], real.bubbles[place], transfer))
        rows.append([name[:200], shown, *fractions])
    columns = ["place", "ranks", "bubble, predicted#", "bubble, real#", "of it transfer#"]
    return {
        "title": f"Step {step.step:,}",
        "cards": [
            ("Step time", _format_time(real.seconds), f"step {step.step:,}"),
            ("Predicted", _format_time(predicted.seconds), f"the real one is {longer}"),
            ("Bubble", format_percent(real.bubble), f"predicted {format_percent(predicted.bubble)}"),
        ],
        "drawing": draw_gantt(timelines, {"Predicted": predicted, "Real": real}),
        "table": Table(columns, rows, f"Places of step {step.step}"),
    }


def draw_gantt(timelines: PipelineTimelines, steps: Mapping[str, StepTimeline]) -> Markup:
    """Draw steps below one another, by their titles, over the same time axis; `timelines` names places and stages."""
    across = build_linear_axis(0.0, 1e3 * max(1e-6, *(step.seconds for step in steps.values())))
    used = {bar.kind for step in steps.values() for row in step.rows for bar in row}
    kinds = [name for name in (*KINDS.values(), WAIT, AFTER) if name in used]
    legend = [
        build_element("li", build_element("i", class_=f"block {_CSS[name]}", aria_hidden="true"), name)
        for name in (*kinds, BUBBLE)
    ]
    # Ticks whose text would run out of the drawing are left out.
    ticks = tuple(tick for tick in across.ticks if across.place(tick) <= 1 - _LETTER)
    marks = draw_ticks(replace(across, ticks=ticks), "left")
    unit = build_element("span", "ms", class_="unit")
    return build_element(
        "figure",
        build_element("figcaption", build_element("ul", legend, class_="legend")),
        [_draw_step(title, timelines, step, across) for title, step in steps.items()],
        build_element(
            "div",
            unit,
            build_element("div", marks, class_="marks"),
            class_="times",
        ),
        class_="gantt",
    )


def _draw_step(title: str, timelines: PipelineTimelines, step: StepTimeline, across: Axis) -> Markup:
    places = timelines.places[:_MAX_PLACES]
    bubbles = [f"{name[:60]} {format_percent(b)}" for name, b in zip(places, step.bubbles, strict=False)]
    names = []
    for name in places:
        words, _, last = name.rpartition(" ")  # the last word stays visible when there is no room for all of them
        names.append(build_element("span", build_element("span", words[:60]), f"\u00a0{last[:20]}", title=name[:200]))
    drawing = build_element(
        "svg",
        [_draw_row(timelines, step, place, across) for place in range(len(places))],
        viewBox=f"0 0 {_WIDTH} {_ROW * len(places)}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title}: a step of {_format_time(step.seconds)}. Bubble: {', '.join(bubbles)}.",
        style=f"height:{1.5 * len(places):g}rem",
    )
    omitted = len(timelines.places) - len(places)
    note = f"{omitted:,} more places are not drawn; the table has them."
    return join_html(
        build_element("h3", title, build_element("small", f" {_format_time(step.seconds)}")),
        build_element("div", build_element("div", names, class_="places"), drawing, class_="rows"),
        build_element("p", note, class_="note") if omitted else None,
    )


def _draw_row(timelines: PipelineTimelines, step: StepTimeline, place: int, across: Axis) -> Markup:
    """Draw the actions of a place over a bar of bubble."""
    y = place * _ROW + (_ROW - _BAR) / 2

    def find_x(seconds: float) -> float:
        return min(max(_WIDTH * across.place(1e3 * seconds), 0.0), float(_WIDTH))

    def draw_bar(title: str, x: str, width: float, css: str) -> Markup:
        title_element = build_element("title", title)
        return build_element("rect", title_element, x=x, y=y, width=f"{width:.2f}", height=_BAR, class_=css)

    bubble = f"{timelines.places[place][:60]}: {BUBBLE} {format_percent(step.bubbles[place])}"
    shapes = [draw_bar(bubble, "0", find_x(step.seconds), "n")]
    if sum(map(len, step.rows)) <= _MAX_BARS:
        for bar in step.rows[place]:
            stage = timelines.stages[bar.stage] if bar.stage < len(timelines.stages) else str(bar.stage)
            times = f"{_format_time(bar.lasts)} from {_format_time(bar.start)}"
            title = f"{bar.kind}, microbatch {bar.microbatch}, {stage[:60]}: {times}"
            left, right = find_x(bar.start), find_x(bar.end)
            shapes.append(draw_bar(title, f"{left:.2f}", max(right - left, 0.3), _CSS[bar.kind]))
        return build_element("g", shapes)
    # Too many bars for a text each: one shape for each kind.
    for kind, bars in groupby(sorted(step.rows[place], key=lambda bar: bar.kind), key=lambda bar: bar.kind):
        ends = [(find_x(bar.start), find_x(bar.end)) for bar in bars]
        path = "".join(f"M{left:.2f} {y}V{y + _BAR}H{max(right, left + 0.1):.2f}V{y}z" for left, right in ends)
        shapes.append(build_element("path", build_element("title", kind), d=path, class_=_CSS[kind]))
    return build_element("g", shapes)


def _format_time(seconds: float) -> str:
    if seconds >= 1:
        return format_duration(seconds)
    return f"{format_number(float(f'{1e3 * seconds:.3g}'))}\u00a0ms"
