"""Further families, with configs of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models.whole_folders import templates
from tests.models.whole_folders.families import CHATML, PINPOINTS, square, tiles
from tests.models.whole_folders.qwen import (
    GLM_FIELDS,
    GLM_TOKENS,
    PATCHES,
    QWEN_FIELDS,
    QWEN_TOKENS,
    STILLS,
    patch_grid,
)
from tests.models.whole_folders.stored import Ids, StoredFamily
from tests.models.whole_models import MROPE, MROPE_FIELDS, QWEN_VISION, TEXT, VISION, WIDTH

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GLM_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": WIDTH,
    "patch_size": 4,
    "image_size": 16,
}
GLM_MROPE = {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}
SLICES = {
    "scale_resolution": 32,
    "patch_size": 4,
    "max_slice_nums": 4,
    "slice_mode": True,
    "downsample_mode": "16x",
    "use_image_id": True,
}
SLICE_NAMES = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
QFORMER: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "encoder_hidden_size": 24,
    "cross_attention_frequency": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GLM_CHAT: dict[str, Any] = {"pad": "<|endoftext|>", "bos": None, "eos": "<|eot|>", "ends": ("<|user|>",)}
PADDLE_TOKENS = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|VIDEO_PLACEHOLDER|>")
ERNIE_TOKENS = (*PADDLE_TOKENS, "<|VIDEO_START|>", "<|VIDEO_END|>")
ERNIE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: "
    + templates.parts(
        image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        video="<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
    )
    + "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


def described(model_type: str, build: Callable[[Ids], dict[str, Any]]) -> Callable[[Ids], Any]:
    """Return what builds the config of a model type from fields, some of which are ids of tokens."""
    return lambda ids: CONFIG_MAPPING[model_type](**build(ids))


def ids_of(ids: Ids, fields: dict[str, str]) -> dict[str, int]:
    """Return the ids of tokens by the config's names."""
    return {key: ids[token] for key, token in fields.items()}


def fields_of_text(model_type: str, **more: Any) -> dict[str, Any]:
    """Return the fields of a text model of some type."""
    return {**TEXT, "model_type": model_type, **more}


