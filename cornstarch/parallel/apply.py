"""A whole model spread over the processes of a run: matrices, then tokens, then replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.parallel.context import shard_items, shard_tokens, tokens_are_cut, whole_rows
from cornstarch.parallel.data import apply_data_parallel, check_data_plan
from cornstarch.parallel.mesh import Meshes
from cornstarch.parallel.tensor import shard_tensors
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import WHOLE_MODEL, ModulePlan


def spread(model: nn.Module, layout: Layout, device_type: str) -> nn.Module:
    """Return what to call instead of the model, whose parameters and tokens are now shared out as the layout says.

    All processes must call it, with the same weights. Make the optimizer afterwards. A loss that a process then has is
    the sum over its tokens, divided by the tokens of its replica; gradients are averaged over processes.
    """
    check_data_plan(model, layout.plan.data)
    meshes = Meshes(layout, device_type)
    for module, plan in planned_modules(model, layout):
        if plan.tp > 1:
            assert meshes.tensor is not None
            encoder = module.module if isinstance(module, ModalEncoderModule) else None
            vocabulary = plan.tp_vocabulary and encoder is None
            shard_tensors(encoder or module, meshes.tensor, sequence=plan.tp_sequence, vocabulary=vocabulary)
        if plan.cp > 1 and isinstance(module, ModalEncoderModule):
            shard_items(module, meshes.context(plan.cp))
        elif plan.cp > 1:
            shard_tokens(module, meshes.context(plan.cp), mode=plan.cp_mode, distribution=plan.cp_distribution)
    if meshes.data.size() == 1 and layout.plan.data.kind == "ddp":
        return model  # there is nobody to average with
    return apply_data_parallel(model, meshes.data, layout.plan.data)


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Run a block in which every process computes whole sequences: to evaluate, or to generate."""
    language_model = model.language_model if isinstance(model, MultimodalModel) else model
    with whole_rows(language_model) if tokens_are_cut(language_model) else nullcontext():
        yield


def planned_modules(model: nn.Module, layout: Layout) -> Iterator[tuple[nn.Module, ModulePlan]]:
    """Yield each module of a model with its part of the plan."""
    plans = layout.plan.modules
    if not isinstance(model, MultimodalModel):
        yield model, next(iter(plans.values()))
        return
    for name, encoder in model.encoders.items():
        yield encoder, plans.get(name) or plans[WHOLE_MODEL]
    yield model.language_model, plans.get("language_model") or plans[WHOLE_MODEL]


__all__ = ["planned_modules", "spread", "whole_sequences"]
