"""Qwen-VL and what was built like it (patches of images of any size), and models that hear."""

from __future__ import annotations

from typing import Any

from tests.models.whole_folders import templates
from tests.models.whole_folders.families import CHATML
from tests.models.whole_folders.stored import StoredFamily, existing

QWEN_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_FIELDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PATCHES: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 8 * 8,
    "max_pixels": 24 * 24,
    "size": {"shortest_edge": 8 * 8, "longest_edge": 24 * 24},
}
STILLS: dict[str, Any] = {**PATCHES, "temporal_patch_size": 1}
OMNI_TOKENS = (
    *("<|im_start|>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"),
    *("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),
)
OMNI_NAMES = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
GLM_TOKENS = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|video|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
GLM_FIELDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}


def patch_grid(processor: str, image: str = "Qwen2VLImageProcessor", video: str = "Qwen2VLVideoProcessor") -> Any:
    """Return the settings of a processor that cuts images of any size into patches."""
    return {
        "processor_class": processor,
        "image_processor": {"image_processor_type": image, **PATCHES},
        "video_processor": {"video_processor_type": video, **PATCHES},
    }


def qwen_vl(model: str, name: str, processor: str, template: str = templates.QWEN_VL, **fields: str) -> StoredFamily:
    """Describe a Qwen-VL."""
    tokens = (*QWEN_TOKENS, "<think>", "</think>")
    config = existing(name, **{**QWEN_FIELDS, **fields})
    video = "Qwen3VLVideoProcessor" if processor == "Qwen3VLProcessor" else "Qwen2VLVideoProcessor"
    bytes_only = name == "qwen3.5"
    return StoredFamily(
        model, config, patch_grid(processor, video=video), template, tokens, is_byte_level=bytes_only, **CHATML
    )


def spectrogram() -> dict[str, Any]:
    """Return the settings of a feature extractor that makes 32 frames of one second of sound."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 8,
        "sampling_rate": 16000,
        "hop_length": 500,
        "chunk_length": 1,
        "n_fft": 400,
    }


FAMILIES: dict[str, StoredFamily] = {
    "qwen2-vl": qwen_vl("Qwen2VLForConditionalGeneration", "qwen2-vl", "Qwen2VLProcessor"),
    "qwen2.5-vl": qwen_vl("Qwen2_5_VLForConditionalGeneration", "qwen2.5-vl", "Qwen2_5_VLProcessor"),
    "qwen3-vl": qwen_vl("Qwen3VLForConditionalGeneration", "qwen3-vl", "Qwen3VLProcessor"),
    "qwen3-vl-moe": qwen_vl("Qwen3VLMoeForConditionalGeneration", "qwen3-vl-moe", "Qwen3VLProcessor"),
    "qwen3.5": qwen_vl("Qwen3_5ForConditionalGeneration", "qwen3.5", "Qwen3VLProcessor", templates.QWEN3_5),
    "qwen2.5-omni": StoredFamily(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        existing(
            "qwen2.5-omni",
            image_token_id="<|IMAGE|>",
            video_token_id="<|VIDEO|>",
            audio_token_id="<|AUDIO|>",
            vision_start_token_id="<|vision_bos|>",
            vision_end_token_id="<|vision_eos|>",
            audio_start_token_id="<|audio_bos|>",
            audio_end_token_id="<|audio_eos|>",
        ),
        {**patch_grid("Qwen2_5OmniProcessor"), "feature_extractor": spectrogram()},
        templates.QWEN_OMNI,
        OMNI_TOKENS,
        named=OMNI_NAMES,
        kinds=("image", "audio"),
        **CHATML,
    ),
    "glm4v": StoredFamily(
        "Glm4vForConditionalGeneration",
        existing("glm4v", **GLM_FIELDS),
        patch_grid("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
        templates.GLM,
        GLM_TOKENS,
        pad="<|endoftext|>",
        bos=None,
        eos="<|eot|>",
        ends=("<|user|>",),
    ),
    "qwen2-audio": StoredFamily(
        "Qwen2AudioForConditionalGeneration",
        existing("qwen2-audio", audio_token_id="<|AUDIO|>"),
        {"processor_class": "Qwen2AudioProcessor", "feature_extractor": spectrogram()},
        templates.QWEN_AUDIO,
        ("<|im_start|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
        kinds=("audio",),
        **CHATML,
    ),
    "audioflamingo3": StoredFamily(
        "AudioFlamingo3ForConditionalGeneration",
        existing("audioflamingo3", audio_token_id="<sound>"),
        {"processor_class": "AudioFlamingo3Processor", "feature_extractor": spectrogram()},
        templates.SOUND,
        ("<|im_start|>", "<sound>"),
        kinds=("audio",),
        **CHATML,
    ),
}
