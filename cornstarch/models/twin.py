"""Build a tiny twin of a model: the same class and options, with few and narrow layers.

Errors in sharding a model depend on its structure, not on its size. So a plan can be verified on a twin, on a CPU, in
seconds.
"""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

_LAYERS, _EXPERTS, _HEAD = 2, 4, 16
# Names that are common in transformers' configs; configs with other names alias these.
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth")
_HEAD_COUNTS = "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads".split()
_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
_INNER = re.compile(r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|d_ff|mlp_dim|hidden_dim)")
_LATENT_RANKS = ("q_lora_rank", "kv_lora_rank")
# Experts of a mixture, experts per token, expert groups, and groups per token.
_EXPERT_COUNTS = re.compile(r"(moe_)?num_(local_|routed_)?experts|n_routed_experts|zero_expert_num")
_EXPERTS_PER_TOKEN = re.compile(
    r"(moe_)?num_experts_per_tok(en)?|num_selected_experts|moe_top_?k|top_?k_experts|experts_top_?k|moe_k"
)
_EXPERT_GROUPS = re.compile(r"n_group|num_expert_groups?")
_GROUPS_PER_TOKEN = re.compile(r"topk_groups?")
# Numbers that determine the kind of a layer by its index, and how many further layers until every kind has occurred.
_FIRST_INDICES = "first_k_dense_replace num_dense_layers moe_layer_start_index attn_layer_offset expert_layer_offset"
_PERIODS = (
    "attn_layer_period expert_layer_period decoder_sparse_step interleave_moe_layer_step moe_layer_interval "
    "moe_layer_freq"
)
_KINDS_BY_INDEX = dict.fromkeys(_FIRST_INDICES.split(), 1) | dict.fromkeys(_PERIODS.split(), 0)
_LISTS_OF_INDICES = ("moe_layers", "mlp_only_layers", "cross_attention_layers")
_LAST_LAYERS = "num_kv_shared_layers"
# Heads of a state-space layer and their width; their product is the width of the model times `expand`.
_STATE_HEADS = (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim"), ("num_heads", "head_dim"))
_EXPANSIONS = ("mamba_expand", "expand")
_PATCHES, _FRAMES = 4, 32  # patches in a row of a small image, positions of a short recording
_DROPOUT = re.compile(r".*(dropout|pdrop|layerdrop|drop_path|drop_rate|drop_prob).*")


def build_twin_config(config: PreTrainedConfig, multiple: int = 1, layers: int = _LAYERS) -> PreTrainedConfig:
    """Return a config of the same class and options with few and narrow layers, and without dropout.

    The vocabulary, positions and image sizes stay, so that the same data fits. Sharded sizes (heads, widths, experts)
    stay a multiple of `multiple` if they were. `layers` layers are left, and more if there are more kinds of layers.
    """
    twin = copy.deepcopy(config)
    for part in _iterate_configs(twin):
        _shorten(part, layers)
        _narrow(part, multiple)
        _narrow_experts(part, multiple)
        for name, value in list(vars(part).items()):
            if _DROPOUT.fullmatch(name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return twin


def copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module."""
    # Eight empty dictionaries of hooks in each module take most of the time of `copy.deepcopy`: they are made here.
    states = (value for part in module.modules() for value in vars(part).values())
    return copy.deepcopy(module, {id(one): OrderedDict() for one in states if type(one) is OrderedDict and not one})


def shorten_items(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return a copy of a config for smaller images and shorter recordings; None if it says nothing of their sizes."""
    # Attention over all pairs of some hundred patches takes most of the time and memory of a narrow model.
    shorter, is_shorter = copy.deepcopy(config), False
    for part in _iterate_configs(shorter):
        sizes = vars(part)
        image, patch, frames = (sizes.get(name) for name in ("image_size", "patch_size", "max_source_positions"))
        if type(image) is int and type(patch) is int and image > _PATCHES * patch:
            part.image_size, is_shorter = _PATCHES * patch, True
        if type(frames) is int and frames > _FRAMES:
            part.max_source_positions, is_shorter = _FRAMES, True
    return shorter if is_shorter else None


def _iterate_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _iterate_configs(value)


def _shorten(config: PreTrainedConfig, layers: int) -> None:
    """Keep the first layer of every kind, and at least `layers`."""
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
        # The first layers until every kind that depends on a layer's index has occurred.
        numbers = {key: vars(config).get(key) for key in _KINDS_BY_INDEX}
        needed = [value + _KINDS_BY_INDEX[key] for key, value in numbers.items() if type(value) is int]
        kept = sorted({*kinds.values(), *range(min(count, max(layers, *needed, 0)))})
        setattr(config, name, len(kept))
        for key, value in lists.items():
            setattr(config, key, [value[layer] for layer in kept])
        for key, among in indices.items():
            new = [position for position, layer in enumerate(kept) if layer in among]
            setattr(config, key, len(new) if key == _LAST_LAYERS else new)


def _narrow(config: PreTrainedConfig, multiple: int) -> None:
    numbers = {name: value for name, value in vars(config).items() if type(value) is int}
    width = next((numbers[name] for name in _WIDTHS if name in numbers), None)
    if width is None:
        return
    new_width = width
    # Latent attention (MLA): head widths with and without positions belong together and stay.
    is_latent, has_head_size = "qk_rope_head_dim" in numbers, "head_dim" in numbers
    for heads_name in _HEAD_COUNTS:
        heads = numbers.get(heads_name)
        # A config that states the width of a head has any number of heads; otherwise they divide the model's width.
        if not heads or (width % heads and not has_head_size and not is_latent):
            continue
        has_groups = heads_name == "num_attention_heads" and "num_key_value_heads" in numbers
        groups = numbers["num_key_value_heads"] if has_groups else heads
        groups = groups if groups and heads % groups == 0 else heads
        few, each = _reduce_count(groups, multiple), _reduce_count(heads // groups, 1)
        # With sectioned rotary positions (mRoPE) the width of a head stays, or they would not fit.
        rope = vars(config).get("rope_parameters") or vars(config).get("rope_scaling") or {}
        is_sectioned = isinstance(rope, dict) and any("section" in str(key) for key in rope)
        head = width // heads if is_sectioned else min(numbers.get("head_dim", width // heads), _HEAD)
        new_width = few * each * head
        setattr(config, heads_name, few * each)
        if has_groups:
            config.num_key_value_heads = few
        if has_head_size and not is_latent:
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
    expand = next((numbers[name] for name in _EXPANSIONS if name in numbers), 0)
    for heads_name, size_name in _STATE_HEADS:
        if expand and numbers.get(heads_name, 0) * numbers.get(size_name, 0) == expand * width:
            size = min(numbers[size_name], _HEAD // 2)
            setattr(config, size_name, size)
            setattr(config, heads_name, expand * new_width // size)
            break


def _narrow_experts(config: PreTrainedConfig, multiple: int) -> None:
    found = [(name, value) for name, value in vars(config).items() if _EXPERT_COUNTS.fullmatch(name)]
    # An option is one number, or a list with one per layer.
    listed = [one for _, value in found for one in (value if isinstance(value, list) else [value])]
    counts = [one for one in listed if type(one) is int]
    few = min((_reduce_count(count, math.lcm(multiple, _EXPERTS)) for count in counts), default=0)
    if not counts or few == min(counts):
        return  # already few, or a number that the ranks do not divide: the twin must show that
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


def _set_numbers(config: PreTrainedConfig, name: str, value: Any, change: Callable[[int], int]) -> None:
    if isinstance(value, list):
        setattr(config, name, [change(number) if type(number) is int else number for number in value])
    elif type(value) is int:
        setattr(config, name, change(value))


def _reduce_count(count: int, multiple: int) -> int:
    """Return the smallest divisor of `count` above 1 that is a multiple of `multiple`; `count` if there is none."""
    wanted = math.lcm(multiple, 2 if count % 2 == 0 else 1)
    return wanted if count % wanted == 0 else count


def add_noise(model: nn.Module, seed: int = 0, scale: float = 0.1) -> None:
    """Add noise to every parameter, the same on every rank: zeros and small weights hide wrong dependencies."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(scale * torch.randn(parameter.shape, generator=noise).to(parameter))
