"""Language models and image encoders of published sizes, and small ones, with random weights."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

_LANGUAGE_MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "Qwen3-1.7B": (Qwen3ForCausalLM, Qwen3Config, {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
    }),
    "Qwen3-8B": (Qwen3ForCausalLM, Qwen3Config, {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
        "max_position_embeddings": 40_960,
    }),
    "Llama-3.2-3B": (LlamaForCausalLM, LlamaConfig, {
        "vocab_size": 128_256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    }),
    "small Qwen3": (Qwen3ForCausalLM, Qwen3Config, {
        "vocab_size": 16_384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
    }),
    "small Llama": (LlamaForCausalLM, LlamaConfig, {
        "vocab_size": 8_192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": False,
    }),
}  # fmt: skip
_ENCODERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "SigLIP-so400m": (SiglipVisionModel, SiglipVisionConfig, {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 384, "patch_size": 14, "vision_use_head": False,
    }),
    "CLIP-L/336": (CLIPVisionModel, CLIPVisionConfig, {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 336, "patch_size": 14,
    }),
    "small SigLIP": (SiglipVisionModel, SiglipVisionConfig, {
        "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 6,
        "image_size": 128, "patch_size": 16, "vision_use_head": False,
    }),
    "small CLIP": (CLIPVisionModel, CLIPVisionConfig, {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4,
        "image_size": 128, "patch_size": 16,
    }),
}  # fmt: skip


def language_model(name: str, **changed: Any) -> Any:
    """Return a language model; `changed` overrides options of its config."""
    model, config, options = _LANGUAGE_MODELS[name]
    return model(config(**{**options, **changed}))


def encoder(name: str) -> Any:
    """Return an image encoder."""
    model, config, options = _ENCODERS[name]
    return model(config(**options))
