"""What a reader of the documentation has: models under their hub names, an image, a sound; here all of them tiny."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipImageProcessor,
    WhisperConfig,
    WhisperModel,
)

from tests.documented.hub import IMAGE, TEXT, make_hub, tokenizer

CHAT = "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}"


def lay_out(folder: Path) -> None:
    """Write everything into `folder`, so that a hub name is a path relative to it."""
    for name, path in make_hub(folder / "parts").items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(path)
    words = tokenizer()
    words.chat_template = CHAT
    words.save_pretrained(folder / "Qwen/Qwen3-1.7B")
    Qwen3ForCausalLM(Qwen3Config(**TEXT, head_dim=8)).save_pretrained(folder / "Qwen/Qwen3-1.7B")
    side = {"height": 32, "width": 32}
    SiglipImageProcessor(size=side).save_pretrained(folder / "google/siglip-so400m-patch14-384")
    whisper().save_pretrained(folder / "openai/whisper-large-v3")
    llava().save_pretrained(folder / "llava-hf/llava-1.5-7b-hf")
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side).save_pretrained(folder / "llava-hf/llava-1.5-7b-hf")
    noise = np.random.default_rng(0)
    for name in ("photo.png", "chart.png"):
        Image.fromarray(noise.integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(folder / name)


def whisper() -> WhisperModel:
    """Return a model whose encoder takes one second of sound."""
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"d_model": 24, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "vocab_size": 8}
    return WhisperModel(WhisperConfig(**sizes, **widths, **ids, max_source_positions=50, max_target_positions=8))


def llava() -> LlavaForConditionalGeneration:
    """Return a whole multimodal model, to be taken apart."""
    vision = CLIPVisionConfig(hidden_size=24, intermediate_size=48, **IMAGE)
    text = LlamaConfig(**{**TEXT, "vocab_size": TEXT["vocab_size"] + 1})
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=TEXT["vocab_size"])
    )
