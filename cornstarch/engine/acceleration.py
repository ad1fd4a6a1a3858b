"""Acceleration of a model on its device: compiled layers, a fused loss without all logits, fp8 matrix products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from cornstarch.compat.compiler import has_triton, set_activation_budget
from cornstarch.errors import ConfigError
from cornstarch.kernels.compile import compile_layers
from cornstarch.kernels.compile_log import CompileLog
from cornstarch.kernels.fp8 import MIN_DIM, Scaling, explain_no_fp8, multiply_in_fp8
from cornstarch.kernels.fused_loss import fuse_head_with_loss, has_head
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.item_encoders import attend_within_items
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.ddp_fsdp import wrapping_units
from cornstarch.pipeline.remote_module import RemoteModule
from cornstarch.plan.plan import Plan, explain_uncompiled

CompileMode = Literal["auto", "layers", "off"]
Fp8Mode = Scaling | Literal["off"]


@dataclass
class Acceleration:
    """What is done for speed."""

    compiled: dict[str, int] = field(default_factory=dict)
    """By part: layers that are to be compiled."""
    compile_log: CompileLog = field(default_factory=CompileLog)
    """What torch compiled of them so far, how often, and which run eagerly after all."""
    packed: list[str] = field(default_factory=list)
    """Encoders of items of any size that attend to all items of a batch at once."""
    fused_loss: bool = False
    """Whether the loss is computed without all logits."""
    fp8: dict[str, int] = field(default_factory=dict)
    """By part: linear layers that multiply in fp8."""
    notes: list[str] = field(default_factory=list)
    """Why something is not done."""
    log: Callable[[str], None] = field(default=lambda text: None, repr=False)
    """Shows each note to the user once, when it is found out."""

    def note(self, text: str) -> None:
        """Remember why something is not done; the same only once."""
        if text not in self.notes:
            self.notes.append(text)
            self.log(text)

    def figures(self) -> dict[str, float]:
        """Return the numbers that are logged with every step: recompilations so far, and layers that run eagerly."""
        if not self.compiled:
            return {}
        log = self.compile_log
        return {"recompilations": log.recompilations, "eager_layers": sum(log.eager.values())}

    def describe_compilation(self) -> dict[str, Any] | None:
        """Return what the report shows of compiled layers; None if nothing is compiled."""
        return {"parts": self.compile_log.describe(), "notes": self.notes} if self.compiled else None


def find_uncompiled_modules(plan: Plan, ranks: int) -> dict[str, str]:
    """Return the modules of a plan whose layers cannot be compiled, with the reason."""
    if ranks == 1:
        return {}
    reason = explain_uncompiled(plan.schedule if plan.is_pipeline else None)
    return {} if reason is None else dict.fromkeys(plan.modules, reason)


def compiles(compile: CompileMode, device: torch.device) -> bool:
    """Return whether layers are compiled on a device."""
    return compile == "layers" or (compile == "auto" and device.type == "cuda" and has_triton())


def check_fp8(fp8: Fp8Mode, device: torch.device) -> None:
    """Refuse fp8 on a device that has none."""
    if fp8 != "off" and (reason := explain_no_fp8(device)) is not None:
        raise ConfigError(
            f"fp8 = {fp8}\n  fp8 needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell); "
            f"{reason}.\n  Use fp8: off; on a GPU with precision: bf16."
        )


def accelerate_model(
    model: nn.Module,
    device: torch.device,
    compile: CompileMode = "auto",
    activation_budget: float = 1.0,
    whole: Mapping[str, str] | None = None,
    log: Callable[[str], None] = lambda text: None,
    fp8: Fp8Mode = "off",
    stages: Sequence[nn.Module] | None = None,
) -> Acceleration:
    """Make a parallelized model compute quickly, in place; names and values of parameters stay.

    `compile`: with `layers`, a layer that cannot be compiled is an error. Of the activations of compiled layers the
    fraction `activation_budget` is kept for the backward pass. Parts in `whole` are not compiled, for the reason given.
    `fp8`: large linear layers in trained parts multiply in fp8, scaled by rows or by matrices. `stages`: what this
    rank's stages run instead of a model that was split: the model itself, or a copy of it for each of several stages.
    """
    check_fp8(fp8, device)
    speed, whole = Acceleration(log=log), whole or {}
    if compile == "layers" and device.type == "cuda" and not has_triton():
        raise ConfigError("compile = layers\n  Triton, which makes kernels for GPUs, is not there. Use compile: off.")
    encoders = model.encoders if isinstance(model, MultimodalModel) else {}  # batches have any number of images
    parts = [part for one in (stages if stages is not None else [model]) for part in _list_parts(one)]
    if stages is None:  # the inputs of stages were recorded with the attention that encoders have
        speed.packed = attend_within_items(model, speed.note)
    for name, part in parts:
        why = fuse_head_with_loss(part)
        speed.fused_loss = speed.fused_loss or why is None
        if why is not None and device.type == "cuda" and has_head(part):
            speed.note(f"{name}: the loss is computed from the logits of all tokens, which take memory: {why}")
    if fp8 != "off":  # before layers are compiled: the scaling becomes part of their kernels
        found = Counter[str]()
        for name, part in parts:
            found[name] += multiply_in_fp8(wrapping_units(part), fp8)
        speed.fp8 = {name: count for name, count in found.items() if count}
        if not speed.fp8:
            speed.note(
                f"nothing is computed in fp8: no linear layer inside trained layers has {MIN_DIM} or more inputs and "
                "outputs, both multiples of 16"
            )
        for name, count in speed.fp8.items():
            log(f"{name}: {count} linear layers multiply in fp8 ({fp8})")
            if name in whole or not compiles(compile, device):
                speed.note(f"{name} is not compiled: in fp8 it is likely to be slower than in bf16")
    if not compiles(compile, device):
        return speed
    set_activation_budget(activation_budget)
    for name, part in parts:
        if name in whole:
            if compile == "layers":
                raise ConfigError(f"compile = layers\n  {name} cannot be compiled: {whole[name]}. Use compile: auto.")
            speed.note(f"{name} is not compiled: {whole[name]}")
            continue
        layers = wrapping_units(part)
        if layers:
            on_failure = speed.note if compile == "auto" else None
            speed.compiled[name] = speed.compiled.get(name, 0) + compile_layers(
                layers, on_failure, log=speed.compile_log, part=name, any_rows=name in encoders
            )
    return speed


def _list_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the encoders and the language model that run here, without wrappers, or the model."""
    if not isinstance(model, MultimodalModel):
        return [("model", unwrap(model))]
    parts = {name: encoder.module for name, encoder in model.encoders.items()}
    parts["language_model"] = model.language_model
    return [(name, unwrap(part)) for name, part in parts.items() if not isinstance(part, RemoteModule)]
