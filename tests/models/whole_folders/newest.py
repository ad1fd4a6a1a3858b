"""Further families: those that hear, those of Llama, and the newest."""

from __future__ import annotations

from typing import Any

from tests.models.whole_folders import templates
from tests.models.whole_folders.families import CHATML, GEMMA_TOKENS, square
from tests.models.whole_folders.more import (
    EXPERTS,
    GLM_CHAT,
    GLM_VISION,
    QFORMER,
    described,
    fields_of_text,
    ids_of,
)
from tests.models.whole_folders.qwen import (
    GLM_FIELDS,
    GLM_TOKENS,
    OMNI_NAMES,
    OMNI_TOKENS,
    STILLS,
    patch_grid,
    spectrogram,
)
from tests.models.whole_folders.stored import StoredFamily
from tests.models.whole_models import AUDIO_TOWER, MROPE_FIELDS, TEXT, VISION, WIDTH

LLAMA4_TOKENS = (
    *("<|header_start|>", "<|header_end|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>", "<|video|>", "<|python_tag|>"),
)
LLAMA_CHAT: dict[str, Any] = {"bos": "<|begin_of_text|>", "eos": "<|eot|>", "ends": ("<|eot|>",), "adds_bos": True}

FAMILIES: dict[str, StoredFamily] = {
    "mllama": StoredFamily(
        "MllamaForConditionalGeneration",
        described(
            "mllama",
            lambda ids: {
                "vision_config": {
                    "hidden_size": 24,
                    "num_hidden_layers": 2,
                    "num_global_layers": 1,
                    "attention_heads": 2,
                    "intermediate_size": 32,
                    "vision_output_dim": 72,
                    "image_size": 16,
                    "patch_size": 8,
                    "max_num_tiles": 4,
                    "intermediate_layers_indices": [0, 1],
                },
                "text_config": {
                    **{k: v for k, v in TEXT.items() if k != "head_dim"},
                    "num_hidden_layers": 3,
                    "cross_attention_layers": [1],
                },
                "image_token_index": ids["<|image|>"],
            },
        ),
        {
            "processor_class": "MllamaProcessor",
            "image_processor": {**square("MllamaImageProcessor"), "max_image_tiles": 4},
        },
        templates.LLAMA,
        LLAMA4_TOKENS,
        **LLAMA_CHAT,
    ),
    "llama4": StoredFamily(
        "Llama4ForConditionalGeneration",
        described(
            "llama4",
            lambda ids: {
                "vision_config": {
                    **VISION,
                    "num_hidden_layers": 2,
                    "patch_size": 4,
                    "intermediate_size": 96,
                    "vision_output_dim": 24,
                    "projector_input_dim": 24,
                    "projector_output_dim": 24,
                },
                "text_config": {
                    **TEXT,
                    "intermediate_size_mlp": 48,
                    "num_local_experts": 2,
                    "num_experts_per_tok": 1,
                    "attention_chunk_size": 512,
                },
                "boi_token_index": ids["<|image_start|>"],
                "eoi_token_index": ids["<|image_end|>"],
                "image_token_index": ids["<|patch|>"],
            },
        ),
        {
            "processor_class": "Llama4Processor",
            "image_processor": square("Llama4ImageProcessor", max_patches=4, resize_to_max_canvas=False),
            "patch_size": 4,
            "pixel_shuffle_ratio": 0.5,
        },
        templates.LLAMA,
        LLAMA4_TOKENS,
        **LLAMA_CHAT,
    ),
    "phi4-multimodal": StoredFamily(
        "Phi4MultimodalForCausalLM",
        described(
            "phi4_multimodal",
            lambda ids: {
                **{k: v for k, v in TEXT.items() if k != "head_dim"},
                "vision_config": {
                    **VISION,
                    "num_hidden_layers": 2,
                    "patch_size": 4,  # its processor counts on 32 x 32 patches
                    "image_size": 128,
                    "crop_size": 128,
                    "image_token_id": ids["<|image|>"],
                },
                "audio_config": {
                    "hidden_size": 24,
                    "intermediate_size": 32,
                    "num_blocks": 2,
                    "num_attention_heads": 2,
                    "ext_pw_out_channel": 24,
                    "depthwise_separable_out_channel": 24,
                    "input_size": 80,
                    "nemo_conv_channels": 24,
                    "dropout_rate": 0.0,
                    "audio_token_id": ids["<|audio|>"],
                },
            },
        ),
        {
            "processor_class": "Phi4MultimodalProcessor",
            "image_processor": {
                "image_processor_type": "Phi4MultimodalImageProcessor",
                "size": {"height": 128, "width": 128},
                "patch_size": 4,
                "dynamic_hd": 1,
            },
            "audio_processor": {"feature_extractor_type": "Phi4MultimodalFeatureExtractor"},
        },
        templates.PHI,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|audio|>", "<|end|>"),
        named={"image_token": "<|image|>", "audio_token": "<|audio|>"},
        kinds=("image", "audio"),
        cases=("no item", "one", "two separated"),  # an image has hundreds of tokens
        pad="<|endoftext|>",
        bos=None,
        eos="<|eos|>",
        ends=("<|end|>",),
    ),
    "granite-speech": StoredFamily(
        "GraniteSpeechForConditionalGeneration",
        described(
            "granite_speech",
            lambda ids: {
                "text_config": {k: v for k, v in fields_of_text("granite").items() if k != "head_dim"},
                "encoder_config": {
                    "input_dim": 160,
                    "num_layers": 2,
                    "hidden_dim": 24,
                    "feedforward_mult": 2,
                    "num_heads": 2,
                    "dim_head": 12,
                    "output_dim": 8,
                    "context_size": 16,
                    "max_pos_emb": 32,
                    "dropout": 0.0,
                    "conv_kernel_size": 3,
                },
                "projector_config": {**QFORMER, "model_type": "blip_2_qformer"},
                "audio_token_index": ids["<|audio|>"],
                "has_lora_adapter": False,
            },
        ),
        {
            "processor_class": "GraniteSpeechProcessor",
            "audio_processor": {"feature_extractor_type": "GraniteSpeechFeatureExtractor"},
        },
        templates.im_start(audio="<|audio|>"),
        ("<|im_start|>", "<|audio|>"),
        kinds=("audio",),
        **CHATML,
    ),
    "glm-asr": StoredFamily(
        "GlmAsrForConditionalGeneration",
        described(
            "glmasr",
            lambda ids: {
                "audio_config": {
                    "hidden_size": 24,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "intermediate_size": 96,
                    "num_mel_bins": 8,
                },
                "text_config": fields_of_text("llama"),
                "audio_token_id": ids["<|pad|>"],
            },
        ),
        {"processor_class": "GlmAsrProcessor", "feature_extractor": spectrogram()},
        templates.GLM.replace("[gMASK]<sop>", "")
        .replace("part.type == 'image'", "part.type == 'audio'")
        .replace("<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_audio|><|pad|><|end_of_audio|>"),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_audio|>", "<|end_of_audio|>", "<|pad|>"),
        kinds=("audio",),
        **GLM_CHAT,
    ),
    "qwen3-asr": StoredFamily(
        "Qwen3ASRForConditionalGeneration",
        described(
            "qwen3_asr",
            lambda ids: {
                "audio_config": {
                    **{key: value for key, value in AUDIO_TOWER.items() if key != "max_source_positions"},
                    "output_dim": WIDTH,
                    "downsample_hidden_size": 8,
                    "num_mel_bins": 16,
                },
                "text_config": fields_of_text("qwen3"),
                "audio_token_id": ids["<|audio_pad|>"],
                "timestamp_token_id": ids["<timestamp>"],
            },
        ),
        {
            "processor_class": "Qwen3ASRProcessor",
            "feature_extractor": {
                **spectrogram(),
                "feature_extractor_type": "Qwen3ASRFeatureExtractor",
                "feature_size": 16,
            },
        },
        templates.im_start(audio="<|audio_start|><|audio_pad|><|audio_end|>"),
        ("<|im_start|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>", "<timestamp>"),
        named={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        kinds=("audio",),
        **CHATML,
    ),
    "qianfan-ocr": StoredFamily(
        "QianfanOCRForConditionalGeneration",
        described(
            "qianfan_ocr",
            lambda ids: {
                "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [4, 4], "drop_path_rate": 0.0},
                "text_config": fields_of_text("qwen3"),
                "image_token_id": ids["<IMG_CONTEXT>"],
                "image_seq_length": 4,
            },
        ),
        {
            "processor_class": "QianfanOCRProcessor",
            "image_processor": square("GotOcr2ImageProcessor", crop_to_patches=True, min_patches=1, max_patches=4),
            "image_seq_length": 4,
        },
        templates.im_start(image="<image>\n"),
        ("<|im_start|>", "<image>", "<img>", "</img>", "<IMG_CONTEXT>"),
        named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
        **CHATML,
    ),
    "qwen3-omni-moe": StoredFamily(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        described(
            "qwen3_omni_moe_thinker",
            lambda ids: {
                "audio_config": {
                    **AUDIO_TOWER,
                    "output_dim": WIDTH,
                    "downsample_hidden_size": 8,
                    "num_mel_bins": 16,
                },
                "vision_config": {
                    **{key: value for key, value in GLM_VISION.items() if key != "image_size"},
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0],
                },
                "text_config": {**TEXT, **EXPERTS, **MROPE_FIELDS},
                "image_token_id": ids["<|IMAGE|>"],
                "video_token_id": ids["<|VIDEO|>"],
                "audio_token_id": ids["<|AUDIO|>"],
                "vision_start_token_id": ids["<|vision_bos|>"],
                "vision_end_token_id": ids["<|vision_eos|>"],
                "audio_start_token_id": ids["<|audio_bos|>"],
                "audio_end_token_id": ids["<|audio_eos|>"],
            },
        ),
        {
            **patch_grid("Qwen3OmniMoeProcessor"),
            "feature_extractor": {**spectrogram(), "feature_size": 16},
        },
        templates.QWEN_OMNI,
        OMNI_TOKENS,
        named=OMNI_NAMES,
        kinds=("image", "audio"),
        **CHATML,
    ),
    "glm-ocr": StoredFamily(
        "GlmOcrForConditionalGeneration",
        described(
            "glm_ocr",
            lambda ids: {
                "vision_config": {**GLM_VISION, "model_type": "glm_ocr_vision"},
                "text_config": fields_of_text("glm_ocr_text", **MROPE_FIELDS),
                **ids_of(ids, GLM_FIELDS),
            },
        ),
        patch_grid("Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor"),
        templates.GLM,
        GLM_TOKENS,
        **GLM_CHAT,
    ),
    "deepseek-vl-hybrid": StoredFamily(
        "DeepseekVLHybridForConditionalGeneration",
        described(
            "deepseek_vl_hybrid",
            lambda ids: {
                "vision_config": {**VISION, "model_type": "siglip_vision_model"},
                "text_config": fields_of_text("llama"),
                "high_res_vision_config": {
                    "hidden_size": 24,
                    "output_channels": 24,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": 64,
                    "patch_size": 8,
                    "mlp_dim": 32,
                    "window_size": 4,
                    "global_attn_indexes": [1],
                    "num_pos_feats": 12,
                    "model_type": "sam_vision_model",
                },
                "image_token_id": ids["<image_placeholder>"],
            },
        ),
        {
            "processor_class": "DeepseekVLHybridProcessor",
            "image_processor": square(
                "DeepseekVLHybridImageProcessor", min_size=8, high_res_size={"height": 64, "width": 64}
            ),
            "num_image_tokens": 4,
        },
        templates.DEEPSEEK_VL,
        ("<image_placeholder>",),
        named={"image_token": "<image_placeholder>"},
        adds_bos=True,
        ends=("</s>",),
    ),
    "hunyuan-vl": StoredFamily(
        "HunYuanVLForConditionalGeneration",
        described(
            "hunyuan_vl",
            lambda ids: {
                "vision_config": {
                    "hidden_size": 24,
                    "intermediate_size": 32,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "num_hidden_layers": 2,
                    "out_hidden_size": WIDTH,
                    "text_hidden_size": WIDTH,
                    "patch_size": 4,
                    "max_image_size": 32,
                    "min_image_size": 8,
                },
                "text_config": {
                    **TEXT,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "xdrope_section": [1, 1, 1, 1]},
                },
                "image_token_id": ids["<image>"],
                "im_start_id": ids["<image_start>"],
                "im_end_id": ids["<image_end>"],
                "im_newline_id": ids["<image_newline>"],
            },
        ),
        {
            "processor_class": "HunYuanVLProcessor",
            "image_processor": {"image_processor_type": "HunYuanVLImageProcessor", **STILLS},
        },
        templates.DEEPSEEK_VL.replace("<image_placeholder>", "<image_start><image><image_end>"),
        ("<image>", "<image_start>", "<image_end>", "<image_newline>"),
        named={"image_token": "<image>", "image_start_token": "<image_start>", "image_end_token": "<image_end>"},
        adds_bos=True,
        ends=("</s>",),
    ),
    "gemma4": StoredFamily(
        "Gemma4ForConditionalGeneration",
        described(
            "gemma4",
            lambda ids: {
                "vision_config": {
                    "hidden_size": 24,
                    "intermediate_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 12,
                    "patch_size": 4,
                    "pooling_kernel_size": 3,
                    "position_embedding_size": 64,
                },
                "audio_config": None,
                "text_config": {
                    **TEXT,
                    "layer_types": ["sliding_attention", "full_attention"],
                    "global_head_dim": 16,
                    "sliding_window": 128,
                    "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": len(ids),
                },
                "boi_token_id": ids["<start_of_image>"],
                "eoi_token_id": ids["<end_of_image>"],
                "image_token_id": ids["<image_soft_token>"],
                "video_token_id": ids["<|video|>"],
            },
        ),
        {
            "processor_class": "Gemma4Processor",
            "image_processor": {
                "image_processor_type": "Gemma4ImageProcessor",
                "patch_size": 4,
                "max_soft_tokens": 70,
                "pooling_kernel_size": 3,
            },
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
            "video_processor": {"video_processor_type": "Gemma4VideoProcessor", "patch_size": 4},
            "image_seq_length": 70,
        },
        templates.GEMMA.replace("<start_of_image>", "<image_soft_token>"),
        (*GEMMA_TOKENS, "<|video|>", "<audio_soft_token>", "<start_of_audio>", "<end_of_audio>"),
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "audio_token": "<audio_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
        },
        bos="<bos>",
        eos="<eos>",
        adds_bos=True,
        ends=("<end_of_turn>",),
    ),
}
