"""Failures and restarts of a run, from `restarts.jsonl` in its folder, as data and as a section of the report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cornstarch.report import number_format as fmt
from cornstarch.report.html import Table, TableCell
from cornstarch.report.json_values import as_mapping, as_number, as_text

RESTARTS = "restarts.jsonl"
_MAX_BYTES = 4_000_000
_MAX_SHOWN = 100


@dataclass(frozen=True)
class RestartLine:
    """A line of restarts.jsonl; what is missing or damaged is None."""

    kind: str
    """failure, restart, resized or end."""
    attempt: int | None
    time: float | None
    step: int | None
    ranks: int | None
    cause: str
    message: str
    lost_steps: float | None
    lost_seconds: float | None
    down_seconds: float | None


def read_restarts(folder: Path) -> list[RestartLine]:
    """Return the lines; none if there is no such file. Lines that cannot be read are left out."""
    try:
        with open(folder / RESTARTS, "rb") as file:
            content = file.read(_MAX_BYTES)
    except OSError:
        return []
    lines = []
    for line in content.splitlines():
        try:
            found = as_mapping(json.loads(line))
        except (ValueError, RecursionError):
            continue
        if not found:
            continue
        whole = {key: as_number(found.get(key)) for key in ("attempt", "step", "ranks")}
        counts = {key: None if one is None or abs(one) > 2**53 else int(one) for key, one in whole.items()}
        figures = {key: as_number(found.get(key)) for key in ("time", "lost_steps", "lost_seconds", "down_seconds")}
        kind, cause, message = (as_text(found.get(key)) for key in ("kind", "cause", "message"))
        lines.append(RestartLine(kind=kind, cause=cause, message=message, **counts, **figures))  # type: ignore[arg-type]
    return lines


def build_restarts_view(folder: Path) -> dict[str, Any] | None:
    """Return the section about failures and restarts; None if nothing has failed."""
    lines = read_restarts(folder)
    failures, restarts = ([line for line in lines if line.kind == kind] for kind in ("failure", "restart"))
    if not lines:
        return None
    lost_steps = sum(one.lost_steps or 0 for one in restarts)
    lost_seconds = sum(one.lost_seconds or 0 for one in restarts)
    lead = f"{fmt.pluralize(len(failures), 'failure')}, {fmt.pluralize(len(restarts), 'restart')}"
    if restarts:
        lead += f"; {fmt.pluralize(int(lost_steps), 'step')} and {fmt.format_duration(lost_seconds)} were lost"
    rows: list[list[str | TableCell]] = []
    for line in lines[-_MAX_SHOWN:]:
        css = {"failure": "bad", "restart": "good", "end": "bad"}.get(line.kind, "warn")
        size = f"goes on with {fmt.pluralize(line.ranks, 'process', 'processes')}" if line.ranks else ""
        text = line.cause[:300] or size
        note = line.message.strip().splitlines()[-1][:300] if line.message.strip() else ""
        rows.append([
            TableCell(line.kind[:40], "span", f"pill {css}"),
            fmt.MISSING if line.step is None else f"{line.step:,}",
            TableCell(text, "span", "text", note=note),
            fmt.format_count(line.lost_steps) if line.lost_steps is not None else "",
            fmt.format_duration(line.lost_seconds) if line.lost_seconds is not None else "",
            fmt.format_timestamp(line.time),
        ])  # fmt: skip
    columns = ["what", "step#", "why", "lost steps#", "lost time#", "time"]
    return {"lead": f"{lead}.", "table": Table(columns, rows, "Failures and restarts")}
