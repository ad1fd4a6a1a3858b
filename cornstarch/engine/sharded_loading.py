"""Decides which slices of a model's weights this rank reads, and checks models of which it has only some stages.

Whether a language model obeys masks, and whether its tokens can be sharded, is found by running it. A rank that never
read the other stages cannot run the model, but what can go wrong depends on its class and options, not on its size: so
a tiny twin runs instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cornstarch.attention import attend_through_masks
from cornstarch.attention.mask_verification import is_on_meta, mark_verified
from cornstarch.checkpoint.weights import strip_adapter_names
from cornstarch.config import RunConfig
from cornstarch.data.formats import DataSource
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.plan_requirements import check_loss
from cornstarch.errors import UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.models.twin import add_noise, build_twin_config
from cornstarch.parallel.context import shard_tokens
from cornstarch.parallel.mesh import DeviceMeshes, StageMeshes
from cornstarch.parallel.passes import TensorSharder, build_tensor_sharder, needs_mask_attention
from cornstarch.pipeline.stages import StageAssignment
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL, ModulePlan
from cornstarch.tasks.build import build_meta_model, resolve_task_name
from cornstarch.tasks.build_model import GetPartShard, PartShard

_NO_TWIN = "it is run before it is cut, and there is no small model of its kind that could be run in its place"


class ShardedLoading:
    """How this rank reads the weights of a run's model."""

    def __init__(self, config: RunConfig, context: DistributedContext) -> None:
        self._config, self._context = config, context
        self.stages: StageAssignment | None = None
        """The stages that weights are read for, if they were assigned on a model without weights."""

    def cuts(self, train: DataSource) -> GetPartShard | None:
        """Return what of each part this rank reads; None: all of it. The training data may tell the kind of model."""
        context, model = self._context, self._config.model
        if not context.is_pipeline:
            is_whole = all(plan.tp == 1 for plan in context.plan.modules.values())
            return None if is_whole else tensor_cuts(context.layout, context.meshes)
        # Only a model whose parts are read one by one can be read by stages.
        if model.start_from is not None or (model.language_model is None and model.whole is None):
            return None
        if model.whole is not None and resolve_task_name(self._config, model.whole, train) != "causal-lm":
            return None
        return self._stage_cuts(train)

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
        if any(plan.tp > 1 for plan in self._context.plan.modules.values()):
            _ = self._context.stage_groups  # all ranks make their groups now, also those that shard no tensor

        def of(name: str, is_encoder: bool) -> PartShard | None:
            if name in whole:
                return None
            module = bare.language_model if name == LANGUAGE_MODEL else bare.encoders[name].module
            named = unwrap(module).named_parameters(remove_duplicate=False)
            # In the folder of a part there are no adapters.
            stored_names = frozenset(strip_adapter_names(key) for key, one in named if id(one) in held)
            tensors = None
            if name in here and here[name].tp > 1:
                tensors = TensorSharder(here[name], self._context.stage_groups.meshes, is_encoder)
            return PartShard(tensors, stored_names)

        return of


def features_need_weights(model: Any, config: RunConfig) -> dict[str, str]:
    """Return the encoders that must be whole because their outputs are cached under a digest of their weights."""
    if not config.features.cache or not isinstance(model, MultimodalModel):
        return {}
    return dict.fromkeys(model.encoders, "its features are kept, under a name made of its weights")


def tensor_cuts(layout: Layout, meshes: DeviceMeshes) -> GetPartShard:
    """Return how the matrices of parts are sharded while they are read, where all modules share their ranks."""

    def of(name: str, is_encoder: bool) -> PartShard | None:
        cut = build_tensor_sharder(layout, meshes, name, is_encoder)
        return None if cut is None else PartShard(cut)

    return of


def find_whole_modules(stages: StageAssignment, packed: bool) -> dict[str, str]:
    """Return the modules that this rank needs whole until they are sharded, by name, with the reason."""
    found: dict[str, str] = {}
    masks = needs_mask_attention(stages.model, packed)
    for name, module, plan in stages.here():
        is_run = (masks and name == LANGUAGE_MODEL) or _shards_tokens(module, plan)
        if is_run and _build_twin(module, plan.cp) is None:
            found[name] = _NO_TWIN
    return found


def apply_mask_attention(language_model: nn.Module, device: torch.device) -> None:
    """Let a language model attend through masks as data, after checking that it, or its twin, really does."""
    if on_meta := is_on_meta(language_model):
        attend_through_masks(_require_twin(language_model, 1, device))
    attend_through_masks(language_model)
    if on_meta:
        mark_verified(unwrap(language_model))


def check_cp(module: nn.Module, plan: ModulePlan, meshes: DeviceMeshes | StageMeshes, device: torch.device) -> None:
    """Check on a twin that the tokens of a module can be sharded, if other stages own some of its layers."""
    # Otherwise `apply_cp` runs the module itself to check that.
    if _shards_tokens(module, plan) and is_on_meta(module):
        twin = _require_twin(module, plan.cp, device)
        shard_tokens(twin, meshes.context(plan.cp), mode=plan.cp_mode, distribution=plan.cp_distribution)


def _shards_tokens(module: nn.Module, plan: ModulePlan) -> bool:
    return plan.cp > 1 and not isinstance(module, ModalEncoderModule)


def _require_twin(model: nn.Module, multiple: int, device: torch.device) -> nn.Module:
    twin = _build_twin(model, multiple)
    if twin is None:
        raise UnsupportedModelError(f"{type(unwrap(model)).__name__} is not all here: {_NO_TWIN}.")
    return twin.to(device)


def _build_twin(model: nn.Module, multiple: int) -> nn.Module | None:
    """Return a tiny transformers model of the same class, its dimensions multiples of `multiple` ranks, or None."""
    inner = unwrap(model)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            twin: nn.Module = type(inner)(build_twin_config(inner.config, multiple))  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return None
    add_noise(twin)
    return twin
