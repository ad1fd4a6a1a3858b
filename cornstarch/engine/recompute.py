"""Activation checkpointing: compute activations again in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from cornstarch.attention.backends import build_checkpoint_contexts
from cornstarch.errors import ConfigError
from cornstarch.kernels.activation_checkpointing import checkpoint_layer
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.hugging_face import checkpoint_activations
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.apply import iter_planned_modules
from cornstarch.plan.layout import Layout


def recompute_planned(model: nn.Module, layout: Layout) -> None:
    """Switch it on for the modules of which a plan says so; before they are cut."""
    for module, plan in iter_planned_modules(model, layout):
        if plan.activation_checkpointing:
            recompute_activations(module.module if isinstance(module, ModalEncoderModule) else module)


def recompute_activations(model: nn.Module) -> None:
    """Switch it on: by the model's own means if it has them, else for each layer of its lists of layers."""
    plain = unwrap(model)
    if isinstance(model, MultimodalModel) or getattr(plain, "supports_gradient_checkpointing", False):
        options = {"use_reentrant": False, "context_fn": build_checkpoint_contexts}
        if isinstance(model, MultimodalModel):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        else:
            checkpoint_activations(plain, options)
        return
    layers = list(_layers(model))
    if not layers:
        raise ConfigError(
            f"activation_checkpointing: {type(plain).__name__} has no list of layers (nn.Sequential or "
            "nn.ModuleList) whose activations could be computed again."
        )
    for layer in layers:
        checkpoint_layer(layer)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of the outermost lists."""
    if isinstance(module, nn.Sequential | nn.ModuleList):
        yield from module
    else:
        for child in module.children():
            yield from _layers(child)
