"""Tiny whole Hugging Face multimodal models, each with a batch as its processor would make it.

A batch has two samples of unequal length (one image or clip in the first, two in the second, of unequal size where
the model allows it), padded on the side that is asked for. How many placeholders an item needs is asked of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCABULARY = 100
PAD, IMAGE, AUDIO, VIDEO = 0, 90, 91, 92
MARKS = {IMAGE: (93, 94), AUDIO: (95, 96)}  # what stands before and after an item
WIDTH = 32

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
}
AUDIO_TOWER: dict[str, Any] = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 16,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
MROPE_FIELDS = {"rope_parameters": MROPE}

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """One kind of multimodal model: how to build it, and what its encoder is given."""

    model_class: str
    config: Callable[[], Any]
    items: Callable[[], Inputs]
    """The encoders' inputs for three items."""
    lengths: Callable[[PreTrainedModel, Inputs], list[int]]
    tokens: tuple[int, int, int] = (IMAGE, IMAGE, IMAGE)
    text: Callable[[Tensor], Inputs] = lambda input_ids: {}
    """Further inputs that the processor computes from the text."""

    def build(self) -> PreTrainedModel:
        """Build the model; its weights are random, with none of the zeros that new models have."""
        torch.manual_seed(0)
        model = getattr(transformers, self.model_class)(self.config())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.nan_to_num(parameter).clamp(-8, 8) + 0.1 * torch.randn_like(parameter))
        return model.eval()

    def batch(self, model: PreTrainedModel, side: str = "left") -> Inputs:
        """Return a batch of two samples, padded on this side; "none": one sample."""
        torch.manual_seed(1)
        items = self.items()
        lengths = self.lengths(model, items)
        runs = list(zip(self.tokens, lengths, strict=True))
        samples = [_sentence(runs)] if side == "none" else [_sentence(runs[:1]), _sentence(runs[1:])]
        ids, mask = _pad(samples, side)
        return {"input_ids": ids, "attention_mask": mask, **self.text(ids), **items}


def _sentence(runs: list[tuple[int, int]]) -> Tensor:
    ids = torch.randint(5, 80, (3,)).tolist()
    for token, count in runs:
        before, after = MARKS[token]
        ids += [before, *[token] * count, after, *torch.randint(5, 80, (2,)).tolist()]
    return torch.tensor(ids)


def _pad(samples: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    longest = max(len(sample) for sample in samples)
    ids = torch.full((len(samples), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        place = slice(longest - len(sample), None) if side == "left" else slice(len(sample))
        ids[row, place], mask[row, place] = sample, 1
    return ids, mask


def why_not_here(name: str, whole: PreTrainedModel) -> str | None:
    """Return why a model cannot be taken apart with this transformers; None if it can."""
    if name == "qwen2.5-omni" and not hasattr(whole.model, "get_audio_features"):
        return "this transformers keeps the towers of Qwen2.5-Omni beside its text model, not around it"
    return None


def text_batch(side: str = "left") -> Inputs:
    """Return a batch without any item."""
    torch.manual_seed(2)
    ids, mask = _pad([torch.randint(5, 80, (4,)), torch.randint(5, 80, (7,))], side)
    return {"input_ids": ids, "attention_mask": mask}


def _types(ids: Tensor) -> Inputs:
    return {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int() + 3 * (ids == AUDIO).int()}


def _token_types(ids: Tensor) -> Inputs:
    return {"token_type_ids": (ids == IMAGE).long()}


def _image_lengths(model: PreTrainedModel, items: Inputs) -> list[int]:
    """Ask the model how many features each item has."""
    with torch.no_grad():
        features = model.model.get_image_features(**items).pooler_output  # type: ignore[union-attr, operator]
    if isinstance(features, Tensor) and features.dim() == 2:
        return [len(features) // 3] * 3
    return [item.reshape(-1, item.shape[-1]).shape[0] for item in features]


def _audio_lengths(model: PreTrainedModel, items: Inputs) -> list[int]:
    """Return lengths whose sum is right: these models put the features of all clips in one row."""
    with torch.no_grad():
        output = model.model.get_audio_features(**items)  # type: ignore[union-attr, operator]
    features = output.pooler_output
    total = features.reshape(-1, features.shape[-1]).shape[0]
    return [total - 2, 1, 1]


def _images() -> Inputs:
    return {"pixel_values": torch.randn(3, 3, 16, 16)}


# ---------------------------------------------------------------------- LLaVA and its kin


def _llava() -> Any:
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
    )


def _llava_pixtral() -> Any:
    return transformers.LlavaConfig(
        vision_config=transformers.PixtralVisionConfig(**{**VISION, "image_size": 32}, head_dim=12),
        text_config=transformers.MistralConfig(**TEXT),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def _draw_sized_images() -> Inputs:
    return {"pixel_values": torch.randn(3, 3, 32, 32), "image_sizes": torch.tensor([[32, 16], [16, 32], [32, 32]])}


PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def _anyres() -> dict[str, Any]:
    return {"image_grid_pinpoints": PINPOINTS, "image_token_id": IMAGE, "video_token_id": VIDEO}


def _llava_next() -> Any:
    return transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION), text_config=transformers.LlamaConfig(**TEXT), **_anyres()
    )


def _llava_next_video() -> Any:
    return transformers.LlavaNextVideoConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION), text_config=transformers.LlamaConfig(**TEXT), **_anyres()
    )


