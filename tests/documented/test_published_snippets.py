"""What the published documents of Cornstarch 0.0.5 show, run as they show it.

Hub names are replaced by tiny local folders; obvious typos of the documents are corrected. The part of each page
that a test stands for is in its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.optim import Adam
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, ModelOutput
from transformers.models.clip import CLIPImageProcessor, CLIPVisionModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.siglip import SiglipVisionModel
from transformers.models.vit.modeling_vit import ViTModel
from transformers.models.whisper import WhisperFeatureExtractor

from cornstarch.models.multimodal_language_model import (
    ModalEncoderModule,
    MultimodalModel,
    MultimodalModelProcessor,
    MultimodalProjector,
)
from cornstarch.models.multimodal_language_model.configuration_multimodal_language_model import (
    MultimodalProjectorConfig,
)
from cornstarch.models.multimodal_language_model.processing_multimodal_language_model import MultimodalProcessor
from tests.documented.hub import make_hub


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture
def image() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_import_paths() -> None:
    from cornstarch.models.multimodal_language_model import modeling_multimodal_language_model as modeling

    assert modeling.MultimodalProjector is MultimodalProjector
    assert MultimodalProcessor is MultimodalModelProcessor


def test_creating_a_multimodal_llm(hub: dict[str, str]) -> None:
    llm = LlamaForCausalLM.from_pretrained(hub["meta-llama/Llama-3.1-8B-Instruct"])
    vision_encoder = ViTModel.from_pretrained(hub["google/vit-base"])

    mllm = MultimodalModel(
        encoders={
            "vision": ModalEncoderModule(vision_encoder),
        },
        language_model=llm,
    )
    assert mllm.language_model is llm
    assert mllm.vision_encoder.module is vision_encoder
    assert isinstance(mllm.encoders["vision"].projector, MultimodalProjector)


def test_creating_a_projector(hub: dict[str, str]) -> None:
    my_encoder_module = CLIPVisionModel.from_pretrained(hub["openai/clip-vit-base-patch32"])
    llm = LlamaForCausalLM.from_pretrained(hub["meta-llama/Llama-3.2-1B"])
    my_projector_module = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 32))
    your_config = MultimodalProjectorConfig(my_encoder_module.config, llm.config, "linear", "gelu")

    wrapped_projector_module = MultimodalProjector(your_config, my_projector_module)
    encoder = ModalEncoderModule(module=my_encoder_module, projector=wrapped_projector_module)
    assert issubclass(MultimodalProjector, PreTrainedModel)
    assert encoder.projector.projection is my_projector_module

    encoder = ModalEncoderModule(module=my_encoder_module)
    assert encoder.projector is None
    MultimodalModel(encoders={"vision": encoder}, language_model=llm, init_projector_type="mlp", init_activation="relu")
    assert isinstance(encoder.projector, MultimodalProjector)
    assert [p.shape for p in encoder.projector.parameters()] == [(32, 24), (32,), (32, 32), (32,)]


def pack_image_features(features: torch.Tensor, newline: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Stands for Llava-Next's own: a newline after each image, everything in one row."""
    items = [torch.cat([item, newline[None].to(item)]) for item in features]
    return torch.cat(items), [len(item) for item in items]


def postprocess_projector_callback(
    inputs: dict,
    output: BaseModelOutput | tuple,
    vision_feature_select_strategy: Optional[str] = None,  # noqa: UP045
) -> BaseModelOutput | tuple:
    pixel_values = inputs.get("pixel_values")

    if pixel_values is not None and pixel_values.size(0) > 0:
        # output[0] == output.last_hidden_state
        image_features = output[0]
        image_features, feature_lens = pack_image_features(image_features, torch.zeros(32))

    # replace output hidden state with postprocessed results
    if isinstance(output, ModelOutput):
        output.last_hidden_state = image_features
    else:
        output = (image_features,) + output[1:]

    return output


