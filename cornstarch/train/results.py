"""What a run says about itself: how far it is, what a step did, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

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
    flops: int = 0
    """What the model multiplies for it, forward and backward; 0 if that is not counted."""


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
    waited: float = 0.0
    """Seconds that this process waited for the batch."""


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
