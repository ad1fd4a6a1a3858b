"""How a layer can be sharded, and how layers are recognized: by names, and by reading a module's code and attributes.

Two sources say how a layer is sharded: the model's own plan, whose words change from one release of transformers to the
next, and the names that layers have in hundreds of models. Code between the layers of a region that looks at all
channels at once would go wrong with some of them, often silently; it is found by reading it.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn

Kind = Literal["column", "row", "partial", "heads", "experts", "expert", "expert_bias", "rotary_keys"]


@dataclass(frozen=True)
class Style:
    """How one layer, or one parameter, is sharded.

    column: a linear layer by its outputs; row: by its inputs. partial: replicated, but each rank's gradient covers only
    its heads (norms of queries and keys). heads: a parameter with one entry per head along `dim`. experts: a module of
    experts, of which each rank computes a partial sum of the output; expert and expert_bias: its parameters.
    rotary_keys: a replicated linear layer, whose last `parts` outputs go to each rank's heads.
    """

    kind: Kind
    parts: tuple[int, ...] = ()  # the sizes of what is fused along the sharded dim; empty if nothing is
    dim: int = 0  # of a parameter: the sharded dim
    whole: bool = False  # of a column: outputs are gathered. Of a row: inputs are full, and each rank takes its part


# The words of transformers 5.0 to 5.22. A layer with any other word is not sharded.
ALIASES: dict[str, Style] = {
    **dict.fromkeys(("colwise", "local_colwise"), Style("column")),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), Style("column", whole=True)),
    **dict.fromkeys(("rowwise", "local_rowwise"), Style("row")),
    **dict.fromkeys(("rowwise_rep", "rowwise_split_input"), Style("row", whole=True)),
    "replicated_with_grad_allreduce": Style("partial"),
    "mla_kv_a_proj": Style("rotary_keys"),
}

# Attention: separate queries, keys and values. Dotted names: the layers are in modules inside the attention module.
SEPARATE = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"), ("self.query", "self.key", "self.value"),
    ("attention.query", "attention.key", "attention.value"),
)  # fmt: skip
# The same in one layer: [all queries; all keys; all values].
FUSED = ("qkv", "qkv_proj", "c_attn")
# The same in one layer, head by head: each head's query, key and value lie together.
BY_HEAD = ("query_key_value",)
# Low-rank attention: the layers that expand the compressed activation to heads, and those before them.
LOW_RANK = ("q_b_proj", "kv_b_proj")
BEFORE_LOW_RANK = {"q_a_proj", "q_a_layernorm", "kv_a_layernorm", "kv_a_proj_with_mqa"}
ATTENTION_OUT = ("o_proj", "out_proj", "output.dense", "dense", "o", "out_lin", "proj", "projection_layer", "c_proj")
# Norms of queries and keys, inside attention.
HEAD_NORMS = {
    "q_norm", "k_norm", "v_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm", "q_ln", "k_ln",
}  # fmt: skip
# Parameters with one entry per head, and the dim of the heads.
PER_HEAD = {"sinks": 0, "relative_attention_bias.weight": 1}

# Feed-forward: (up projections, down projection).
FEED_FORWARD = (
    (("gate_proj", "up_proj"), "down_proj"), (("up_proj",), "down_proj"), (("w1", "w3"), "w2"), (("fc1",), "fc2"),
    (("linear_fc1",), "linear_fc2"), (("wi",), "wo"), (("wi_0", "wi_1"), "wo"),
    (("intermediate_dense",), "output_dense"), (("intermediate.dense",), "output.dense"), (("lin1",), "lin2"),
    (("c_fc",), "c_proj"), (("fc_in",), "fc_out"), (("dense_h_to_4h",), "dense_4h_to_h"),
)  # fmt: skip
# The same with gate and value in one layer, one after the other.
FEED_FORWARD_FUSED = (
    (("gate_up_proj",), "down_proj"), (("input_linear",), "output_linear"), (("weights_in",), "weights_out"),
    (("Wi",), "Wo"),
)  # fmt: skip

# Names in attention modules and configs for the number of heads, of key and value heads, and the width of all heads.
HEADS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "encoder_attention_heads",
    "decoder_attention_heads",
)  # fmt: skip
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
WIDTHS = ("all_head_size", "inner_dim", "split_size", "embed_dim", "hidden_size", "dim", "q_dim")
KEY_VALUE_WIDTHS = ("kv_dim",)

# Attention modules in which these names have another meaning, and why they are not sharded.
UNSUPPORTED_ATTENTION = {
    "CodeGenAttention": "its fused projection holds queries, values and keys in four blocks",
    "GPTBigCodeAttention": "its keys and values are one head in the same projection as all queries",
}


# Over channels, these need all of them. (A softmax of attention is over positions.)
_ACROSS = re.compile(r"\.(mean|std|var|topk|softmax|sort|norm|argmax|cumsum)\(|F\.(softmax|normalize)\(")
_SIZES = re.compile(r"^ *\w+, \w+, (\w+) = \w+\.(?:size\(\)|shape)", re.MULTILINE)

_sources: WeakKeyDictionary[type, str] = WeakKeyDictionary()  # classes made at run time must not live forever


def _get_source(kind: type) -> str:
    if kind not in _sources:
        try:
            _sources[kind] = inspect.getsource(kind)
        except (OSError, TypeError):  # made at run time: there is no source
            _sources[kind] = ""
    return _sources[kind]


def looks_across_channels(module: nn.Module) -> str:
    """Return the operation over all channels in a feed-forward module's code, or ""."""
    found = _ACROSS.search(_get_source(type(module)))
    return "" if found is None else found.group(0).strip(".(")


def shapes_by_input(module: nn.Module) -> bool:
    """Return whether an attention module shapes its heads' output by the width of its input."""
    source = _get_source(type(module))
    return any(re.search(rf"(?:view|reshape)\([^()]*\b{name}\)", source) for name in _SIZES.findall(source))


def has_slopes(module: nn.Module, config: Any) -> bool:
    """Return whether attention takes slopes per head (ALiBi), which another module makes for all heads."""
    takes = "alibi" in inspect.signature(module.forward).parameters
    return takes and getattr(config, "alibi", True) is not False


def get_head_width(module: nn.Module) -> int:
    """Return the channels of one head if a module has that number, or 0."""
    numbers = (getattr(module, name, None) for name in ("head_dim", "head_size", "attention_head_size"))
    return next((number for number in numbers if isinstance(number, int)), 0)


def has_head_count(module: nn.Module) -> bool:
    """Return whether a module itself has its number of heads; a config may be about other attention."""
    return any(isinstance(module.__dict__.get(name), int) for name in HEADS)


def count_heads(module: nn.Module, config: Any) -> tuple[int, int]:
    """Return the numbers of heads and of key and value heads in a module or its config; 0 if there are none."""
    heads = _find_number(module, config, HEADS)
    return heads, _find_number(module, config, KEY_VALUE_HEADS) or heads


def _find_number(module: nn.Module, config: Any, names: tuple[str, ...]) -> int:
    for source in (module, getattr(module, "config", None), config):
        for name in names:
            number = getattr(source, name, None)
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                return number
    return 0
