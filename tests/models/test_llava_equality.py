"""CLIP and Llama composed equal `LlavaForConditionalGeneration` with the same weights: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from cornstarch.models.multimodal_language_model import (
    ModalEncoderModule,
    MultimodalModel,
    MultimodalProjector,
    MultimodalProjectorConfig,
)
from tests.zoo import ENCODERS, LANGUAGE_MODELS, RAGGED, VOCABULARY, build, item_count, text_batch

IMAGE_TOKEN = VOCABULARY - 1
PATCHES = 4
# Where LLaVA keeps what the composed model keeps elsewhere.
PLACES = {
    "vision_encoder.module.": "model.vision_tower.",
    "vision_encoder.projector.projection.": "model.multi_modal_projector.",
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
}


class LlavaProjection(nn.Module):
    """The two linear layers of LLaVA, under LLaVA's names."""

    def __init__(self, vision: CLIPVisionConfig, text: LlamaConfig) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(vision.hidden_size, text.hidden_size)
        self.act = nn.GELU()
        self.linear_2 = nn.Linear(text.hidden_size, text.hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        """Project the features."""
        return self.linear_2(self.act(self.linear_1(features)))


def make_llava(layer: int, strategy: str) -> LlavaForConditionalGeneration:
    """Build a tiny LLaVA of the zoo's CLIP and Llama configs."""
    config = LlavaConfig(
        vision_config=ENCODERS["clip"].config(),
        text_config=LANGUAGE_MODELS["llama"].build().config,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=layer,
        vision_feature_select_strategy=strategy,
    )
    model = build(LlavaForConditionalGeneration, config)
    assert isinstance(model, LlavaForConditionalGeneration)
    return model


def compose_like(llava: LlavaForConditionalGeneration) -> MultimodalModel:
    """Compose fresh parts as LLaVA does, and copy LLaVA's weights into them."""
    layer, strategy = llava.config.vision_feature_layer, llava.config.vision_feature_select_strategy

    def ask_for_all_layers(inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "output_hidden_states": True}

    def select_features(inputs: dict[str, Any], output: Any) -> Any:
        states = output.hidden_states[layer]
        output.last_hidden_state = states[:, 1:] if strategy == "default" else states
        return output

    vision, text = llava.config.vision_config, llava.config.text_config
    encoder = ModalEncoderModule(
        ENCODERS["clip"].build(seed=7),
        projector=MultimodalProjector(MultimodalProjectorConfig(vision, text), LlavaProjection(vision, text)),
        preprocess_callback=ask_for_all_layers,
        postprocess_module_callback=select_features,
    )
    model = MultimodalModel({"vision": encoder}, build(LlamaForCausalLM, text, seed=8))
    model.set_modality_token_ids({"vision": IMAGE_TOKEN})
    weights = llava.state_dict()
    model.load_state_dict({name: weights[place_in_llava(name)] for name in model.state_dict()})
    return model


def place_in_llava(name: str) -> str:
    """Return LLaVA's name of one of our parameters."""
    ours = next(prefix for prefix in PLACES if name.startswith(prefix))
    return name.replace(ours, PLACES[ours], 1)


@pytest.mark.parametrize("padding", ["right", "none"])
@pytest.mark.parametrize(("layer", "strategy"), [(-2, "default"), (-1, "full")])
def test_loss_and_every_gradient(layer: int, strategy: str, padding: str) -> None:
    llava = make_llava(layer, strategy)
    model = compose_like(llava)
    length = PATCHES if strategy == "default" else PATCHES + 1
    rows = RAGGED if padding == "right" else ("tt*ttt*tt", "*tttt*ttt")
    batch = text_batch(rows, [length] * item_count(rows), IMAGE_TOKEN)
    # Rare, but the random text may hold the image's token.
    pixels = ENCODERS["clip"].inputs(item_count(rows))
    batch["labels"][batch["input_ids"] == IMAGE_TOKEN] = -100

    expected = llava(**batch, **pixels)
    found = model(**batch, **pixels)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)

    expected.loss.backward()
    found.loss.backward()
    theirs = dict(llava.named_parameters())
    assert len(theirs) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        gradient = theirs[place_in_llava(name)].grad
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-8, msg=name)
