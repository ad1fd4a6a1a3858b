"""Curves before they are drawn, and where they are drawn."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornstarch.report.charts import (
    Chart,
    ChartLine,
    build_linear_axis,
    build_log_axis,
    draw_chart,
    keep_finite,
    smooth_points,
    thin_points,
)
from cornstarch.report.number_format import (
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_number,
    format_percent,
    format_tick,
    format_timestamp,
)

NAN, INFINITY = math.nan, math.inf


# ------------------------------------------------------------------------------------------------ points


@given(st.lists(st.floats(), min_size=40, max_size=400), st.integers(9, 60))
def test_thinning_keeps_extremes_and_order(values: list[float], most: int) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    kept = thin_points(points, most)
    assert len(kept) <= most
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    known = [value for _, value in keep_finite(points)]
    if known:
        drawn = [value for _, value in keep_finite(kept)]
        assert (min(drawn), max(drawn)) == (min(known), max(known))
        assert (keep_finite(kept)[0], keep_finite(kept)[-1]) == (keep_finite(points)[0], keep_finite(points)[-1])


def test_stretch_of_nan_leaves_a_gap() -> None:
    values = [NAN if 400 <= step < 600 else 1.0 for step in range(5000)]
    kept = thin_points([(step, value) for step, value in enumerate(values)])
    assert any(math.isnan(value) for step, value in kept if 400 <= step < 600)
    assert not any(math.isnan(value) for step, value in kept if step > 700)


def test_smoothing_is_the_mean_of_a_window() -> None:
    points = [(step, math.sin(step * 12.9) + step / 300) for step in range(300)]
    smoothed = smooth_points(points, fraction=0.04)
    assert len(smoothed) == 300
    for index in (0, 1, 5, 6, 100, 293):
        reach = min(6, index)
        window = [value for _, value in points[index - reach : index + reach + 1]]
        assert smoothed[index] == pytest.approx((index, sum(window) / len(window)))
    assert smoothed[-1][1] == pytest.approx(sum(value for _, value in points[-7:]) / 7)


def test_smoothing_keeps_a_constant_and_skips_values_that_are_not_finite() -> None:
    points = [(step, NAN if step % 7 == 0 else INFINITY if step % 11 == 0 else 2.5) for step in range(5000)]
    smoothed = smooth_points(points)
    assert len(smoothed) == 1000
    assert all(value == pytest.approx(2.5) for _, value in smoothed)
    assert smooth_points([]) == [] and smooth_points([(3, 1.0)]) == [(3, 1.0)]


# ------------------------------------------------------------------------------------------------ axes


sensible = st.floats(-1e90, 1e90)


@given(sensible, sensible, st.booleans())
def test_linear_axis_covers_its_range(one: float, other: float, whole: bool) -> None:
    low, high = sorted((one, other))
    axis = build_linear_axis(low, high, whole)
    assert axis.low < axis.high
    assert 1 <= len(axis.ticks) <= 11
    assert list(axis.ticks) == sorted(set(axis.ticks))
    if high - low > 1e-6 * max(abs(low), abs(high)):
        assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in (low, high, *axis.ticks))


@given(st.floats(1e-90, 1e90), st.floats(1e-90, 1e90))
def test_log_axis_covers_its_range(one: float, other: float) -> None:
    low, high = sorted((one, other))
    axis = build_log_axis(low, high)
    assert 1 <= len(axis.ticks) <= 8
    assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in (low, high, *axis.ticks))
    assert not axis.shows(0.0) and not axis.shows(-1.0) and not axis.shows(NAN)


TICKS: list[tuple[float, float, list[float]]] = [
    (0, 600, [0, 200, 400, 600]),
    (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    (3, 3, [0, 1, 2, 3, 4]),
    (-2, 8, [-2, 0, 2, 4, 6, 8]),
]


@pytest.mark.parametrize(("low", "high", "ticks"), TICKS)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert build_linear_axis(low, high).ticks == pytest.approx(ticks)


# ------------------------------------------------------------------------------------------------ drawing


def places(drawn: str, kind: str) -> list[tuple[float, float]]:
    """Return the points of a path, in the drawing's own units."""
    found = re.search(rf'class="{kind}" d="([^"]*)"', drawn)
    assert found is not None
    numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", found[1].replace("h0", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_points_are_drawn_at_their_values() -> None:
    points = [(0, 4.0), (5, 1.0), (10, 0.0)]
    drawn = draw_chart(Chart("Loss", [ChartLine("training", points), ChartLine("evaluation", [(5, 2.0)], 2, "dots")]))
    assert places(drawn, "curve line c1") == [(0, 0), (500, 750), (1000, 1000)]
    assert places(drawn, "dot c2") == [(500, 500)]


