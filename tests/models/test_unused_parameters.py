"""Trained parameters that never get a gradient are found without a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from tests.models.small import PATCHES, VISION, clip, compose_model, llama
from tests.models.whole_models import FAMILIES
from tests.zoo import ENCODERS, LANGUAGE_MODELS, MODALITY_TOKEN, RAGGED, item_count, text_batch

SIZES_UNKNOWN = {"pixtral", "siglip2"}  # their configs do not say how large images are
RANDOM = {"wav2vec2"}  # masks some of a sound, at random


def without_gradient(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]


@pytest.mark.parametrize("name", ENCODERS)
def test_unused_parameters_are_those_without_gradients(name: str) -> None:
    part = ENCODERS[name]
    model = MultimodalModel({part.modality: part.build()}, LANGUAGE_MODELS["llama"].build()).train()
    model.set_modality_token_ids({part.modality: MODALITY_TOKEN})
    random_numbers = torch.random.get_rng_state()
    found = model.find_unused_parameters()
    assert torch.equal(torch.random.get_rng_state(), random_numbers)
    inputs = part.inputs(item_count(RAGGED))
    model(**text_batch(RAGGED, part.feature_lengths(item_count(RAGGED))), **inputs).loss.backward()
    if name not in SIZES_UNKNOWN | RANDOM:
        assert found == without_gradient(model)
        return
    assert found == []
    if name not in RANDOM:
        model.keep_encoders_running({part.modality: part.inputs(1)})
        assert model.find_unused_parameters() == without_gradient(model)


def test_a_callback_decides_which_parameters_are_used() -> None:
    def layer_before_the_last(inputs: dict[str, Any], output: Any) -> Any:
        output.last_hidden_state = output.hidden_states[-2]
        return output

    encoder = ModalEncoderModule(
        clip(),
        preprocess_callback=lambda inputs: {**inputs, "output_hidden_states": True},
        postprocess_module_callback=layer_before_the_last,
    )
    model = MultimodalModel({"vision": encoder}, llama())
    model.set_modality_token_ids({"vision": VISION})
    ids = torch.tensor([[3, *[VISION] * PATCHES, 4]])
    found = model.find_unused_parameters()
    model(input_ids=ids, labels=ids, pixel_values=torch.randn(1, 3, 8, 8)).loss.backward()
    assert found == without_gradient(model)
    assert any("layers.1." in name for name in found) and any("post_layernorm" in name for name in found)


@pytest.mark.parametrize("name", ["llava", "gemma3", "llava-next", "qwen2.5-vl"])
def test_parameters_of_whole_models(name: str) -> None:
    whole = FAMILIES[name].build()
    batch = FAMILIES[name].batch(whole, "right")
    model = MultimodalModel.from_multimodal(whole).train()
    found = model.find_unused_parameters()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert found == ([] if name == "llava-next" else without_gradient(model))  # the sizes of its images are unknown


def test_frozen_parameters_are_not_reported_as_unused() -> None:
    model = compose_model()
    assert {name.split(".")[2] for name in model.find_unused_parameters()} == {"post_layernorm"}
    model.train(encoders_mode={"vision": (False, True)})
    assert model.find_unused_parameters() == []
