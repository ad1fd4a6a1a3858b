"""An explanation as data: steps, each with a sentence, a picture and the bytes that ranks send in it; no torch.

What is drawn is plain boxes in rows, so that one way of drawing does for a terminal (`terminal`) and one for a page
(`drawing`), whatever is explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["c1", "c2", "c3", "c4", "c5", "c6", "n", "f", "b", "i", "w"]
"""The colour of a box, by the name of its class on a page (`cornstarch.report.style`): c1 to c6 are series, n is
nothing of note, the others are what a place of a pipeline does."""

SERIES: tuple[Tone, ...] = ("c1", "c2", "c3", "c4", "c5", "c6")

NUMBER_BYTES = 4
"""Bytes of a number: float32."""


@dataclass(frozen=True)
class Box:
    """A piece of something that a rank holds, or something that it does."""

    start: float
    end: float
    """Where it stands in its row, in any unit."""
    text: str
    tone: Tone = "n"
    said: str = ""
    """What it is, in words."""
    fresh: bool = False
    """Whether this step has brought it."""


@dataclass(frozen=True)
class Row:
    """One rank."""

    name: str
    boxes: tuple[Box, ...]
    beside: str = ""
    """What this rank does in the step, or holds: a few words."""


@dataclass(frozen=True)
class Arrow:
    """A message from one row to another, in the column at which it stands."""

    source: int
    target: int
    at: float


@dataclass(frozen=True)
class Step:
    """One step: what happens and why, and how things stand after it."""

    title: str
    says: str
    rows: tuple[Row, ...]
    head: tuple[Box, ...] = ()
    """What stands over the columns."""
    sent: tuple[float, ...] = ()
    """Bytes that each rank sends in this step; empty: none."""
    arrows: tuple[Arrow, ...] = ()
    text: str = ""
    """The picture for a terminal, where it is not the table of the boxes."""


@dataclass(frozen=True)
class Formula:
    """A figure by its formula, beside the same figure counted step by step."""

    name: str
    symbols: str
    """2 (N − 1) / N × size"""
    numbers: str
    """2 × 3 / 4 × 32 B"""
    result: str
    counted: str
    """What the steps come to."""


@dataclass(frozen=True)
class Story:
    """Everything about one topic."""

    topic: str
    title: str
    lead: str
    """What it is for, in a sentence or two."""
    steps: tuple[Step, ...]
    formulas: tuple[Formula, ...] = ()
    remarks: tuple[str, ...] = ()
    """What else is to be known."""
    legend: tuple[tuple[Tone, str], ...] = ()
    """What the colours mean."""

    @property
    def sent(self) -> tuple[float, ...]:
        """The bytes that each rank has sent after the last step."""
        ranks = len(self.steps[0].rows)
        return tuple(sum(step.sent[rank] for step in self.steps if step.sent) for rank in range(ranks))


def byte_count(count: float) -> str:
    """Return a number of bytes: exact while it is short, else with a unit."""
    from cornstarch.report.figures import size

    return f"{count:,.10g} B" if count < 10_000 else size(count).replace("\u00a0", " ")


def sent_words(sent: tuple[float, ...]) -> str:
    """Say who sends how much in a step; nothing where nobody does."""
    if not any(sent):
        return ""
    if len({*sent}) == 1:
        return f"Sent in this step: {byte_count(sent[0])} by every rank."
    each = ", ".join(f"{byte_count(count)} by rank {rank}" for rank, count in enumerate(sent) if count)
    return f"Sent in this step: {each}."


def same_or_range(values: tuple[float, ...]) -> str:
    """Return the bytes of all ranks as one figure, or the least and the most."""
    low, high = min(values), max(values)
    return byte_count(low) if high - low < 0.5 else f"{byte_count(low)} to {byte_count(high)}"
