"""Compiled layers in the report: layers of each part that are compiled or eager, and every recompilation."""

from __future__ import annotations

from typing import Any

from cornstarch.report import number_format as fmt
from cornstarch.report.html import Table, TableCell
from cornstarch.report.json_values import as_list, as_mapping, as_number, as_text
from cornstarch.report.run_record import RunRecord

_MAX_ROWS = 100


def build_compilation_view(run: RunRecord) -> dict[str, Any] | None:
    """Return the tables of compiled layers and of recompilations; None if the run compiles nothing."""
    found = as_mapping(run.summary.get("compilation"))
    parts = [as_mapping(part) for part in as_list(found.get("parts"))][:_MAX_ROWS]
    if not parts:
        return None
    rows: list[list[str | TableCell]] = []
    eager = 0.0
    for part in parts:
        variants = as_mapping(part.get("variants"))
        kinds = ", ".join(f"{name[:60]}: {fmt.format_count(as_number(count))}" for name, count in variants.items())
        counts = [as_number(part.get(name)) or 0 for name in ("compiled", "eager")]
        eager += counts[1]
        seconds = fmt.format_duration(as_number(part.get("seconds")))
        rows.append([as_text(part.get("part"))[:60], *map(fmt.format_count, counts), kinds or fmt.MISSING, seconds])
    again = [event for event in run.metrics.events if event.name == "recompiled"]
    lines = [[f"{event.step:,}", event.text[:500]] for event in again[-_MAX_ROWS:]]
    return {
        "lead": f"{fmt.pluralize(len(again), 'recompilation')} of layers on the first process.",
        "eager": f"{eager:,.0f} layers run eagerly: torch does not compile them." if eager else "",
        "table": Table(
            ["part", "compiled#", "eager#", "variants of each class", "compiling#"], rows, "Compiled layers"
        ),
        "again": Table(["step", "layer and the guard that failed"], lines, "Recompilations") if lines else None,
        "notes": [as_text(note)[:400] for note in as_list(found.get("notes"))][:_MAX_ROWS],
    }
