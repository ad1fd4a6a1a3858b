"""What tensor parallelism refuses, before any process group exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.tensor.plan import plan_regions
from cornstarch.parallel.tensor.regions import Region, child
from cornstarch.parallel.tensor.sequence import check_sequence
from cornstarch.parallel.tensor.styles import Style
from cornstarch.parallel.tensor.vocabulary import check_vocabulary

_ADAPTERS = {"base_layer", "lora_A", "lora_B"}
_MOST = 1024  # ranks that are tried when an error lists the sizes that work


def check_tensor_plan(
    model: nn.Module,
    size: int,
    *,
    plan: Mapping[str, Style | str] | None = None,
    sequence: bool = False,
    vocabulary: bool = False,
) -> None:
    """Refuse a model that cannot be cut over so many ranks, and say which sizes work.

    No process group is needed, and the model may be on the meta device. The arguments are those of `shard_tensors`.
    """
    found = plan_regions(model, plan)
    inner = unwrap(model)
    for region in found.regions:
        _check_adapters(inner, region)
    if sequence:
        check_sequence(inner, found)
    if vocabulary:
        check_vocabulary(inner)
    misfits = sorted({misfit for region in found.regions for misfit in region.misfits(size)})
    if misfits:
        fitting = [n for n in range(1, _MOST + 1) if all(region.fits(n) for region in found.regions)]
        raise ConfigError(
            f"{type(inner).__name__} cannot be cut over {size} ranks (tp = {size}): it has "
            f"{' and '.join(misfits)}.\n  Use {_alternatives(fitting)}."
        )


def _check_adapters(model: nn.Module, region: Region) -> None:
    """Refuse adapters on cut layers that are not plain LoRA."""
    owner = model.get_submodule(region.owner)
    for key, style in region.styles.items():
        layer: Any = child(owner, key) if key else owner
        if not hasattr(layer, "base_layer"):
            continue
        name = ".".join(filter(None, (region.owner, key)))
        held = [part for part, inside in layer.named_children() if any(True for _ in inside.parameters())]
        if style.kind not in ("column", "row") or set(held) - _ADAPTERS:
            others = ", ".join(sorted(set(held) - _ADAPTERS)) or type(layer).__name__
            raise UnsupportedModelError(
                f"{name} has adapters that tensor parallelism cannot cut ({others}); LoRA on linear layers can be."
            )


def _alternatives(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


__all__ = ["check_tensor_plan"]
