"""Make any Hugging Face model tiny from nothing but its config class.

The names of sizes repeat over hundreds of configs, so a table of patterns shrinks nearly all of them; lists
with one entry per layer keep one layer of every kind, so that a hybrid model stays hybrid. A config that
cannot be shrunk this way is a limit of this file, never of the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tests.zoo import BOS, EOS, HEADS, HIDDEN, LAYERS, PAD, VOCABULARY, build

PARAMETER_LIMIT = 4_000_000
HEAD = HIDDEN // HEADS
TABLE = VOCABULARY + 16  # beyond the words of the zoo's texts there is room for tokens of special meaning

# First match wins. A size is never made larger than the config's own default.
RULES: tuple[tuple[str, float], ...] = (
    (r"type_vocab_size", 2),
    (r".*vocab(_size)?(_base|_per_layer_input)?", TABLE),
    (r".*(dropout|pdrop|layerdrop|drop_path|drop_rate|drop_prob|jitter_noise).*|drop", 0.0),
    (r"mask_(time|feature)_prob", 0.0),
    (r"num_kv_shared_layers|num_nextn_predict_layers", 0),
    (r"num_feat_extract_layers", 13),  # counts another list
    (r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_end_index|.*_layer_offset", 1),
    (r".*(layer_period|layer_interval|_every_n_layers|window_pattern|full_attention_interval|group_size)", 2),
    (r".*(key_value_heads|kv_heads)", HEADS // 2),
    (r"mamba_(d_head|head_?dim)|mamba_(n_heads|num_heads)|num_heads_mamba", 8),
    (r"qk_head_dim", 2 * HEAD),
    (r"attention_head_dim", 2 * HEAD),
    (r"(.*_)?(head_?dim|d_head|dim_head|d_kv|kv_channels|head_size|rotary_dim)", HEAD),
    (r"(.*_)?(heads?|attention_heads|query_groups)", HEADS),
    (r"(.*_)?(layers?|num_blocks|depth|layers_per_stack)", LAYERS),
    (r"(moe|shared|expert|dense).*(intermediate_size|hidden_size)", 16),
    (r"(.*_)?(intermediate_size.*|ffn_dim|ffn_hidden_size|n_inner|d_?ff|dim_ff|d_inner|feed_forward_size)", 64),
    (r"hidden_size_per_layer_input", 8),
    (r"mamba_d_ssm|attention_hidden_size", 2 * HIDDEN),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|embedding_dim|emb_dim|proj_dim)", HIDDEN),
    (r"dim|lru_width|hidden_dim", HIDDEN),
    (r".*(shared_experts|experts_per_tok(en)?|moe_topk|moe_k|top_k_experts)", 2),
    (r".*(num_experts|num_local_experts|n_routed_experts|expert_num)", 4),
    (r"(n|topk|num_expert)_groups?|mamba_n_?groups|o_groups", 1),
    (r".*_rank", 8),
    (r"num_groups", 4),
    (r".*(d_state|state_size)", 8),
    (r"index_topk(_blocks)?", 64),
    (r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_target_positions)", 128),
    (r"sliding_window(_size)?|attention_window_size|local_attention|.*chunk_size|block_size|index_block_size", 8),
    (r"window_size", 16),
    (r"(.*_)?(image_size|img_size|spec_size|max_source_positions)", 32),
    (r"patch_size|patch_stride", 8),
    (r"num_frames", 2),
    (r"max_length", 64),
    (r"num_queries|two_stage_num_proposals", 8),
    (r"depths|.*num_blocks|blocks_per_stage|num_block_repeats", 1),
)
# Lists with one width per stage: made narrower all alike, because stages and heads divide each other.
WIDTHS = r".*hidden_sizes|.*embed_dims?|dims|.*channels|conv_dim|.*dim_per_stage|.*channel_list|tdnn_dim"
FIXED: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "use_cache": False}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


def rule_of(name: str) -> float | None:
    """Return what the table says about a size, or None."""
    return next((tiny for pattern, tiny in RULES if re.fullmatch(pattern, name)), None)


def shrunken_size(name: str, value: Any) -> Any:
    """Return the tiny value of one size, or the value itself where no rule speaks of it."""
    tiny = rule_of(name)
    if tiny is None or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return min(value, tiny)


def shrunken_list(name: str, value: Any) -> Any:
    """Return a list of sizes made tiny: each by its rule, or all widths by the same power of two."""
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in value):
        return value
    if not re.fullmatch(WIDTHS, name):
        return type(value)(shrunken_size(name, size) for size in value)
    while min(value) >= 16 and all(size % 2 == 0 for size in value):
        value = type(value)(size // 2 for size in value)
    return value


def list_stored_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what the config stores, without what it only computes."""
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def keep_layers(values: dict[str, Any]) -> tuple[int, list[int]]:
    """Return the number of layers and the ones to keep: the first of every kind, and at least `LAYERS`."""
    count = next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), 0)
    per_layer = [value for value in values.values() if isinstance(value, list) and len(value) == count]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([value[layer] for value in per_layer]), layer)
    firsts = list(kinds.values())[: 2 * LAYERS]
    others = [layer for layer in range(count) if layer not in firsts]
    return count, sorted(firsts + others[: max(0, LAYERS - len(firsts))])


