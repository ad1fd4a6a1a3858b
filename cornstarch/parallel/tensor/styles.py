"""How a layer can be cut, and the tables by which layers are known: data only.

Two sources say which layer is cut how: the model's own plan, whose words change from one release of transformers to the
next, and the names that layers have in hundreds of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["column", "row", "partial", "heads", "experts", "expert", "expert_bias", "rotary_keys"]


@dataclass(frozen=True)
class Style:
    """How one layer, or one parameter, is cut.

    column: a linear layer by its outputs; row: by its inputs. partial: whole everywhere, but each rank's gradient
    covers only its heads (norms of queries and keys). heads: a parameter with one entry per head along `dim`. experts:
    a module of experts whose ranks make shares of the output; expert and expert_bias: its parameters. rotary_keys: a
    linear layer that is whole, whose last `parts` outputs go to each rank's heads.
    """

    kind: Kind
    parts: tuple[int, ...] = ()
    """The sizes of what is fused along the cut dim; empty if nothing is."""
    dim: int = 0
    """Of a parameter: the dim that is cut."""
    whole: bool = False
    """Of a column: outputs are joined. Of a row: inputs are whole, and each rank takes its part."""


# The words of transformers 5.0 to 5.22. What is not here is not understood, and its layer is left whole.
ALIASES: dict[str, Style] = {
    "colwise": Style("column"),
    "local_colwise": Style("column"),
    "colwise_rep": Style("column", whole=True),
    "colwise_gather_output": Style("column", whole=True),
    "rowwise": Style("row"),
    "local_rowwise": Style("row"),
    "rowwise_rep": Style("row", whole=True),
    "rowwise_split_input": Style("row", whole=True),
    "replicated_with_grad_allreduce": Style("partial"),
    "mla_kv_a_proj": Style("rotary_keys"),
}

# Attention: queries, keys and values apart. Dotted names: the layers are in modules inside the attention module.
APART = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("self.query", "self.key", "self.value"),
    ("attention.query", "attention.key", "attention.value"),
)
# The same in one layer: [all queries; all keys; all values].
FUSED = ("qkv", "qkv_proj", "c_attn")
# The same in one layer, head by head: each head's query, key and value lie together.
BY_HEAD = ("query_key_value",)
# Low-rank attention: the layers that make heads of the compressed activation, and what is before them.
LOW_RANK = ("q_b_proj", "kv_b_proj")
BEFORE_LOW_RANK = {"q_a_proj", "q_a_layernorm", "kv_a_layernorm", "kv_a_proj_with_mqa"}
ATTENTION_OUT = ("o_proj", "out_proj", "output.dense", "dense", "o", "out_lin", "proj", "projection_layer", "c_proj")
# Norms of queries and keys, inside attention.
HEAD_NORMS = {
    "q_norm", "k_norm", "v_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm", "q_ln", "k_ln",
}  # fmt: skip
# Parameters with one entry per head, and the dim of the heads.
PER_HEAD = {"sinks": 0, "relative_attention_bias.weight": 1}

# Feed-forward: (layers that widen, the layer that narrows).
FEED_FORWARD = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("fc1",), "fc2"),
    (("linear_fc1",), "linear_fc2"),
    (("wi",), "wo"),
    (("wi_0", "wi_1"), "wo"),
    (("intermediate_dense",), "output_dense"),
    (("intermediate.dense",), "output.dense"),
    (("lin1",), "lin2"),
    (("c_fc",), "c_proj"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
# The same with gate and value in one layer, one after the other.
FEED_FORWARD_FUSED = (
    (("gate_up_proj",), "down_proj"),
    (("input_linear",), "output_linear"),
    (("weights_in",), "weights_out"),
    (("Wi",), "Wo"),
)

# What attention modules and configs call the number of heads, of key and value heads, and the width of all heads.
HEADS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "encoder_attention_heads",
    "decoder_attention_heads",
)  # fmt: skip
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
WIDTHS = ("all_head_size", "inner_dim", "split_size", "embed_dim", "hidden_size", "dim", "q_dim")
KEY_VALUE_WIDTHS = ("kv_dim",)

# Attention modules that mean something else by these names.
OTHERWISE = {
    "CodeGenAttention": "its fused projection holds queries, values and keys in four blocks",
    "GPTBigCodeAttention": "its keys and values are one head in the same projection as all queries",
}

__all__ = ["Style"]
