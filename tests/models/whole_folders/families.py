"""The families whose folders the tests use first."""

from __future__ import annotations

from typing import Any

from tests.models.whole_folders import templates
from tests.models.whole_folders.stored import StoredFamily, existing

SQUARE = {"height": 16, "width": 16}
QWEN_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN: dict[str, Any] = {"pad": "<|endoftext|>", "bos": None, "eos": "<|im_end|>", "ends": ("<|im_end|>",)}
QWEN_FIELDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PATCHES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 8 * 8, "max_pixels": 24 * 24}
GRID_SIZE = {"size": {"shortest_edge": 8 * 8, "longest_edge": 24 * 24}}


def patch_grid(processor: str, image: str = "Qwen2VLImageProcessor", video: str = "Qwen2VLVideoProcessor") -> Any:
    """Return the settings of a processor that cuts images of any size into patches."""
    sizes = {**PATCHES, **GRID_SIZE}
    return {
        "processor_class": processor,
        "image_processor": {"image_processor_type": image, **sizes},
        "video_processor": {"video_processor_type": video, **sizes},
    }


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
    "qwen2.5-vl": StoredFamily(
        "Qwen2_5_VLForConditionalGeneration",
        existing("qwen2.5-vl", **QWEN_FIELDS),
        patch_grid("Qwen2_5_VLProcessor"),
        templates.QWEN_VL,
        QWEN_TOKENS,
        **QWEN,
    ),
    "llava": StoredFamily(
        "LlavaForConditionalGeneration",
        existing("llava", image_token_id="<image>"),
        {
            "processor_class": "LlavaProcessor",
            "image_processor": {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 16},
                "crop_size": SQUARE,
            },
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        templates.LLAVA,
        ("<image>",),
        adds_bos=True,
        ends=(" ",),
    ),
    "gemma3": StoredFamily(
        "Gemma3ForConditionalGeneration",
        existing(
            "gemma3",
            image_token_id="<image_soft_token>",
            boi_token_index="<start_of_image>",
            eoi_token_index="<end_of_image>",
        ),
        {
            "processor_class": "Gemma3Processor",
            "image_processor": {
                "image_processor_type": "Gemma3ImageProcessor",
                "size": SQUARE,
                "image_seq_length": 4,
                "do_pan_and_scan": None,
            },
            "image_seq_length": 4,
        },
        templates.GEMMA,
        ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        bos="<bos>",
        eos="<eos>",
        adds_bos=True,
        ends=("<end_of_turn>",),
    ),
    "idefics3": StoredFamily(
        "Idefics3ForConditionalGeneration",
        existing("idefics3", image_token_id="<image>"),
        {
            "processor_class": "Idefics3Processor",
            "image_processor": {
                "image_processor_type": "Idefics3ImageProcessor",
                "size": {"longest_edge": 32},
                "max_image_size": {"longest_edge": 16},
                "do_image_splitting": True,
            },
            "image_seq_len": 4,
        },
        templates.IDEFICS,
        (
            *("<|im_start|>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
            *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        ),
        bos="<|im_start|>",
        eos="<end_of_utterance>",
        ends=("<end_of_utterance>",),
    ),
    "qwen2-audio": StoredFamily(
        "Qwen2AudioForConditionalGeneration",
        existing("qwen2-audio", audio_token_id="<|AUDIO|>"),
        {"processor_class": "Qwen2AudioProcessor", "feature_extractor": spectrogram()},
        templates.QWEN_AUDIO,
        ("<|im_start|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
        kinds=("audio",),
        **QWEN,
    ),
}