def _llava_onevision() -> Any:
    return transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.Qwen2Config(**TEXT),
        **_anyres(),
    )


def _tile_images() -> Inputs:
    return {"pixel_values": torch.randn(3, 5, 3, 16, 16), "image_sizes": torch.tensor([[20, 30], [30, 14], [32, 27]])}


def _vipllava() -> Any:
    return transformers.VipLlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        vision_feature_layers=[-1, -2],
    )


# ---------------------------------------------------------------------- Qwen


def _qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 24, "num_heads": 2, "hidden_size": WIDTH, "patch_size": 4}
    return transformers.Qwen2VLConfig(
        vision_config=vision,
        text_config={**TEXT, **MROPE_FIELDS},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=93,
        vision_end_token_id=94,
    )


QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": WIDTH,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}


def _qwen2_5_vl() -> Any:
    return transformers.Qwen2_5_VLConfig(
        vision_config=dict(QWEN_VISION),
        text_config={**TEXT, **MROPE_FIELDS},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=93,
        vision_end_token_id=94,
    )


def _qwen3_vision() -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": 24,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": WIDTH,
        "patch_size": 4,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 16,
    }


def _qwen3_vl() -> Any:
    return transformers.Qwen3VLConfig(
        vision_config=_qwen3_vision(),
        text_config={**TEXT, **MROPE_FIELDS},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=93,
        vision_end_token_id=94,
    )


def _qwen3_5() -> Any:
    vision = {k: v for k, v in _qwen3_vision().items() if k != "deepstack_visual_indexes"}
    return transformers.Qwen3_5Config(
        vision_config=vision,
        text_config={
            **TEXT,
            "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=93,
        vision_end_token_id=94,
    )


def _patches() -> Inputs:
    grid = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 6, 4]])
    return {"pixel_values": torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4), "image_grid_thw": grid}


def _qwen2_audio() -> Any:
    return transformers.Qwen2AudioConfig(
        audio_config=transformers.Qwen2AudioEncoderConfig(**AUDIO_TOWER),
        text_config=transformers.Qwen2Config(**TEXT),
        audio_token_id=AUDIO,
    )


def _clips() -> Inputs:
    mask = torch.zeros(3, 32, dtype=torch.long)
    for row, frames in enumerate((32, 20, 11)):
        mask[row, :frames] = 1
    return {"input_features": torch.randn(3, 8, 32), "feature_attention_mask": mask}


def _clip_lengths(model: PreTrainedModel, items: Inputs) -> list[int]:
    frames = (items["feature_attention_mask"].sum(-1) - 1) // 2 + 1  # the strided convolution
    return ((frames - 2) // 2 + 1).tolist()  # the pooling


def _qwen2_5_omni() -> Any:
    audio = {**AUDIO_TOWER, "n_window": 4, "output_dim": WIDTH}
    return transformers.Qwen2_5OmniThinkerConfig(
        audio_config=audio,
        vision_config=dict(QWEN_VISION),
        text_config={**TEXT, **MROPE_FIELDS},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_token_index=AUDIO,
        vision_start_token_id=93,
        vision_end_token_id=94,
        audio_start_token_id=95,
        audio_end_token_id=96,
    )


def _images_and_clip() -> Inputs:
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    clip, mask = torch.randn(1, 8, 24), torch.ones(1, 24, dtype=torch.long)
    mask[0, 21:] = 0
    images = {"pixel_values": torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4), "image_grid_thw": grid}
    return {**images, "input_features": clip, "feature_attention_mask": mask}


def _image_and_clip_lengths(model: PreTrainedModel, items: Inputs) -> list[int]:
    first, second = (items["image_grid_thw"].prod(-1) // 4).tolist()
    return [first, *_clip_lengths(model, items), second]


def _qwen3_vl_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    return transformers.Qwen3VLMoeConfig(
        vision_config=_qwen3_vision(),
        text_config={**TEXT, **MROPE_FIELDS, **experts},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=93,
        vision_end_token_id=94,
    )


# ---------------------------------------------------------------------- other image models


def _internvl() -> Any:
    vision = {**VISION, "image_size": [16, 16], "patch_size": [4, 4]}
    return transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**vision),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=IMAGE,
    )


