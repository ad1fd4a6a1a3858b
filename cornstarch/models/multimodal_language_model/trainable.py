"""Freezing: what is trained, declared per part."""

from __future__ import annotations

from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.unwrap import is_peft

FIXED = "_cornstarch_fixed"
"""The attribute in which a part remembers the names of the parameters that it keeps fixed."""


def set_trainable(part: nn.Module, trainable: bool) -> None:
    """Train or freeze a part: sets `requires_grad` of its parameters and its train/eval mode.

    Parameters that the part itself keeps fixed are never trained: the base weights under PEFT adapters, the
    sinusoids of an audio encoder, layers that the user froze one by one. They are those that required no gradient
    when the part was first declared, while others did.
    """
    fixed = _fixed_parameters(part)
    part.train(trainable)
    for name, parameter in part.named_parameters():
        if parameter.is_floating_point():  # quantised weights have no gradient
            parameter.requires_grad_(trainable and name not in fixed)


def _fixed_parameters(part: nn.Module) -> frozenset[str]:
    known: frozenset[str] | None = part.__dict__.get(FIXED)
    if known is None:
        known = frozenset(name for name, p in part.named_parameters() if not p.requires_grad)
        if len(known) == sum(1 for _ in part.named_parameters()):  # frozen as a whole: no choice within the part
            if is_peft(part):
                raise ConfigError(
                    "No parameter of the PEFT model requires a gradient, so its adapters cannot be told from its base. "
                    "Compose it before freezing it, and freeze it with train(encoders_mode=…, llm_mode=…)."
                )
            known = frozenset()
        part.__dict__[FIXED] = known
    return known
