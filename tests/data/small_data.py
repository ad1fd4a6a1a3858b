"""Small data files, and collators for them."""

from __future__ import annotations

import io
import json
import struct
import wave
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerFast

from cornstarch.config import DataConfig, SourceConfig
from cornstarch.models.multimodal_language_model import MultimodalModel, MultimodalProcessor
from tests.models.local_processors import image, processor_of, tokenizer
from tests.zoo import ENCODERS, LANGUAGE_MODELS

WORDS = "cat dog sound loud look now the a and or".split()


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write JSONL, or a JSON list if the file is called so."""
    rows = list(rows)
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text)
    return path


def png(width: int = 20, height: int = 20, seed: int = 0, format: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image(width, height, seed).save(stream, format)
    return stream.getvalue()


def huge_png(width: int, height: int) -> bytes:
    """A file of a few bytes that says it has very many pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def wav(samples: np.ndarray, rate: int = 16000, width: int = 2, channels: int = 1) -> bytes:
    """A WAV file of floats between -1 and 1 (several channels: [samples, channels])."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        scaled = np.round(samples.flatten() * (2 ** (8 * width - 1) - 1)).astype("<i8")
        scaled = scaled + 128 if width == 1 else scaled
        file.writeframes(scaled.view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return stream.getvalue()


def tone(seconds: float = 0.05, rate: int = 16000, pitch: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)


def data_config(path: Path | str, **options: Any) -> DataConfig:
    source = {key: options.pop(key) for key in list(options) if key in SourceConfig.model_fields}
    return DataConfig(train=[{"path": str(path), **source}], **options)


def processor_for(
    words: PreTrainedTokenizerFast | None = None, **encoders: str
) -> tuple[MultimodalProcessor, MultimodalModel]:
    """A processor of tiny parts, and its model."""
    built = {name: ENCODERS[encoder].build() for name, encoder in encoders.items()}
    language_model = LANGUAGE_MODELS["llama"].build()
    if words is not None and len(words) > language_model.get_input_embeddings().weight.shape[0]:
        language_model.resize_token_embeddings(len(words))
    model = MultimodalModel(built, language_model).eval()
    parts: Mapping[str, Any] = {name: processor_of(encoder) for name, encoder in encoders.items()}
    return MultimodalProcessor(parts, words or tokenizer(), model), model


def mixed_rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Conversations with none, one or two images, or a sound, of different lengths."""
    rows = []
    for number in range(count):
        row: dict[str, Any] = {}
        asked = " ".join(WORDS[: 1 + number % 5])
        if number % 4 in (1, 2):
            images = [f"{number}_{i}.png" for i in range(number % 4)]
            for i, name in enumerate(images):
                (folder / name).write_bytes(png(20, 20, 10 * number + i))
            row["images"] = images
            asked = "<image> " * len(images) + asked
        if number % 4 == 3:
            (folder / f"{number}.wav").write_bytes(wav(tone(0.02 + 0.002 * number)))
            row["audios"] = [f"{number}.wav"]
            asked += " <audio>"
        answer = " ".join(WORDS[number % 3 : number % 3 + 1 + number % 4])
        row["messages"] = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append(row)
    return rows


def as_image(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")
