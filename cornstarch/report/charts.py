"""Curves as inline SVG, complete without scripts.

The SVG holds lines only and is stretched over its box, with strokes that keep their width; the texts of the axes are
HTML beside it, so that they stay readable on a screen of any width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from cornstarch.report import figures
from cornstarch.report.curves import Axis, Point, finite, linear_axis, log_axis, thin
from cornstarch.report.markup import Markup, element, join

COLOURS = 6
Unit = Literal["plain", "percent", "count", "size"]
_SIDE = 1000  # of the drawing, in its own units
_LETTER = 0.027  # the width of a letter as a share of the drawing's, on a narrow screen
_FLAG_ROWS = 3
_MOST_LARGE_DOTS, _MOST_DOTS = 25, 100  # more points than these have small dots, or none


@dataclass(frozen=True)
class Line:
    """One curve."""

    name: str
    points: Sequence[Point]
    colour: int = 1
    look: Literal["line", "raw", "dots"] = "line"
    """A line; a faint one behind the others; a line with its points."""


@dataclass(frozen=True)
class Chart:
    """Curves over the steps of a run, with one unit."""

    title: str
    lines: Sequence[Line]
    unit: Unit = "plain"
    marks: Sequence[tuple[float, str]] = ()
    """Steps at which something happened, and what."""
    range: tuple[float, float] | None = None
    """The range of the values, if it is known before."""
    from_zero: bool = False
    """Begin the axis at zero, however far away the values are."""
    log: bool = False
    """Offer a logarithmic scale too."""
    tall: bool = False
    across: str = "step"
    """What is counted from left to right."""


def draw(chart: Chart) -> Markup:
    """Return the chart as a figure with legend, axes and what its script needs; empty if there is nothing to draw."""
    lines = [Line(line.name, thin(line.points), line.colour, line.look) for line in chart.lines]
    known = [point for line in lines for point in finite(line.points)]
    if not known:
        return Markup("")
    steps = [step for step, _ in known]
    first, last = min(steps), max(steps)
    across = linear_axis(0.0 if 0 < first < 0.1 * last else first, last)
    scales = _scales(chart, [value for _, value in known])
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", chart.title),
            _log_switch() if len(scales) > 1 else None,
            _legend(chart, lines, across),
        ),
        element("div", [_plot(chart, lines, across, up) for up in scales], class_="plots"),
        _lost(chart),
        _data(chart, lines, across, scales),
        class_="chart tall" if chart.tall else "chart",
    )


def _scales(chart: Chart, values: Sequence[float]) -> list[Axis]:
    low, high = chart.range or (min(values), max(values))
    if 0 <= low < 0.5 * high or (chart.from_zero and low > 0):  # a curve that falls far is seen against zero too
        low = 0.0
    unit = 1024.0 ** int(math.log(high, 1024)) if chart.unit == "size" and high > 1 else 1.0
    scales = [linear_axis(low, high, whole=True, unit=unit)]
    positive = [value for value in values if value > 1e-100]
    if chart.log and positive:
        scales.append(log_axis(min(positive), max(positive)))
    return scales


def _log_switch() -> Markup:
    return element("label", element("input", type="checkbox", class_="log-choice"), "log scale", class_="switch")


def _legend(chart: Chart, lines: Sequence[Line], across: Axis) -> Markup:
    """Name the curves with their last values; the script puts those under the pointer in their place."""
    last = max(step for line in lines for step, _ in finite(line.points))
    return element(
        "ul",
        element("li", f"{chart.across} ", element("b", f"{last:,.0f}", class_="at")),
        [
            element(
                "li",
                element("i", class_=f"swatch {line.look} c{line.colour}", aria_hidden="true"),
                f"{line.name} ",
                element("b", show(finite(line.points)[-1][1], chart.unit), class_="value"),
            )
            for line in lines
            if finite(line.points)
        ],
        class_="legend",
    )


def _plot(chart: Chart, lines: Sequence[Line], across: Axis, up: Axis) -> Markup:
    marks = [(step, text) for step, text in chart.marks if across.low <= step <= across.high]
    percent = [f"{100 * (1 - up.place(tick)):.2f}%" for tick in up.ticks]
    return element(
        "div",
        element(
            "div",
            [
                element("span", _tick(tick, chart.unit), style=f"top:{top}")
                for tick, top in zip(up.ticks, percent, strict=True)
            ],
            class_="up",
            aria_hidden="true",
        ),
        element(
            "div",
            element(
                "svg",
                _grid(across, up),
                element("path", class_="mark", d="".join(f"M{_x(across, step)} 0V{_SIDE}" for step, _ in marks)),
                [_curve(line, across, up) for line in lines],
                viewBox=f"0 0 {_SIDE} {_SIDE}",
                preserveAspectRatio="none",
                role="img",
                aria_label=_description(chart, lines, up),
            ),
            _flags(across, marks),
            class_="area",
        ),
        element(
            "div",
            [
                element("span", figures.tick(tick), style=f"left:{100 * across.place(tick):.2f}%")
                for tick in across.ticks
            ],
            class_="across",
            aria_hidden="true",
        ),
        class_="plot log" if up.log else "plot linear",
    )


def _grid(across: Axis, up: Axis) -> Markup:
    rows = "".join(f"M0 {_y(up, tick)}H{_SIDE}" for tick in up.ticks)
    columns = "".join(f"M{_x(across, tick)} 0V{_SIDE}" for tick in across.ticks)
    base = f"M0 {_SIDE}H{_SIDE}"
    return join(
        element("path", class_="grid", d=rows),
        element("path", class_="grid faint", d=columns),
        element("path", class_="base", d=base),
    )


def _flags(across: Axis, marks: Sequence[tuple[float, str]]) -> list[Markup]:
    """Return what the marks mean, in as many rows as keep them apart; what finds no place is left out."""
    shown: list[Markup] = []
    free = [0.0] * _FLAG_ROWS  # where each row is free from, as a share of the drawing's width
    for step, text in sorted(marks):
        place, width = across.place(step), _LETTER * (len(text) + 2)
        before = place + width > 1  # it would run out of the drawing, so it stands before its line
        begin = place - width if before else place
        row = next((row for row, end in enumerate(free) if begin >= end), None)
        if row is not None:
            kind = "flag before" if before else "flag"
            style = f"left:{100 * place:.2f}%;top:{row * 1.1 - 0.2:.1f}rem"
            shown.append(element("span", text, class_=kind, style=style))
            free[row] = begin + width
    return shown


def _curve(line: Line, across: Axis, up: Axis) -> Markup:
    parts = []
    for drawable, run in groupby(line.points, key=lambda point: up.shows(point[1])):
        if drawable:
            places = [f"{_x(across, step)} {_y(up, value)}" for step, value in run]
            # A path of no length is drawn as a dot by its round ends.
            parts.append("M" + "L".join(places) + ("h0" if len(places) == 1 else ""))
    drawn = element("path", class_=f"curve {line.look} c{line.colour}", d="".join(parts))
    if line.look != "dots" or len(line.points) > _MOST_DOTS:
        return drawn
    dots = "".join(f"M{_x(across, x)} {_y(up, value)}h0" for x, value in line.points if up.shows(value))
    size = "dot" if len(line.points) <= _MOST_LARGE_DOTS else "dot small"
    return join(drawn, element("path", class_=f"{size} c{line.colour}", d=dots))


def _x(across: Axis, step: float) -> str:
    return f"{_SIDE * across.place(step):.1f}".removesuffix(".0")


def _y(up: Axis, value: float) -> str:
    return f"{_SIDE * (1 - up.place(value)):.1f}".removesuffix(".0")


def _description(chart: Chart, lines: Sequence[Line], up: Axis) -> str:
    """Say in words what is drawn, for those who do not see it."""
    said = [f"{chart.title}{', logarithmic scale' if up.log else ''}."]
    for line in lines:
        known = finite(line.points)
        if known and line.look != "raw":
            (start, first), (end, last) = known[0], known[-1]
            values = [value for _, value in known]
            extremes = f"lowest {show(min(values), chart.unit)}, highest {show(max(values), chart.unit)}"
            span = f"{show(first, chart.unit)} at step {start:,.0f}, {show(last, chart.unit)} at step {end:,.0f}"
            said.append(f"{line.name}: {span}, {extremes}.")
    return " ".join(said)


def _lost(chart: Chart) -> Markup | None:
    """Say how many values cannot be drawn, and where the first one is."""
    said = []
    for line in chart.lines:
        lost = [step for step, value in line.points if not math.isfinite(value)]
        if lost:
            values = figures.several(len(lost), "value is", "values are")
            said.append(f"{line.name}: {values} NaN or infinite, first at step {lost[0]:,.0f}. ")
    return element("p", said, class_="note warning") if said else None


def _data(chart: Chart, lines: Sequence[Line], across: Axis, scales: Sequence[Axis]) -> Markup:
    """Return what the script reads: the same points as those drawn."""
    drawn = [line for line in lines if finite(line.points)]
    content = {
        "unit": chart.unit,
        "across": [across.low, across.high],
        "up": [[up.low, up.high, up.log] for up in scales],
        "lines": [[[_short(step), _short(value)] for step, value in finite(line.points)] for line in drawn],
    }
    text = json.dumps(content, separators=(",", ":"))  # numbers and our own names: nothing in it could end the element
    return element("script", Markup(text), type="application/json")


def _short(value: float) -> float:
    return int(value) if value == round(value) and abs(value) < 2**53 else float(f"{value:.5g}")


def show(value: float, unit: Unit) -> str:
    """Return a value in the chart's unit."""
    return {"plain": figures.plain, "percent": figures.percent, "count": figures.count, "size": figures.size}[unit](
        value
    )


def _tick(value: float, unit: Unit) -> str:
    if unit == "percent":
        return f"{100 * value:g}%"
    return figures.size(value) if unit == "size" else figures.tick(value)
