"""A tiny twin of a model: the same class and the same options, with few and narrow layers.

What can go wrong when a model is cut over processes depends on how it is built, not on how large it is. So a plan can
be tried on a twin, on a CPU, in seconds.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
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
_INNER = re.compile(r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|d_ff|mlp_dim|hidden_dim)")
_LATENT_RANKS = ("q_lora_rank", "kv_lora_rank")
# Experts of a mixture, how many of them a token goes to, the groups they stand in, and how many groups a token may use.
_EXPERT_COUNTS = re.compile(r"(moe_)?num_(local_|routed_)?experts|n_routed_experts|zero_expert_num")
_EXPERTS_PER_TOKEN = re.compile(
    r"(moe_)?num_experts_per_tok(en)?|num_selected_experts|moe_top_?k|top_?k_experts|experts_top_?k|moe_k"
)
_EXPERT_GROUPS = re.compile(r"n_group|num_expert_groups?")
_GROUPS_PER_TOKEN = re.compile(r"topk_groups?")
# Numbers that say by a layer's index what it is, and how many layers it takes until one of every kind has come.
_KINDS_BY_INDEX = {
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "attn_layer_offset": 1,
    "expert_layer_offset": 1,
    "attn_layer_period": 0,
    "expert_layer_period": 0,
    "decoder_sparse_step": 0,
    "interleave_moe_layer_step": 0,
    "moe_layer_interval": 0,
    "moe_layer_freq": 0,
}
_LISTS_OF_INDICES = ("moe_layers", "mlp_only_layers", "cross_attention_layers")
_LAST_LAYERS = "num_kv_shared_layers"
# Heads of a state-space layer and their width, where together they are the width of the model times `expand`.
_STATE_HEADS = (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim"), ("num_heads", "head_dim"))
_EXPANSIONS = ("mamba_expand", "expand")
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
        _narrow_experts(part, multiple)
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
        indices = {key: vars(config)[key] for key in _LISTS_OF_INDICES if isinstance(vars(config).get(key), list)}
        if last := vars(config).get(_LAST_LAYERS):
            indices[_LAST_LAYERS] = range(count - last, count)
        lists = {
            key: value
            for key, value in vars(config).items()
            if isinstance(value, list) and len(value) == count and key not in indices
        }
        kinds = {
            repr([[value[layer] for value in lists.values()], [layer in value for value in indices.values()]]): layer
            for layer in reversed(range(count))
        }
        kept = sorted({*kinds.values(), *range(min(count, _layers_of_all_kinds(config, layers)))})
        setattr(config, name, len(kept))
        for key, value in lists.items():
            setattr(config, key, [value[layer] for layer in kept])
        for key, among in indices.items():
            new = [position for position, layer in enumerate(kept) if layer in among]
            setattr(config, key, len(new) if key == _LAST_LAYERS else new)


def _layers_of_all_kinds(config: PreTrainedConfig, layers: int) -> int:
    """Return how many of the first layers hold one of every kind that depends on a layer's index; at least `layers`."""
    numbers = {name: vars(config).get(name) for name in _KINDS_BY_INDEX}
    needed = [value + _KINDS_BY_INDEX[name] for name, value in numbers.items() if type(value) is int]
    return max(layers, *needed, 0)


def _narrow(config: PreTrainedConfig, multiple: int) -> None:
    width = next((vars(config)[name] for name in _WIDTHS if type(vars(config).get(name)) is int), None)
    if width is None:
        return
    new_width = width
    state = _state_heads(config, width)
    for heads_name, groups_name in _HEAD_COUNTS:
        heads = vars(config).get(heads_name)
        if type(heads) is not int or not heads or (width % heads and not _has_own_head_sizes(config)):
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
        if type(vars(config).get("head_dim")) is int and not _is_latent(config):
            config.head_dim = head
    for name, value in list(vars(config).items()):
        if type(value) is not int:
            continue
        if name in _WIDTHS and value == width:
            setattr(config, name, new_width)
        elif _INNER.fullmatch(name):
            setattr(config, name, min(value, math.lcm(2 * new_width, multiple)))
        elif name in _LATENT_RANKS:
            setattr(config, name, min(value, new_width))
        elif name == "rotary_dim":
            setattr(config, name, min(value, _HEAD))
    if state is not None:
        _narrow_state_heads(config, *state, new_width)


def _state_heads(config: PreTrainedConfig, width: int) -> tuple[str, str, int] | None:
    """Return the names of the heads of state-space layers and of their width, and how often wider these layers are."""
    expand = next((vars(config)[name] for name in _EXPANSIONS if type(vars(config).get(name)) is int), None)
    for heads_name, size_name in _STATE_HEADS:
        heads, size = vars(config).get(heads_name), vars(config).get(size_name)
        if expand and type(heads) is int and type(size) is int and heads * size == expand * width:
            return heads_name, size_name, expand
    return None


def _narrow_state_heads(config: PreTrainedConfig, heads_name: str, size_name: str, expand: int, width: int) -> None:
    size = min(vars(config)[size_name], _HEAD // 2)
    setattr(config, size_name, size)
    setattr(config, heads_name, expand * width // size)


def _has_own_head_sizes(config: PreTrainedConfig) -> bool:
    """Whether the width of a head is said by itself, so that heads need not divide the width of the model."""
    return type(vars(config).get("head_dim")) is int or _is_latent(config)


def _is_latent(config: PreTrainedConfig) -> bool:
    """Whether attention is latent (MLA): heads have parts with and without positions, whose widths belong together."""
    return type(vars(config).get("qk_rope_head_dim")) is int


def _narrow_experts(config: PreTrainedConfig, multiple: int) -> None:
    """Leave few experts, and let a token go to fewer of them, in as many groups as they can still stand in."""
    found = [(name, value) for name, value in vars(config).items() if _EXPERT_COUNTS.fullmatch(name)]
    counts = [count for _, value in found for count in _numbers(value)]
    few = min((_fewer(count, math.lcm(multiple, _EXPERTS)) for count in counts), default=0)
    if not counts or few == min(counts):
        return  # there are few already, or a number that the processes do not divide: that must show
    for name, value in found:
        _set_numbers(config, name, value, lambda count: few if count > few else count)
    groups = next((value for name, value in vars(config).items() if _EXPERT_GROUPS.fullmatch(name)), None) or 1
    for name, value in list(vars(config).items()):
        if _EXPERTS_PER_TOKEN.fullmatch(name):
            _set_numbers(config, name, value, lambda chosen: few if chosen == min(counts) else min(chosen, few // 2))
        elif _EXPERT_GROUPS.fullmatch(name):
            _set_numbers(config, name, value, lambda count: min(count, 2))
        elif _GROUPS_PER_TOKEN.fullmatch(name):
            _set_numbers(config, name, value, lambda chosen: min(chosen, 2 if chosen == groups else 1))


def _numbers(value: Any) -> list[int]:
    """Return the numbers of an option that is one number, or one for each layer."""
    return [number for number in (value if isinstance(value, list) else [value]) if type(number) is int]


def _set_numbers(config: PreTrainedConfig, name: str, value: Any, change: Callable[[int], int]) -> None:
    if isinstance(value, list):
        setattr(config, name, [change(number) if type(number) is int else number for number in value])
    elif type(value) is int:
        setattr(config, name, change(value))


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
