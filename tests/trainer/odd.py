"""Language models that no table has: one that can be cut, and one that tensor parallelism cuts wrongly, silently."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Relative(nn.Module):
    """An activation that looks at all channels at once; of each rank's own it makes something else."""

    def forward(self, x: Tensor) -> Tensor:
        """Return each channel relative to the largest."""
        return x / x.abs().amax(-1, keepdim=True)


class OwnLlama(LlamaForCausalLM):
    """A class that no test knows; there is nothing odd about it."""


class OddLlama(LlamaForCausalLM):
    """A model whose feed-forward layers cannot be cut by channels, and do not look it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = Relative()


def odd(**sizes: Any) -> OddLlama:
    """Return an odd model."""
    return OddLlama(LlamaConfig(**{**SIZES, **sizes}))
