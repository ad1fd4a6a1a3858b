"""A whole model spread over the processes of a run: matrices, then tokens, then replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from cornstarch.attention import attend_through_masks
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context import shard_items, shard_tokens, tokens_are_cut, whole_rows
from cornstarch.parallel.data import apply_data_parallel, check_data_plan
from cornstarch.parallel.lending import lend_items
from cornstarch.parallel.loading import loaded_whole
from cornstarch.parallel.mesh import Meshes, StageMeshes
from cornstarch.parallel.tensor import cut_added_adapters, is_cut, shard_tensors
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import WHOLE_MODEL, ModulePlan


class TensorCut:
    """How one module's matrices are cut over ranks; called with the module, it cuts it."""

    def __init__(self, plan: ModulePlan, meshes: Meshes | StageMeshes, is_encoder: bool) -> None:
        assert meshes.tensor is not None
        self.mesh, self.sequence = meshes.tensor, plan.tp_sequence
        self.vocabulary = plan.tp_vocabulary and not is_encoder

    def __call__(self, module: Any) -> None:
        """Cut a module; of one that was cut while it was read, the adapters that it has been given since."""
        if is_cut(unwrap(module)):
            cut_added_adapters(module, self.mesh)
        else:
            shard_tensors(module, self.mesh, sequence=self.sequence, vocabulary=self.vocabulary)


def tensor_cut(layout: Layout, meshes: Meshes, name: str, is_encoder: bool = False) -> TensorCut | None:
    """Return how a module's matrices are cut, for those who read its weights; None if they are not."""
    plan = plan_of(layout, name)
    return TensorCut(plan, meshes, is_encoder) if plan.tp > 1 else None


def must_attend_through_masks(model: nn.Module, packed: bool) -> bool:
    """Whether a model's rows have what plain causal attention does not tell: documents, spans that see both ways."""
    if not isinstance(model, MultimodalModel):
        return False
    return packed or any(encoder.attention != "causal" for encoder in model.encoders.values())


def spread(
    model: nn.Module,
    layout: Layout,
    device_type: str,
    meshes: Meshes | None = None,
    lend: bool = False,
    packed: bool = False,
) -> nn.Module:
    """Return what to call instead of the model, whose parameters and tokens are now shared out as the layout says.

    All processes must call it, with the same weights. Make the optimizer afterwards. A loss that a process then has is
    the sum over its tokens, divided by the tokens of its replica; gradients are averaged over processes.

    Args:
        model: The model, whole, or with modules that were cut as `tensor_cut` says while they were read.
        layout: How it is shared out.
        device_type: cpu or cuda.
        meshes: Those of the layout, if there are some already: modules must be cut over the same ones.
        lend: Let the encoders of replicas lend items to one another in passes of training (`lending`).
        packed: Whether rows may have several samples.
    """
    check_data_plan(model, layout.plan.data)
    if layout.plan.data.kind == "fsdp1" and isinstance(model, MultimodalModel):
        # First of all: it is found out by running encoders as they are.
        model.given_zeros = tuple(model.get_parameter(name) for name in model.unreached_parameters())
    meshes = meshes or Meshes(layout, device_type)
    for module, plan in planned_modules(model, layout):
        spread_inside(module, plan, meshes)
    if isinstance(model, MultimodalModel) and must_attend_through_masks(model, packed):
        # Now, on all ranks: the check runs the model, and once parameters are sharded, a rank whose batch is the first
        # to need masks would wait in it for ranks whose batches do not.
        attend_through_masks(model.language_model)
    if lend and layout.dp > 1 and isinstance(model, MultimodalModel):
        replicas = meshes.replicas()
        for encoder in model.encoders.values():
            lend_items(encoder, replicas)
    if meshes.data.size() == 1 and layout.plan.data.kind == "ddp":
        return model  # there is nobody to average with
    return apply_data_parallel(model, meshes.data, layout.plan.data)


def spread_inside(module: nn.Module, plan: ModulePlan, meshes: Meshes | StageMeshes) -> None:
    """Cut the matrices of a module, and what it computes of each batch: tokens, or an encoder's items."""
    is_encoder = isinstance(module, ModalEncoderModule)
    if plan.tp > 1:
        TensorCut(plan, meshes, is_encoder)(module.module if is_encoder else module)
    if plan.cp > 1 and isinstance(module, ModalEncoderModule):
        shard_items(module, meshes.context(plan.cp))
    elif plan.cp > 1:
        shard_tokens(module, meshes.context(plan.cp), mode=plan.cp_mode, distribution=plan.cp_distribution)


def whole_reasons(model: nn.Module, layout: Layout) -> dict[str, str]:
    """Return why modules of which processes have parts were read whole, by the names of their classes."""
    cut = [module for module, plan in planned_modules(model, layout) if plan.tp > 1 or layout.plan.is_pipeline]
    inner = [unwrap(module.module if isinstance(module, ModalEncoderModule) else module) for module in cut]
    reasons = {type(module).__name__: loaded_whole(module) for module in inner}
    return {name: reason for name, reason in reasons.items() if reason is not None}


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Run a block in which every process computes whole sequences: to evaluate, or to generate."""
    language_model = model.language_model if isinstance(model, MultimodalModel) else model
    with whole_rows(language_model) if tokens_are_cut(language_model) else nullcontext():
        yield


def planned_modules(model: nn.Module, layout: Layout) -> Iterator[tuple[nn.Module, ModulePlan]]:
    """Yield each module of a model with its part of the plan."""
    if not isinstance(model, MultimodalModel):
        yield model, next(iter(layout.plan.modules.values()))
        return
    for name, encoder in model.encoders.items():
        yield encoder, plan_of(layout, name)
    yield model.language_model, plan_of(layout, "language_model")


def plan_of(layout: Layout, name: str) -> ModulePlan:
    """Return the part of the plan for a module of this name in a multimodal model."""
    plans = layout.plan.modules
    return plans.get(name) or plans[WHOLE_MODEL]


__all__ = [
    "must_attend_through_masks",
    "planned_modules",
    "spread",
    "spread_inside",
    "tensor_cut",
    "whole_reasons",
    "whole_sequences",
]
