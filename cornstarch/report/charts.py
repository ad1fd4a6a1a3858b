"""Line charts as inline SVG, complete without scripts: thinned and smoothed curves, round axes, drawings.

The SVG contains lines only and is stretched over its box, with strokes that keep their width. The texts of the axes
are HTML beside it, so that they stay readable on a screen of any width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Literal

from markupsafe import Markup

from cornstarch.report import number_format as fmt
from cornstarch.report.html import build_element, join_html

Point = tuple[float, float]
Unit = Literal["plain", "percent", "count", "size"]

COLOURS = 6
LONG = 100  # points; a longer curve gets a smooth line over the raw one
_MAX_POINTS = 1000
_LARGEST, _SMALLEST = 1e100, 1e-100  # beyond, the arithmetic of an axis would overflow
_SIDE = 1000  # of the drawing, in its own units
_LETTER = 0.027  # the width of a letter as a fraction of the drawing's, on a narrow screen
_FLAG_ROWS = 3
_MAX_LARGE_DOTS, _MAX_DOTS = 25, 100  # more points than these have small dots, or none
_FORMATS = {
    "plain": fmt.format_number, "percent": fmt.format_percent, "count": fmt.format_count, "size": fmt.format_bytes,
}  # fmt: skip


def keep_finite(points: Iterable[Point]) -> list[Point]:
    """Return the points that can be drawn."""
    return [point for point in points if abs(point[1]) < _LARGEST]


def thin_points(points: Sequence[Point], most: int = _MAX_POINTS) -> list[Point]:
    """Return at most `most` points: both ends, and the extremes of each stretch; values not finite leave a gap."""
    if len(points) <= most:
        return list(points)
    stretches = (most - 2) // 3
    kept: list[Point] = []
    for index in range(stretches):
        stretch = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        drawable = keep_finite(stretch)
        if drawable:
            kept += sorted({min(drawable, key=itemgetter(1)), max(drawable, key=itemgetter(1))})
        if len(drawable) < len(stretch):
            kept.append((stretch[-1][0], math.nan))
    known = keep_finite(points)
    ends = dict.fromkeys(point for point in (*known[:1], *known[-1:]) if point not in kept)
    return sorted([*kept, *ends], key=itemgetter(0))


def smooth_points(points: Sequence[Point], fraction: float = 0.04, most: int = _MAX_POINTS) -> list[Point]:
    """Return at most `most` means, at even distances, over windows of this fraction of all points that do not lag."""
    known = keep_finite(points)
    half = max(2, round(len(known) * fraction / 2))
    sums = list(accumulate((value for _, value in known), initial=0.0))
    count = min(most, len(known))
    smoothed = []
    for index in ((place * (len(known) - 1)) // max(1, count - 1) for place in range(count)):
        # Symmetric at the beginning, where curves are steep; at the end, where they are flat, the window looks back.
        after = min(half, max(index, half // 8), len(known) - 1 - index)
        first, last = index - min(half, index), index + after + 1
        smoothed.append((known[index][0], (sums[last] - sums[first]) / (last - first)))
    return smoothed


@dataclass(frozen=True)
class Axis:
    """The range of an axis, its ticks, and whether it is logarithmic."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value, from 0 at the low end to 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def shows(self, value: float) -> bool:
        """Return whether a value can be placed on this axis at all."""
        return abs(value) < _LARGEST and (value > _SMALLEST or not self.log)


