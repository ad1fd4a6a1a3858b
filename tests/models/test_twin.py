"""Tiny twins: the same options, few and narrow layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    WhisperConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from cornstarch.models.twin import build_twin_config, copy_module
from tests.models.mixtures import MIXTURES, mixture_config

LARGE: list[tuple[PreTrainedConfig, Any]] = [
    (LlamaConfig(num_key_value_heads=8), AutoModelForCausalLM),
    (MixtralConfig(), AutoModelForCausalLM),
    (GPT2Config(), AutoModelForCausalLM),
    (Gemma3TextConfig(), AutoModelForCausalLM),
    (GPTJConfig(), AutoModelForCausalLM),  # rotates a part of a head
    (Mamba2Config(), AutoModelForCausalLM),  # heads of another width
    (CLIPVisionConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16), CLIPVisionModel),
]


@pytest.mark.parametrize(("config", "kind"), LARGE, ids=lambda value: type(value).__name__)
def test_a_twin_is_small_and_runs(config: PreTrainedConfig, kind: Any) -> None:
    twin = build_twin_config(config, 2)
    assert type(twin) is type(config) and twin.num_hidden_layers < config.num_hidden_layers
    make = getattr(kind, "from_config", None) or kind
    with torch.device("meta"):
        small, large = (sum(p.numel() for p in make(one).parameters()) for one in (twin, config))
    assert small < large / 10
    model = make(twin)
    if kind is CLIPVisionModel:
        assert model(torch.zeros(1, 3, twin.image_size, twin.image_size)).last_hidden_state.isfinite().all()
    else:
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize("name", MIXTURES)
def test_a_twin_of_a_published_mixture_runs_through_its_experts(name: str) -> None:
    config = mixture_config(name)
    twin = build_twin_config(config, 2)
    model = AutoModelForCausalLM.from_config(twin)
    assert sum(p.numel() for p in model.parameters()) < 8_000_000
    model(torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), use_cache=False).logits.square().sum().backward()
    routed = {p.grad is not None and bool(p.grad.any()) for key, p in model.named_parameters() if ".experts." in key}
    assert routed == {True}  # it has experts, and all kinds of their weights are used


def test_experts_of_a_twin_are_few_and_chosen_as_before() -> None:
    twin = build_twin_config(mixture_config("DeepSeek-V3"), 2)
    assert (twin.n_routed_experts, twin.num_experts_per_tok, twin.n_group, twin.topk_group) == (4, 2, 2, 1)
    assert build_twin_config(mixture_config("Qwen3-30B-A3B"), 8).num_experts_per_tok == 4  # of 8
    assert build_twin_config(mixture_config("Llama-4-Scout")).num_experts_per_tok == 1
    assert set(build_twin_config(mixture_config("Hunyuan-A13B")).moe_topk) == {2}
    odd = build_twin_config(mixture_config("FlexOlmo-7x7B"), 2)
    assert (odd.num_experts, odd.num_experts_per_tok) == (7, 5)  # 2 does not divide 7: the mistake must show


def test_layer_kinds_that_depend_on_an_index_are_kept() -> None:
    assert build_twin_config(mixture_config("DeepSeek-V3")).num_hidden_layers == 4  # three are dense
    scout = build_twin_config(mixture_config("Llama-4-Scout"))
    assert scout.moe_layers == list(range(scout.num_hidden_layers)) and scout.num_hidden_layers <= 4
    config = Gemma3nTextConfig(num_hidden_layers=20, num_kv_shared_layers=10)
    twin = build_twin_config(config)
    assert 0 < twin.num_kv_shared_layers < twin.num_hidden_layers < 8
    assert set(twin.layer_types[: -twin.num_kv_shared_layers]) == set(config.layer_types)


def test_sharded_sizes_stay_a_multiple() -> None:
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336)
    for size in (2, 4, 8):
        twin = build_twin_config(config, size)
        assert twin.num_key_value_heads % size == twin.num_attention_heads % size == twin.intermediate_size % size == 0
        assert twin.num_attention_heads // twin.num_key_value_heads > 1  # heads are still grouped
    assert build_twin_config(config, 3).num_key_value_heads == 8  # 3 does not divide 8: the mistake must show


def test_a_layer_of_every_kind_is_kept() -> None:
    config = Gemma3TextConfig(num_hidden_layers=12)
    twin = build_twin_config(config)
    assert set(twin.layer_types) == set(config.layer_types) and len(twin.layer_types) == twin.num_hidden_layers


def test_options_and_data_stay() -> None:
    config = LlamaConfig(tie_word_embeddings=True, attention_bias=True, attention_dropout=0.3, vocab_size=777)
    twin = build_twin_config(config)
    assert twin.tie_word_embeddings and twin.attention_bias and twin.vocab_size == 777
    assert twin.attention_dropout == 0.0
    assert config.attention_dropout == 0.3 and config.num_hidden_layers == 32  # the original is as it was


def test_a_copy_of_a_module_shares_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3))
    model[1].register_parameter("weight", torch.nn.Parameter(torch.ones(3, 3)))
    called = []
    model[0].register_forward_hook(lambda *_: called.append("hook"))
    copied = copy_module(model)
    copied[1].register_forward_hook(lambda *_: called.append("of the copy"))
    copied[0].weight.data.zero_()
    model(torch.ones(1, 2))
    assert called == ["hook"] and bool(model[0].weight.any())  # hooks that are there are copied
    copied(torch.ones(1, 2))
    assert called == ["hook", "hook", "of the copy"]


def test_configs_inside_configs() -> None:
    twin = build_twin_config(Qwen2_5_VLConfig())
    assert twin.text_config.num_hidden_layers <= 4
    assert twin.text_config.hidden_size < Qwen2_5_VLConfig().text_config.hidden_size
    assert build_twin_config(WhisperConfig(encoder_layers=12, decoder_layers=12)).encoder_layers == 2
