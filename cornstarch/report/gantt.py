"""Gantt charts of pipelined steps: the actions of each place, as predicted and as recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from cornstarch.report.charts import Axis, build_linear_axis
from cornstarch.report.html import Table, build_element, join_html
from cornstarch.report.number_format import format_duration, format_number, format_percent, format_tick, pluralize
from cornstarch.report.timelines import (
    AFTER,
    BUBBLE,
    KINDS,
    WAIT,
    PipelineTimelines,
    StepComparison,
    StepTimeline,
    TimelineBar,
)

_WIDTH = 1000  # of a drawing, in its own units
_ROW, _BAR = 20, 16
_MAX_BARS = 3000  # of one drawing that have a text of their own
_MAX_PLACES = 64
_LETTER = 0.022  # the width of a digit as a fraction of the drawing's, on a narrow screen
_CLASSES = {
    "forward": "f",
    "backward": "b",
    "input gradient": "i",
    "weight gradient": "w",
    WAIT: "t",
    AFTER: "o",
    BUBBLE: "n",
}


def build_pipeline_view(timelines: PipelineTimelines | None) -> dict[str, Any] | None:
    """Return the section of recorded steps; None if the run has no pipeline."""
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
    longer = f"{abs(step.difference) * 100:.1f}\u00a0% {'longer' if step.difference >= 0 else 'shorter'}"
    return {
        "title": f"Step {step.step:,}",
        "cards": [
            ("Step time", _format_time(real.seconds), f"step {step.step:,}"),
            ("Predicted", _format_time(predicted.seconds), f"the real one is {longer}"),
            ("Bubble", format_percent(real.bubble), f"predicted {format_percent(predicted.bubble)}"),
        ],
        "drawing": draw_gantt(timelines, {"Predicted": predicted, "Real": real}),
        "table": _build_place_table(timelines, step),
    }


def draw_gantt(timelines: PipelineTimelines, steps: Mapping[str, StepTimeline]) -> Markup:
    """Draw steps below one another, over the same time axis.

    Args:
        timelines: Names the places and stages.
        steps: The steps, by their titles.
    """
    across = build_linear_axis(0.0, 1e3 * max(1e-6, *(step.seconds for step in steps.values())))
    used = {bar.kind for step in steps.values() for row in step.rows for bar in row}
    kinds = [name for name in (*KINDS.values(), WAIT, AFTER) if name in used]
    legend = [
        build_element("li", build_element("i", class_=f"block {_CLASSES[name]}", aria_hidden="true"), name)
        for name in (*kinds, BUBBLE)
    ]
    # Ticks whose text would run out of the drawing are left out.
    ticks = [tick for tick in across.ticks if across.place(tick) <= 1 - _LETTER]
    marks = [build_element("span", format_tick(t), style=f"left:{100 * across.place(t):.2f}%") for t in ticks]
    return build_element(
        "figure",
        build_element("figcaption", build_element("ul", legend, class_="legend")),
        [_draw_step(title, timelines, step, across) for title, step in steps.items()],
        build_element(
            "div",
            build_element("span", "ms", class_="unit"),
            build_element("div", marks, class_="marks"),
            class_="times",
        ),
        class_="gantt",
    )


def _draw_step(title: str, timelines: PipelineTimelines, step: StepTimeline, across: Axis) -> Markup:
    names = timelines.places[:_MAX_PLACES]
    omitted = len(timelines.places) - len(names)
    bubbles = [f"{name[:60]} {format_percent(b)}" for name, b in zip(names, step.bubbles, strict=False)]
    return join_html(
        build_element("h3", title, build_element("small", f" {_format_time(step.seconds)}")),
        build_element(
            "div",
            build_element("div", [_draw_name(name) for name in names], class_="places"),
            build_element(
                "svg",
                [_draw_row(timelines, step, place, across) for place in range(len(names))],
                viewBox=f"0 0 {_WIDTH} {_ROW * len(names)}",
                preserveAspectRatio="none",
                role="img",
                aria_label=f"{title}: a step of {_format_time(step.seconds)}. Bubble: {', '.join(bubbles)}.",
                style=f"height:{1.5 * len(names):g}rem",
            ),
            class_="rows",
        ),
        build_element("p", f"{omitted:,} more places are not drawn; the table has them.", class_="note")
        if omitted
        else None,
    )


def _draw_name(name: str) -> Markup:
    """Return the name of a place; its last word stays visible when there is no room for all of it."""
    words, _, last = name.rpartition(" ")
    return build_element("span", build_element("span", words[:60]), f"\u00a0{last[:20]}", title=name[:200])


def _draw_row(timelines: PipelineTimelines, step: StepTimeline, place: int, across: Axis) -> Markup:
    """Draw the actions of a place over a bar of bubble."""
    y = place * _ROW + (_ROW - _BAR) / 2
    bubble = build_element(
        "rect",
        build_element("title", f"{timelines.places[place][:60]}: {BUBBLE} {format_percent(step.bubbles[place])}"),
        x=0,
        y=y,
        width=f"{_x(across, step.seconds):.2f}",
        height=_BAR,
        class_="n",
    )
    if sum(map(len, step.rows)) <= _MAX_BARS:
        return build_element("g", bubble, [_draw_bar(timelines, bar, across, y) for bar in step.rows[place]])
    # Too many bars for a text each: one shape for each kind.
    shapes = []
    for kind, bars in groupby(sorted(step.rows[place], key=lambda bar: bar.kind), key=lambda bar: bar.kind):
        ends = [(_x(across, bar.start), _x(across, bar.end)) for bar in bars]
        path = "".join(f"M{left:.2f} {y}V{y + _BAR}H{max(right, left + 0.1):.2f}V{y}z" for left, right in ends)
        shapes.append(build_element("path", build_element("title", kind), d=path, class_=_CLASSES[kind]))
    return build_element("g", bubble, shapes)


def _draw_bar(timelines: PipelineTimelines, bar: TimelineBar, across: Axis, y: float) -> Markup:
    stage = timelines.stages[bar.stage] if bar.stage < len(timelines.stages) else str(bar.stage)
    times = f"{_format_time(bar.lasts)} from {_format_time(bar.start)}"
    left, right = _x(across, bar.start), _x(across, bar.end)
    return build_element(
        "rect",
        build_element("title", f"{bar.kind}, microbatch {bar.microbatch}, {stage[:60]}: {times}"),
        x=f"{left:.2f}",
        y=y,
        width=f"{max(right - left, 0.3):.2f}",
        height=_BAR,
        class_=_CLASSES[bar.kind],
    )


def _build_place_table(timelines: PipelineTimelines, step: StepComparison) -> Table:
    columns = ["place", "ranks", "bubble, predicted#", "bubble, real#", "of it transfer#"]
    rows = [
        [
            name[:200],
            _format_ranks(timelines.ranks[place]),
            format_percent(step.predicted.bubbles[place]),
            format_percent(step.real.bubbles[place]),
            format_percent(step.real.transfers[place] / step.real.seconds if step.real.seconds else 0.0),
        ]
        for place, name in enumerate(timelines.places)
    ]
    return Table(columns, rows, f"Places of step {step.step}")


def _format_ranks(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:8]))
    return f"{first}, … ({len(ranks):,})" if len(ranks) > 8 else first


def _x(across: Axis, seconds: float) -> float:
    return min(max(_WIDTH * across.place(1e3 * seconds), 0.0), float(_WIDTH))


def _format_time(seconds: float) -> str:
    if seconds >= 1:
        return format_duration(seconds)
    return f"{format_number(float(f'{1e3 * seconds:.3g}'))}\u00a0ms"
