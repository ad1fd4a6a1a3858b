"""Position, step results and the final result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

Status = Literal["finished", "stopped"]


@dataclass
class Position:
    """The progress of a run; a checkpoint stores it beside weights and states."""

    step: int = 0
    """Optimizer steps done."""
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
    """Whether the run is complete."""


@dataclass(frozen=True)
class StepTotals:
    """The counts of a step, summed over all ranks."""

    trained_tokens: int
    tokens: int
    samples: int
    items: Mapping[str, int]
    """By modality."""
    broken: int
    too_long: int
    """Samples that were skipped."""
    stop: bool
    """Whether a rank received a stop signal."""
    flops: int = 0
    """FLOPs of forward and backward; 0 if they are not counted."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step."""

    step: int
    """Counted from 1."""
    loss: Tensor
    """The mean over all trained tokens of the step, on the device; with several ranks, this rank's summand of it."""
    learning_rate: float
    grad_norm: Tensor | None
    """Before clipping; None if gradients are not clipped."""
    totals: StepTotals
    waited: float = 0.0
    """Seconds that this rank waited for the batch."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    status: Status
    """finished, or stopped by a signal (the same call resumes)."""
    step: int
    evaluation: dict[str, Any] | None
    """The measures of the last evaluation."""
    exchanged: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By modality: the measures with its items shuffled between samples."""
    folder: Path = Path()
    report: Path | None = None
