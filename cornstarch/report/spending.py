"""profile.json as data: where the time of a step goes, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from cornstarch.report.values import entries, mapping, number, text

PROFILE = "profile.json"
KINDS = ("attention", "matrix products")
REST = "rest"


@dataclass(frozen=True)
class Row:
    """What one thing takes of a mean step, in seconds."""

    name: str
    seconds: float
    forward: float | None = None
    """None: it has no forward and backward of its own."""
    backward: float | None = None
    kinds: Mapping[str, Row] = field(default_factory=dict)
    """What it is made of; empty if it is of one kind."""


@dataclass(frozen=True)
class RankSpending:
    """One process."""

    seconds: float
    """A mean step."""
    hidden: float
    """Communication that went on beside computing; in no row."""
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Spending:
    """Where the time goes."""

    steps: tuple[int, ...]
    device: str
    notes: tuple[str, ...]
    ranks: tuple[RankSpending, ...]

    @property
    def seconds(self) -> float:
        """A step, on average over processes."""
        return fmean(rank.seconds for rank in self.ranks)

    @property
    def hidden(self) -> float:
        """Communication that went on beside computing, on average over processes."""
        return fmean(rank.hidden for rank in self.ranks)

    def rows(self) -> list[Row]:
        """Return what things take on average over processes."""
        return [_mean([_of(rank, name) for rank in self.ranks]) for name in self._names()]

    def extremes(self, name: str) -> tuple[float, float]:
        """Return the least and the most that something takes in any process."""
        found = [_of(rank, name).seconds for rank in self.ranks]
        return min(found), max(found)

    def _names(self) -> list[str]:
        """Return the names of all rows: stages have different ones, in the same order."""
        names: list[str] = []
        for rank in self.ranks:
            at = 0
            for row in rank.rows:
                if row.name not in names:
                    names.insert(at, row.name)
                at = names.index(row.name) + 1
        return names

    def title(self) -> str:
        """Return what was measured, in words."""
        first, last = self.steps[0], self.steps[-1]
        which = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        several = f", mean of {len(self.ranks)} processes" if len(self.ranks) > 1 else ""
        return f"{which}, {milliseconds(self.seconds)} ms each on {self.device}{several}"


def milliseconds(seconds: float | None) -> str:
    """Return a time with as many digits as help."""
    if not seconds:
        return ""
    return f"{1e3 * seconds:,.{0 if seconds >= 0.9995 else 1 if seconds >= 0.00995 else 2}f}"


def _of(rank: RankSpending, name: str) -> Row:
    return next((row for row in rank.rows if row.name == name), Row(name, 0.0))


def _mean(rows: Sequence[Row]) -> Row:
    phases = [row.forward is not None or row.backward is not None for row in rows]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.kinds))
    return Row(
        rows[0].name,
        fmean(row.seconds for row in rows),
        fmean(row.forward or 0.0 for row in rows) if any(phases) else None,
        fmean(row.backward or 0.0 for row in rows) if any(phases) else None,
        {kind: _mean([row.kinds.get(kind, Row(kind, 0.0)) for row in rows]) for kind in kinds},
    )


# ------------------------------------------------------------------------------------------------ reading


def read_spending(data: Mapping[str, Any]) -> Spending:
    """Read what profile.json holds; raise ValueError if it is something else."""
    ranks = tuple(_rank(mapping(rank)) for rank in entries(data.get("ranks")))
    steps = tuple(int(_seconds(step)) for step in entries(data.get("steps")))
    if not ranks or not steps:
        raise ValueError("it has no ranks, or no steps")
    notes = tuple(text(note) for note in entries(data.get("notes")))
    return Spending(steps, text(data.get("device")), notes, ranks)


def _rank(rank: Mapping[str, Any]) -> RankSpending:
    rows = tuple(_row(mapping(row)) for row in entries(rank.get("rows")))
    return RankSpending(_seconds(rank.get("seconds")), _seconds(rank.get("hidden_communication", 0.0)), rows)


def _row(row: Mapping[str, Any]) -> Row:
    forward, backward = (number(row.get(phase)) for phase in ("forward", "backward"))
    found = Row(text(row.get("name")), _seconds(row.get("seconds")), forward, backward)
    kinds = {kind: _kind(kind, mapping(row[kind])) for kind in KINDS if kind in row}
    if KINDS[0] not in kinds:  # a projector is all products
        return found
    known = kinds.values()
    kinds[REST] = Row(
        REST,
        max(found.seconds - sum(one.seconds for one in known), 0.0),
        max((forward or 0.0) - sum(one.forward or 0.0 for one in known), 0.0),
        max((backward or 0.0) - sum(one.backward or 0.0 for one in known), 0.0),
    )
    return Row(found.name, found.seconds, forward, backward, kinds)


def _kind(kind: str, phases: Mapping[str, Any]) -> Row:
    forward, backward = (number(phases.get(phase)) or 0.0 for phase in ("forward", "backward"))
    return Row(kind, forward + backward, forward, backward)


def _seconds(value: object) -> float:
    known = number(value)
    if known is None or not 0 <= known < float("inf"):
        raise ValueError(f"{value!r} is no time")
    return known


def hidden_note(read: Spending) -> str:
    """Return what is said of communication that costs no time; nothing if there was none."""
    if read.hidden < 1e-5:
        return ""
    return f"Beside computing: {milliseconds(read.hidden)} ms of communication, in no row."


__all__ = ["PROFILE", "RankSpending", "Row", "Spending", "hidden_note", "milliseconds", "read_spending"]
