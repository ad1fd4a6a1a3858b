"""Models cut over ranks compute what one process computes: the loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers
from torch import nn

from cornstarch.parallel.tensor import Style, find_unsharded_modules, tensor_plan
from tests import zoo
from tests.parallel.tensor.forms import forms
from tests.parallel.tensor.work import alone, assert_same, cut, forward_and_back
from tests.parity.pool import Pool


@pytest.mark.parametrize("name", [*zoo.LANGUAGE_MODELS, *zoo.ENCODERS])
def test_every_model_of_the_zoo(workers: Pool, name: str) -> None:
    expected = alone(name)
    for found in workers.run(2, cut, name, 2, {}):
        assert_same(found, expected)


@pytest.mark.parametrize("name", [*zoo.LANGUAGE_MODELS, *zoo.ENCODERS])
def test_all_attention_and_feed_forward_layers_are_sharded(name: str) -> None:
    part: Any = zoo.LANGUAGE_MODELS.get(name) or zoo.ENCODERS[name]
    model = part.build()
    assert all("merger" in owner for owner in find_unsharded_modules(model)), find_unsharded_modules(model)
    styles = tensor_plan(model)
    columns = [key for key, style in styles.items() if style.kind in ("column", "expert")]
    rows = [key for key, style in styles.items() if style.kind == "row"]
    assert len(columns) >= 2 * zoo.LAYERS and len(rows) >= zoo.LAYERS


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "gpt2"])
def test_four_ranks_give_the_gradients_of_one_process(workers: Pool, name: str) -> None:
    """There are two heads of keys and values: two ranks share each."""
    expected = alone(name)
    for found in workers.run(4, cut, name, 4, {}):
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "phi3", "whisper"])
def test_activation_checkpointing_gives_the_same_gradients(workers: Pool, name: str) -> None:
    expected = alone(name)
    for found in workers.run(2, cut, name, 2, {}, {"recompute": True}):
        assert_same(found, expected)


@pytest.mark.parametrize("options", [{"num_key_value_heads": 1}, {"attention_bias": True, "num_key_value_heads": 1}])
def test_single_key_value_head_is_replicated(workers: Pool, options: dict[str, Any]) -> None:
    expected = alone("llama", **options)
    for found in workers.run(2, cut, "llama", 2, options):
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_stay_tied(workers: Pool, name: str, tied: bool) -> None:
    options = {"tie_word_embeddings": tied}
    expected = alone(name, **options)
    for found in workers.run(2, cut, name, 2, options):
        assert_same(found, expected)


@pytest.mark.parametrize("form", forms())
def test_other_layer_forms_match_one_process(workers: Pool, form: str) -> None:
    expected = forward_and_back(form)
    for found in workers.run(2, forward_and_back, form, 2):
        assert_same(found, expected)


EXPECTED: dict[str, dict[str, Style]] = {
    "t5": {
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": Style("heads", (4,), 1),
        "encoder.block.1.layer.0.SelfAttention.q": Style("column"),
        "encoder.block.1.layer.1.DenseReluDense.wo": Style("row"),
    },
    "gpt_oss": {
        "model.layers.0.self_attn.sinks": Style("heads", (4,), 0),
        "model.layers.0.mlp.experts.gate_up_proj": Style("expert", (), 2),
        "model.layers.0.mlp.experts.down_proj_bias": Style("expert_bias"),
    },
    "deepseek_v3": {
        "model.layers.0.self_attn.kv_a_proj_with_mqa": Style("rotary_keys", (8,)),
        "model.layers.0.self_attn.kv_b_proj": Style("column"),
    },
    "bert": {
        "encoder.layer.0.attention.self.query": Style("column"),
        "encoder.layer.0.attention.output.dense": Style("row"),
        "encoder.layer.0.intermediate.dense": Style("column"),
        "encoder.layer.0.output.dense": Style("row"),
    },
    "olmo2": {
        "model.layers.0.self_attn.q_proj": Style("column", whole=True),
        "model.layers.0.self_attn.o_proj": Style("row", whole=True),
    },
    "cohere": {"model.layers.0.self_attn.q_norm.weight": Style("heads", (4,), 0)},
    "apertus": {"model.layers.0.mlp.act_fn": Style("partial")},
    "falcon": {"transformer.h.0.mlp.dense_h_to_4h": Style("column")},
}


@pytest.mark.parametrize("form", EXPECTED)
def test_styles_of_other_layer_forms(form: str) -> None:
    styles = tensor_plan(forms()[form]())
    assert {name: styles.get(name) for name in EXPECTED[form]} == EXPECTED[form]


def test_module_names_and_classes_are_preserved() -> None:
    build: Callable[[], nn.Module] = forms()["t5"]
    assert isinstance(build(), transformers.T5EncoderModel)