FAMILIES: dict[str, StoredFamily] = {
    "qwen3.5-moe": StoredFamily(
        "Qwen3_5MoeForConditionalGeneration",
        described(
            "qwen3_5_moe",
            lambda ids: {
                "vision_config": {**GLM_VISION, "num_position_embeddings": 16},
                "text_config": {
                    **TEXT,
                    **EXPERTS,
                    **GLM_MROPE,
                    "shared_expert_intermediate_size": 16,
                    "layer_types": ["linear_attention", "full_attention"],
                    "linear_num_key_heads": 2,
                    "linear_num_value_heads": 2,
                    "linear_key_head_dim": 8,
                    "linear_value_head_dim": 8,
                },
                **ids_of(ids, QWEN_FIELDS),
            },
        ),
        patch_grid("Qwen3VLProcessor", video="Qwen3VLVideoProcessor"),
        templates.QWEN3_5,
        (*QWEN_TOKENS, "<think>", "</think>"),
        is_byte_level=True,
        **CHATML,
    ),
    "exaone4.5": StoredFamily(
        "Exaone4_5_ForConditionalGeneration",
        described(
            "exaone4_5",
            lambda ids: {
                "vision_config": {**QWEN_VISION, "num_key_value_heads": 1},
                "text_config": fields_of_text("exaone4", layer_types=["full_attention", "full_attention"]),
                "image_token_id": ids["<|image_pad|>"],
                "video_token_id": ids["<|video_pad|>"],
            },
        ),
        patch_grid("Exaone4_5_Processor"),
        templates.QWEN_VL,
        QWEN_TOKENS,
        **CHATML,
    ),
    "glm4v-moe": StoredFamily(
        "Glm4vMoeForConditionalGeneration",
        described(
            "glm4v_moe",
            lambda ids: {
                "vision_config": GLM_VISION,
                "text_config": {
                    **TEXT,
                    **GLM_MROPE,
                    "n_routed_experts": 4,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 16,
                },
                **ids_of(ids, GLM_FIELDS),
            },
        ),
        patch_grid("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
        templates.GLM,
        GLM_TOKENS,
        **GLM_CHAT,
    ),
    "glm4.6v": StoredFamily(
        "Glm46VForConditionalGeneration",
        described(
            "glm46v",
            lambda ids: {
                "vision_config": {**GLM_VISION, "model_type": "glm4v_vision"},
                "text_config": fields_of_text("glm4v_text", **GLM_MROPE),
                **ids_of(ids, GLM_FIELDS),
            },
        ),
        patch_grid("Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor"),
        templates.GLM,
        GLM_TOKENS,
        **GLM_CHAT,
    ),
    "video-llama-3": StoredFamily(
        "VideoLlama3ForConditionalGeneration",
        described(
            "video_llama_3",
            lambda ids: {
                "vision_config": {k: v for k, v in VISION.items() if k != "image_size"} | {"patch_size": 4},
                "text_config": fields_of_text("qwen2"),
                "image_token_id": ids["<|image_pad|>"],
                "video_token_id": ids["<|video_pad|>"],
            },
        ),
        {
            "processor_class": "VideoLlama3Processor",
            "image_processor": {
                "image_processor_type": "VideoLlama3ImageProcessor",
                **PATCHES,
                "temporal_patch_size": 1,
            },
            "video_processor": {
                "video_processor_type": "VideoLlama3VideoProcessor",
                **PATCHES,
                "temporal_patch_size": 1,
            },
        },
        templates.im_start(image="<|image_pad|>\n", video="<|video_pad|>\n"),
        QWEN_TOKENS,
        **CHATML,
    ),
    "paddleocr-vl": StoredFamily(
        "PaddleOCRVLForConditionalGeneration",
        described(
            "paddleocr_vl",
            lambda ids: {
                "vision_config": {**VISION, "patch_size": 4},
                "text_config": {**TEXT, **MROPE_FIELDS},
                "image_token_id": ids["<|IMAGE_PLACEHOLDER|>"],
                "video_token_id": ids["<|VIDEO_PLACEHOLDER|>"],
                "vision_start_token_id": ids["<|IMAGE_START|>"],
                "vision_end_token_id": ids["<|IMAGE_END|>"],
            },
        ),
        {
            "processor_class": "PaddleOCRVLProcessor",
            "image_processor": {
                "image_processor_type": "PaddleOCRVLImageProcessor",
                **PATCHES,
                "temporal_patch_size": 1,
            },
        },
        ERNIE,
        ERNIE_TOKENS,
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        ends=("</s>",),
    ),
    "ernie4.5-vl-moe": StoredFamily(
        "Ernie4_5_VLMoeForConditionalGeneration",
        described(
            "ernie4_5_vl_moe",
            lambda ids: {
                "vision_config": {
                    "depth": 2,
                    "hidden_size": 24,
                    "num_heads": 2,
                    "intermediate_size": 32,
                    "patch_size": 4,
                },
                "text_config": {
                    **{k: v for k, v in TEXT.items() if k != "head_dim"},
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
                    "moe_intermediate_size": [16, 8],
                    "moe_k": 2,
                    "moe_num_experts": 4,
                    "moe_num_shared_experts": 1,
                    "mlp_layer_types": ["dense", "sparse"],
                },
                "image_start_token_id": ids["<|IMAGE_START|>"],
                "image_end_token_id": ids["<|IMAGE_END|>"],
                "image_token_id": ids["<|IMAGE_PLACEHOLDER|>"],
                "video_start_token_id": ids["<|VIDEO_START|>"],
                "video_end_token_id": ids["<|VIDEO_END|>"],
                "video_token_id": ids["<|VIDEO_PLACEHOLDER|>"],
            },
        ),
        {
            "processor_class": "Ernie4_5_VLMoeProcessor",
            "image_processor": {"image_processor_type": "Ernie4_5_VLMoeImageProcessor", **STILLS},
            "video_processor": {
                "video_processor_type": "Ernie4_5_VLMoeVideoProcessor",
                **PATCHES,
                "draw_on_frames": False,  # which needs a font
            },
        },
        ERNIE,
        ERNIE_TOKENS,
        named={
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
        ends=("</s>",),
    ),
    "ovis2": StoredFamily(
        "Ovis2ForConditionalGeneration",
        described(
            "ovis2",
            lambda ids: {
                "vision_config": {**VISION, "vocab_size": 32, "hidden_stride": 1},
                "text_config": fields_of_text("qwen2"),
                "hidden_size": WIDTH,
                "vocab_size": len(ids),
                "image_token_id": ids["<IMG_ATOM>"],
                "visual_indicator_token_ids": [
                    ids[token] for token in ("<IMG_START>", "<IMG_END>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>")
                ],
            },
        ),
        {
            "processor_class": "Ovis2Processor",
            "image_processor": square("Ovis2ImageProcessor", crop_to_patches=True, min_patches=1, max_patches=4),
            "image_seq_length": 4,
        },
        templates.im_start("You are a helpful assistant.", image="<image>\n"),
        ("<|im_start|>", "<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_END>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>"),
        **CHATML,
    ),
    "granite4-vision": StoredFamily(
        "Granite4VisionForConditionalGeneration",
        described(
            "granite4_vision",
            lambda ids: {
                "vision_config": {
                    **VISION,
                    "hidden_size": 64,  # its projector has a head for every 64
                    "patch_size": 4,
                    "model_type": "siglip_vision_model",
                },
                "text_config": {k: v for k, v in TEXT.items() if k != "head_dim"},
                "image_token_index": ids["<image>"],
                "image_grid_pinpoints": PINPOINTS,
                "vision_feature_select_strategy": "full",
                "downsample_rate": "1/2",
                "deepstack_layer_map": [[-1, 0]],
                "spatial_target_layers": [1],
                "qformer_config": {
                    **QFORMER,
                    "hidden_size": 64,
                    "encoder_hidden_size": 64,
                    "model_type": "blip_2_qformer",
                },
                "projector_dropout": 0.0,
            },
        ),
        {
            "processor_class": "Granite4VisionProcessor",
            "image_processor": tiles("LlavaNextImageProcessor"),
            "patch_size": 4,
            "vision_feature_select_strategy": "full",
            "downsample_rate": "1/2",
        },
        templates.im_start(image="<image>\n"),
        ("<|im_start|>", "<image>"),
        **CHATML,
    ),
    "janus": StoredFamily(
        "JanusForConditionalGeneration",
        described(
            "janus",
            lambda ids: {
                "vision_config": {**VISION, "mlp_ratio": 2.0, "projection_dim": WIDTH, "num_image_tokens": 4},
                "text_config": fields_of_text("llama"),
                "vq_config": {
                    "embed_dim": 4,
                    "num_embeddings": 8,
                    "latent_channels": 4,
                    "base_channels": 32,
                    "channel_multiplier": [1, 1],
                    "num_res_blocks": 1,
                    "num_patches": 4,
                    "projection_dim": WIDTH,
                    "image_token_embed_dim": WIDTH,
                },
                "image_token_id": ids["<image_placeholder>"],
            },
        ),
        {
            "processor_class": "JanusProcessor",
            "image_processor": square("JanusImageProcessor", min_size=8),
            "num_image_tokens": 4,
        },
        templates.DEEPSEEK_VL,
        ("<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
        named={
            "image_token": "<image_placeholder>",
            "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>",
        },
        adds_bos=True,
        ends=("</s>",),
    ),
    "video-llava": StoredFamily(
        "VideoLlavaForConditionalGeneration",
        described(
            "video_llava",
            lambda ids: {
                "vision_config": {**VISION, "model_type": "clip_vision_model"},
                "text_config": fields_of_text("llama"),
                "image_token_index": ids["<image>"],
                "video_token_index": ids["<video>"],
            },
        ),
        {
            "processor_class": "VideoLlavaProcessor",
            "image_processor": square("VideoLlavaImageProcessor", size={"shortest_edge": 16}),
            "video_processor": {
                **square("x", size={"shortest_edge": 16}),
                "video_processor_type": "VideoLlavaVideoProcessor",
            },
            "patch_size": 8,
        },
        templates.LLAVA,
        ("<image>", "<video>"),
        adds_bos=True,
        ends=(" ",),
    ),
    "minicpm-v4.6": StoredFamily(
        "MiniCPMV4_6ForConditionalGeneration",
        described(
            "minicpmv4_6",
            lambda ids: {
                "vision_config": {**VISION, "patch_size": 4, "image_size": 32, "insert_layer_id": 1},
                "text_config": fields_of_text(
                    "qwen3_5_text",
                    layer_types=["linear_attention", "full_attention"],
                    linear_num_key_heads=2,
                    linear_num_value_heads=2,
                    linear_key_head_dim=8,
                    linear_value_head_dim=8,
                    **GLM_MROPE,
                ),
                "insert_layer_id": 1,
                "image_size": 32,
                "patch_size": 4,
                "image_token_id": ids["<|image_pad|>"],
                "video_token_id": ids["<|video_pad|>"],
            },
        ),
        {
            "processor_class": "MiniCPMV4_6Processor",
            "image_processor": {"image_processor_type": "MiniCPMV4_6ImageProcessor", **SLICES},
            "video_processor": {"video_processor_type": "MiniCPMV4_6VideoProcessor", **SLICES},
        },
        templates.im_start(image="<|image_pad|>", video="<|video_pad|>"),
        ("<|im_start|>", "<|image_pad|>", "<|video_pad|>", *SLICE_NAMES.values()),
        named={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", **SLICE_NAMES},
        **CHATML,
    ),
}
