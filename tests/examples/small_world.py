"""What the examples ask for, at the paths that they name: tiny models under hub names, and data that can be learned.

Images have one colour, sounds one pitch, texts one telling word. The language models have learned to repeat a word that
stands before the question, so that a projector alone can make them tell what it sees or hears, as with real ones.
"""

from __future__ import annotations

import json
import wave
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
COLOURS = {"red": (210, 40, 40), "green": (40, 200, 60), "blue": (40, 60, 210), "yellow": (220, 210, 50)}
PITCHES = {"low": 150, "middle": 900, "high": 4000}
KIND, UNKIND = ["good", "great", "lovely", "fine"], ["bad", "awful", "dull", "poor"]
FILLING = "a the film was and it very story play of in book seen".split()
QUESTIONS = ["what colour is it ?", "tell me the colour"]
SOUND_QUESTION = "how does it sound ?"
SYSTEM = "Answer the question about the sound. Without a question, write down what is said."
VOCABULARY = [
    *SPECIAL, *COLOURS, *PITCHES, *KIND, *UNKIND, *FILLING, "user:", "assistant:", "system:", "summarize:", "is",
    *" ".join([*QUESTIONS, SOUND_QUESTION, SYSTEM]).split(),
]  # fmt: skip
RATE = 16_000
PRETRAINING = 150  # steps


