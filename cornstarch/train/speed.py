"""What a run does to compute quickly on its device: compiled layers, a loss without all logits, the best kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cornstarch.compat import compile_counts, has_triton, set_activation_budget
from cornstarch.compute.compiling import compile_layers
from cornstarch.compute.head import fuse_head_with_loss
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.units import wrapping_units
from cornstarch.plan.plan import Plan

CompileMode = Literal["auto", "layers", "off"]

# cuDNN's kernels are the quickest on the GPUs that have them; what they cannot do, the next takes.
_QUICKEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass
class Speed:
    """What is done for speed, and what is not, with the reason."""

    compiled: dict[str, int] = field(default_factory=dict)
    """By part: layers that are compiled."""
    fused_loss: bool = False
    """Whether the loss is computed without all logits."""
    notes: list[str] = field(default_factory=list)
    """Why something is not done."""
    tell: Callable[[str], None] = field(default=lambda words: None, repr=False)
    """Hears of each of them once, when it is found out."""
    _before: dict[str, int] = field(default_factory=compile_counts, repr=False)

    def note(self, words: str) -> None:
        """Write down why something is not done; the same only once."""
        if words not in self.notes:
            self.notes.append(words)
            self.tell(words)

    def compilations(self) -> dict[str, int]:
        """Return how many graphs were compiled since, and how often a layer fell back to Python."""
        return {name: count - self._before.get(name, 0) for name, count in compile_counts().items()}


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return what has layers of its own, by name."""
    if isinstance(model, MultimodalModel):
        encoders = {name: encoder.module for name, encoder in model.encoders.items()}
        return {**encoders, "language_model": model.language_model}
    return {"model": model}


def not_compiled(plan: Plan, ranks: int) -> dict[str, str]:
    """Return the modules of a plan whose layers cannot be compiled, with the reason."""
    if ranks == 1:
        return {}
    found: dict[str, str] = {}
    for name, module in plan.modules.items():
        if plan.is_pipeline and plan.schedule in ("zero_bubble", "auto"):
            found[name] = "the schedule takes the backward pass of its layers apart"
        elif module.tp > 1 or module.cp > 1:
            found[name] = "its layers talk to other ranks (tp, cp)"
    return found


def speed_up(
    model: nn.Module,
    device: torch.device,
    compile: CompileMode = "auto",
    activation_budget: float = 1.0,
    whole: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> Speed:
    """Make a model compute quickly, in place; names and values of parameters stay.

    Args:
        model: What is trained, after it was spread over processes.
        device: Where it computes.
        compile: `layers`: every layer is compiled, and one that cannot be is an error. `auto`: on a GPU, where it can.
        activation_budget: The share of the activations of compiled layers that is kept for the backward pass; the rest
            is computed again, what is cheapest first.
        whole: Parts whose layers are not to be compiled, with the reason.
        tell: Told why something is not done, now or when it is tried.
    """
    speed = Speed(tell=tell)
    whole = whole or {}
    can = has_triton() if device.type == "cuda" else True
    if compile == "layers" and not can:
        raise ConfigError("compile = layers\n  Triton, which makes kernels for GPUs, is not there. Use compile: off.")
    parts = parts_of(model)
    for part in parts.values():
        why = fuse_head_with_loss(unwrap(part))
        speed.fused_loss = speed.fused_loss or why is None
    if compile == "off" or (compile == "auto" and not (device.type == "cuda" and can)):
        return speed
    set_activation_budget(activation_budget)
    for name, part in parts.items():
        if name in whole:
            if compile == "layers":
                raise ConfigError(f"compile = layers\n  {name} cannot be compiled: {whole[name]}. Use compile: auto.")
            speed.note(f"{name} is not compiled: {whole[name]}")
            continue
        layers = wrapping_units(unwrap(part))
        if layers:
            speed.compiled[name] = compile_layers(layers, speed.note if compile == "auto" else None)
    return speed


@contextmanager
def quickest_kernels() -> Iterator[None]:
    """Let attention without a special mask take the quickest kernel of the device, within this block."""
    with sdpa_kernel(_QUICKEST, set_priority=True):
        yield


__all__ = ["CompileMode", "Speed", "not_compiled", "quickest_kernels", "speed_up"]
