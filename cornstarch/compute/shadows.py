"""Copies of modules that are run on shapes alone, and what is found out about them on the way."""

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
from cornstarch.models.multimodal_language_model.preprocessing.shape_inference import (
    Shape,
    is_float,
    weightless,
)
from cornstarch.trees import map_tensors


def shadow(module: nn.Module) -> nn.Module:
    """Return a copy of a module to be traced: weights are shapes, and are trained as those of the module are."""
    made = weightless(module)
    for one, copied in zip(module.modules(), made.modules(), strict=True):
        copied.training = one.training
    for parameter, shape in zip(module.parameters(), made.parameters(), strict=True):
        shape.requires_grad_(parameter.requires_grad)
    for part in made.modules():
        if isinstance(part, PreTrainedModel):
            _choose_code(part)
    return made


def _choose_code(model: PreTrainedModel) -> None:
    """Let a model attend where it is seen, and multiply experts without asking who chose them."""
    with suppress(ValueError, ImportError):  # else it has attention code of its own, whose products are seen as such
        model.set_attn_implementation(DENSE_IMPLEMENTATION)
    with suppress(ValueError, ImportError):  # else it has no experts
        model.set_experts_implementation("grouped_mm")


def as_shapes(value: Any) -> Any:
    """Return inputs with shapes in the place of real numbers; integers stay, on the CPU."""
    return map_tensors(lambda t: Shape.of(t.shape, t.dtype) if is_float(t) else t.detach().cpu(), value)


@contextmanager
def checkpointing() -> Iterator[list[nn.Module]]:
    """Find modules that keep no activations: what is saved in them goes to other hooks than ours."""
    found: list[nn.Module] = []
    saved: list[Tensor] = []
    probe = torch.ones((), requires_grad=True)

    def look(module: nn.Module, _: Any) -> None:
        if found or not torch.is_grad_enabled() or not any(True for _ in module.parameters(recurse=False)):
            return
        saved.clear()
        probe.square()
        if not saved:
            found.append(module)

    def keep(tensor: Tensor) -> Tensor:
        saved[:] = [tensor]
        return tensor

    handle = register_module_forward_pre_hook(look)
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            yield found
    finally:
        handle.remove()
        saved.clear()


__all__ = ["as_shapes", "checkpointing", "shadow"]
