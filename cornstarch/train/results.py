"""What a run says about itself: how far it is, what a step did, how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from cornstarch.parallel import processes
from cornstarch.train.data.loader import StepBatch

Status = Literal["finished", "stopped"]


@dataclass
class Position:
    """How far a run is; what a checkpoint says beside weights and states."""

    step: int = 0
    """Steps of the optimizer that are done."""
    epoch: int = 0
    batch: int = 0
    """The next batch of the epoch."""
    tokens: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Time spent training, over all starts."""
    broken: int = 0
    too_long: int = 0
    best: float | None = None
    best_step: int | None = None
    evaluations_without_improvement: int = 0
    ended: bool = False
    """Nothing is left to do."""


@dataclass(frozen=True)
class StepTotals:
    """What a step has in all processes together."""

    trained_tokens: int
    tokens: int
    samples: int
    items: Mapping[str, int]
    """By modality."""
    broken: int
    too_long: int
    """Samples that were left out."""
    stop: bool
    """Whether a process was told to end."""


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    step: int
    """Its number, counted from 1."""
    loss: Tensor
    """The mean over all trained tokens of the step, on the device; of several processes, this one's share of it."""
    learning_rate: float
    grad_norm: Tensor | None
    """Before clipping; None if nothing is clipped."""
    totals: StepTotals


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    status: Status
    """finished, or stopped by a signal (the same call goes on)."""
    step: int
    evaluation: dict[str, Any] | None
    """The measures of the last evaluation."""
    exchanged: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By modality: the measures with its items exchanged between samples."""
    folder: Path = Path()
    report: Path | None = None


def begin_totals(
    batch: StepBatch, modalities: Sequence[str], stop: bool, replica_size: int
) -> Callable[[], StepTotals]:
    """Begin to add up what a step has in all processes; return what waits for it.

    Args:
        batch: What this process has.
        modalities: Their names, the same in all processes.
        stop: Whether this process was told to end.
        replica_size: So many processes have, and count, the same.
    """
    items = [sum(portion.items.get(name, 0) for portion in batch.portions) for name in modalities]
    tokens = sum(portion.tokens for portion in batch.portions)
    too_long = sum(sample.too_long for sample in batch.skipped)
    broken = len(batch.skipped) - too_long
    sums = processes.begin_sum([batch.trained_tokens, tokens, batch.samples, broken, too_long, stop, *items])

    @cache
    def totals() -> StepTotals:
        # Rounded up: of the processes of a replica one alone may have been told to end.
        trained, tokens, samples, broken, too_long, stop, *counts = (-(-int(one) // replica_size) for one in sums())
        by_name = dict(zip(modalities, counts, strict=True))
        return StepTotals(trained, tokens, samples, by_name, broken, too_long, stop > 0)

    return totals