def _mistral3() -> Any:
    return transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**{**VISION, "image_size": 32}, head_dim=12),
        text_config=transformers.MistralConfig(**TEXT),
        image_token_id=IMAGE,
        spatial_merge_size=2,
    )


def _gemma3() -> Any:
    text = {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    return transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.Gemma3TextConfig(**text),
        image_token_id=IMAGE,
        mm_tokens_per_image=4,
    )


def _paligemma() -> Any:
    return transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.GemmaConfig(**TEXT),
        image_token_id=IMAGE,
        projection_dim=WIDTH,
        hidden_size=WIDTH,
    )


def _idefics3() -> Any:
    return transformers.Idefics3Config(
        vision_config={**VISION, "patch_size": 4},
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        scale_factor=2,
    )


def _smolvlm() -> Any:
    return transformers.SmolVLMConfig(
        vision_config={**VISION, "patch_size": 4},
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        scale_factor=2,
    )


def _idefics2() -> Any:
    perceiver = {
        "hidden_size": WIDTH,
        "resampler_n_latents": 3,
        "resampler_depth": 1,
        "resampler_n_heads": 2,
        "resampler_head_dim": 8,
        "num_key_value_heads": 1,
    }
    return transformers.Idefics2Config(
        vision_config={**VISION, "patch_size": 4},
        perceiver_config=perceiver,
        text_config=transformers.MistralConfig(**TEXT),
        image_token_id=IMAGE,
    )


def _one_image_per_row() -> Inputs:
    return {"pixel_values": torch.randn(3, 1, 3, 16, 16)}


def _aya_vision() -> Any:
    return transformers.AyaVisionConfig(
        vision_config=transformers.SiglipVisionConfig(**{**VISION, "patch_size": 4}),
        text_config=transformers.Cohere2Config(**TEXT),
        image_token_id=IMAGE,
        adapter_layer_norm_eps=1e-6,
    )


def _cohere2_vision() -> Any:
    return transformers.Cohere2VisionConfig(
        vision_config=transformers.SiglipVisionConfig(**{**VISION, "patch_size": 4}),
        text_config=transformers.Cohere2Config(**TEXT),
        image_token_id=IMAGE,
        alignment_intermediate_size=16,
    )


def _got_ocr2() -> Any:
    vision = {
        "hidden_size": 24,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
        "mlp_dim": 32,
        "window_size": 2,
        "global_attn_indexes": [1],
    }
    return transformers.GotOcr2Config(
        vision_config=vision, text_config=transformers.Qwen2Config(**TEXT), image_token_id=IMAGE
    )


def _deepseek_vl() -> Any:
    return transformers.DeepseekVLConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
    )


def _lfm2_vl() -> Any:
    return transformers.Lfm2VlConfig(
        vision_config=transformers.Siglip2VisionConfig(**{**VISION, "num_patches": 16, "patch_size": 4}),
        text_config=transformers.Lfm2Config(**TEXT, layer_types=["conv", "full_attention"]),
        image_token_id=IMAGE,
        projector_hidden_size=16,
    )


def _ragged_patches() -> Inputs:
    mask = torch.ones(3, 16, dtype=torch.int32)
    mask[0, 8:] = 0
    return {
        "pixel_values": torch.randn(3, 16, 3 * 4 * 4),
        "spatial_shapes": torch.tensor([[2, 4], [4, 4], [4, 4]]),
        "pixel_attention_mask": mask,
    }


def _glm4v() -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 24,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": WIDTH,
        "patch_size": 4,
        "image_size": 16,
    }
    return transformers.Glm4vConfig(
        vision_config=vision,
        text_config={**TEXT, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=93,
        image_end_token_id=94,
        video_start_token_id=97,
        video_end_token_id=98,
    )


def _aria() -> Any:
    experts = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 16}
    return transformers.AriaConfig(
        vision_config=transformers.Idefics3VisionConfig(**{**VISION, "patch_size": 4}),
        text_config=transformers.AriaTextConfig(**{**TEXT, **experts}),
        image_token_id=IMAGE,
        projector_patch_to_query_dict={16: 3},
    )


def _lighton_ocr() -> Any:
    return transformers.LightOnOcrConfig(
        vision_config=transformers.PixtralVisionConfig(**{**VISION, "image_size": 32}, head_dim=12),
        text_config=transformers.Qwen3Config(**TEXT),
        image_token_id=IMAGE,
        spatial_merge_size=2,
    )


# ---------------------------------------------------------------------- audio


def _audioflamingo3() -> Any:
    return transformers.AudioFlamingo3Config(
        audio_config={**_qwen_audio_sizes(), "max_source_positions": 16},
        text_config=transformers.Qwen2Config(**TEXT),
        audio_token_id=AUDIO,
    )


