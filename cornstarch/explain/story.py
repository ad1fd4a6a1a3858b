"""An explanation as data: steps, each with a sentence, a diagram and the bytes that ranks send in it. No torch.

Diagrams are plain boxes in rows, so that one renderer for terminals (`terminal`) and one for pages (`page`) can draw
every topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cornstarch.errors import ConfigError
from cornstarch.report.number_format import format_bytes

Tone = Literal["c1", "c2", "c3", "c4", "c5", "c6", "n", "f", "b", "i", "w"]
"""The colour of a box, by its CSS class (`report/templates/style.css`): c1 to c6 are series, n is neutral, the others
are the kinds of pipeline actions."""

SERIES: tuple[Tone, ...] = ("c1", "c2", "c3", "c4", "c5", "c6")
NUMBER_BYTES = 4  # float32


@dataclass(frozen=True)
class DiagramBox:
    """A piece of data on a rank, or an action of it."""

    start: float
    end: float
    """Its place in the row, in any unit."""
    text: str
    tone: Tone = "n"
    tooltip: str = ""
    fresh: bool = False
    """Whether it is new in this step."""


@dataclass(frozen=True)
class DiagramRow:
    """One rank."""

    name: str
    boxes: Sequence[DiagramBox]
    beside: str = ""
    """A short note on this rank in this step."""


@dataclass(frozen=True)
class Arrow:
    """A message from one row to another, at a place in units of the boxes."""

    source: int
    target: int
    at: float


@dataclass(frozen=True)
class StoryStep:
    """One step: what happens and why, and the state after it."""

    title: str
    description: str
    rows: Sequence[DiagramRow]
    head: Sequence[DiagramBox] = ()
    """The column headers."""
    sent: Sequence[float] = ()
    """Bytes that each rank sends in this step; empty: none."""
    arrows: Sequence[Arrow] = ()
    text: str = ""
    """The diagram for a terminal; empty: the table of the boxes."""


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
    """The sum over the steps."""

    @classmethod
    def of_bytes(cls, name: str, symbols: str, numbers: str, result: float, counted: Sequence[float]) -> Formula:
        """Return a formula for bytes; those counted on each rank become one figure, or the least and the most."""
        return cls(name, symbols, numbers, format_byte_count(result), format_range(counted))


@dataclass(frozen=True)
class Story:
    """Everything about one topic."""

    topic: str
    title: str
    lead: str
    """What the technique is for, in a sentence or two."""
    steps: Sequence[StoryStep]
    formulas: Sequence[Formula]
    remarks: Sequence[str]
    legend: Sequence[tuple[Tone, str]] = ()
    """What the colours mean."""

    @property
    def sent(self) -> tuple[float, ...]:
        """The bytes that each rank has sent after the last step."""
        return sum_sent(self.steps)


def sum_sent(steps: Sequence[StoryStep]) -> tuple[float, ...]:
    """Return the bytes that each rank sends in all these steps together."""
    ranks = range(len(steps[0].rows))
    return tuple(float(sum(step.sent[rank] for step in steps if step.sent)) for rank in ranks)


def check_divisible(elements: int, pieces: int, reason: str) -> None:
    """Raise ConfigError with the numbers near to `elements` if it cannot be cut into equal pieces."""
    if elements % pieces or elements < pieces:
        near = max(1, elements // pieces) * pieces
        raise ConfigError(f"--elements {elements}: {reason}. Use {near} or {near + pieces}.")


def build_head(names: Sequence[object]) -> list[DiagramBox]:
    """Return column headers of one unit each."""
    return [DiagramBox(at, at + 1, str(name)) for at, name in enumerate(names)]


def format_byte_count(count: float) -> str:
    """Return a number of bytes: exact while it is short, else with a unit."""
    return f"{count:,.10g} B" if count < 10_000 else format_bytes(count).replace("\u00a0", " ")


def format_range(values: Sequence[float]) -> str:
    """Return the bytes of all ranks as one figure, or the least and the most."""
    low, high = min(values), max(values)
    return format_byte_count(low) if high - low < 0.5 else f"{format_byte_count(low)} to {format_byte_count(high)}"


def describe_sent(sent: Sequence[float]) -> str:
    """Return how much each rank sends in a step; "" if none sends anything."""
    if not any(sent):
        return ""
    if len({*sent}) == 1:
        return f"Sent in this step: {format_byte_count(sent[0])} by every rank."
    each = ", ".join(f"{format_byte_count(count)} by rank {rank}" for rank, count in enumerate(sent) if count)
    return f"Sent in this step: {each}."
