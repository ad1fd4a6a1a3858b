"""The FLOPs of a run's steps, counted for the whole model, which is copied before it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.config import RunConfig
from cornstarch.cost.flops import FlopCounter, StepFlops
from cornstarch.engine.recompute import recompute_activations
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import is_sharded
from cornstarch.tasks.meta_model import build_meta_model
from cornstarch.tasks.task import Task


class RunFlops:
    """Counts the FLOPs of a run's steps; if that fails, it logs the reason once and counts nothing.

    Args:
        task: The task, before its model is sharded or compiled.
        config: The run.
        log: Shows a message to the user.
    """

    def __init__(self, task: Task, config: RunConfig, log: Callable[[str], None]) -> None:
        self._log = log
        self._counter: FlopCounter | None = None
        self._task, self._config = task, config
        self._can_count = True
        if not is_sharded(task.model):
            self._build_counter(lambda: task.model)

    def _build_counter(self, whole: Callable[[], nn.Module]) -> None:
        try:
            self._counter = FlopCounter(whole(), lambda model, inputs: _compute_loss(self._task, model, inputs))
        except Exception as error:  # a module that cannot be copied, say: a missing figure must not end a run
            self._give_up(error)

    def step(self, inputs: Mapping[str, Any]) -> StepFlops | None:
        """Return the FLOPs of a forward and a backward pass by part; None if they cannot be counted."""
        if self._counter is None and self._can_count:  # sharded: count a whole copy, built when it is first needed
            self._build_counter(lambda: _build_unsharded(self._task.model, self._config))
        if self._counter is None:
            return None
        try:
            return self._counter.step(inputs)
        except Exception as error:
            self._give_up(error)
            return None

    def total(self, inputs: Mapping[str, Any]) -> float:
        """Return the FLOPs of all parts; 0 if they cannot be counted."""
        found = self.step(inputs)
        return 0.0 if found is None else found.total

    def _give_up(self, error: Exception) -> None:
        self._counter, self._can_count = None, False
        self._log(f"FLOPs are not counted: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


def _build_unsharded(model: nn.Module, config: RunConfig) -> nn.Module:
    """Return the whole model of a sharded one, without weights."""
    with torch.random.fork_rng(devices=[]):
        bare = build_meta_model(config)
    if isinstance(bare, MultimodalModel) and isinstance(model, MultimodalModel):
        bare.set_modality_token_ids(model.modality_token_ids)
    if config.loop.activation_checkpointing:
        recompute_activations(bare)
    return bare


def _compute_loss(task: Task, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    before, task.wrapped = task.wrapped, model
    try:
        return task.loss(inputs)
    finally:
        task.wrapped = before
