"""Draw a layout, or the first replica of a large one: a table for a terminal, and a self-contained SVG; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import chain
from textwrap import wrap

from cornstarch.plan.layout import Layout, columns
from cornstarch.plan.rank_order import Span

MOST_ROWS = 64
MOST_NODES = 48
CELLS_IN_A_LINE = 8
LETTERS_IN_A_LINE = 112

Range = tuple[int, int]
"""First and last."""


@dataclass(frozen=True)
class RankRow:
    """Consecutive ranks with the same modules."""

    ranks: Range
    modules: tuple[str, ...]
    stage: Range
    dp: Range
    cp: Range
    tp: Range


def as_text(layout: Layout) -> str:
    """Return the sizes, the modules of every rank, and warnings, as text."""
    shown = count_shown_replicas(layout)
    cells: list[tuple[str, ...]] = [("node", "ranks", "module", "stage", "dp", "cp", "tp")]
    last = None
    for row in rows(layout, shown):
        nodes = _format_range((layout.node(row.ranks[0]), layout.node(row.ranks[1])))
        numbers = [_format_range(axis) for axis in (row.stage, row.dp, row.cp, row.tp)]
        cells.append((nodes if nodes != last else "", _format_range(row.ranks), format_modules(row.modules), *numbers))
        last = nodes
    parts = [layout.describe(), "\n".join([*columns(cells), *_describe_hidden(layout, shown)])]
    parts += [f"warning: {warning}" for warning in layout.warnings]
    if reasons := layout.unexecutable():
        parts.append("\n- ".join(["This layout can be planned, but not run yet:", *reasons]))
    return "\n\n".join(parts)


def format_modules(modules: tuple[str, ...]) -> str:
    """Return the names of modules, or their number where there are many."""
    return " + ".join(modules) if len(modules) <= 4 else f"all {len(modules)} modules"


def count_shown_replicas(layout: Layout) -> int:
    """Return how many replicas are drawn: all, or those that fit into the first node, but at least one."""
    spans = layout.placement.spans
    whole = sum(layout.dp * span.stages * span.cp * -(-span.tp // layout.ranks_per_node) for span in spans)
    if whole <= MOST_ROWS or (len(spans) == 1 and spans[0].ranks == 1 and layout.nodes <= MOST_ROWS):
        return layout.dp
    return min(layout.dp, max(1, layout.ranks_per_node // layout.placement.replica))


def _describe_hidden(layout: Layout, shown: int) -> Iterator[str]:
    if shown == layout.dp:
        return
    replica, together = layout.placement.replica, layout.placement.together
    first = "the first is" if shown == 1 else f"the first {shown} are"
    yield f"… × {layout.dp:,} replicas, of which {first} shown."
    if together == 1:
        yield f"Each stands {replica:,} ranks after the one before it."
    else:
        many = f"{together:,} replicas stand" if together < layout.dp else "All replicas stand"
        yield f"{many} together ({together * replica:,} ranks): each module of all of them, then the next module."


def _format_range(span: Range) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]}–{span[1]}"


def rows(layout: Layout, replicas: int) -> list[RankRow]:
    """Return the ranks of the first replicas: by tp group and node, or coarser where that is too long."""
    found: list[RankRow] = []
    for fine in (_rows_by_group, _rows_by_stage, partial(_rows_by_stage, merged=True)):
        every = chain.from_iterable(fine(layout, span, replicas) for span in layout.placement.spans)
        found = sorted(every, key=lambda row: row.ranks)
        if len(found) <= MOST_ROWS:
            break
    return found


def _rows_by_group(layout: Layout, span: Span, replicas: int) -> Iterator[RankRow]:
    """Yield a row for each tp group, cut at the end of a node; replicas of one rank are merged within a node."""
    every = layout.ranks_per_node
    if span.ranks == 1:
        starts, low = layout.placement.starts(span)[:replicas].tolist(), 0
        for dp in range(1, replicas + 1):
            follows = dp < replicas and starts[dp] == starts[dp - 1] + 1
            if not (follows and starts[dp] % every):
                yield RankRow((starts[low], starts[dp - 1]), span.modules, (0, 0), (low, dp - 1), (0, 0), (0, 0))
                low = dp
        return
    for dp in range(replicas):
        start = layout.placement.start(span, dp)
        for group in range(span.stages * span.cp):
            stage, cp = divmod(group, span.cp)
            first = start + group * span.tp
            low, last = first, first + span.tp - 1
            while low <= last:
                high = min(last, (low // every + 1) * every - 1)  # the end of the node
                tp = (low - first, high - first)
                yield RankRow((low, high), span.modules_at(stage), (stage, stage), (dp, dp), (cp, cp), tp)
                low = high + 1


def _rows_by_stage(layout: Layout, span: Span, replicas: int, merged: bool = False) -> Iterator[RankRow]:
    """Yield a row for each stage; merged: stages with the same modules become one row."""
    last = span.stages - 1
    runs = [(stage, stage) for stage in range(span.stages)]
    if merged:
        runs = [(0, 0), (1, last)] if span.first and last else [(0, last)]
    for dp in range(replicas):
        start = layout.placement.start(span, dp)
        for low, high in runs:
            ranks = (start + low * span.stage_ranks, start + (high + 1) * span.stage_ranks - 1)
            yield RankRow(ranks, span.modules_at(low), (low, high), (dp, dp), (0, span.cp - 1), (0, span.tp - 1))


_CELL, _GAP, _MARGIN, _TITLE = 46, 14, 24, 22
_COLOURS = ["#0f857c", "#cc5a14", "#5b57d1", "#b83280", "#68750f", "#1f74b8", "#8a5300", "#15703d"]
_STYLE = """
svg { background: #ffffff; font-family: system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }
text { fill: #17212b; font-size: 12px; } .head { font-size: 17px; font-weight: 600; } .soft { fill: #55626f; }
.cell text { fill: #ffffff; text-anchor: middle; } .number { font-size: 13px; font-weight: 600; }
.where { font-size: 9.5px; } .node { fill: #eef1f3; stroke: #d5dce1; } .group { fill: none; stroke: #17212b;
stroke-width: 1.6; } .warn { fill: #8a5300; }
@media (prefers-color-scheme: dark) { svg { background: #0f1418; } text { fill: #e4eaef; } .soft { fill: #9eacb8; }
.node { fill: #171e24; stroke: #2a343d; } .group { stroke: #e4eaef; } .warn { fill: #f2b84b; } }
"""


def as_svg(layout: Layout) -> str:
    """Return an SVG: a panel for each node, a cell for each rank, coloured by module, with frames around tp groups."""
    shown = count_shown_replicas(layout)
    touched = [range(layout.node(row.ranks[0]), layout.node(row.ranks[1]) + 1) for row in rows(layout, shown)]
    nodes = sorted({*chain(*touched)}) if shown < layout.dp else list(range(layout.nodes))
    drawn = nodes[:MOST_NODES]
    wide = min(layout.ranks_per_node, CELLS_IN_A_LINE, layout.world)
    high = -(-min(layout.ranks_per_node, layout.world) // wide)
    panel = (wide * _CELL + 2 * _GAP, high * _CELL + _GAP + _TITLE + 4)
    in_a_line = max(1, 1000 // (panel[0] + _GAP))

    parts, top = _draw_heading(layout, len(nodes) - len(drawn), shown)
    for index, node in enumerate(drawn):
        line, column = divmod(index, in_a_line)
        x, y = _MARGIN + column * (panel[0] + _GAP), top + line * (panel[1] + _GAP)
        parts.append(f'<rect class="node" x="{x}" y="{y}" width="{panel[0]}" height="{panel[1]}" rx="8"/>')
        parts.append(f'<text class="soft" x="{x + _GAP}" y="{y + 19}">node {node:,}</text>')
        first = node * layout.ranks_per_node
        for rank in range(first, min(first + layout.ranks_per_node, layout.world)):
            line, column = divmod(rank - first, wide)
            parts += _draw_cell(layout, rank, x + _GAP + column * _CELL, y + _GAP + _TITLE - 4 + line * _CELL)
    width = max(2 * _MARGIN + min(in_a_line, len(drawn)) * (panel[0] + _GAP) - _GAP, 720)
    height = top + -(-len(drawn) // in_a_line) * (panel[1] + _GAP) + _MARGIN - _GAP
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    title = f"<title>{_escape(layout.describe().splitlines()[0])}</title>"
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', title, f"<style>{_STYLE}</style>"]
    return "\n".join([*head, *parts, "</svg>\n"])


def _draw_heading(layout: Layout, left_out: int, shown: int) -> tuple[list[str], int]:
    """Return title, legend and notes, and the y position of the panels."""
    y = _MARGIN + 12
    parts = [f'<text class="head" x="{_MARGIN}" y="{y}">{_escape(layout.describe().splitlines()[0])}</text>']
    for index, span in enumerate(layout.placement.spans):
        y += 22
        sizes = " × ".join([f"{span.stages} stages", f"dp {layout.dp:,}", f"cp {span.cp}", f"tp {span.tp}"])
        inside = f", with {format_modules(span.first)} in the first" if span.first and span.stages > 1 else ""
        words = f"{format_modules(span.modules_at(span.stages - 1))}: "
        words += f"{sizes}{inside}" if span.stages > 1 else sizes.partition(" × ")[2]
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(f'<rect x="{_MARGIN}" y="{y - 11}" width="13" height="13" rx="3" fill="{colour}"/>')
        parts.append(f'<text x="{_MARGIN + 20}" y="{y}">{_escape(words)}</text>')
    notes = ["In each cell: the rank; s stage, d replica, c cp rank, t tp rank. Frames: tp groups."]
    notes += list(_describe_hidden(layout, shown))
    notes += [f"{left_out:,} more nodes are not drawn."] if left_out else []
    for kind, text in [*(("soft", note) for note in notes), *(("warn", warning) for warning in layout.warnings)]:
        for line in wrap(text, LETTERS_IN_A_LINE):
            y += 18
            parts.append(f'<text class="{kind}" x="{_MARGIN}" y="{y}">{_escape(line)}</text>')
    return parts, y + 16


def _draw_cell(layout: Layout, rank: int, x: int, y: int) -> Iterator[str]:
    span, _, _ = layout.placement.locate(rank)
    place = layout.place(rank)
    colour = _COLOURS[layout.placement.spans.index(span) % len(_COLOURS)]
    size, middle = _CELL - 4, x + _CELL // 2 - 2
    upper = f"s{place.stage} d{place.dp}" if span.stages > 1 else f"d{place.dp}"
    lower = " ".join([f"c{place.cp}"] * (span.cp > 1) + [f"t{place.tp}"] * (span.tp > 1))
    yield '<g class="cell">'
    yield f"<title>{_escape(f'rank {rank}: {format_modules(place.modules)}')}, stage {place.stage}, dp {place.dp}, "
    yield f"cp {place.cp}, tp {place.tp}</title>"
    yield f'<rect x="{x}" y="{y}" width="{size}" height="{size}" rx="5" fill="{colour}"/>'
    large = "number" if rank < 100_000 else "where"
    yield f'<text class="{large}" x="{middle}" y="{y + 16}">{rank}</text>'
    yield f'<text class="where" x="{middle}" y="{y + 27}">{upper}</text>'
    yield f'<text class="where" x="{middle}" y="{y + 37}">{lower}</text></g>'
    if span.tp > 1:  # the frame of the tp group along this cell: above and below, and at the ends
        left, right, top, bottom = x - 2, x + _CELL - 2, y - 2, y + _CELL - 2
        path = f"M{left} {top}H{right}M{left} {bottom}H{right}"
        path += f"M{left} {top}V{bottom}" if place.tp == 0 else ""
        path += f"M{right} {top}V{bottom}" if place.tp == span.tp - 1 else ""
        yield f'<path class="group" d="{path}"/>'


def _escape(text: str) -> str:
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in text))