@lru_cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, without a chat template."""
    numbers = {word: number for number, word in enumerate(dict.fromkeys(VOCABULARY))}
    inner = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="<mask>", **names)


# ------------------------------------------------------------------------------------------------ models


def store(folder: Path, *things: Any) -> None:
    """Write a model and what belongs to it."""
    for thing in things:
        thing.save_pretrained(folder)


def clip(folder: Path) -> None:
    """Write a vision encoder that makes five tokens of an image."""
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    square = {"height": 8, "width": 8}
    store(
        folder,
        CLIPVisionModel(CLIPVisionConfig(**sizes, num_attention_heads=2)),
        CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=square),
    )


def siglip(folder: Path) -> None:
    """Write a vision encoder that makes four tokens of an image."""
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    store(
        folder,
        SiglipVisionModel(SiglipVisionConfig(**sizes, num_attention_heads=2)),
        SiglipImageProcessor(size={"height": 8, "width": 8}),
    )


def whisper(folder: Path) -> None:
    """Write a model whose encoder makes ten tokens of a second."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 16}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "vocab_size": 8}
    # Random weights must be large, or the sounds would drown in the positions.
    positions = {"max_source_positions": 10, "max_target_positions": 8, "init_std": 0.3}
    store(
        folder,
        WhisperModel(WhisperConfig(**sizes, **widths, **ids, **positions)),
        WhisperFeatureExtractor(feature_size=16, sampling_rate=RATE, hop_length=RATE // 20, chunk_length=1),
    )


def language_model(folder: Path) -> None:
    """Write a language model that repeats a word about which it is asked.

    It is a Llama wherever it stands: in a folder of a Qwen, transformers would split texts as Qwen does.
    """
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(tokenizer()), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    _learn_to_repeat(model)
    store(folder, model, tokenizer())


def _learn_to_repeat(model: nn.Module) -> None:
    """Train on `user: red red red what colour is it ? assistant: it is red` and the like."""
    draw = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(PRETRAINING):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / PRETRAINING)
        texts = [_repeat(draw) for _ in range(48)]
        batch = tokenizer()(texts, padding=True, add_special_tokens=False, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        told = (labels == tokenizer().convert_tokens_to_ids("assistant:")).long().cumsum(1)
        loss = model(input_ids=batch["input_ids"], labels=labels.masked_fill(told == 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _repeat(draw: np.random.Generator) -> str:
    word = str(draw.choice([*COLOURS, *PITCHES]))
    seen = " ".join([word] * int(draw.integers(3, 11)))
    if word in COLOURS:
        return f"<s>user: {seen} {draw.choice(QUESTIONS)} assistant: it is {word}</s>"
    if draw.random() < 0.5:
        return f"<s>system: {SYSTEM} user: {seen} {SOUND_QUESTION} assistant: it is {word}</s>"
    return f"<s>system: {SYSTEM} user: {seen} assistant: {word}</s>"


def t5(folder: Path) -> None:
    """Write a T5."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    ids = {"vocab_size": len(tokenizer()), "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    store(folder, T5ForConditionalGeneration(T5Config(**sizes, **ids)), tokenizer())


def bert(folder: Path) -> None:
    """Write a BERT for masked words, as it is published."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(**sizes, vocab_size=len(tokenizer()), max_position_embeddings=32))
    store(folder, model, tokenizer())


# ------------------------------------------------------------------------------------------------ data


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write JSONL, or a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{','.join(lines)}]")


def picture(colour: str, number: int, side: int = 12) -> Image.Image:
    """Return a noisy image of a colour."""
    noise = np.random.default_rng(number).integers(-25, 26, (side, side, 3))
    return Image.fromarray(np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8))


def pictures(folder: Path, first: int, count: int) -> list[tuple[str, str]]:
    """Write images; return the name and the colour of each."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for number in range(first, first + count):
        colour = list(COLOURS)[number % len(COLOURS)]
        picture(colour, number).save(folder / f"{number}.png")
        found.append((f"{number}.png", colour))
    return found


def llava_rows(images: Sequence[tuple[str, str]], answer: str = "it is") -> list[dict[str, Any]]:
    """Return conversations about images, and an answer that begins so and ends with the colour."""
    return [
        {
            "image": name,
            "conversations": [
                {"from": "human", "value": f"<image>\n{QUESTIONS[number % 2]}"},
                {"from": "gpt", "value": f"{answer} {colour}"},
            ],
        }
        for number, (name, colour) in enumerate(images)
    ]


def message_rows(folder: str, images: Sequence[tuple[str, str]], answer: str) -> list[dict[str, Any]]:
    """Return the same as messages."""
    return [
        {
            "images": [f"{folder}/{name}"],
            "messages": [
                {"role": "user", "content": f"<image>\n{QUESTIONS[number % 2]}"},
                {"role": "assistant", "content": f"{answer} {colour}"},
            ],
        }
        for number, (name, colour) in enumerate(images)
    ]


def tone(path: Path, pitch: str, number: int) -> None:
    """Write half a second of a noisy tone."""
    draw = np.random.default_rng(number)
    frequency = PITCHES[pitch] * draw.uniform(0.9, 1.1)
    times = np.arange(RATE // 2) / RATE
    sound = 0.5 * np.sin(2 * np.pi * frequency * times) + 0.02 * draw.standard_normal(len(times))
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound * 32767 / 2).astype("<i2").tobytes())


def tones(folder: Path, first: int, count: int) -> list[tuple[str, str]]:
    """Write sounds; return the path, relative to the folder's parent, and the pitch of each."""
    found = []
    for number in range(first, first + count):
        pitch = list(PITCHES)[number % len(PITCHES)]
        tone(folder / f"{number}.wav", pitch, number)
        found.append((f"{folder.name}/{number}.wav", pitch))
    return found


def transcripts(sounds: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return sounds with what is said in them."""
    return [{"audio": path, "text": pitch} for path, pitch in sounds]


def sound_questions(sounds: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return conversations about sounds."""
    return [
        {
            "audios": [path],
            "messages": [
                {"role": "user", "content": f"<audio> {SOUND_QUESTION}"},
                {"role": "assistant", "content": f"it is {pitch}"},
            ],
        }
        for path, pitch in sounds
    ]


def articles(count: int, seed: int) -> dict[str, list[str]]:
    """Return texts that begin with what they are about."""
    draw = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        others = draw.choice([*KIND, *FILLING], int(draw.integers(3, 7)))
        texts.append([str(draw.choice(list(COLOURS))), *map(str, others)])
    return {"article": [" ".join(text) for text in texts], "highlights": [text[0] for text in texts]}


def reviews(count: int, seed: int) -> dict[str, list[Any]]:
    """Return texts with a word that tells their label, somewhere among others."""
    draw = np.random.default_rng(seed)
    texts, labels = [], []
    for number in range(count):
        words = [str(word) for word in draw.choice(FILLING, int(draw.integers(3, 8)))]
        words.insert(int(draw.integers(len(words) + 1)), str(draw.choice([UNKIND, KIND][number % 2])))
        texts.append(" ".join(words))
        labels.append(number % 2)
    return {"sentence": texts, "label": labels}


def save_dataset(folder: Path, splits: dict[str, dict[str, list[Any]]], **kinds: Any) -> None:
    """Write a Hugging Face dataset with splits; `kinds` are the features of columns that are no plain values."""
    import datasets

    datasets.disable_progress_bars()
    tables = {}
    for name, columns in splits.items():
        table = datasets.Dataset.from_dict(columns)
        for column, kind in kinds.items():
            table = table.cast_column(column, kind)
        tables[name] = table
    datasets.DatasetDict(tables).save_to_disk(folder)
