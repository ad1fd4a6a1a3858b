"""A tiny twin of a model: the same class and the same options, with few and narrow layers.

What can go wrong when a model is cut over processes depends on how it is built, not on how large it is. So a plan can
be tried on a twin, on a CPU, in seconds.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

_LAYERS, _EXPERTS, _HEAD = 2, 4, 16
# By the names that transformers' configs share; a config that has others under an alias answers to these, too.
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth")
_HEAD_COUNTS = (
    ("num_attention_heads", "num_key_value_heads"),
    ("num_heads", None),
    ("n_head", None),
    ("n_heads", None),
    ("encoder_attention_heads", None),
    ("decoder_attention_heads", None),
)
_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
_INNER = re.compile(r"(.*_)?(intermediate_size|ffn_dim|n_inner|d_ff|mlp_dim|hidden_dim)")
_EXPERT_COUNTS = re.compile(r"num_(local_)?experts|n_routed_experts")
_DROPOUT = re.compile(r".*(dropout|pdrop|layerdrop|drop_path|drop_rate|drop_prob).*")


def twin_config(config: PreTrainedConfig, multiple: int = 1, layers: int = _LAYERS) -> PreTrainedConfig:
    """Return a config of the same class and options with few and narrow layers, and without dropout.

    The vocabulary, positions and sizes of images stay, so that the same data fits. What is cut over processes (heads,
    widths, experts) stays a multiple of `multiple` where it was one. At most so many layers are left, and one of every
    kind.
    """
    twin = copy.deepcopy(config)
    for part in _parts(twin):
        _shorten(part, layers)
        _narrow(part, multiple)
        for name, value in list(vars(part).items()):
            if _DROPOUT.fullmatch(name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return twin


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _shorten(config: PreTrainedConfig, layers: int) -> None:
    """Keep the first layer of every kind, and at least so many."""
    for name in _LAYER_COUNTS:
        count = vars(config).get(name)
        if type(count) is not int or count <= layers:
            continue
        lists = {key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == count}
        kinds = {repr([value[layer] for value in lists.values()]): layer for layer in reversed(range(count))}
        kept = sorted({*kinds.values(), *range(layers)})
        setattr(config, name, len(kept))
        for key, value in lists.items():
            setattr(config, key, [value[layer] for layer in kept])


def _narrow(config: PreTrainedConfig, multiple: int) -> None:
    width = next((vars(config)[name] for name in _WIDTHS if type(vars(config).get(name)) is int), None)
    if width is None:
        return
    new_width = width
    for heads_name, groups_name in _HEAD_COUNTS:
        heads = vars(config).get(heads_name)
        if type(heads) is not int or not heads or width % heads:
            continue
        groups = vars(config).get(groups_name) if groups_name else None
        groups = groups if type(groups) is int and groups and heads % groups == 0 else heads
        few = _fewer(groups, multiple)
        each = _fewer(heads // groups, 1)
        head = _head_size(config, width // heads)
        new_width = few * each * head
        setattr(config, heads_name, few * each)
        if groups_name and type(vars(config).get(groups_name)) is int:
            setattr(config, groups_name, few)
        if type(vars(config).get("head_dim")) is int:
            config.head_dim = head
    for name, value in list(vars(config).items()):
        if type(value) is not int:
            continue
        if name in _WIDTHS and value == width:
            setattr(config, name, new_width)
        elif _INNER.fullmatch(name):
            setattr(config, name, min(value, math.lcm(2 * new_width, multiple)))
        elif _EXPERT_COUNTS.fullmatch(name):
            setattr(config, name, _fewer(value, math.lcm(multiple, _EXPERTS)))


def _fewer(count: int, multiple: int) -> int:
    """Return the smallest number above 1 that divides `count` and is a multiple of `multiple`, if that divides it."""
    wanted = math.lcm(multiple, 2 if count % 2 == 0 else 1)
    return wanted if count % wanted == 0 else count


def _head_size(config: PreTrainedConfig, size: int) -> int:
    """Return the width of a head; where rotary positions are cut into sections, these must go on fitting."""
    rope = vars(config).get("rope_parameters") or vars(config).get("rope_scaling") or {}
    if isinstance(rope, dict) and any("section" in str(key) for key in rope):
        return size
    own: Any = vars(config).get("head_dim")
    return min(own if type(own) is int else size, _HEAD)


def disturb(model: nn.Module, seed: int = 0, scale: float = 0.1) -> None:
    """Add noise to every parameter, the same in every process.

    Fresh models hold zeros (biases, gates) and very small weights, behind which a wrong dependency hides.
    """
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(scale * torch.randn(parameter.shape, generator=noise).to(parameter))


__all__ = ["disturb", "twin_config"]