@pytest.mark.parametrize(
    ("vision_class", "vision", "llm_class", "llm"),
    [
        (CLIPVisionModel, "openai/clip-vit-large-patch14", MistralForCausalLM, "mistralai/Mistral-7B-Instruct-v0.3"),
        (SiglipVisionModel, "google/siglip-so400m-patch14-384", LlamaForCausalLM, "meta-llama/Llama-3.1-8B-Instruct"),
    ],
)
def test_llava_next_by_callback(hub: dict[str, str], vision_class: Any, vision: str, llm_class: Any, llm: str) -> None:
    mllm = MultimodalModel(
        encoders={
            "vision": ModalEncoderModule(
                model=vision_class.from_pretrained(hub[vision]),
                postprocess_projector_callback=postprocess_projector_callback,
            )
        },
        language_model=llm_class.from_pretrained(hub[llm]),
    )
    mllm.set_modality_token_ids({"vision": 19})
    tokens = (32 // 16) ** 2 + (vision_class is CLIPVisionModel) + 1
    input_ids = torch.tensor([[3] + [19] * tokens + [4], [19] * tokens + [5, 6]])
    outputs = mllm(input_ids=input_ids, pixel_values=torch.randn(2, 3, 32, 32), labels=input_ids.clone())
    outputs.loss.backward()
    assert outputs.logits.shape == (2, tokens + 2, 19)


def test_preprocessing_with_two_encoders_and_functions(hub: dict[str, str], image: Image.Image) -> None:
    mm_processor = MultimodalProcessor(
        encoder_processors={
            "vision": CLIPImageProcessor.from_pretrained(hub["openai/clip-vit-base-patch32"]),
            "audio": WhisperFeatureExtractor.from_pretrained(hub["openai/whisper-large-v3"]),
        },
        llm_tokenizer=AutoTokenizer.from_pretrained(hub["meta-llama/Llama-3.1-8B-Instruct"]),
        num_feature_calculation_funcs={
            "vision": lambda *args, **kwargs: (224 // 16) ** 2 + 1,
            "audio": lambda *args, **kwargs: 1500,
        },
    )
    # The page prints special_tokens_map; transformers 5 lists added special tokens in all_special_tokens.
    assert {"<vision>", "<audio>"} <= set(mm_processor.llm_tokenizer.all_special_tokens)
    inputs = mm_processor(
        encoder_inputs={
            "vision": {"images": [image]},
            "audio": {"raw_speech": [np.zeros(8000, dtype=np.float32)], "sampling_rate": 16000},
        },
        llm_inputs={"text": ["Describe <vision> this <audio> sound ."]},
        return_tensors="pt",
    )
    ids = inputs["input_ids"]
    assert (ids == mm_processor.modality_token_ids["vision"]).sum() == 197
    assert (ids == mm_processor.modality_token_ids["audio"]).sum() == 1500
    assert inputs["pixel_values"].shape == (1, 3, 32, 32)


def test_predefined_tokens(hub: dict[str, str]) -> None:
    mm_processor = MultimodalProcessor(
        encoder_processors={"vision": CLIPImageProcessor.from_pretrained(hub["openai/clip-vit-base-patch32"])},
        llm_tokenizer=AutoTokenizer.from_pretrained(hub["meta-llama/Llama-3.1-8B-Instruct"]),
        predefined_tokens={"vision": "<image>"},
    )
    tokens = mm_processor.llm_tokenizer.all_special_tokens
    assert "<image>" in tokens and "<vision>" not in tokens


def test_freezing_modules(hub: dict[str, str]) -> None:
    clip = CLIPVisionModel.from_pretrained
    mllm = MultimodalModel(
        encoders={
            "vision": ModalEncoderModule(clip(hub["openai/clip-vit-base-patch32"])),
            "audio": ModalEncoderModule(clip(hub["openai/clip-vit-large-patch14"])),
        },
        language_model=LlamaForCausalLM.from_pretrained(hub["meta-llama/Llama-3.2-1B"]),
    )

    mllm.train(
        encoders_mode={
            "vision": (False, True),  # encoder and projector, respectively
            "audio": (True, True),
        },
        llm_mode=False,
    )
    assert not any(p.requires_grad for p in mllm.vision_encoder.module.parameters())
    assert all(p.requires_grad for p in mllm.vision_encoder.projector.parameters())
    assert all(p.requires_grad for p in mllm.audio_encoder.parameters())
    assert not any(p.requires_grad for p in mllm.language_model.parameters())

    mllm.train(llm_mode=True)
    assert all(p.requires_grad for p in mllm.parameters())
    mllm.train(
        {encoder: (True, True) for encoder in mllm.encoders},
        llm_mode=True,
    )
    with pytest.raises(ValueError):
        mllm.train("non_existing_encoder")


def test_pretraining_a_vlm_step_by_step(hub: dict[str, str], image: Image.Image, tmp_path: Path) -> None:
    """The end-to-end example: processor with predefined token, labels cloned from input_ids, a training loop."""
    vision_encoder = CLIPVisionModel.from_pretrained(hub["openai/clip-vit-base-patch32"])
    language_model = AutoModelForCausalLM.from_pretrained(hub["meta-llama/Llama-3.2-1B"])
    model = MultimodalModel(
        encoders={"vision": ModalEncoderModule(vision_encoder)},
        language_model=language_model,
    ).to(dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.train()

    image_processor = CLIPImageProcessor.from_pretrained(hub["openai/clip-vit-base-patch32"])
    tokenizer = AutoTokenizer.from_pretrained(hub["meta-llama/Llama-3.2-1B"], use_fast=True)
    tokenizer.pad_token = tokenizer.eos_token
    processor = MultimodalProcessor(
        encoder_processors={"vision": image_processor},
        llm_tokenizer=tokenizer,
        model=model,
        predefined_tokens={"vision": "<image>"},
    )

    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer.zero_grad()
    texts = ['"human" <image> What is it ? "gpt" A digit .', '"human" Describe this . "gpt" the sound .']
    losses = []
    for _ in range(8):
        images = [image]
        inputs = processor(
            encoder_inputs={"vision": {"images": images}} if images else None,
            llm_inputs={"text": texts, "padding": True},
            return_tensors="pt",
        ).to("cpu")
        inputs["labels"] = inputs["input_ids"].clone()
        outputs = model(**inputs)
        loss = outputs.loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]

    text_only = processor(encoder_inputs=None, llm_inputs={"text": texts[1:], "padding": True}, return_tensors="pt")
    assert model(**text_only).logits.shape[0] == 1


def test_processor_of_tokenizer_and_image_processor(hub: dict[str, str], image: Image.Image) -> None:
    """The page on DDP, without DDP: a bare encoder and the two-argument processor."""
    vision_model_name = hub["openai/clip-vit-base-patch32"]
    language_model_name = hub["meta-llama/Llama-3.2-1B"]
    vision_encoder = CLIPVisionModel.from_pretrained(vision_model_name)
    language_model = AutoModelForCausalLM.from_pretrained(language_model_name)

    model = MultimodalModel(
        encoders={"vision": vision_encoder},
        language_model=language_model,
    ).to(dtype=torch.bfloat16)

    image_processor = CLIPImageProcessor.from_pretrained(vision_model_name)
    text_tokenizer = AutoTokenizer.from_pretrained(language_model_name, use_fast=True)
    text_tokenizer.pad_token_id = text_tokenizer.eos_token_id

    processor = MultimodalModelProcessor(
        tokenizer=text_tokenizer,
        image_processor=image_processor,
        model=model,  # the page leaves it out, and with it the number of tokens per image
    )
    inputs = processor(text="<vision> Describe this image .", images=image, return_tensors="pt")
    inputs["labels"] = inputs["input_ids"].clone()
    optimizer = Adam(model.parameters())
    outputs = model(**inputs)
    loss = outputs.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.isfinite(loss)
    assert MultimodalModelProcessor(tokenizer=text_tokenizer, image_processor=image_processor).modality_tokens == {
        "vision": "<vision>"
    }
