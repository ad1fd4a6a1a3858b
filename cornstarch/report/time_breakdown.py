"""profile.json as data: the time of a step by module and kind of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from cornstarch.report.json_values import as_finite, as_list, as_mapping, as_number, as_text

PROFILE = "profile.json"
_KINDS = ("attention", "matrix products")
_REST = "rest"


@dataclass(frozen=True)
class BreakdownRow:
    """The time of one module or kind of work in a mean step, in seconds."""

    name: str
    seconds: float
    forward: float | None = None
    """None: there is no forward and backward of its own."""
    backward: float | None = None
    kinds: Mapping[str, BreakdownRow] = field(default_factory=dict)
    """The time by kind of work; empty if there is only one."""

    def format_phases(self) -> list[str]:
        """Return the times of forward, backward and both, in milliseconds."""
        return [format_milliseconds(one) for one in (self.forward, self.backward, self.seconds)]


@dataclass(frozen=True)
class RankBreakdown:
    """The breakdown of one process."""

    seconds: float
    """The length of a mean step."""
    hidden: float
    """Communication that overlapped with computation; in no row."""
    rows: tuple[BreakdownRow, ...]


@dataclass(frozen=True)
class ProfileBreakdown:
    """The breakdown of all processes."""

    steps: tuple[int, ...]
    device: str
    notes: tuple[str, ...]
    ranks: tuple[RankBreakdown, ...]

    @property
    def seconds(self) -> float:
        """The length of a step, averaged over processes."""
        return fmean(rank.seconds for rank in self.ranks)

    def rows(self) -> list[BreakdownRow]:
        """Return the rows, averaged over processes; processes of different stages have different rows."""
        names: list[str] = []
        for rank in self.ranks:
            at = 0
            for row in rank.rows:
                # A row of some stages only goes after its predecessor, so that all orders are kept.
                if row.name not in names:
                    names.insert(at, row.name)
                at = names.index(row.name) + 1
        return [_average_rows([_find_row(rank, name) for rank in self.ranks]) for name in names]

    def extremes(self, name: str) -> tuple[float, float]:
        """Return the shortest and the longest time of a row in any process."""
        times = [_find_row(rank, name).seconds for rank in self.ranks]
        return min(times), max(times)

    def title(self) -> str:
        """Describe which steps were measured, and how long they took."""
        first, last = self.steps[0], self.steps[-1]
        which = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        several = f", mean of {len(self.ranks)} processes" if len(self.ranks) > 1 else ""
        return f"{which}, {format_milliseconds(self.seconds)} ms each on {self.device}{several}"


def format_milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds, with more decimals for shorter times; "" for none."""
    if not seconds:
        return ""
    return f"{1e3 * seconds:,.{0 if seconds >= 0.9995 else 1 if seconds >= 0.00995 else 2}f}"


def _find_row(rank: RankBreakdown, name: str) -> BreakdownRow:
    return next((row for row in rank.rows if row.name == name), BreakdownRow(name, 0.0))


def _average_rows(rows: Sequence[BreakdownRow]) -> BreakdownRow:
    phases = [row.forward is not None or row.backward is not None for row in rows]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.kinds))
    return BreakdownRow(
        rows[0].name,
        fmean(row.seconds for row in rows),
        fmean(row.forward or 0.0 for row in rows) if any(phases) else None,
        fmean(row.backward or 0.0 for row in rows) if any(phases) else None,
        {kind: _average_rows([row.kinds.get(kind, BreakdownRow(kind, 0.0)) for row in rows]) for kind in kinds},
    )


def read_time_breakdown(data: Mapping[str, Any]) -> ProfileBreakdown:
    """Read the content of profile.json; raise ValueError if it is malformed."""
    ranks = []
    for rank in map(as_mapping, as_list(data.get("ranks"))):
        rows = tuple(_read_row(as_mapping(row)) for row in as_list(rank.get("rows")))
        hidden = _read_seconds(rank.get("hidden_communication", 0.0))
        ranks.append(RankBreakdown(_read_seconds(rank.get("seconds")), hidden, rows))
    steps = tuple(int(_read_seconds(step)) for step in as_list(data.get("steps")))
    if not ranks or not steps:
        raise ValueError("the file has no ranks or no steps")
    notes = [text for note in as_list(data.get("notes")) if (text := as_text(note))]
    hidden = fmean(rank.hidden for rank in ranks)
    if hidden >= 1e-5:
        notes.append(f"Beside computing: {format_milliseconds(hidden)} ms of communication, in no row.")
    return ProfileBreakdown(steps, as_text(data.get("device")), tuple(notes), tuple(ranks))


def _read_row(row: Mapping[str, Any]) -> BreakdownRow:
    forward, backward = (as_number(row.get(phase)) for phase in ("forward", "backward"))
    kinds = {}
    for kind in _KINDS:
        if kind in row:
            there, back = (as_number(as_mapping(row[kind]).get(phase)) or 0.0 for phase in ("forward", "backward"))
            kinds[kind] = BreakdownRow(kind, there + back, there, back)
    found = BreakdownRow(as_text(row.get("name")), _read_seconds(row.get("seconds")), forward, backward)
    if _KINDS[0] not in kinds:  # a projector has matrix products only
        return found
    known = kinds.values()
    kinds[_REST] = BreakdownRow(
        _REST,
        max(found.seconds - sum(one.seconds for one in known), 0.0),
        max((forward or 0.0) - sum(one.forward or 0.0 for one in known), 0.0),
        max((backward or 0.0) - sum(one.backward or 0.0 for one in known), 0.0),
    )
    return replace(found, kinds=kinds)


def _read_seconds(value: object) -> float:
    seconds = as_finite(value)
    if seconds < 0:
        raise ValueError(f"{value!r} is not a time")
    return seconds
