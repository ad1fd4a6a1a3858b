"""Models as `save_pretrained` writes them, and ragged conversations with JPEG files: what a training run reads.

Everything is made from a seed: weights are random, words are invented, images are smooth noise with JPEG's usual size.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import known_models
import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, SiglipImageProcessor

IMAGE_SIZE = (640, 480)
MAX_LENGTH = 4096
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<image>",
)  # fmt: skip
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMPOSED_TEMPLATE = _CHATML.replace("IMAGE", "<image>")
QWEN_TEMPLATE = _CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")


# ---------------------------------------------------------------------------------------------------- words and data


def invent_words(count: int = 6000) -> list[str]:
    """Return invented words of one to four syllables."""
    drawn = random.Random(0)
    syllables = [a + b for a in "b d f g k l m n p r s t v z st tr".split() for b in "a e i o u en ar il".split()]
    words = {"".join(drawn.choices(syllables, k=drawn.randint(1, 4))) for _ in range(2 * count)}
    return sorted(words)[:count]


def build_tokenizer(template: str = COMPOSED_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 8,000 tokens, trained on the invented words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words, drawn = invent_words(), random.Random(1)
    texts = (" ".join(drawn.choices(words, k=200)) for _ in range(400))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL[1:]),
    )  # fmt: skip
    made.chat_template = template
    return made


def write_images(folder: Path, count: int = 256) -> list[str]:
    """Write JPEG files of 640 x 480; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(2)
    names = []
    for number in range(count):
        names.append(f"{number:04}.jpg")
        coarse = Image.fromarray(drawn.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        fine = drawn.integers(0, 40, (IMAGE_SIZE[1], IMAGE_SIZE[0], 3), dtype=np.uint8)
        pixels = np.asarray(coarse.resize(IMAGE_SIZE, Image.Resampling.BICUBIC)) // 2 + fine
        Image.fromarray(pixels.astype(np.uint8)).save(folder / names[-1], quality=85)
    return names


def write_conversations(
    path: Path, images: list[str], count: int, tokens_per_image: int, seed: int = 3, most_words: int = 2500
) -> None:
    """Write a LLaVA file: 0 to 4 images and 50 to 2,500 words a sample, a quarter of the words in the question.

    A sample that would have more than 4,096 tokens gets fewer words: a padded trainer would have to cut it.
    """
    drawn, words = random.Random(seed), invent_words()
    rows: list[dict[str, Any]] = []
    for number in range(count):
        shown = drawn.choices(images, k=drawn.randint(0, 4))
        most = int((MAX_LENGTH - 64 - len(shown) * (tokens_per_image + 2)) / 1.3)  # invented words take 1.2 tokens
        total = min(drawn.randint(min(50, most_words), most_words), most)
        asked = max(total // 4, 5)
        question = "<image>\n" * len(shown) + " ".join(drawn.choices(words, k=asked))
        answer = " ".join(drawn.choices(words, k=max(total - asked, 5)))
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        rows.append({"id": str(number), "image": shown, "conversations": turns})
        if not shown:
            del rows[-1]["image"]
    path.write_text(json.dumps(rows))


# ---------------------------------------------------------------------------------------------------- model folders


def _build(make: Any) -> Any:
    """Build a model in bf16 on the GPU, if there is one: random weights of billions of parameters take minutes else."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return make()
    finally:
        torch.set_default_dtype(torch.float32)


def write_parts(folder: Path, vision: str, language: str) -> None:
    """Write the folders `vision` and `language` of the parts of a composed model."""
    encoder = _build(lambda: known_models.encoder(vision))
    size = encoder.config.image_size
    encoder.save_pretrained(folder / "vision")
    SiglipImageProcessor(size={"height": size, "width": size}).save_pretrained(folder / "vision")
    _build(lambda: known_models.language_model(language)).save_pretrained(folder / "language")
    build_tokenizer().save_pretrained(folder / "language")


def write_qwen_vl(folder: Path, tiny: bool = False) -> None:
    """Write a Qwen2.5-VL of 3.75 billion parameters with its own processor."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = build_tokenizer(QWEN_TEMPLATE)
    ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    text = {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
        "max_position_embeddings": 32_768, "use_sliding_window": False, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
    }  # fmt: skip
    if tiny:
        text |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        text |= {"vocab_size": 8192, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
        vision |= {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}
        vision |= {"fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    model = _build(lambda: Qwen2_5_VLForConditionalGeneration(config))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    size = {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size), chat_template=QWEN_TEMPLATE
    ).save_pretrained(folder)