def test_log_scale_is_a_second_plot_without_values_below_zero() -> None:
    drawn = draw_chart(Chart("Loss", [ChartLine("training", [(0, 100.0), (4, 0.0), (6, 10.0), (10, 1.0)])], log=True))
    linear, log = drawn.split('class="plot log"')
    assert len(places(linear, "curve line c1")) == 4
    assert places(log, "curve line c1") == [(0, 0), (600, 500), (1000, 1000)]
    assert 'type="checkbox"' in linear
    assert "checkbox" not in draw_chart(Chart("Loss", [ChartLine("training", [(0, -1.0)])], log=True))


def test_chart_without_points_is_empty() -> None:
    assert draw_chart(Chart("Loss", [])) == draw_chart(Chart("Loss", [ChartLine("training", [(1, NAN)])])) == ""


def test_overlapping_marks_are_placed_in_rows() -> None:
    line = ChartLine("training", [(0, 1.0), (100, 2.0)])
    drawn = draw_chart(Chart("Loss", [line], marks=[(50, "resumed"), (51, "stopped"), (100, "best"), (500, "outside")]))
    assert re.findall(r'class="flag( before)?" style="left:([\d.]+)%;top:(-?[\d.]+)rem">(\w+)', drawn) == [
        ("", "50.00", "-0.2", "resumed"),
        ("", "51.00", "0.9", "stopped"),
        (" before", "100.00", "-0.2", "best"),
    ]


# ------------------------------------------------------------------------------------------------ numbers


NUMBERS: list[tuple[Callable[..., str], list[tuple[float | None, str]]]] = [
    (format_number, [(0.0712345, "0.07123"), (2.1, "2.1"), (12345.6, "12,346"), (3e-5, "3e-5"), (0, "0"), (None, "–")]),
    (format_number, [(NAN, "NaN"), (-INFINITY, "-Infinity"), (1e12, "1e12"), (-0.25, "-0.25"), (99999.9, "100,000")]),
    (format_percent, [(0.9717, "97.2 %"), (1.0, "100.0 %"), (0, "0.0 %"), (NAN, "NaN"), (None, "–")]),
    (format_count, [(12384, "12,384"), (1_302_528, "1.3 M"), (7.24e9, "7.24 B"), (999_960, "1 M"), (0, "0")]),
    (format_tick, [(10_000, "10k"), (250_000, "250k"), (0.5, "0.5"), (2000, "2,000"), (0, "0")]),
    (format_flops, [(5.1e6, "5.1 MFLOPs"), (72.6e12, "72.6 TFLOPs"), (0, "0 FLOPs"), (12, "12 FLOPs")]),
    (format_bytes, [(0, "0 B"), (1536, "1.5 KiB"), (652e6, "621.8 MiB"), (2**40, "1 TiB"), (None, "–")]),
    (format_duration, [(0.26, "0.3 s"), (59, "59 s"), (102, "1 min 42 s"), (3 * 3600 + 125, "3 h 2 min")]),
    (format_duration, [(5 * 86400 + 7200, "5 d 2 h"), (None, "–"), (NAN, "NaN")]),
    (format_timestamp, [(0, "1970-01-01 00:00 UTC"), (None, "–"), (1e300, "–"), (NAN, "–")]),
]


@pytest.mark.parametrize(("show", "pairs"), NUMBERS, ids=lambda value: getattr(value, "__name__", ""))
def test_numbers_are_formatted(show: Callable[..., str], pairs: list[tuple[float | None, str]]) -> None:
    assert [show(value).replace("\xa0", " ") for value, _ in pairs] == [text for _, text in pairs]
