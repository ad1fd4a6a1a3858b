"""Models with layers that the zoo has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from tests import zoo


def forms() -> dict[str, Callable[[], nn.Module]]:
    """Return models with layers that the zoo has not, tiny."""
    sizes = {"vocab_size": zoo.VOCABULARY, "hidden_size": zoo.HIDDEN, "num_hidden_layers": 2}
    usual: dict[str, Any] = {**sizes, "num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": zoo.PAD}
    grouped: dict[str, Any] = {**usual, "num_key_value_heads": 2}
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    low_rank: dict[str, Any] = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    routed: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    hf: Any = transformers
    configs: dict[str, Any] = {
        "t5": lambda: hf.T5EncoderModel(hf.T5Config(vocab_size=zoo.VOCABULARY, **t5)),
        "t5_gated": lambda: hf.T5EncoderModel(
            hf.T5Config(vocab_size=zoo.VOCABULARY, **t5, feed_forward_proj="gated-gelu")
        ),
        "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**grouped, head_dim=8, **experts)),
        "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
            hf.DeepseekV3Config(
                **{**usual, **low_rank, **routed, "num_key_value_heads": 4},
                v_head_dim=8,
                first_k_dense_replace=1,
                moe_intermediate_size=16,
            )
        ),
        "bert": lambda: hf.BertModel(hf.BertConfig(**usual, **quiet)),
        "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**grouped)),
        "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**grouped, use_qk_norm=True)),
        "apertus": lambda: hf.ApertusForCausalLM(hf.ApertusConfig(**grouped)),
        "falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**usual, multi_query=True)),
        "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**usual, hidden_dropout=0.0, attention_dropout=0.0)),
        "gptj": lambda: hf.GPTJForCausalLM(
            hf.GPTJConfig(
                vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        ),
    }
    return {name: _disturb(make) for name, make in configs.items()}


def _disturb(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with zoo.reproducible(0):
            model = make()
        zoo.disturb(model)
        return model.eval()

    return build