def shrunken_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the keyword arguments that make a config of the same class tiny."""
    values = list_stored_values(config)
    count, kept = keep_layers(values)
    free_ids = iter(range(TABLE - 1, VOCABULARY, -1))
    tiny: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            tiny[name] = type(value)(**shrunken_values(value))
        elif name in FIXED:
            tiny[name] = FIXED[name]
        elif re.fullmatch(r".*token_(id|index)", name) and isinstance(value, int) and value >= VOCABULARY:
            tiny[name] = next(free_ids)
        elif isinstance(value, list) and count and len(value) == count:
            tiny[name] = [shrunken_size(name, value[layer]) for layer in kept]
        elif isinstance(value, list | tuple) and value:
            tiny[name] = shrunken_list(name, value)
        elif name in LAYER_COUNTS and value == count:
            tiny[name] = len(kept)
        else:
            tiny[name] = shrunken_size(name, value)
    if "num_key_value_heads" in tiny and values["num_key_value_heads"] == values.get("num_attention_heads"):
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]  # not every model can group its heads
    heads = values.get("num_heads")
    if isinstance(heads, list | tuple) and isinstance(values.get("embed_dim"), int):
        # Widths double from stage to stage, as heads do; the config itself computes the last one.
        tiny |= {"embed_dim": HEAD * heads[0], "num_heads": heads}
        tiny.pop("hidden_size", None)
    return {name: value for name, value in tiny.items() if value is not values[name]}


def shrunken_configs(config_class: type[PreTrainedConfig], problems: list[str]) -> Iterator[PreTrainedConfig]:
    """Yield ever bolder attempts at a tiny config; what was wrong with one goes to `problems`."""
    default = config_class()
    tiny = shrunken_values(default)
    values = {**list_stored_values(default), **tiny}
    layers = next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), LAYERS)
    # Some defaults are left open although the model cannot be built without them.
    filled: dict[str, Any] = {name: size for name in values if values[name] is None and (size := rule_of(name))}
    filled |= {"layer_types": ["full_attention"] * layers} if values.get("layer_types", 0) is None else {}
    derived = {name: value for name, value in tiny.items() if "head_dim" not in name and name != "hidden_size"}
    doubled = {name: 2 * HEAD for name in tiny if name == "head_dim"}
    narrow = {"window_size": 1} if "window_size" in values else {}
    attempts = [tiny, {**tiny, **filled}, derived, {**tiny, **doubled}, {**tiny, **narrow}]
    for number, attempt in enumerate(attempts):
        if attempt in attempts[:number]:  # a config without these sizes: what has failed would fail again
            continue
        try:
            config = config_class(**attempt)
        except Exception as error:  # each config class has its own kind of complaint
            problems.append(str(error))
        else:
            yield config


def tiny_models(
    model_class: type[PreTrainedModel],
    config_class: type[PreTrainedConfig],
    adjust: dict[str, Any],
    problems: list[str],
) -> Iterator[PreTrainedModel]:
    """Yield attempts at a tiny model in eval mode; what was wrong with one goes to `problems`.

    `adjust` overwrites attributes that the config has. A model that would be large is told by its meta twin, and not
    built.
    """
    for config in shrunken_configs(config_class, problems):
        own = config_for(model_class, config)
        for name in adjust.keys() & list_stored_values(own).keys():
            setattr(own, name, adjust[name])
        try:
            with torch.device("meta"):
                parameters = sum(parameter.numel() for parameter in model_class(own).parameters())
            if parameters > PARAMETER_LIMIT:
                problems.append(f"has {parameters / 1e6:.0f} million parameters")
                continue
            model = build(model_class, own).eval()
        except Exception as error:
            problems.append(str(error))
        else:
            yield model


def config_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of the config that the class itself is made of: a text model of a multimodal family."""
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in vars(config).values() if isinstance(part, wanted)), config)
