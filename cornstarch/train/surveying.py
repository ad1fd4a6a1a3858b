"""How modules that come from no library are made: found by running them on the run's own data."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.pipeline.survey import survey
from cornstarch.plan.plan import Plan
from cornstarch.train.data.collate import CollatedBatch


def survey_own_module(model: nn.Module, plan: Plan, some_batch: Callable[[], CollatedBatch | None]) -> None:
    """Find out where a module can be cut, if a plan cuts it and no config says how it is made; it is remembered.

    Args:
        model: The whole model.
        plan: How it is spread.
        some_batch: Returns something to run it on.
    """
    inner = unwrap(model)
    if not plan.is_pipeline or isinstance(inner, MultimodalModel | PreTrainedModel | nn.Sequential):
        return
    if (batch := some_batch()) is not None:
        survey(model, lambda twin: batch.inputs)


__all__ = ["survey_own_module"]