def build_linear_axis(low: float, high: float, whole: bool = False, unit: float = 1.0, target: int = 5) -> Axis:
    """Return an axis over a range, with ticks at round multiples of `unit`; `whole` makes it end at ticks."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(low) * 0.5 or 1.0
        low, high = (0.0, low + room) if low >= 0 else (low - room, 0.0)
    least = (high - low) / unit / target
    power = 10.0 ** math.floor(math.log10(least))
    step = unit * next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if whole:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        low, high = first * step, last * step
    return Axis(low, high, tuple(index * step for index in range(first, last + 1)))


def build_log_axis(low: float, high: float) -> Axis:
    """Return a logarithmic axis over a range of positive values, with ticks at 1, 2 and 5 where there is room."""
    high = max(high, low * 1.5)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        # From the last tick at or below `low` to the first one at or above `high`.
        first = max(index for index, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
        last = min((i for i, tick in enumerate(ticks) if tick >= high * (1 - 1e-9)), default=len(ticks) - 1)
        ticks = ticks[first : last + 1]
        if len(ticks) <= 8:
            break
    every = -(-len(ticks) // 8)  # many decades: every second one, every third one, …
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), tuple(ticks[::every]), log=True)


@dataclass(frozen=True)
class ChartLine:
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
    lines: Sequence[ChartLine]
    unit: Unit = "plain"
    marks: Sequence[tuple[float, str]] = ()
    """Steps at which something happened, with a short text."""
    range: tuple[float, float] | None = None
    """The range of the values, if it is known beforehand."""
    from_zero: bool = False
    """Begin the axis at zero, however far away the values are."""
    log: bool = False
    """Offer a logarithmic scale too."""
    tall: bool = False
    across: str = "step"
    """The name of the horizontal axis."""


def draw_chart(chart: Chart) -> Markup:
    """Return the chart as a figure with legend, axes and the data for its script; empty if no point can be drawn."""
    lines = [replace(line, points=thin_points(line.points)) for line in chart.lines]
    known = [point for line in lines for point in keep_finite(line.points)]
    if not known:
        return Markup("")
    steps = [step for step, _ in known]
    first, last = min(steps), max(steps)
    across = build_linear_axis(0.0 if 0 < first < 0.1 * last else first, last)
    values = [value for _, value in known]
    low, high = chart.range or (min(values), max(values))
    if 0 <= low < 0.5 * high or (chart.from_zero and low > 0):  # show zero for a curve that falls far
        low = 0.0
    unit = 1024.0 ** int(math.log(high, 1024)) if chart.unit == "size" and high > 1 else 1.0
    scales = [build_linear_axis(low, high, whole=True, unit=unit)]
    positive = [value for value in values if value > _SMALLEST]
    if chart.log and positive:
        scales.append(build_log_axis(min(positive), max(positive)))
    box = build_element("input", type="checkbox", class_="log-choice")
    log_switch = build_element("label", box, "log scale", class_="switch") if len(scales) > 1 else None
    gaps = []
    for line in chart.lines:
        lost = [step for step, value in line.points if not math.isfinite(value)]
        if lost:
            count = fmt.pluralize(len(lost), "value is", "values are")
            gaps.append(f"{line.name}: {count} NaN or infinite, first at step {lost[0]:,.0f}. ")
    curves = [keep_finite(line.points) for line in lines]
    data = {
        "unit": chart.unit,
        "across": [across.low, across.high],
        "up": [[up.low, up.high, up.log] for up in scales],
        "lines": [[[*map(_shorten, point)] for point in curve] for curve in curves if curve],
    }
    return build_element(
        "figure",
        build_element("figcaption", build_element("h3", chart.title), log_switch, _draw_legend(chart, lines, last)),
        build_element("div", [_draw_plot(chart, lines, across, up) for up in scales], class_="plots"),
        build_element("p", gaps, class_="note warning") if gaps else None,
        # Numbers and fixed names: nothing in it can end the element.
        build_element("script", Markup(json.dumps(data, separators=(",", ":"))), type="application/json"),
        class_="chart tall" if chart.tall else "chart",
    )


def _shorten(value: float) -> float:
    return int(value) if value == round(value) and abs(value) < 2**53 else float(f"{value:.5g}")


def _draw_legend(chart: Chart, lines: Sequence[ChartLine], last: float) -> Markup:
    """Name the curves with their last values; the script replaces them by the values under the pointer."""
    items = [build_element("li", f"{chart.across} ", build_element("b", f"{last:,.0f}", class_="at"))]
    for line in lines:
        if known := keep_finite(line.points):
            swatch = build_element("i", class_=f"swatch {line.look} c{line.colour}", aria_hidden="true")
            value = build_element("b", _FORMATS[chart.unit](known[-1][1]), class_="value")
            items.append(build_element("li", swatch, f"{line.name} ", value))
    return build_element("ul", items, class_="legend")


def _draw_plot(chart: Chart, lines: Sequence[ChartLine], across: Axis, up: Axis) -> Markup:
    marks = [(step, text) for step, text in chart.marks if across.low <= step <= across.high]
    rows = "".join(f"M0 {_y(up, tick)}H{_SIDE}" for tick in up.ticks)
    columns = "".join(f"M{_x(across, tick)} 0V{_SIDE}" for tick in across.ticks)
    drawing = build_element(
        "svg",
        build_element("path", class_="grid", d=rows),
        build_element("path", class_="grid faint", d=columns),
        build_element("path", class_="base", d=f"M0 {_SIDE}H{_SIDE}"),
        build_element("path", class_="mark", d="".join(f"M{_x(across, step)} 0V{_SIDE}" for step, _ in marks)),
        [_draw_curve(line, across, up) for line in lines],
        viewBox=f"0 0 {_SIDE} {_SIDE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=_describe_chart(chart, lines, up),
    )
    return build_element(
        "div",
        build_element("div", draw_ticks(up, "top", chart.unit), class_="up", aria_hidden="true"),
        build_element("div", drawing, _draw_flags(across, marks), class_="area"),
        build_element("div", draw_ticks(across, "left"), class_="across", aria_hidden="true"),
        class_="plot log" if up.log else "plot linear",
    )


def draw_ticks(axis: Axis, side: Literal["top", "left"], unit: Unit = "plain") -> list[Markup]:
    """Return the texts of an axis, placed by their distance from a side of the drawing."""
    spans = []
    for tick in axis.ticks:
        text = fmt.format_bytes(tick) if unit == "size" else fmt.format_tick(tick)
        text = f"{100 * tick:g}%" if unit == "percent" else text
        place = axis.place(tick) if side == "left" else 1 - axis.place(tick)
        spans.append(build_element("span", text, style=f"{side}:{100 * place:.2f}%"))
    return spans


def _draw_flags(across: Axis, marks: Sequence[tuple[float, str]]) -> list[Markup]:
    """Return the texts of the marks, in rows so that they do not overlap; one without room is left out."""
    flags: list[Markup] = []
    free = [0.0] * _FLAG_ROWS  # where each row is free from, as a fraction of the drawing's width
    for step, text in sorted(marks):
        place, width = across.place(step), _LETTER * (len(text) + 2)
        before = place + width > 1  # the text would leave the drawing, so it goes before its line
        begin = place - width if before else place
        row = next((row for row, end in enumerate(free) if begin >= end), None)
        if row is not None:
            kind = "flag before" if before else "flag"
            style = f"left:{100 * place:.2f}%;top:{row * 1.1 - 0.2:.1f}rem"
            flags.append(build_element("span", text, class_=kind, style=style))
            free[row] = begin + width
    return flags


def _draw_curve(line: ChartLine, across: Axis, up: Axis) -> Markup:
    parts = []
    for drawable, run in groupby(line.points, key=lambda point: up.shows(point[1])):
        if drawable:
            places = [f"{_x(across, step)} {_y(up, value)}" for step, value in run]
            # A path of no length is drawn as a dot by its round ends.
            parts.append("M" + "L".join(places) + ("h0" if len(places) == 1 else ""))
    curve = build_element("path", class_=f"curve {line.look} c{line.colour}", d="".join(parts))
    if line.look != "dots" or len(line.points) > _MAX_DOTS:
        return curve
    dots = "".join(f"M{_x(across, x)} {_y(up, value)}h0" for x, value in line.points if up.shows(value))
    size = "dot" if len(line.points) <= _MAX_LARGE_DOTS else "dot small"
    return join_html(curve, build_element("path", class_=f"{size} c{line.colour}", d=dots))


def _x(across: Axis, step: float) -> str:
    return f"{_SIDE * across.place(step):.1f}".removesuffix(".0")


def _y(up: Axis, value: float) -> str:
    return f"{_SIDE * (1 - up.place(value)):.1f}".removesuffix(".0")


def _describe_chart(chart: Chart, lines: Sequence[ChartLine], up: Axis) -> str:
    """Describe the drawing for readers who do not see it."""
    show = _FORMATS[chart.unit]
    sentences = [f"{chart.title}{', logarithmic scale' if up.log else ''}."]
    for line in lines:
        known = keep_finite(line.points)
        if known and line.look != "raw":
            (start, first), (end, last) = known[0], known[-1]
            values = [value for _, value in known]
            extremes = f"lowest {show(min(values))}, highest {show(max(values))}"
            span = f"{show(first)} at step {start:,.0f}, {show(last)} at step {end:,.0f}"
            sentences.append(f"{line.name}: {span}, {extremes}.")
    return " ".join(sentences)
