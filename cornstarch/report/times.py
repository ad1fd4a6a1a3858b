"""Where the time of a step goes, as a section of the page."""

from __future__ import annotations

from cornstarch.report import figures
from cornstarch.report.markup import Markup, element, join
from cornstarch.report.overview import bar
from cornstarch.report.reading import Run
from cornstarch.report.sections import table
from cornstarch.report.spending import Row, hidden_note, milliseconds


def times(run: Run) -> Markup | None:
    """Return the section; None if the run was not profiled."""
    read = run.spending
    if read is None:
        return None
    several = len(read.ranks) > 1
    columns = ["part", "forward, ms#", "backward, ms#", "total, ms#", "share#", *(["least#", "most#"] * several)]
    body: list[list[str]] = []
    for row in read.rows():
        extremes = [milliseconds(one) or "0" for one in read.extremes(row.name)] if several else []
        body.append([row.name[:60], *_cells(row, read.seconds), *extremes])
        for kind in row.kinds.values():
            body.append([element("small", kind.name), *_cells(kind, None), *([""] * 2 * several)])
    foot = ["a step", "", "", milliseconds(read.seconds), "", *([""] * 2 * several)]
    title = read.title()
    return join(
        element("p", f"{title[0].upper()}{title[1:]}.", class_="lead"),
        table(columns, body, "Where the time goes", foot),
        [element("p", note[:400], class_="note") for note in (*read.notes, hidden_note(read)) if note],
    )


def _cells(row: Row, step: float | None) -> list[str]:
    shown = [milliseconds(one) for one in (row.forward, row.backward, row.seconds)]
    if not step:
        return [*shown, ""]
    share = row.seconds / step
    return [*shown, join(figures.percent(share), bar(share))]
