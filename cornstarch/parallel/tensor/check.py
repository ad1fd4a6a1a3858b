"""What tensor parallelism refuses, before any process group exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.tensor.adapters import check_adapters
from cornstarch.parallel.tensor.order import is_cut
from cornstarch.parallel.tensor.plan import plan_regions
from cornstarch.parallel.tensor.regions import Region, child
from cornstarch.parallel.tensor.sequence import check_sequence
from cornstarch.parallel.tensor.styles import Style
from cornstarch.parallel.tensor.vocabulary import check_vocabulary

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

    No process group is needed, and the model may be on the meta device, or cut already. The arguments are those of
    `shard_tensors`.
    """
    inner = unwrap(model)
    if is_cut(inner):
        return  # it was checked then
    found = plan_regions(model, plan)
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
    """Refuse adapters on cut layers that are not plain LoRA, and those around a module with cut parameters."""
    owner = model.get_submodule(region.owner)
    parts = region.owner.split(".")
    for end in range(1, len(parts)):
        around = model.get_submodule(".".join(parts[:end]))
        if hasattr(around, "base_layer"):
            check_adapters(".".join(parts[:end]), around, can_be_cut=False)
    for key, style in region.styles.items():
        layer: Any = child(owner, key) if key else owner
        if not hasattr(layer, "base_layer"):
            continue
        name = ".".join(filter(None, (region.owner, key)))
        check_adapters(name, layer, style.kind in ("column", "row"))


def _alternatives(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


__all__ = ["check_tensor_plan"]
