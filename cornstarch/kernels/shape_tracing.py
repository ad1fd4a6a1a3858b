"""Copies of modules that run on shapes alone, and what such a run reveals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from cornstarch.attention.interface import DENSE_IMPLEMENTATION
from cornstarch.models.multimodal_language_model.shape_inference import ShapeTensor, copy_without_weights, is_float
from cornstarch.trees import map_tensors


def copy_as_shapes(module: nn.Module) -> nn.Module:
    """Return a copy of a module to be traced: weights are shapes, train mode and `requires_grad` are the module's."""
    copied = copy_without_weights(module)
    for source, target in zip(module.modules(), copied.modules(), strict=True):
        target.training = source.training
    for parameter, shape in zip(module.parameters(), copied.parameters(), strict=True):
        shape.requires_grad_(parameter.requires_grad)
    for part in copied.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        with suppress(ValueError, ImportError):  # a model with its own attention code: its products are traced as such
            part.set_attn_implementation(DENSE_IMPLEMENTATION)
        with suppress(ValueError, ImportError):  # a model without experts; grouped products need no routing values
            part.set_experts_implementation("grouped_mm")
    return copied


def convert_to_shapes(value: Any) -> Any:
    """Replace floating-point tensors by shapes; integers stay, on the CPU."""
    return map_tensors(lambda t: ShapeTensor.of(t.shape, t.dtype) if is_float(t) else t.detach().cpu(), value)


@contextmanager
def find_checkpointed_modules() -> Iterator[list[nn.Module]]:
    """Collect the first module under activation checkpointing: its saved tensors go to other hooks than ours."""
    found: list[nn.Module] = []
    saved: list[Tensor] = []
    probe = torch.ones((), requires_grad=True)

    def check_module(module: nn.Module, _: Any) -> None:
        if found or not torch.is_grad_enabled() or not any(True for _ in module.parameters(recurse=False)):
            return
        saved.clear()
        probe.square()  # saves its input: with our hook, or with the one of a checkpoint
        if not saved:
            found.append(module)

    def save(tensor: Tensor) -> Tensor:
        saved[:] = [tensor]
        return tensor

    handle = register_module_forward_pre_hook(check_module)
    try:
        with saved_tensors_hooks(save, lambda tensor: tensor):
            yield found
    finally:
        handle.remove()
        saved.clear()
