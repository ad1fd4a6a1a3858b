"""Mixtures of experts as they are published: the class, and how many experts a token goes to, of how many.

Vocabularies and depths are small, so that only the routing and the shapes of attention are the published ones.
`python -m tests.models.mixtures` cuts them all into stages.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from cornstarch.pipeline.split import analyze_model

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V2": (
        "deepseek_v2",
        {"n_routed_experts": 160, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "first_k_dense_replace": 1,
         "topk_method": "group_limited_greedy"},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
    ),
    "Kimi-K2": (
        "deepseek_v3",
        {"n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
         "num_attention_heads": 64, "num_key_value_heads": 64},
    ),
    "dots.llm1": (
        "dots1",
        {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "num_key_value_heads": 32,
         "first_k_dense_replace": 1},
    ),
    "ERNIE-4.5-21B-A3B": ("ernie4_5_moe", {"moe_num_experts": 64, "moe_k": 6, "moe_layer_start_index": 1}),
    "FlexOlmo-7x7B": ("flex_olmo", {"num_experts": 7, "num_experts_per_tok": 5}),
    "GLM-4.5": (
        "glm4_moe",
        {"n_routed_experts": 160, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "hidden_size": 5120,
         "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "GLM-4.7-Flash": ("glm4_moe_lite", {"n_routed_experts": 64, "num_experts_per_tok": 4}),
    "gpt-oss-20b": ("gpt_oss", {"num_local_experts": 32, "num_experts_per_tok": 4}),
    "gpt-oss-120b": ("gpt_oss", {"num_local_experts": 128, "num_experts_per_tok": 4}),
    "granite-3.0-3b-a800m": ("granitemoe", {"num_local_experts": 40, "num_experts_per_tok": 8}),
    "granite-4.0-h-small": (
        "granitemoehybrid",
        {"num_local_experts": 72, "num_experts_per_tok": 10, "num_hidden_layers": 8, "hidden_size": 4096,
         "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 2, "mamba_n_heads": 128, "mamba_d_head": 64},
    ),
    "Hunyuan-A13B": (
        "hunyuan_v1_moe",
        {"num_experts": 64, "moe_topk": [8] * 8, "head_dim": 128, "num_key_value_heads": 8, "num_hidden_layers": 8},
    ),
    "Jamba-v0.1": ("jamba", {"num_experts": 16, "num_experts_per_tok": 2, "use_mamba_kernels": False}),
    "JetMoE-8B": ("jetmoe", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "LFM2-8B-A1B": (
        "lfm2_moe",
        {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 9,
         "layer_types": ["conv", "conv", "full_attention"] * 3},
    ),
    "Llama-4-Scout": (
        "llama4_text",
        {"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    ),
    "Llama-4-Maverick": (
        "llama4_text",
        {"num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    ),
    "LongCat-Flash": ("longcat_flash", {"n_routed_experts": 512, "moe_topk": 12, "zero_expert_num": 256}),
    "MiniMax-Text-01": ("minimax", {"num_local_experts": 32, "num_experts_per_tok": 2}),
    "MiniMax-M2": ("minimax_m2", {"num_local_experts": 256, "num_experts_per_tok": 8}),
    "Mixtral-8x7B": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "OLMoE-1B-7B": ("olmoe", {"num_experts": 64, "num_experts_per_tok": 8}),
    "Phi-3.5-MoE": ("phimoe", {"num_local_experts": 16, "num_experts_per_tok": 2}),
    "Qwen1.5-MoE-A2.7B": ("qwen2_moe", {"num_experts": 60, "num_experts_per_tok": 4}),
    "Qwen2-57B-A14B": ("qwen2_moe", {"num_experts": 64, "num_experts_per_tok": 8}),
    "Qwen3-30B-A3B": ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8}),
    "Qwen3-Next-80B-A3B": ("qwen3_next", {"num_experts": 512, "num_experts_per_tok": 10}),
}  # fmt: skip


def mixture_config(name: str) -> PreTrainedConfig:
    """Return the config of a published mixture with a small vocabulary and eight layers, or a period of them."""
    kind, options = MIXTURES[name]
    small = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 8}
    return AutoConfig.for_model(kind, **{**small, **options})


def boundaries(name: str) -> int:
    """Return at how many places a mixture can be cut, which is found and proved on a small copy."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(mixture_config(name))
    return len(analyze_model(model).boundaries)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for one in MIXTURES:
        print(f"{one}: can be cut at {boundaries(one)} places", flush=True)
