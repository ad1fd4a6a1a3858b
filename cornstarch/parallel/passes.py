"""The passes that shard a model; `engine.parallelize` applies them in order.

Each pass takes a module, changes it in place or wraps it, and returns the module to use from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context import shard_items, shard_tokens
from cornstarch.parallel.encoder_balancing import attach_encoder_balancing
from cornstarch.parallel.expert import shard_experts
from cornstarch.parallel.loading import full_read_reason
from cornstarch.parallel.mesh import DeviceMeshes, StageMeshes
from cornstarch.parallel.tensor import is_sharded, shard_added_adapters, shard_tensors
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import WHOLE_MODEL, DataPlan, ModulePlan


def record_unreached_parameters(model: nn.Module, plan: DataPlan) -> nn.Module:
    """With FSDP 1, record the parameters that no loss depends on: it makes zero gradients for them."""
    if plan.kind == "fsdp1" and isinstance(model, MultimodalModel):
        model.zero_gradient_parameters = tuple(model.get_parameter(name) for name in model.find_unused_parameters())
    return model


def apply_tp(module: nn.Module, plan: ModulePlan, meshes: DeviceMeshes | StageMeshes) -> nn.Module:
    """Shard the layers of a language model or an encoder over the tensor-parallel ranks."""
    if plan.tp > 1:
        is_encoder = isinstance(module, ModalEncoderModule)
        TensorSharder(plan, meshes, is_encoder)(module.module if is_encoder else module)
    return module


def apply_cp(module: nn.Module, plan: ModulePlan, meshes: DeviceMeshes | StageMeshes) -> nn.Module:
    """Shard the tokens of a language model, or the items of an encoder, over the context-parallel ranks."""
    if plan.cp > 1 and isinstance(module, ModalEncoderModule):
        shard_items(module, meshes.context(plan.cp))
    elif plan.cp > 1:
        shard_tokens(module, meshes.context(plan.cp), mode=plan.cp_mode, distribution=plan.cp_distribution)
    return module


def apply_ep(module: nn.Module, plan: ModulePlan, meshes: DeviceMeshes | StageMeshes) -> nn.Module:
    """Share the experts of a language model or an encoder out over ranks, which exchange tokens."""
    if plan.ep > 1:
        experts = meshes.experts(plan.ep)
        # A module without tp beside one with it is the same on all of those ranks, which then do the same.
        across = experts.across if plan.tp > 1 or experts.across.ndim == 1 else experts.across["ep"]
        shard_experts(module.module if isinstance(module, ModalEncoderModule) else module, across, experts.data)
    return module


def apply_encoder_balancing(model: nn.Module, meshes: DeviceMeshes) -> nn.Module:
    """Let replicas with few items encode some of those of others."""
    if isinstance(model, MultimodalModel):
        replicas = meshes.replicas()
        for encoder in model.encoders.values():
            attach_encoder_balancing(encoder, replicas)
    return model


def needs_mask_attention(model: nn.Module, packed: bool) -> bool:
    """Return whether rows have several documents, or spans with bidirectional attention."""
    if not isinstance(model, MultimodalModel):
        return False
    return packed or any(encoder.attention != "causal" for encoder in model.encoders.values())


class TensorSharder:
    """Shards the layers of one module; for those who read its weights, too."""

    def __init__(self, plan: ModulePlan, meshes: DeviceMeshes | StageMeshes, is_encoder: bool) -> None:
        assert meshes.tensor is not None
        self.mesh, self.sequence = meshes.tensor, plan.tp_sequence
        self.vocabulary = plan.tp_vocabulary and not is_encoder

    def __call__(self, module: Any) -> None:
        """Shard a module. If it was sharded while it was read, shard the adapters that were added since."""
        if is_sharded(unwrap(module)):
            shard_added_adapters(module, self.mesh)
        else:
            shard_tensors(module, self.mesh, sequence=self.sequence, vocabulary=self.vocabulary)


def build_tensor_sharder(layout: Layout, meshes: DeviceMeshes, name: str, is_encoder: bool) -> TensorSharder | None:
    """Return the sharder of a module; None without tensor parallelism."""
    plan = get_module_plan(layout, name)
    return TensorSharder(plan, meshes, is_encoder) if plan.tp > 1 else None


def explain_full_reads(model: nn.Module, layout: Layout) -> dict[str, str]:
    """Return why sharded modules were read in full first, by class name."""
    sharded = [module for module, plan in iter_planned_modules(model, layout) if plan.tp > 1 or layout.plan.is_pipeline]
    inner = [unwrap(module.module if isinstance(module, ModalEncoderModule) else module) for module in sharded]
    reasons = {type(module).__name__: full_read_reason(module) for module in inner}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def iter_planned_modules(model: nn.Module, layout: Layout) -> Iterator[tuple[nn.Module, ModulePlan]]:
    """Yield each module of a model with its plan."""
    if not isinstance(model, MultimodalModel):
        yield model, next(iter(layout.plan.modules.values()))
        return
    for name, encoder in model.encoders.items():
        yield encoder, get_module_plan(layout, name)
    yield model.language_model, get_module_plan(layout, "language_model")


def get_module_plan(layout: Layout, name: str) -> ModulePlan:
    return layout.plan.modules.get(name) or layout.plan.modules[WHOLE_MODEL]
