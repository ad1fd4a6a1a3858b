"""A tiny model that sees and hears, described in YAML, with images and sounds as files."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cornstarch.train import dump_config
from tests.trainer.tiny import tiny_config, write_data

Command = Callable[..., tuple[int, str, str]]

AUDIO = {
    "token": "<audio>",
    "train": "full",
    "config": {
        "model_type": "whisper", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8,
        "max_source_positions": 5, "vocab_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "processor_config": {
        "class_name": "WhisperFeatureExtractor", "feature_size": 8, "sampling_rate": 16000, "hop_length": 1600,
        "chunk_length": 1, "n_fft": 400,
    },
}  # fmt: skip


def write_sound(path: Path, seconds: float = 0.5, seed: int = 0) -> Path:
    """Write noise as a WAV file."""
    samples = np.random.default_rng(seed).integers(-9000, 9000, int(16000 * seconds)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())
    return path


def write_config(folder: Path, *overrides: str, name: str = "run.yaml", **sections: Any) -> Path:
    """Write a run of `tests.trainer.tiny` as YAML; its folder is `folder / run`."""
    (folder / name).write_text(dump_config(tiny_config(folder, *overrides, **sections)))
    return folder / name


def add_sounds(folder: Path, name: str = "train.json") -> None:
    """Add rows about sounds to a file of rows."""
    if not (folder / name).exists():
        write_data(folder, name=name)
    (folder / "sounds").mkdir(exist_ok=True)
    rows = json.loads((folder / name).read_text())
    for number in range(8):
        write_sound(folder / f"sounds/{number}.wav", seed=number)
        turns = [{"from": "human", "value": "what is <audio>"}, {"from": "gpt", "value": "a loud sound"}]
        rows.append({"audio": f"sounds/{number}.wav", "conversations": turns})
    (folder / name).write_text(json.dumps(rows))


def break_rows(folder: Path, name: str) -> list[str]:
    """Add rows with broken files to a file of rows; return what they are named by in messages."""
    add_sounds(folder, name)
    rows = json.loads((folder / name).read_text())
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(folder / "whole.jpg")
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:300])
    write_sound(folder / "silent.wav", seconds=0)
    asked = {"image": "what is <image>", "audio": "what is <audio>"}
    for kind, file in (("image", "cut.jpg"), ("audio", "silent.wav"), ("image", "missing.png")):
        turns = [{"from": "human", "value": asked[kind]}, {"from": "gpt", "value": "a cat"}]
        rows.append({kind: file, "conversations": turns})
    (folder / name).write_text(json.dumps(rows))
    return ["cut.jpg", "silent.wav", "missing.png"]


def record(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind of a run's metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def summary(folder: Path) -> dict[str, Any]:
    """Return a run's summary."""
    return json.loads((folder / "run.json").read_text())
