"""Attention modules that have some of the heads: what they count, and what they are given."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import UnsupportedModelError
from cornstarch.parallel.tensor.collectives import Group, copy_in
from cornstarch.parallel.tensor.regions import Region
from cornstarch.parallel.tensor.styles import HEADS, KEY_VALUE_HEADS, KEY_VALUE_WIDTHS, WIDTHS


def count_own_heads(module: nn.Module, region: Region, ranks: int) -> None:
    """Let an attention module count the heads that it has here."""
    heads = region.heads // ranks
    pairs = max(region.key_value_heads // ranks, 1)
    numbers = dict.fromkeys(HEADS, (region.heads, heads))
    numbers |= dict.fromkeys(KEY_VALUE_HEADS, (region.key_value_heads, pairs))
    own = module.__dict__
    for name, (before, after) in numbers.items():
        if own.get(name) == before:
            own[name] = after
    for name in WIDTHS:
        if own.get(name) == region.width:
            own[name] = region.width // ranks
    for name in KEY_VALUE_WIDTHS:
        if isinstance(own.get(name), int):
            own[name] = own[name] // region.key_value_heads * pairs
    if "num_key_value_groups" in own:
        own["num_key_value_groups"] = heads // pairs
    if own.get("config") is not None:
        said = {name: after for name, (before, after) in numbers.items() if getattr(own["config"], name, 0) == before}
        own["config"] = OwnConfig(own["config"], said)


class OwnConfig:
    """A config as an attention module sees it: the very same, but for the number of heads."""

    def __init__(self, config: Any, numbers: Mapping[str, int]) -> None:
        self.__dict__.update(_config=config, _numbers=dict(numbers))

    def __getattr__(self, name: str) -> Any:
        numbers = self.__dict__["_numbers"]
        return numbers[name] if name in numbers else getattr(self.__dict__["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_config"], name, value)

    def __deepcopy__(self, memory: Any) -> OwnConfig:
        return OwnConfig(copy.deepcopy(self.__dict__["_config"], memory), self.__dict__["_numbers"])


# Arguments that are used for each rank's heads as they are: if they are learned, their gradients are added up.
_FOR_ALL_HEADS = ("position_emb", "rotary", "cos", "sin", "freqs")
# Arguments that layers of the region read, and biases that the region itself has made for its heads.
_READ = ("state", "position_bias", "key_value", "query", "key", "value", "context", "embeds", "latents", "features")
_READ_EXACTLY = {"x", "q", "k", "v", "input", "inputs", "kv"}


def watch_arguments(module: nn.Module, group: Group) -> None:
    """Add up the gradients of learned tensors that an attention module uses for its heads, beside its layers."""
    names = list(inspect.signature(module.forward).parameters)

    def enter(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        named = dict(zip(names, inputs, strict=False))
        changed = {name: treated(name, value) for name, value in {**named, **options}.items()}
        return tuple(changed[name] for name in named) + inputs[len(named) :], {name: changed[name] for name in options}

    def treated(name: str, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(treated(name, inner) for inner in value)
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        if any(word in name for word in _FOR_ALL_HEADS):
            return copy_in(value, group)
        if name in _READ_EXACTLY or any(word in name for word in _READ):
            return value
        raise UnsupportedModelError(
            f"{type(module).__name__} is given `{name}`, which is learned; tensor parallelism does not know how it is "
            "used. Leave `tp` at 1."
        )

    module.register_forward_pre_hook(enter, with_kwargs=True)


__all__ = ["count_own_heads", "watch_arguments"]
