"""Write tables and a figure of the results of slow_network.py, from one file or several.

python benchmarks/slow_picture.py slow_network.json --page tables.md --picture docs/images/slow_networks.svg

If a method occurs several times, the last result counts. Losses are compared with those of DDP only after the same
number of steps. The load is the system's, before and after a method was measured, including its own two ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slow_network import figures_of

from cornstarch.report.charts import Axis, Point, build_linear_axis, build_log_axis, smooth_points
from cornstarch.report.html import Markup, build_element

DRAWN = (
    "ddp", "torch-powersgd", "int8", "int4", "sign", "topk", "randomk", "powersgd", "local", "diloco", "async",
    "gossip-now",
)  # fmt: skip
_COLOURS = (
    "#1b2733", "#8b98a5", "#b7791f", "#ca8a04", "#0f766e", "#7c3aed", "#a78bfa", "#c2410c", "#2563eb", "#15803d",
    "#db2777", "#0891b2",
)  # fmt: skip
_WIDTH, _HEIGHT = 1040, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 310, 56, 52
_SMOOTHED = 0.1  # fraction of the steps that a point of a curve averages
_LEAST = 0.5  # start of the time axis, in seconds


def ways_table(ways: Sequence[dict[str, Any]]) -> str:
    """Return the results of a network as Markdown."""
    ddp = next(one for one in ways if one["way"] == "ddp")
    plain = figures_of(ddp)
    lines = [
        "| | steps | ms per step: quickest block | median | mean of all | to DDP: quickest | median | mean | "
        "ms of CPU | MB a step and rank | counters to formula | held-out loss | to DDP | load |",
        f"|{'---|' * 14}",
    ]
    for one in ways:
        found = figures_of(one)
        ratio = found["bytes"] / found["formula"]
        times = ("step_ms", "median_ms", "mean_ms")
        ratios = [f"{plain[key] / found[key]:.1f} ×" for key in times]
        shown = " | ".join([f"{found[key]:.0f}" for key in times] + ratios)
        worse = f"{100 * (found['held_out'] / plain['held_out'] - 1):+.2f} %" if one["steps"] == ddp["steps"] else ""
        load = " – ".join(f"{value:.0f}" for value in one.get("load", ()))
        lines.append(
            f"| {one['words']} | {one['steps']} | {shown} | {found['cpu_ms']:.0f} | "
            f"{found['bytes'] / 1e6:.3f} | {ratio:.3f} | {found['held_out']:.4f} | {worse} | {load} |"
        )
    return "\n".join(lines)


def straggler_table(found: Sequence[dict[str, Any]]) -> str:
    """Return the straggler results as Markdown."""
    lines = ["| | steps per second | with a straggler | kept |", "|---|---|---|---|"]
    for one in found:
        kept = one["uneven"] / one["even"]
        lines.append(f"| {one['words']} | {one['even']:.2f} | {one['uneven']:.2f} | {100 * kept:.0f} % |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ the picture


def curve(way: dict[str, Any]) -> list[Point]:
    """Return the loss of all ranks against the elapsed seconds of the slowest."""
    seconds = [max(times) for times in zip(*way["moments"], strict=True)]
    losses = [sum(own) / len(own) for own in zip(*way["losses"], strict=True)]
    smoothed = smooth_points(list(enumerate(losses)), _SMOOTHED)
    return [(seconds[int(step)], loss) for step, loss in smoothed if seconds[int(step)] >= _LEAST]


def picture(ways: Sequence[dict[str, Any]], title: str) -> Markup:
    """Return loss against wall time as an SVG."""
    curves = {one["words"]: curve(one) for one in ways}
    points = [point for one in curves.values() for point in one]
    across = build_log_axis(_LEAST, max(seconds for seconds, _ in points))
    up = build_linear_axis(min(loss for _, loss in points), max(loss for _, loss in points), whole=True)
    named = zip(curves.items(), _COLOURS, strict=False)
    lines = [_line(points, across, up, colour) for (_, points), colour in named]
    described = f"{title}. " + " ".join(
        f"{name}: {points[-1][1]:.2f} after {points[-1][0]:.0f} s." for name, points in curves.items()
    )
    return build_element(
        "svg",
        build_element("title", described),
        build_element("rect", width=_WIDTH, height=_HEIGHT, fill="#ffffff"),
        build_element("text", title, x=_LEFT, y=28, class_="title"),
        build_element("style", Markup("text{font:14px system-ui,sans-serif;fill:#1b2733}.title{font-weight:600}")),
        _grid(across, up),
        lines,
        _legend(curves),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
    )


def _x(across: Axis, value: float) -> float:
    return round(_LEFT + across.place(value) * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(up: Axis, value: float) -> float:
    return round(_HEIGHT - _BOTTOM - up.place(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _line(points: Sequence[Point], across: Axis, up: Axis, colour: str) -> Markup:
    places = "L".join(f"{_x(across, seconds)} {_y(up, loss)}" for seconds, loss in points)
    last = points[-1]
    return Markup(
        build_element("path", d=f"M{places}", fill="none", stroke=colour, stroke_width="2.2", stroke_linejoin="round")
        + build_element("circle", cx=_x(across, last[0]), cy=_y(up, last[1]), r=4, fill=colour)
    )


def _grid(across: Axis, up: Axis) -> Iterator[Markup]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in up.ticks:
        yield build_element("path", d=f"M{_LEFT} {_y(up, tick)}H{right}", stroke="#d9dfe5")
        yield build_element("text", f"{tick:g}", x=_LEFT - 8, y=_y(up, tick) + 5, text_anchor="end")
    for tick in across.ticks:
        yield build_element("path", d=f"M{_x(across, tick)} {_TOP}V{bottom}", stroke="#eef1f4")
        yield build_element("text", f"{tick:g}", x=_x(across, tick), y=bottom + 20, text_anchor="middle")
    yield build_element("text", "seconds (logarithmic)", x=(_LEFT + right) / 2, y=_HEIGHT - 10, text_anchor="middle")
    yield build_element("text", "training loss", x=_LEFT, y=_TOP - 10)


def _legend(curves: dict[str, list[Point]]) -> Iterator[Markup]:
    left = _WIDTH - _RIGHT + 18
    for row, ((name, points), colour) in enumerate(zip(curves.items(), _COLOURS, strict=False)):
        middle = _TOP + 6 + 37 * row
        yield build_element("path", d=f"M{left} {middle}h18", stroke=colour, stroke_width="3")
        yield build_element("text", name, x=left + 26, y=middle + 5)
        yield build_element("text", f"{points[-1][0]:.0f} s", x=left + 26, y=middle + 22, fill_opacity="0.6")


# ------------------------------------------------------------------------------------------------ all of it


def merged(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the contents of several files, by part, network and method."""
    content: dict[str, dict[str, Any]] = {}
    for path in paths:
        for part, found in json.loads(path.read_text()).items():
            content.setdefault(part, {}).update(found)
    return content