def _qwen_audio_sizes() -> dict[str, Any]:
    return {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "num_mel_bins": 8,
    }


def _masked_clips() -> Inputs:
    clips = _clips()
    return {"input_features": clips["input_features"], "input_features_mask": clips["feature_attention_mask"]}


def _voxtral() -> Any:
    return transformers.VoxtralConfig(
        audio_config={**_qwen_audio_sizes(), "intermediate_size": 96, "max_source_positions": 16},
        text_config=transformers.LlamaConfig(**TEXT),
        audio_token_id=AUDIO,
    )


def _long_clips() -> Inputs:
    return {"input_features": torch.randn(3, 8, 32)}


CLIPS = (AUDIO, AUDIO, AUDIO)

FAMILIES: Mapping[str, Family] = {
    "llava": Family("LlavaForConditionalGeneration", _llava, _images, _image_lengths),
    "llava-pixtral": Family("LlavaForConditionalGeneration", _llava_pixtral, _draw_sized_images, _image_lengths),
    "llava-next": Family("LlavaNextForConditionalGeneration", _llava_next, _tile_images, _image_lengths),
    "llava-next-video": Family(
        "LlavaNextVideoForConditionalGeneration", _llava_next_video, _tile_images, _image_lengths
    ),
    "llava-onevision": Family(
        "LlavaOnevisionForConditionalGeneration", _llava_onevision, _tile_images, _image_lengths
    ),
    "vipllava": Family("VipLlavaForConditionalGeneration", _vipllava, _images, _image_lengths),
    "qwen2-vl": Family("Qwen2VLForConditionalGeneration", _qwen2_vl, _patches, _image_lengths, text=_types),
    "qwen2.5-vl": Family("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl, _patches, _image_lengths, text=_types),
    "qwen3-vl": Family("Qwen3VLForConditionalGeneration", _qwen3_vl, _patches, _image_lengths, text=_types),
    "qwen3.5": Family("Qwen3_5ForConditionalGeneration", _qwen3_5, _patches, _image_lengths, text=_types),
    "qwen3-vl-moe": Family("Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe, _patches, _image_lengths, text=_types),
    "qwen2.5-omni": Family(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        _qwen2_5_omni,
        _images_and_clip,
        _image_and_clip_lengths,
        tokens=(IMAGE, AUDIO, IMAGE),
    ),
    "aria": Family("AriaForConditionalGeneration", _aria, _images, _image_lengths),
    "lighton-ocr": Family("LightOnOcrForConditionalGeneration", _lighton_ocr, _draw_sized_images, _image_lengths),
    "qwen2-audio": Family("Qwen2AudioForConditionalGeneration", _qwen2_audio, _clips, _clip_lengths, tokens=CLIPS),
    "internvl": Family("InternVLForConditionalGeneration", _internvl, _images, _image_lengths),
    "mistral3": Family("Mistral3ForConditionalGeneration", _mistral3, _draw_sized_images, _image_lengths),
    "gemma3": Family("Gemma3ForConditionalGeneration", _gemma3, _images, _image_lengths, text=_token_types),
    "paligemma": Family("PaliGemmaForConditionalGeneration", _paligemma, _images, _image_lengths, text=_token_types),
    "idefics2": Family("Idefics2ForConditionalGeneration", _idefics2, _one_image_per_row, _image_lengths),
    "idefics3": Family("Idefics3ForConditionalGeneration", _idefics3, _one_image_per_row, _image_lengths),
    "smolvlm": Family("SmolVLMForConditionalGeneration", _smolvlm, _one_image_per_row, _image_lengths),
    "aya-vision": Family("AyaVisionForConditionalGeneration", _aya_vision, _images, _image_lengths),
    "cohere2-vision": Family("Cohere2VisionForConditionalGeneration", _cohere2_vision, _images, _image_lengths),
    "got-ocr2": Family(
        "GotOcr2ForConditionalGeneration",
        _got_ocr2,
        lambda: {"pixel_values": torch.randn(3, 3, 64, 64)},
        _image_lengths,
    ),
    "deepseek-vl": Family("DeepseekVLForConditionalGeneration", _deepseek_vl, _images, _image_lengths),
    "lfm2-vl": Family("Lfm2VlForConditionalGeneration", _lfm2_vl, _ragged_patches, _image_lengths),
    "glm4v": Family("Glm4vForConditionalGeneration", _glm4v, _patches, _image_lengths, text=_types),
    "audioflamingo3": Family(
        "AudioFlamingo3ForConditionalGeneration", _audioflamingo3, _masked_clips, _audio_lengths, tokens=CLIPS
    ),
    "voxtral": Family("VoxtralForConditionalGeneration", _voxtral, _long_clips, _audio_lengths, tokens=CLIPS),
}
