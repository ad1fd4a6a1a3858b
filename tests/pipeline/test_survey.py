"""What a survey finds out about a model, what it refuses, and that it is made once."""

from __future__ import annotations

import time

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cornstarch.errors import UnsupportedModelError
from cornstarch.pipeline import survey as surveying
from cornstarch.pipeline.survey import survey
from tests.models.mixtures import boundaries
from tests.models.shrink import tiny_models
from tests.zoo import ENCODERS, LANGUAGE_MODELS


def test_a_large_model_is_surveyed_on_a_narrow_twin_of_all_its_layers() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32))
    before = torch.random.get_rng_state()
    found = survey(model)
    assert len(found.layers) == 32
    assert found.boundaries == list(range(1, 33))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(before, torch.random.get_rng_state())


# Groups of experts, heads that do not divide the width, most experts; `python -m tests.models.mixtures` cuts them all.
@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.5", "OLMoE-1B-7B", "Qwen3-30B-A3B", "gpt-oss-120b"])
def test_a_mixture_of_as_many_experts_as_published_can_be_cut(name: str) -> None:
    assert boundaries(name) >= 4


def test_it_is_made_once_for_a_class_and_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = surveying._surveyed
    monkeypatch.setattr(surveying, "_surveyed", lambda *said: made.append(said) or original(*said))
    build = LANGUAGE_MODELS["llama"].build
    survey(build(num_hidden_layers=5))
    survey(build(num_hidden_layers=5, seed=3))
    assert len(made) == 1
    survey(build(num_hidden_layers=5, attention_bias=True))
    assert len(made) == 2
    start = time.perf_counter()
    survey(build(num_hidden_layers=5))
    assert len(made) == 2, time.perf_counter() - start


def test_what_is_read_far_behind_travels() -> None:
    found = survey(ENCODERS["qwen3_vl"].build())
    assert found.live["deepstack_merger_list.0"] == 2  # handed out with the result
    found = survey(ENCODERS["wav2vec2"].build())
    assert found.live["feature_projection"] == 2


def test_layers_that_read_each_others_keys_are_not_parted() -> None:
    config = transformers.Gemma3nTextConfig(
        num_hidden_layers=4, num_kv_shared_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, laurel_rank=4,
        intermediate_size=[64] * 4, layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4, pad_token_id=0,
    )  # fmt: skip
    found = survey(transformers.Gemma3nForCausalLM(config))
    assert 1 in found.boundaries or 4 in found.boundaries
    assert {2, 3} <= found.barred.keys()
    assert "reads what layer" in found.barred[3]


def test_a_loss_of_the_routers_bars_every_cut() -> None:
    model = LANGUAGE_MODELS["mixtral"].build(num_hidden_layers=3, output_router_logits=True)
    assert survey(model).boundaries == []
    assert survey(LANGUAGE_MODELS["mixtral"].build(num_hidden_layers=3)).boundaries == [1, 2, 3]


def test_a_table_that_is_looked_up_without_gradient_travels() -> None:
    options = {"is_decoder": True}
    models = tiny_models(transformers.RoFormerForCausalLM, transformers.RoFormerConfig, options, [])
    found = survey(next(models))
    assert found.live["roformer.encoder.embed_positions"] == len(found.layers)


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
def test_what_cannot_be_cut_is_refused(model: nn.Module, reason: str) -> None:
    for _ in range(2):  # also from memory
        with pytest.raises(UnsupportedModelError, match=reason):
            survey(model, lambda _: {"x": torch.ones(2, 4)})


def test_a_model_that_does_not_run_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no small copy of it runs .*wrong"):
        survey(Looped(), lambda _: {"wrong": torch.ones(2, 4)})
