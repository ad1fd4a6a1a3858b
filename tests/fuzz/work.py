"""What the worker processes do: train a case by the Trainer's own way, and read what it saved."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.config.run_folder import METRICS
from cornstarch.data.loader import StepBatch
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import RunResult, StepResult
from cornstarch.train import load_config
from cornstarch.trainer.checkpointer import load_run
from cornstarch.trainer.recording_trainer import gather_parameters
from cornstarch.trainer.trainer import Trainer
from tests.fuzz.case import Case, build_samples, describe_run
from tests.fuzz.models import Folders
from tests.parity.doubled import computed_in_double

disable_progress_bar()
Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Refusal:
    """A run was refused with a reason."""

    reason: str
    steps: int
    """Steps that were done before."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to, as one rank sees it."""

    parameters: Values
    """After the last step, whole; those that this rank holds."""
    averaged: Values
    """The weights averaged over time, with which the model would be used; empty without `loop.ema_decay`."""
    start: Values
    """Before the first step; only where it is asked for."""
    norms: list[float | None]
    """Of the gradients of each step, before clipping."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """The lines of metrics.jsonl; rank 0 has them."""
    answers: list[str] = field(default_factory=list)
    """What the model says to some samples of the evaluation; rank 0 has them."""

    @property
    def used(self) -> Values:
        """The weights that the model would be used with."""
        return self.averaged or self.parameters


class _NoFlops:
    """Stands where FLOPs are counted: tracing a batch through the model takes longer than training on it."""

    def step(self, inputs: Any) -> None:
        """Return nothing."""


class ObservedTrainer(Trainer):
    """The Trainer, without its report and without counting FLOPs, that notes what it comes to."""

    with_start = False
    counts_flops = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.norms: list[float | None] = []
        self.outcome: Outcome | None = None
        self.start: Values = {}

    def setup(self) -> None:
        """Set up, and note the weights that training starts from."""
        super().setup()
        self.run_model.flops = _NoFlops()  # type: ignore[assignment]
        if self.with_start and not self.start:
            self.start = self._values()

    def step(self, batch: StepBatch) -> StepResult:
        """Do a step, and note the norm of its gradients."""
        result = super().step(batch)
        if result.totals.trained_tokens:  # a batch without any is passed over; one process does not even read it out
            self.norms.append(None if result.grad_norm is None else float(result.grad_norm))
        return result

    def _values(self) -> Values:
        whole = gather_parameters(self.model, self.task.wrapped)
        return {name: tensor.cpu().float().numpy() for name, tensor in whole.items()}

    def close_run(self, shuffled: dict[str, dict[str, Any]], write_event: bool = True) -> RunResult:
        """Note what there is, instead of writing a report."""
        parameters = self._values()
        averaged: Values = {}
        if self.config.loop.ema_decay is not None:
            with self.train_step.use_averages():
                averaged = self._values()
        metrics = []
        if self.rank == 0:
            lines = (self.folder.path / METRICS).read_text(encoding="utf-8").splitlines()
            metrics = [json.loads(line) for line in lines]
        answers = [one["answer"] for one in self.logger._summary["answers"]]
        self.outcome = Outcome(parameters, averaged, self.start, self.norms, metrics, answers)
        return RunResult("finished", self.position.step, None)


def train(case: Case, folders: str, output: str, is_reference: bool, resumes: bool = False) -> Outcome | Refusal:
    """Train a case in this process, one of several or alone; with `in_double`, in float64."""
    with computed_in_double() if case.get("in_double") else nullcontext():
        return _train(case, folders, output, is_reference, resumes)


def _train(case: Case, folders: str, output: str, is_reference: bool, resumes: bool) -> Outcome | Refusal:
    trainer: ObservedTrainer | None = None
    try:
        config = load_config(None, base=describe_run(case, Folders(Path(folders)), output))
        data = {"train_data": build_samples(case)}
        if case.get("evaluated"):
            data["evaluation_data"] = build_samples(case, "evaluation_kinds")
        trainer = ObservedTrainer(config, **data, allow_changes=resumes, console=Console(file=io.StringIO()))
        trainer.with_start = is_reference
        trainer.fit()
    except ConfigError as error:
        return Refusal(str(error), 0 if trainer is None else len(trainer.norms))
    assert trainer.outcome is not None
    return trainer.outcome


def load(output: str) -> Values | Refusal:
    """Return the weights of a finished run, as one process would use them."""
    try:
        run = load_run(Path(output), "last", "cpu")
    except ConfigError as error:
        return Refusal(str(error), 0)
    found = named_parameters(run.task.model)
    return {name: parameter.detach().float().numpy() for name, parameter in found.items()}
