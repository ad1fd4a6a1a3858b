"""A run small enough for tests: a tiny CLIP and a tiny Llama with dropout, and a few dozen noisy images."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console

from cornstarch.train import RunConfig, Trainer, load_config
from tests.models import local_processors

WORDS = ["cat", "dog", "loud", "sound"]


def write_data(folder: Path, count: int = 24, name: str = "train.json") -> Path:
    """Write images, and questions about them whose answer is told by the image's brightness."""
    rows = []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(count)
    for number in range(count):
        kind = number % len(WORDS)
        pixels = random.integers(60 * kind, 60 * kind + 60, (20, 20, 3), dtype=np.uint8)
        file = f"images/{name}-{number}.png"
        Image.fromarray(pixels).save(folder / file)
        question = "what is this <image> now" if number % 3 else "what is it <image>"
        turns = [
            {"from": "human", "value": question},
            {"from": "gpt", "value": f"it is {'a ' * (number % 4)}{WORDS[kind]}"},
        ]
        rows.append({"image": file, "conversations": turns})
    rows.append({"conversations": [{"from": "human", "value": "what is it"}, {"from": "gpt", "value": "a cat"}]})
    (folder / name).write_text(json.dumps(rows))
    return folder / name


def tiny_config(folder: Path, *overrides: str, **sections: Any) -> RunConfig:
    """Return a run of 6 steps in `folder / run`; data and tokenizer are written if they are not there."""
    if not (folder / "train.json").exists():
        write_data(folder)
        write_data(folder, 8, "test.json")
        local_processors.tokenizer().save_pretrained(folder / "tokenizer")
    base = {
        "output": str(folder / "run"),
        "device": "cpu",
        "model": {
            "encoders": {
                "vision": {
                    "token": "<image>",
                    "train": "full",
                    "config": {
                        "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "hidden_size": 16,
                        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                        "attention_dropout": 0.1,
                    },
                    "processor_config": {
                        "class_name": "CLIPImageProcessor", "size": {"height": 8, "width": 8}, "do_center_crop": False,
                    },
                }
            },
            "language_model": {
                "tokenizer": str(folder / "tokenizer"),
                "config": {
                    "model_type": "llama", "vocab_size": 96, "hidden_size": 16, "intermediate_size": 16,
                    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0,
                    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.2,
                },
            },
        },
        "data": {"train": [{"path": str(folder / "train.json")}], "max_length": 32},
        "optimizer": {"learning_rate": 1e-2},
        "loop": {"steps": 6, "batch_size": 4},
        "logging": {"every": 1, "progress": "none", "samples": 2},
    }  # fmt: skip
    return load_config(None, overrides, base=merge(base, sections))


def merge(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return a nested mapping with others put over it."""
    result = dict(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if both else value
    return result


def quiet() -> Console:
    """Return a console that nobody reads."""
    return Console(file=io.StringIO(), width=120)


def trainer_of(config: RunConfig, **options: Any) -> Trainer:
    """Return a silent trainer."""
    return Trainer(config, console=quiet(), **options)


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step as it was logged."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


@lru_cache
def vocabulary() -> int:
    """Return how many words the tokenizer has."""
    return len(local_processors.tokenizer())
