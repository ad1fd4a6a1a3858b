"""What the steps of a run multiply: the counter of its whole model, made before that is cut over processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.compute.flops import FlopCounter, StepFlops
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import is_sharded
from cornstarch.train.config import RunConfig
from cornstarch.train.on_meta import model_on_meta
from cornstarch.train.recompute import recompute_activations
from cornstarch.train.tasks.task import Task


class RunFlops:
    """Counts what steps of a run multiply; where it cannot, it says so once and counts nothing.

    Args:
        task: What is trained, before its model is cut or compiled.
        config: The run.
        note: Tells the user something.
    """

    def __init__(self, task: Task, config: RunConfig, note: Callable[[str], None]) -> None:
        self._note = note
        self._counter: FlopCounter | None = None
        self._task, self._config = task, config
        self._can = True
        if not is_sharded(task.model):
            self._make(lambda: task.model)

    def _make(self, whole: Callable[[], nn.Module]) -> None:
        try:
            self._counter = FlopCounter(whole(), lambda model, inputs: _loss(self._task, model, inputs))
        except Exception as error:  # a module that cannot be copied, say: a run must not end for a figure
            self._refuse(error)

    def step(self, inputs: Mapping[str, Any]) -> StepFlops | None:
        """Return what a forward and a backward pass multiply, by part; None if that cannot be counted."""
        if self._counter is None and self._can:  # its matrices are cut: one like it is counted, when that is asked for
            self._make(lambda: _like(self._task.model, self._config))
        if self._counter is None:
            return None
        try:
            return self._counter.step(inputs)
        except Exception as error:
            self._refuse(error)
            return None

    def total(self, inputs: Mapping[str, Any]) -> float:
        """Return it for all parts together; 0 if it cannot be counted."""
        found = self.step(inputs)
        return 0.0 if found is None else found.total

    def _refuse(self, error: Exception) -> None:
        self._counter, self._can = None, False
        self._note(f"FLOPs are not counted: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


def _like(model: nn.Module, config: RunConfig) -> nn.Module:
    """Return a model like one whose matrices are cut, whole and without weights."""
    with torch.random.fork_rng(devices=[]):
        bare = model_on_meta(config)
    if isinstance(bare, MultimodalModel) and isinstance(model, MultimodalModel):
        bare.set_modality_token_ids(model.modality_token_ids)
    if config.loop.activation_checkpointing:
        recompute_activations(bare)
    return bare


def _loss(task: Task, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    before, task.wrapped = task.wrapped, model
    try:
        return task.loss(inputs)
    finally:
        task.wrapped = before
