"""Which layers of a model are cut over ranks, and how: decided before any process group exists, on any device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.tensor.regions import Region, child, find_regions, linear, widths
from cornstarch.parallel.tensor.styles import ALIASES, Style


class TensorPlan:
    """The regions of a model that are cut, and what is left whole, with the reason."""

    def __init__(self, model: nn.Module, own: Mapping[str, Style]) -> None:
        self.regions: list[Region] = []
        self.whole: dict[str, str] = {}
        taken: set[str] = set()
        for owner, region, reason in find_regions(model, own, text_config(model)):
            if region is None:
                self.whole[owner] = str(reason)
            else:
                names = full_names(region)
                if not taken & names.keys():
                    taken |= names.keys()
                    self.regions.append(region)
        for name, style in own.items():
            region = _single(model, name, style)
            # What is in a region is cut with it; what its owner left whole is cut as the model says.
            if region is not None and name not in taken:
                taken.add(name)
                self.regions.append(region)

    @property
    def styles(self) -> dict[str, Style]:
        """How each layer or parameter is cut, by full name."""
        return {name: style for region in self.regions for name, style in full_names(region).items()}


def full_names(region: Region) -> dict[str, Style]:
    """Return the styles of a region by full name."""
    return {".".join(filter(None, (region.owner, key))): style for key, style in region.styles.items()}


def _single(model: nn.Module, name: str, style: Style) -> Region | None:
    """Return a layer that is cut by itself: whole activations go in and come out."""
    layer = linear(child(model, name))
    if not style.whole or layer is None or name.split(".")[-1] == "lm_head":
        return None
    owner, _, key = name.rpartition(".")
    inputs, outputs = widths(layer)
    number = outputs if style.kind == "column" else inputs
    return Region(owner, {key: style}, must_divide={f"{'outputs' if style.kind == 'column' else 'inputs'}": number})


def plan_regions(model: nn.Module, plan: Mapping[str, Style | str] | None = None) -> TensorPlan:
    """Return what of a model is cut; raise `UnsupportedModelError` if nothing is."""
    inner = unwrap(model)
    if plan is not None:
        _check_names(inner, plan)
    own = _styles_of(inner, plan if plan is not None else own_plan(inner))
    found = TensorPlan(inner, own)
    if plan is not None:
        _check_used(inner, own, found)
    if not found.regions:
        reasons = sorted({f"{owner or 'it'}: {reason}" for owner, reason in found.whole.items()})
        why = f" ({reasons[0]})" if reasons else ""
        raise UnsupportedModelError(
            f"{type(inner).__name__} has no layer that tensor parallelism knows how to cut{why}. Leave `tp` at 1, or "
            "give a plan that names its layers."
        )
    return found


def _check_used(model: nn.Module, given: Mapping[str, Style], found: TensorPlan) -> None:
    """Refuse a plan of the user's that names what cannot be cut as it says."""
    for name, style in given.items():
        if found.styles.get(name, style).kind != style.kind or name not in found.styles:
            owner = name.rpartition(".")[0]
            why = found.whole.get(owner, "a region needs a column and a row, with nothing unknown between them")
            raise ConfigError(
                f"The plan cuts {name} of {type(model).__name__} as a {style.kind}, which cannot be: {why}."
            )


def tensor_plan(model: nn.Module) -> dict[str, Style]:
    """Return how each layer or parameter of a model is cut, by name; what is not named stays whole."""
    return plan_regions(model).styles


def kept_whole(model: nn.Module) -> dict[str, str]:
    """Return the modules that look as if they could be cut and are left whole, and why."""
    return plan_regions(model).whole


# ---------------------------------------------------------------------------------------------------- reading


def text_config(model: nn.Module) -> Any:
    """Return the config that counts heads."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def own_plan(model: nn.Module) -> Mapping[str, str]:
    """Return the plan that a model ships, or an empty one."""
    plan = getattr(model, "tp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def _styles_of(model: nn.Module, plan: Mapping[str, Style | str]) -> dict[str, Style]:
    """Return the styles by full name: a plan has `*` in place of the numbers of layers."""
    found: dict[str, Style] = {}
    for name, _ in model.named_modules():
        said = plan.get(name, plan.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)))
        style = ALIASES.get(said) if isinstance(said, str) else said
        if style is not None:
            found[name] = style
    return found


def _check_names(model: nn.Module, plan: Mapping[str, Style | str]) -> None:
    """Refuse a plan of the user's with names that the model has not, or words that nobody knows."""
    there = {re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name, _ in model.named_modules()}
    there |= {name for name, _ in model.named_modules()}
    for name, style in plan.items():
        if isinstance(style, str) and style not in ALIASES:
            raise ConfigError(f"{name}: {style} is no way to cut a layer; known are {', '.join(sorted(ALIASES))}.")
        if name not in there:
            raise ConfigError(f"{name} is in the plan, and {type(model).__name__} has no such module.")


__all__ = ["kept_whole", "tensor_plan"]
