"""The analysis of a model: its layers, the results that stages exchange, refusals, and caching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cornstarch.errors import UnsupportedModelError
from cornstarch.pipeline.example_inputs import guess_inputs
from cornstarch.pipeline.split import analyze_model
from tests.models.mixtures import boundaries
from tests.models.shrink import tiny_models
from tests.zoo import ENCODERS, LANGUAGE_MODELS


def test_large_meta_model_is_analyzed_on_a_narrow_twin_with_all_layers() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32))
    before = torch.random.get_rng_state()
    found = analyze_model(model)
    assert len(found.layers) == 32
    assert found.boundaries == list(range(1, 33))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(before, torch.random.get_rng_state())


# Groups of experts, heads that do not divide the width, most experts; `python -m tests.models.mixtures` cuts them all.
@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.5", "OLMoE-1B-7B", "Qwen3-30B-A3B", "gpt-oss-120b"])
def test_mixture_with_the_published_number_of_experts_can_be_split(name: str) -> None:
    assert boundaries(name) >= 4


def test_analysis_is_cached_for_a_class_and_its_options() -> None:
    twins = []

    def make_inputs(twin: nn.Module) -> dict[str, Any]:
        twins.append(twin)
        return next(guess_inputs(twin))

    build = LANGUAGE_MODELS["llama"].build
    analyze_model(build(num_hidden_layers=5), make_inputs)
    analyze_model(build(num_hidden_layers=5, seed=3), make_inputs)
    assert len(twins) == 1
    analyze_model(build(num_hidden_layers=5, attention_bias=True), make_inputs)
    assert len(twins) == 2
    analyze_model(build(num_hidden_layers=5), make_inputs)
    assert len(twins) == 2


def test_results_that_later_layers_read_are_sent() -> None:
    found = analyze_model(ENCODERS["qwen3_vl"].build())
    assert found.last_reader["deepstack_merger_list.0"] == 2  # handed out with the result
    found = analyze_model(ENCODERS["wav2vec2"].build())
    assert found.last_reader["feature_projection"] == 2


def test_layers_that_share_keys_are_not_separated() -> None:
    config = transformers.Gemma3nTextConfig(
        num_hidden_layers=4, num_kv_shared_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, laurel_rank=4,
        intermediate_size=[64] * 4, layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4, pad_token_id=0,
    )  # fmt: skip
    found = analyze_model(transformers.Gemma3nForCausalLM(config))
    assert 1 in found.boundaries or 4 in found.boundaries
    assert {2, 3} <= found.barred.keys()
    assert "reads what layer" in found.barred[3]


def test_router_loss_bars_every_boundary() -> None:
    model = LANGUAGE_MODELS["mixtral"].build(num_hidden_layers=3, output_router_logits=True)
    assert analyze_model(model).boundaries == []
    assert analyze_model(LANGUAGE_MODELS["mixtral"].build(num_hidden_layers=3)).boundaries == [1, 2, 3]


def test_table_without_a_gradient_is_sent() -> None:
    options = {"is_decoder": True}
    models = tiny_models(transformers.RoFormerForCausalLM, transformers.RoFormerConfig, options, [])
    found = analyze_model(next(models))
    assert found.last_reader["roformer.encoder.embed_positions"] == len(found.layers)


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


class Remembering(nn.Module):
    """Writes into the layers what later ones read, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        sizes = []
        for layer in self.layers:
            x = layer(x)
            sizes.append(x.detach().abs().mean())
        return x * torch.stack(sizes).sum()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Looped(), r"Looped cannot be cut into stages: it runs through its layers \(layers\) again"),
        (Remembering(), "Remembering cannot be cut into stages: a small copy computes something else.* loss differs"),
    ],
)
def test_model_that_cannot_be_split_is_refused(model: nn.Module, reason: str) -> None:
    for _ in range(2):  # also from the cache
        with pytest.raises(UnsupportedModelError, match=reason):
            analyze_model(model, lambda _: {"x": torch.ones(2, 4)})


def test_model_that_does_not_run_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no small copy of it runs .*wrong"):
        analyze_model(Looped(), lambda _: {"wrong": torch.ones(2, 4)})
