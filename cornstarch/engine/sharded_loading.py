"""Decides which slices of a model's weights this rank reads, before any weight is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cornstarch.checkpoint.weights import strip_adapter_names
from cornstarch.config import RunConfig
from cornstarch.data.formats import DataSource
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.partial_model import find_whole_modules
from cornstarch.engine.plan_requirements import check_loss
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.apply import TensorSharder, build_tensor_sharder
from cornstarch.parallel.mesh import DeviceMeshes
from cornstarch.pipeline.stages import StageAssignment
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL
from cornstarch.tasks.build import resolve_task_name
from cornstarch.tasks.build_model import GetPartShard, PartShard
from cornstarch.tasks.meta_model import build_meta_model

FEATURES_NEED_WEIGHTS = "its features are kept, under a name made of its weights"


class ShardedLoading:
    """How this rank reads the weights of a run's model.

    Args:
        config: The run.
        context: The plan and this rank's place in it.
    """

    def __init__(self, config: RunConfig, context: DistributedContext) -> None:
        self._config, self._context = config, context
        self.stages: StageAssignment | None = None
        """The stages that weights are read for, if they were assigned on a model without weights."""

    def cuts(self, train: DataSource) -> GetPartShard | None:
        """Return what of each part this rank reads; None: all of it.

        Args:
            train: The training data; it may say which kind of model there is.
        """
        context = self._context
        if context.is_pipeline:
            return self._stage_cuts(train) if self._is_read_by_part(train) else None
        if all(plan.tp == 1 for plan in context.plan.modules.values()):
            return None
        return tensor_cuts(context.layout, context.meshes)

    def _is_read_by_part(self, train: DataSource) -> bool:
        """Whether the parts of the model are read one by one, so that each can be read by stages."""
        model = self._config.model
        if model.start_from is not None or (model.language_model is None and model.whole is None):
            return False
        return model.whole is None or resolve_task_name(self._config, model.whole, train) == "causal-lm"

    def _stage_cuts(self, train: DataSource) -> GetPartShard:
        """Assign stages on a model without weights; return what of each part this rank's stages have."""
        with torch.random.fork_rng(devices=[]):
            bare = build_meta_model(self._config, train)
        assert isinstance(bare, MultimodalModel)
        if self._config.parallel.verify != "never":
            check_loss(bare, self._context.layout)  # before stages are assigned, which would fail without saying why
        self.stages = stages = StageAssignment(bare, self._context.layout)
        whole = find_whole_modules(stages, self._config.data.packing) | features_need_weights(bare, self._config)
        held, here = stages.local_parameters(), {name: plan for name, _, plan in stages.here()}
        modules: dict[str, nn.Module] = {name: encoder.module for name, encoder in bare.encoders.items()}
        modules[LANGUAGE_MODEL] = bare.language_model
        names = {name: _list_stored_names(module, held) for name, module in modules.items()}
        if any(plan.tp > 1 for plan in self._context.plan.modules.values()):
            _ = self._context.stage_groups  # all ranks make their groups now, also those that shard no tensor

        def of(name: str, is_encoder: bool) -> PartShard | None:
            if name in whole:
                return None
            tensors = None
            if name in here and here[name].tp > 1:
                tensors = TensorSharder(here[name], self._context.stage_groups.meshes, is_encoder)
            return PartShard(tensors, names[name])

        return of


def features_need_weights(model: Any, config: RunConfig) -> dict[str, str]:
    """Return the encoders that must be whole because their outputs are cached under a digest of their weights."""
    if not config.features.cache or not isinstance(model, MultimodalModel):
        return {}
    return dict.fromkeys(model.encoders, FEATURES_NEED_WEIGHTS)


def tensor_cuts(layout: Layout, meshes: DeviceMeshes) -> GetPartShard:
    """Return how the matrices of parts are sharded while they are read, where all modules share their ranks."""

    def of(name: str, is_encoder: bool) -> PartShard | None:
        cut = build_tensor_sharder(layout, meshes, name, is_encoder)
        return None if cut is None else PartShard(cut)

    return of


def _list_stored_names(module: nn.Module, held: set[int]) -> frozenset[str]:
    """Return the names that the local parameters of a part have in its folder, where there are no adapters."""
    named = unwrap(module).named_parameters(remove_duplicate=False)
    return frozenset(strip_adapter_names(name) for name, parameter in named if id(parameter) in held)
