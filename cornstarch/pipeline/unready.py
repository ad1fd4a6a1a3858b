"""Models of which only a part is here, and which would have to be run: a tiny twin is run in their place.

Whether a language model obeys masks, and whether its tokens can be cut, is found out by running it. Of a model whose
other stages were never read that cannot be done; what can go wrong depends on its class and its options, not its size.
"""

from __future__ import annotations

import torch
from torch import nn

from cornstarch.attention import attend_through_masks
from cornstarch.attention.verify import is_on_meta, trust_masks
from cornstarch.errors import UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.models.twin import disturb, twin_config
from cornstarch.parallel.apply import must_attend_through_masks, spread_inside
from cornstarch.parallel.context import shard_tokens
from cornstarch.parallel.mesh import StageMeshes
from cornstarch.pipeline.staging import Staging
from cornstarch.plan.plan import LANGUAGE_MODEL, ModulePlan

NO_TWIN = "it is run before it is cut, and there is no small model of its kind that could be run in its place"


def small_twin(model: nn.Module, multiple: int = 1) -> nn.Module | None:
    """Return a tiny model of the same class and options with random weights, or None if there is none.

    Args:
        model: A transformers model, or a PEFT model around one; it may be on the meta device.
        multiple: What is cut over so many processes stays a multiple of it.
    """
    inner = unwrap(model)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            twin: nn.Module = type(inner)(twin_config(inner.config, multiple))  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return None
    disturb(twin)
    return twin


def must_be_whole(staging: Staging, packed: bool) -> dict[str, str]:
    """Return the modules that must be whole in this process before they are cut, by name, and why."""
    found: dict[str, str] = {}
    masks = must_attend_through_masks(staging.model, packed)
    for name, module, plan in staging.here():
        is_run = (masks and name == LANGUAGE_MODEL) or _cuts_tokens(module, plan)
        if is_run and small_twin(module, plan.cp) is None:
            found[name] = NO_TWIN
    return found


def attend(language_model: nn.Module, device: torch.device) -> None:
    """Let a language model attend through masks, after checking that it, or its twin, really does."""
    on_meta = is_on_meta(language_model)
    if on_meta:
        attend_through_masks(_twin(language_model, 1, device))
    attend_through_masks(language_model)
    if on_meta:
        trust_masks(unwrap(language_model))


def spread_in_part(module: nn.Module, plan: ModulePlan, meshes: StageMeshes, device: torch.device) -> None:
    """Do what `spread_inside` does, for a module of which other stages' parameters may be on the meta device."""
    if _cuts_tokens(module, plan) and is_on_meta(module):
        twin = _twin(module, plan.cp, device)
        shard_tokens(twin, meshes.context(plan.cp), mode=plan.cp_mode, distribution=plan.cp_distribution)
    spread_inside(module, plan, meshes)


def _cuts_tokens(module: nn.Module, plan: ModulePlan) -> bool:
    return plan.cp > 1 and not isinstance(module, ModalEncoderModule)


def _twin(model: nn.Module, multiple: int, device: torch.device) -> nn.Module:
    twin = small_twin(model, multiple)
    if twin is None:
        raise UnsupportedModelError(f"{type(unwrap(model)).__name__} is not all here: {NO_TWIN}.")
    return twin.to(device)


__all__ = ["attend", "must_be_whole", "small_twin", "spread_in_part"]
