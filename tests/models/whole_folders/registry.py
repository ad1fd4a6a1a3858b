"""Which multimodal models of transformers' registry have a folder here, and why the others have none."""

from __future__ import annotations

from transformers.models.auto import modeling_auto

_LISTS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")

_ENCODER_DECODER = "an encoder-decoder: its text decoder is not a causal language model that reads image tokens"
_NOT_A_CHAT = "answers no conversation: its processor has no chat template and takes one prompt"
_OTHER_OUTPUT = "trained for more, or other, than text: images, speech, actions, proteins, or text by diffusion"
_NEEDS_TIMM = "its vision tower is one of timm, which is not installed"
_NOT_WRITTEN = "no tiny folder has been written for it"

NOT_BUILT: dict[str, str] = {
    **dict.fromkeys(
        [
            *("florence2", "pix2struct", "udop", "t5gemma2", "vision-encoder-decoder", "pp_formulanet", "canary"),
            *("cohere_asr", "dia", "moonshine", "moonshine_streaming", "pop2piano", "seamless_m4t", "seamless_m4t_v2"),
            *("speech-encoder-decoder", "speech_to_text", "speecht5", "whisper"),
        ],
        _ENCODER_DECODER,
    ),
    **dict.fromkeys(
        [
            *("blip", "blip-2", "git", "instructblip", "instructblipvideo", "kosmos-2", "kosmos-2.5", "fuyu"),
            *("idefics", "chameleon"),
        ],
        _NOT_A_CHAT,
    ),
    **dict.fromkeys(
        ["qwen2_5_omni", "qwen3_omni_moe", "vibevoice", "emu3", "evolla", "pi0", "diffusion_gemma"], _OTHER_OUTPUT
    ),
    **dict.fromkeys(["fast_vlm", "gemma3n", "perception_lm"], _NEEDS_TIMM),
    "voxtral_realtime": "answers no conversation: its processor has no chat template and takes sounds alone",
}


def model_types() -> dict[str, str]:
    """Return the multimodal models of the installed transformers: model type to class."""
    found: dict[str, str] = {}
    for name in _LISTS:
        for model_type, classes in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}).items():
            found.setdefault(model_type, classes if isinstance(classes, str) else classes[0])
    return found


def uncovered(classes: set[str]) -> dict[str, str]:
    """Return the models of the registry without a folder: the class, and the reason."""
    return {
        class_name: NOT_BUILT.get(model_type, _NOT_WRITTEN)
        for model_type, class_name in sorted(model_types().items())
        if class_name not in classes
    }
