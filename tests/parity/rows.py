"""The rows of the matrix: what is trained. To add one, add an entry to `ROWS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tests.parity.samples import MakeSample, asking, longer, numbers

TOKENIZER = "{tokenizer}"
"""Stands where a config names the folder of the tokenizer."""


@dataclass(frozen=True)
class Row:
    """A model, as a run describes it, and the samples that exercise it."""

    title: str
    model: Mapping[str, Any]
    """The section `model` of a `RunConfig`."""
    make: MakeSample
    modules: tuple[str, ...] = ("model",)
    """What a plan calls its modules."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """More of the section `data`."""


_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
_TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    "model_type": "llama",
    **_SIZES,
    "num_hidden_layers": 3,
    **_TOKENS,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
_WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 96}
"""What 16 and 32 columns hide: a shard of so many may lack what every shard of a few has."""
_PHI3 = {**LLAMA, "model_type": "phi3", "num_key_value_heads": 2}
_MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
_T5 = {"model_type": "t5", **_TOKENS, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4,
       "dropout_rate": 0.0}  # fmt: skip


def llm(config: Mapping[str, Any] = LLAMA, **said: Any) -> dict[str, Any]:
    return {"config": dict(config), "tokenizer": TOKENIZER, **said}


def vision(train: str) -> dict[str, Any]:
    return {
        "token": "<image>",
        "train": train,
        "config": {"model_type": "clip_vision_model", **_SIZES, "image_size": 8, "patch_size": 4},
        "processor_config": {
            "class_name": "CLIPImageProcessorPil", "size": {"height": 8, "width": 8}, "do_center_crop": False,
        },
    }  # fmt: skip


def _audio(train: str) -> dict[str, Any]:
    return {
        "token": "<audio>",
        "train": train,
        "config": {
            "model_type": "whisper", "num_mel_bins": 4, "max_source_positions": 8, "d_model": 16, "encoder_layers": 2,
            "encoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_layers": 1, "decoder_ffn_dim": 16,
            "decoder_attention_heads": 2, "dropout": 0.0, **_TOKENS, "vocab_size": 8, "decoder_start_token_id": 1,
        },
        "processor_config": {"class_name": "PrecomputedFeatureExtractor", "feature_size": 4, "max_frames": 16},
    }  # fmt: skip


class Perceptron(nn.Module):
    """A model that is no transformer and comes from no library."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the mean squared error."""
        return {"loss": ((self.layers(x) - y) ** 2).mean()}


ROWS: dict[str, Row] = {
    "llm": Row("LLM only", {"language_model": llm()}, asking(), ("language_model",)),
    "frozen_vision": Row(
        "frozen vision, projector and LLM trained",
        {"encoders": {"vision": vision("projector")}, "language_model": llm()},
        asking("i"),
        ("vision", "language_model"),
    ),
    "projector": Row(
        "projector trained, all else frozen",
        {"encoders": {"vision": vision("projector")}, "language_model": llm(train="frozen")},
        asking("i"),
        ("vision", "language_model"),
    ),
    "vision_audio": Row(
        "vision, audio and LLM trained",
        {"encoders": {"vision": vision("full"), "audio": _audio("full")}, "language_model": llm()},
        asking("i", "s"),
        ("vision", "audio", "language_model"),
    ),
    "lora": Row(
        "vision frozen, LLM with LoRA",
        {
            "encoders": {"vision": vision("projector")},
            "language_model": llm(_WIDE, train="lora", lora={"rank": 2, "alpha": 4}),
        },
        asking("i"),
        ("vision", "language_model"),
    ),
    "tied": Row(
        "vision, LLM with tied embeddings",
        {"encoders": {"vision": vision("full")}, "language_model": llm({**LLAMA, "tie_word_embeddings": True})},
        asking("i"),
        ("vision", "language_model"),
    ),
    "packed": Row(
        "vision and LLM, packed rows",
        {"encoders": {"vision": vision("full")}, "language_model": llm()},
        asking("i"),
        ("vision", "language_model"),
        {"packing": True, "max_length": 64},
    ),
    "fused": Row("fused weights (Phi3)", {"whole": llm(_PHI3, task="causal-lm")}, asking(), ("language_model",)),
    "moe": Row("MoE (Mixtral)", {"whole": llm(_MIXTRAL, task="causal-lm")}, asking(), ("language_model",)),
    "t5": Row("T5", {"whole": llm(_T5, task="seq2seq-lm")}, asking()),
    "mlp": Row("plain MLP", {"factory": {"function": "tests.parity.rows:Perceptron"}}, numbers),
}

# As many layers of experts as of others, or all of them; each token goes to two of eight.
_EIGHT = {
    **_WIDE, "num_hidden_layers": 3, "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
EXPERTS: dict[str, Mapping[str, Any]] = {
    "mixtral": {**_EIGHT, "num_local_experts": 8, "sliding_window": None},
    "qwen3_moe": {**_EIGHT, "num_experts": 8, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "qwen2_moe": {**_EIGHT, "num_experts": 8, "shared_expert_intermediate_size": 32},
    "olmoe": {**_EIGHT, "num_experts": 8},
    "deepseek_v3": {
        **_EIGHT, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "gpt_oss": {**_EIGHT, "num_local_experts": 8, "head_dim": 16, "sliding_window": 16},
    "glm4_moe": {**_EIGHT, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "granitemoe": {**_EIGHT, "num_local_experts": 8},
}  # fmt: skip
"""Language models with a mixture of experts, by their type."""

APART: dict[str, Row] = {
    **{
        name: Row(name, {"whole": llm({**config, "model_type": name}, task="causal-lm")}, asking(), ("language_model",))
        for name, config in EXPERTS.items()
    },
    **{
        f"{train}_experts": Row(
            f"vision frozen, LLM with experts {train}",
            {
                "encoders": {"vision": vision("projector")},
                "language_model": llm(
                    {**EXPERTS["qwen3_moe"], "model_type": "qwen3_moe"},
                    train=train,
                    lora={"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]},
                ),
            },
            asking("i"),
            ("vision", "language_model"),
        )
        for train in ("frozen", "lora")
    },
    "packed_experts": Row(
        "vision and LLM with experts, packed rows",
        {
            "encoders": {"vision": vision("full")},
            "language_model": llm({**EXPERTS["qwen3_moe"], "model_type": "qwen3_moe"}),
        },
        asking("i"),
        ("vision", "language_model"),
        {"packing": True, "max_length": 64},
    ),
    "long": Row(
        "vision and LLM, packed rows of 256 tokens, images both ways",
        {
            "encoders": {"vision": {**vision("full"), "attention": "item"}},
            "language_model": llm(
                {**LLAMA, "hidden_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 256}
            ),
        },
        longer(asking("i"), 12),
        ("vision", "language_model"),
        {"packing": True, "max_length": 256},
    ),
}
"""Rows that are no part of the matrix: long enough for the attention kernels of GPUs, with heads that they take."""


def row_of(name: str) -> Row:
    """Return a row, of the matrix or apart from it."""
    return ROWS[name] if name in ROWS else APART[name]
