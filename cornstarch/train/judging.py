"""How good the model of a run is, which moment was the best, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from cornstarch.errors import ConfigError
from cornstarch.parallel.apply import whole_sequences
from cornstarch.parallel.data import reshard, whole_model
from cornstarch.train.config import RunConfig
from cornstarch.train.evaluation import Evaluation
from cornstarch.train.results import Position
from cornstarch.train.setup import RunSetup


class Judge:
    """Measures a run's model with the weights that it would be used with.

    Args:
        setup: The run.
    """

    def __init__(self, setup: RunSetup) -> None:
        self._config, self._sources = setup.start.config, setup.start.data.evaluation
        self._placement, self._model = setup.start.placement, setup.model
        self._update, self._exchange, self._evaluator = setup.update, setup.exchange, setup.evaluator

    @contextmanager
    def _weights_in_use(self) -> Iterator[None]:
        """Run a block with weights averaged over processes and over time, where the run has such."""
        with self._exchange.averaged(), self._update.averaged():
            try:
                yield
            finally:
                # Before the trained weights return: what is still gathered would keep the averaged ones, and the next
                # step would be computed with them.
                reshard(self._model.task.wrapped or self._model.module)

    def evaluate(self) -> Evaluation:
        """Measure the model on the evaluation data."""
        with self._weights_in_use(), whole_sequences(self._model.module):
            return self._evaluator()

    def exchanged(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each modality, and what is measured with its items exchanged between samples, if the run asks."""
        if not self._config.loop.exchange_check or not self._sources:
            return
        for modality, kind in self._model.task.modalities().items():
            with self._weights_in_use(), whole_sequences(self._model.module):
                evaluation = self._evaluator.exchanged(kind)
            if evaluation.sources:
                yield modality, evaluation.record()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Run a block in which the model can be asked about samples; all processes must enter it."""
        pipeline = self._model.pipeline
        with (
            self._weights_in_use(),
            self._placement.computing(),
            whole_model(self._model.task.wrapped),
            whole_sequences(self._model.module),
            nullcontext() if pipeline is None else pipeline.evaluating(),
        ):
            yield


# ---------------------------------------------------------------------------------------------------- what is best


def metric_of(config: RunConfig, record: Mapping[str, Any]) -> float:
    """Return what decides which moment is the best, from what `Evaluation.record` returned."""
    name = config.checkpoint.best_by
    metric = record.get(name)
    if metric is None:
        there = ", ".join(key for key in record if key != "sources")
        raise ConfigError(f"checkpoint.best_by = {name}, but the evaluation has only {there}.")
    return metric


def note_metric(config: RunConfig, position: Position, metric: float) -> bool:
    """Remember an evaluation in the position of the run; say whether it is the best so far."""
    improved = _is_improvement(config, position.best, metric)
    position.evaluations_without_improvement = 0 if improved else position.evaluations_without_improvement + 1
    if improved:
        position.best, position.best_step = metric, position.step
    return improved


def _is_improvement(config: RunConfig, best: float | None, metric: float) -> bool:
    if best is None:
        return metric == metric
    stopping = config.loop.early_stopping
    least = stopping.least if stopping is not None else 0.0
    gain = best - metric if config.checkpoint.best_by == "loss" else metric - best
    return gain > least


def is_stopped_early(config: RunConfig, position: Position) -> bool:
    """Say whether the run has not become better for so long that it ends."""
    stopping = config.loop.early_stopping
    return stopping is not None and position.evaluations_without_improvement >= stopping.patience


def is_worth_saving(config: RunConfig, position: Position, metric: float | None) -> bool:
    """Say whether a checkpoint is made after a step, in which `metric` was measured if there was an evaluation."""
    every, step = config.checkpoint.every, position.step
    is_best = metric is not None and position.best_step == step
    return is_best or (every is not None and step % every == 0)


__all__ = ["Judge", "is_stopped_early", "is_worth_saving", "metric_of", "note_metric"]