def by_network(ways: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each network, in the order of slow_ways.py."""
    from slow_ways import WAYS

    order = list(WAYS)
    found: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(ways, key=lambda one: order.index(one["way"])):
        found.setdefault(one["rate"], []).append(one)
    return dict(sorted(found.items()))


def page(networks: dict[str, list[dict[str, Any]]], stragglers: Sequence[dict[str, Any]]) -> str:
    """Return all tables."""
    parts = []
    for rate, ways in networks.items():
        parts.append(f"{rate}, {ways[0]['ranks']} ranks, {ways[0]['numbers']:,} numbers")
        parts.append(ways_table(ways))
    if stragglers:
        parts.append(f"straggler: {stragglers[0]['ranks']} ranks, {stragglers[0]['pretended_ms']:g} ms a step")
        parts.append(straggler_table(stragglers))
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Print the tables and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured", type=Path, nargs="+", help="files written by slow_network.py --output")
    parser.add_argument("--page", type=Path, help="a Markdown file for the tables; default: print them")
    parser.add_argument("--picture", type=Path, help="an SVG of the slowest network")
    given = parser.parse_args()
    if missing := [str(path) for path in given.measured if not path.is_file()]:
        parser.error(f"there is no {' and no '.join(missing)}.")
    content = merged(given.measured)
    networks = by_network(content.get("ways", {}).values())
    if lacking := [rate for rate, ways in networks.items() if not any(one["way"] == "ddp" for one in ways)]:
        parser.error(f"{' and '.join(lacking)}: all is compared with ddp, which was not measured there.")
    text = page(networks, list(content.get("straggler", {}).values()))
    if given.page is None:
        print(text, end="")
    else:
        given.page.write_text(text, encoding="utf-8")
    if given.picture is not None:
        rate = min(networks, key=lambda rate: ("mbit" not in rate, rate))
        ways = [one for name in DRAWN for one in networks[rate] if one["way"] == name]
        steps, ranks = ways[0]["steps"], ways[0]["ranks"]
        title = f"{steps} steps of {ranks} ranks over {rate.replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')}"
        given.picture.write_text(picture(ways, title) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
