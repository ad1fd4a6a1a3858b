"""The families with which images are read: LLaVA and its kin, InternVL, Gemma, Idefics, Pixtral and others."""

from __future__ import annotations

from typing import Any

from tests.models.whole_folders import templates
from tests.models.whole_folders.stored import Ids, StoredFamily, existing

SQUARE = {"height": 16, "width": 16}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
CHATML: dict[str, Any] = {"pad": "<|endoftext|>", "bos": None, "eos": "<|im_end|>", "ends": ("<|im_end|>",)}


def square(name: str, **options: Any) -> dict[str, Any]:
    """Return the settings of an image processor that makes squares."""
    return {"image_processor_type": name, "size": SQUARE, "crop_size": SQUARE, **options}


def tiles(name: str) -> dict[str, Any]:
    """Return the settings of an image processor that cuts an image into tiles, by its shape."""
    return square(name, size={"shortest_edge": 16}, image_grid_pinpoints=PINPOINTS)


LLAVA_FIELDS: dict[str, Any] = {
    "patch_size": 8,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
PIXTRAL_TOKENS = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
PIXTRAL_IMAGES = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 32},
    "patch_size": {"height": 8, "width": 8},
}
IDEFICS_TOKENS = ("<|im_start|>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
ROWS_AND_COLUMNS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
IDEFICS: dict[str, Any] = {"bos": "<|im_start|>", "eos": "<end_of_utterance>", "ends": ("<end_of_utterance>",)}
SPLIT_IMAGES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": True}
GEMMA_TOKENS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
COHERE_TOKENS = (
    *("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL"),
    *(f"TILE_{number}" for number in range(1, 13)),
)
COHERE: dict[str, Any] = {
    "bos": "<BOS_TOKEN>",
    "eos": "<|END_OF_TURN_TOKEN|>",
    "ends": ("<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
}


def _mistral3(ids: Ids) -> Any:
    """Return a config with more than one token for the smallest image: transformers 5.22 loses a dimension of one."""
    config = existing("mistral3", image_token_id="[IMG]")(ids)
    config.vision_config.patch_size = 4
    return config


def _aria(ids: Ids) -> Any:
    """Return a config for images of 980 x 980, the only size that its processor makes."""
    config = existing("aria", image_token_id="<|img|>")(ids)
    config.vision_config.image_size, config.vision_config.patch_size = 980, 245
    return config


FAMILIES: dict[str, StoredFamily] = {
    "llava": StoredFamily(
        "LlavaForConditionalGeneration",
        existing("llava", image_token_id="<image>"),
        {
            "processor_class": "LlavaProcessor",
            "image_processor": square("CLIPImageProcessor", size={"shortest_edge": 16}),
            **LLAVA_FIELDS,
        },
        templates.LLAVA,
        ("<image>",),
        adds_bos=True,
        ends=(" ",),
    ),
    "vipllava": StoredFamily(
        "VipLlavaForConditionalGeneration",
        existing("vipllava", image_token_id="<image>"),
        {
            "processor_class": "LlavaProcessor",
            "image_processor": square("CLIPImageProcessor", size={"shortest_edge": 16}),
            **LLAVA_FIELDS,
        },
        templates.VIPLLAVA,
        ("<image>",),
        adds_bos=True,
    ),
    "llava-pixtral": StoredFamily(
        "LlavaForConditionalGeneration",
        existing("llava-pixtral", image_token_id="[IMG]"),
        {"processor_class": "PixtralProcessor", "image_processor": PIXTRAL_IMAGES, "patch_size": 8},
        templates.MISTRAL,
        PIXTRAL_TOKENS,
        adds_bos=True,
        ends=("</s>",),
    ),
    "mistral3": StoredFamily(
        "Mistral3ForConditionalGeneration",
        _mistral3,
        {
            "processor_class": "PixtralProcessor",
            "image_processor": {**PIXTRAL_IMAGES, "patch_size": {"height": 4, "width": 4}},
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
        templates.MISTRAL,
        PIXTRAL_TOKENS,
        ends=("</s>",),
    ),
    "lighton-ocr": StoredFamily(
        "LightOnOcrForConditionalGeneration",
        existing("lighton-ocr", image_token_id="<|image_pad|>"),
        {
            "processor_class": "LightOnOcrProcessor",
            "image_processor": PIXTRAL_IMAGES,
            "patch_size": 8,
            "spatial_merge_size": 2,
        },
        templates.im_start(image="<|image_pad|>"),
        ("<|im_start|>", "<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
        named={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        **CHATML,
    ),
    "llava-next": StoredFamily(
        "LlavaNextForConditionalGeneration",
        existing("llava-next", image_token_id="<image>"),
        {
            "processor_class": "LlavaNextProcessor",
            "image_processor": tiles("LlavaNextImageProcessor"),
            **LLAVA_FIELDS,
        },
        templates.LLAVA_NEXT,
        ("[INST]", "[/INST]", "<image>"),
        adds_bos=True,
        ends=("</s>",),
    ),
    "llava-next-video": StoredFamily(
        "LlavaNextVideoForConditionalGeneration",
        existing("llava-next-video", image_token_id="<image>", video_token_id="<video>"),
        {
            "processor_class": "LlavaNextVideoProcessor",
            "image_processor": tiles("LlavaNextImageProcessor"),
            "video_processor": {**square("x"), "video_processor_type": "LlavaNextVideoVideoProcessor"},
            **LLAVA_FIELDS,
        },
        templates.LLAVA,
        ("<image>", "<video>"),
        adds_bos=True,
        ends=(" ",),
    ),
    "llava-onevision": StoredFamily(
        "LlavaOnevisionForConditionalGeneration",
        existing("llava-onevision", image_token_id="<image>", video_token_id="<video>"),
        {
            "processor_class": "LlavaOnevisionProcessor",
            "image_processor": {
                **tiles("LlavaOnevisionImageProcessor"),
                "size": SQUARE,
            },
            "video_processor": {**square("x"), "video_processor_type": "LlavaOnevisionVideoProcessor"},
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        templates.LLAVA_ONEVISION,
        ("<|im_start|>", "<image>", "<video>"),
        **CHATML,
    ),
    "internvl": StoredFamily(
        "InternVLForConditionalGeneration",
        existing("internvl", image_token_id="<IMG_CONTEXT>"),
        {
            "processor_class": "InternVLProcessor",
            "image_processor": square("GotOcr2ImageProcessor", crop_to_patches=False, min_patches=1, max_patches=4),
            "video_processor": {**square("x"), "video_processor_type": "InternVLVideoProcessor"},
            "image_seq_length": 4,
        },
        templates.INTERNVL,
        ("<|im_start|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        **CHATML,
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
            "image_processor": square("Gemma3ImageProcessor", image_seq_length=4, do_pan_and_scan=None),
            "image_seq_length": 4,
        },
        templates.GEMMA,
        GEMMA_TOKENS,
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        bos="<bos>",
        eos="<eos>",
        adds_bos=True,
        ends=("<end_of_turn>",),
    ),
    "paligemma": StoredFamily(
        "PaliGemmaForConditionalGeneration",
        existing("paligemma", image_token_id="<image>"),
        {
            "processor_class": "PaliGemmaProcessor",
            "image_processor": square("SiglipImageProcessor", image_seq_length=4),
        },
        None,
        ("<image>",),
        bos="<bos>",
        eos="<eos>",
        adds_bos=True,
        ends=("<eos>",),
    ),
    "idefics2": StoredFamily(
        "Idefics2ForConditionalGeneration",
        existing("idefics2", image_token_id="<image>"),
        {
            "processor_class": "Idefics2Processor",
            "image_processor": {
                "image_processor_type": "Idefics2ImageProcessor",
                "size": {"shortest_edge": 12, "longest_edge": 16},
                "do_image_splitting": False,
            },
            "image_seq_len": 3,
        },
        templates.IDEFICS,
        IDEFICS_TOKENS,
        **IDEFICS,
    ),
    "idefics3": StoredFamily(
        "Idefics3ForConditionalGeneration",
        existing("idefics3", image_token_id="<image>"),
        {
            "processor_class": "Idefics3Processor",
            "image_processor": {"image_processor_type": "Idefics3ImageProcessor", **SPLIT_IMAGES},
            "image_seq_len": 4,
        },
        templates.IDEFICS,
        (*IDEFICS_TOKENS, *ROWS_AND_COLUMNS),
        **IDEFICS,
    ),
    "smolvlm": StoredFamily(
        "SmolVLMForConditionalGeneration",
        existing("smolvlm", image_token_id="<image>"),
        {
            "processor_class": "SmolVLMProcessor",
            "image_processor": {"image_processor_type": "SmolVLMImageProcessor", **SPLIT_IMAGES},
            "video_processor": {
                "video_processor_type": "SmolVLMVideoProcessor",
                **SPLIT_IMAGES,
                "num_frames": 4,
                "fps": 1,
            },
            "image_seq_len": 4,
        },
        templates.IDEFICS,
        (*IDEFICS_TOKENS, *ROWS_AND_COLUMNS, "<video>"),
        **IDEFICS,
    ),
    "aya-vision": StoredFamily(
        "AyaVisionForConditionalGeneration",
        existing("aya-vision", image_token_id="<|IMG_PATCH|>"),
        {
            "processor_class": "AyaVisionProcessor",
            "image_processor": square("GotOcr2ImageProcessor", crop_to_patches=True, min_patches=1, max_patches=4),
            "patch_size": 4,
            "img_size": 16,
            "downsample_factor": 2,
        },
        templates.COHERE,
        COHERE_TOKENS,
        **COHERE,
    ),
    "cohere2-vision": StoredFamily(
        "Cohere2VisionForConditionalGeneration",
        existing("cohere2-vision", image_token_id="<|IMG_PATCH|>"),
        {
            "processor_class": "Cohere2VisionProcessor",
            "image_processor": square(
                "Cohere2VisionImageProcessor",
                crop_to_patches=True,
                min_patches=1,
                max_patches=4,
                patch_size=2,  # of tokens, not of pixels
                downsample_factor=2,
            ),
        },
        templates.COHERE.replace("<image>", "<|IMG_PATCH|>"),
        COHERE_TOKENS,
        named={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        **COHERE,
    ),
    "got-ocr2": StoredFamily(
        "GotOcr2ForConditionalGeneration",
        existing("got-ocr2", image_token_id="<imgpad>"),
        {"processor_class": "GotOcr2Processor", "image_processor": square("GotOcr2ImageProcessor")},
        None,
        ("<|im_start|>", "<img>", "</img>", "<imgpad>"),
        **CHATML,
    ),
    "deepseek-vl": StoredFamily(
        "DeepseekVLForConditionalGeneration",
        existing("deepseek-vl", image_token_id="<image_placeholder>"),
        {
            "processor_class": "DeepseekVLProcessor",
            "image_processor": square("DeepseekVLImageProcessor", min_size=8),
            "num_image_tokens": 4,
        },
        templates.DEEPSEEK_VL,
        ("<image_placeholder>",),
        named={"image_token": "<image_placeholder>"},
        adds_bos=True,
        ends=("</s>",),
    ),
    "lfm2-vl": StoredFamily(
        "Lfm2VlForConditionalGeneration",
        existing("lfm2-vl", image_token_id="<image>"),
        {
            "processor_class": "Lfm2VlProcessor",
            "image_processor": {
                "image_processor_type": "Lfm2VlImageProcessor",
                "do_image_splitting": True,
                "downsample_factor": 2,
                "encoder_patch_size": 4,
                "tile_size": 16,
                "min_tiles": 2,
                "max_tiles": 4,
                "min_image_tokens": 2,
                "max_image_tokens": 4,
                "max_num_patches": 16,
                "max_pixels_tolerance": 2.0,
            },
        },
        templates.LFM,
        (
            *("<|im_start|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
        ),
        named={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
        bos="<|startoftext|>",
        eos="<|im_end|>",
        ends=("<|im_end|>",),
    ),
    "aria": StoredFamily(
        "AriaForConditionalGeneration",
        _aria,
        {
            "processor_class": "AriaProcessor",
            "image_processor": {"image_processor_type": "AriaImageProcessor", "max_image_size": 980},
            "size_conversion": {"980": 3},
        },
        templates.ARIA,
        ("<|im_start|>", "<fim_prefix>", "<fim_suffix>", "<|img|>"),
        named={"image_token": "<|img|>"},
        cases=("no item", "one", "two separated"),  # an image has 980 x 980 pixels
        **CHATML,
    ),
}
