"""Checks that must run a model of which this rank has only some stages: they run on a tiny twin instead.

Whether a language model obeys masks, and whether its tokens can be sharded, is found by running it. A rank that never
read the other stages cannot run the model, but what can go wrong depends on its class and options, not on its size.
"""

from __future__ import annotations

import torch
from torch import nn

from cornstarch.attention import attend_through_masks
from cornstarch.attention.mask_verification import is_on_meta, mark_verified
from cornstarch.errors import UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.models.twin import add_noise, build_twin_config
from cornstarch.parallel.apply import needs_mask_attention
from cornstarch.parallel.context import shard_tokens
from cornstarch.parallel.mesh import DeviceMeshes, StageMeshes
from cornstarch.pipeline.stages import StageAssignment
from cornstarch.plan.plan import LANGUAGE_MODEL, ModulePlan

NO_TWIN = "it is run before it is cut, and there is no small model of its kind that could be run in its place"


def build_small_twin(model: nn.Module, multiple: int = 1) -> nn.Module | None:
    """Return a tiny model of the same class and options with random weights, or None if there is none.

    Args:
        model: A transformers model, or a PEFT model around one; it may be on the meta device.
        multiple: Sharded dimensions stay a multiple of this number of ranks.
    """
    inner = unwrap(model)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            twin: nn.Module = type(inner)(build_twin_config(inner.config, multiple))  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return None
    add_noise(twin)
    return twin


def find_whole_modules(stages: StageAssignment, packed: bool) -> dict[str, str]:
    """Return the modules that this rank needs whole until they are sharded, by name, with the reason."""
    found: dict[str, str] = {}
    masks = needs_mask_attention(stages.model, packed)
    for name, module, plan in stages.here():
        is_run = (masks and name == LANGUAGE_MODEL) or _shards_tokens(module, plan)
        if is_run and build_small_twin(module, plan.cp) is None:
            found[name] = NO_TWIN
    return found


def apply_mask_attention(language_model: nn.Module, device: torch.device) -> None:
    """Let a language model attend through masks as data, after checking that it, or its twin, really does."""
    on_meta = is_on_meta(language_model)
    if on_meta:
        attend_through_masks(_build_twin(language_model, 1, device))
    attend_through_masks(language_model)
    if on_meta:
        mark_verified(unwrap(language_model))


def check_cp(module: nn.Module, plan: ModulePlan, meshes: DeviceMeshes | StageMeshes, device: torch.device) -> None:
    """Check on a twin that the tokens of a module can be sharded, if the module itself cannot run here.

    `apply_cp` runs the module to check that. Where other stages own some of its layers, a tiny twin runs instead: what
    can go wrong depends on the class and its options, not on the size.
    """
    if _shards_tokens(module, plan) and is_on_meta(module):
        twin = _build_twin(module, plan.cp, device)
        shard_tokens(twin, meshes.context(plan.cp), mode=plan.cp_mode, distribution=plan.cp_distribution)


def _shards_tokens(module: nn.Module, plan: ModulePlan) -> bool:
    return plan.cp > 1 and not isinstance(module, ModalEncoderModule)


def _build_twin(model: nn.Module, multiple: int, device: torch.device) -> nn.Module:
    twin = build_small_twin(model, multiple)
    if twin is None:
        raise UnsupportedModelError(f"{type(unwrap(model)).__name__} is not all here: {NO_TWIN}.")
    return twin.to(device)
