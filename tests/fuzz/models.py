"""The parts that fuzz cases are composed of: tiny models by name, written once to folders that runs read them from.

Loading goes by the way that users take, `path: <folder>`, so that reading in part, by stage or by slice is tried too.
The weights carry noise: a mistake could hide behind the zeros and ones of a fresh model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from cornstarch.models.twin import add_noise
from tests.models import local_processors

IMAGE, PATCH = 8, 4
MEL_BINS, MEL_FRAMES = 4, 16
LAYERS = 4

_TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32, "max_position_embeddings": 128}
_GROUPED = {**_SIZES, **_TOKENS, "num_key_value_heads": 2}
_LLAMA = {**_GROUPED, "model_type": "llama"}
_WIDE = {"hidden_size": 64, "intermediate_size": 128}
_MIXTRAL = {**_GROUPED, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": None}  # fmt: skip
_QWEN3 = {**_GROUPED, "head_dim": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama_tied": {**_LLAMA, "tie_word_embeddings": True},
    "llama_wide": {**_LLAMA, **_WIDE},
    "llama_wide_tied": {**_LLAMA, **_WIDE, "tie_word_embeddings": True},
    "qwen2": {**_GROUPED, "model_type": "qwen2"},
    "qwen3": {**_QWEN3, "model_type": "qwen3"},
    "qwen3_tied": {**_QWEN3, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {**_QWEN3, **_EXPERTS, "model_type": "qwen3_moe"},
    "qwen3_next": {
        **_QWEN3,
        **_EXPERTS,
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 16,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "mistral": {**_GROUPED, "model_type": "mistral", "sliding_window": 8},
    "mixtral": _MIXTRAL,
    "mixtral_aux": {**_MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    "gemma2": {**_GROUPED, "model_type": "gemma2", "head_dim": 4, "sliding_window": 8},
    "gemma3": {**_GROUPED, "model_type": "gemma3_text", "head_dim": 4, "sliding_window": 8},
    "phi3": {**_GROUPED, "model_type": "phi3"},
    "gpt2": {
        **_TOKENS, "model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_inner": 32, "n_positions": 128,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "opt": {
        **_TOKENS, "model_type": "opt", "hidden_size": 16, "num_attention_heads": 4, "ffn_dim": 32,
        "word_embed_proj_dim": 16, "max_position_embeddings": 128, "dropout": 0.0, "attention_dropout": 0.0,
        # Not ReLU: where a value is zero but for rounding, its gradient would be all or nothing.
        "activation_function": "gelu",
    },
}  # fmt: skip

_TOWER = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 2}
_SQUARE = {**_TOWER, "image_size": IMAGE, "patch_size": PATCH}
_WHISPER = {
    "model_type": "whisper", "num_mel_bins": MEL_BINS, "max_source_positions": MEL_FRAMES // 2, "d_model": 16,
    "encoder_layers": 2, "encoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_layers": 1,
    "decoder_ffn_dim": 16, "decoder_attention_heads": 2, "dropout": 0.0, **_TOKENS, "vocab_size": 8,
    "decoder_start_token_id": 1,
}  # fmt: skip
_QWEN_TOWER = {
    "model_type": "qwen2_vl_vision", "depth": 2, "embed_dim": 24, "hidden_size": 40, "mlp_ratio": 2, "num_heads": 2,
    "in_channels": 3, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip

_PIXELS = {"size": {"height": IMAGE, "width": IMAGE}}
ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip": (
        {"model_type": "clip_vision_model", **_SQUARE},
        {"class_name": "CLIPImageProcessorPil", **_PIXELS, "do_center_crop": False},
    ),
    "siglip": ({"model_type": "siglip_vision_model", **_SQUARE}, {"class_name": "SiglipImageProcessorPil", **_PIXELS}),
    "vit": (
        {"model_type": "vit", **_SQUARE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        {"class_name": "ViTImageProcessorPil", **_PIXELS},
    ),
    "qwen2_vl": (
        _QWEN_TOWER,
        {
            "class_name": "Qwen2VLImageProcessorPil", "patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2,
            "min_pixels": IMAGE**2, "max_pixels": 3 * IMAGE**2,
        },
    ),
    "whisper": (
        _WHISPER, {"class_name": "PrecomputedFeatureExtractor", "feature_size": MEL_BINS, "max_frames": MEL_FRAMES}
    ),
}  # fmt: skip
"""By name: the config, and the settings of the processor."""

TOKENS = {"vision": "<image>", "audio": "<audio>"}


class Folders:
    """Model folders below one folder, each written once, by whichever process needs it first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tokenizer(self) -> str:
        """Return the folder of the tokenizer that all language models share."""
        return self._write("tokenizer", lambda into: local_processors.tokenizer().save_pretrained(into))

    def language_model(self, name: str, layers: int | None = None, vocabulary: int | None = None, seed: int = 1) -> str:
        """Return the folder of a language model."""
        sizes = dict(LANGUAGE_MODELS[name])
        sizes["n_layer" if sizes["model_type"] == "gpt2" else "num_hidden_layers"] = layers or LAYERS
        if vocabulary is not None:
            sizes["vocab_size"] = vocabulary
        return self._model(AutoModelForCausalLM.from_config, sizes, seed)

    def encoder(self, name: str) -> str:
        """Return the folder of an encoder."""
        # transformers does not say which class belongs to the config of this tower.
        build = Qwen2VisionTransformerPretrainedModel if name == "qwen2_vl" else AutoModel.from_config
        return self._model(build, ENCODERS[name][0])

    def _model(self, build: Callable[[Any], Any], sizes: Mapping[str, Any], seed: int = 1) -> str:
        def save(into: Path) -> None:
            described = dict(sizes)
            config = AutoConfig.for_model(described.pop("model_type"), **described)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = build(config)
                add_noise(model, seed)
            model.save_pretrained(into)

        digest = hashlib.sha256(json.dumps([seed, dict(sizes)], sort_keys=True).encode()).hexdigest()[:8]
        return self._write(f"{sizes['model_type']}-{digest}", save)

    def _write(self, name: str, save: Any) -> str:
        place = self._folder / name
        if not place.exists():
            unfinished = self._folder / f"{name}.{uuid4().hex}"
            unfinished.mkdir(parents=True)
            save(unfinished)
            try:
                os.rename(unfinished, place)
            except OSError:  # another process was faster
                shutil.rmtree(unfinished)
        return str(place)
