"""A run folder as the Trainer writes it, made by formulas: no model, no training."""

from __future__ import annotations

import json
import math
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from PIL import Image, ImageDraw

STARTED = 1_767_225_600.0  # 2026-01-01 00:00 UTC
NUMBERS = "zero one two three four five six seven eight nine".split()

CONFIG = """\
name: demo
seed: 0
model:
  language_model: {config: {model_type: qwen3, hidden_size: 96, num_hidden_layers: 4}, train: full}
  encoders:
    vision: {config: {model_type: clip_vision_model, image_size: 8, patch_size: 2}, train: full, projector: linear}
    audio: {config: {model_type: whisper}, train: projector, projector: mlp}
data:
  train:
    - {path: data/digits/train.json, weight: 2.0}
    - {path: data/spoken/train.json, weight: 1.0}
  evaluation:
    - {path: data/digits/test.json}
    - {path: data/spoken/test.json}
  max_length: 64
optimizer: {name: adamw, learning_rate: 0.002, weight_decay: 0.01}
schedule: {name: cosine, warmup: 30}
loop: {steps: 600, batch_size: 32, evaluate_every: 60}
precision: fp32
device: cpu
"""


def wobble(step: int) -> float:
    """Return noise between -1 and 1 that is the same every time."""
    return (math.sin(step * 12.9898) * 43758.5453) % 2.0 - 1.0


def train_line(step: int, total: int) -> dict[str, Any]:
    """Return a line of training, as at this step of so many."""
    share = step / total
    loss = 0.045 + 2.3 * math.exp(-6 * share) * (1 + 0.16 * wobble(step)) + 0.012 * wobble(step + 7)
    warm = min(1.0, share / 0.05)
    return {
        "kind": "train",
        "step": step,
        "time": STARTED + 9 + step * 0.17,
        "epoch": round(step * 32 / 3200, 4),
        "loss": max(0.004, loss),
        "learning_rate": 0.002 * warm * 0.5 * (1 + math.cos(math.pi * share)),
        "grad_norm": 0.3 + 2.1 * math.exp(-4 * share) * (1 + 0.4 * wobble(step + 3)),
        "tokens": step * 832,
        "tokens_per_second": 4890 * (1 - 0.5 * math.exp(-step / 9)) + 160 * wobble(step + 1),
        "samples_per_second": 188.0 + 6 * wobble(step + 2),
        "items_per_second": {"vision": 126.0 + 5 * wobble(step + 4), "audio": 62.0 + 3 * wobble(step + 5)},
        "memory": int(612e6 + 40e6 * min(1.0, share * 6)),
        "seconds": step * 0.17,
        "skipped": 3,
    }


def evaluation_line(step: int, total: int) -> dict[str, Any]:
    """Return an evaluation of two sources, as at this step of so many."""
    share = step / total
    digits, spoken = (0.1 + best * (1 - math.exp(-rate * share)) for best, rate in ((0.872, 7), (0.845, 5)))
    loss = 0.09 + 2.25 * math.exp(-5.5 * share)
    return {
        "kind": "evaluation",
        "step": step,
        "time": STARTED + 9.5 + step * 0.17,
        "loss": loss,
        "accuracy": (360 * digits + 300 * spoken) / 660,
        "token_accuracy": 0.5 + 0.49 * (1 - math.exp(-7 * share)),
        "seconds": 1.4,
        "sources": {
            "digits": {"loss": loss * 0.9, "accuracy": digits, "count": 360},
            "spoken digits": {"loss": loss * 1.12, "accuracy": spoken, "count": 300},
        },
    }


def write_shuffled_line(step: int, total: int, modality: str) -> dict[str, Any]:
    """Return the last evaluation with exchanged items: the source of the modality falls to chance."""
    line = evaluation_line(step, total) | {"kind": "shuffled", "modality": modality}
    source, chance = {"vision": ("digits", 0.1028), "audio": ("spoken digits", 0.0967)}[modality]
    line["sources"] = {source: {"loss": 5.81, "accuracy": chance, "count": line["sources"][source]["count"]}}
    return line | {"loss": 3.9, "accuracy": chance}


def metrics(total: int, log_every: int, evaluate_every: int) -> Iterator[dict[str, Any]]:
    """Yield all lines of a run that was resumed once."""
    best = 0.0
    for step in range(0, total + 1):
        if step and step % log_every == 0:
            yield train_line(step, total)
        if step % evaluate_every == 0:
            line = evaluation_line(step, total)
            yield line
            if line["accuracy"] > best:
                best = line["accuracy"]
                yield event(step, "best", f"accuracy {best:.4f}")
        if step == total // 2:
            yield event(step, "saved", f"checkpoints/step_{step:08d}")
            yield event(step, "stopped", "SIGTERM: saved and stopped")
            yield event(step, "resumed", f"from checkpoints/step_{step:08d}")
    for modality in ("vision", "audio"):
        yield write_shuffled_line(total, total, modality)
    yield event(total, "finished", f"{total} steps")


def event(step: int, name: str, text: str) -> dict[str, Any]:
    """Return a line of an event."""
    return {"kind": "event", "step": step, "time": STARTED + 10 + step * 0.17, "event": name, "text": text}


def summary(total: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what stands in run.json."""
    parts = [
        ("vision encoder", "CLIPVisionModel", 128_448, 128_448, "full", 2e-3, 5.1e6),
        ("vision projector", "MultimodalProjector", 12_384, 12_384, "full", 2e-3, 0.4e6),
        ("audio encoder", "WhisperEncoder", 402_944, 0, "projector", None, 31.9e6),
        ("audio projector", "MultimodalProjector", 24_768, 24_768, "full", 2e-3, 0.9e6),
        ("language model", "Qwen3ForCausalLM", 1_302_528, 1_302_528, "full", 1e-3, 72.6e6),
    ]
    return {
        "name": "demo",
        "status": "finished",
        "started": STARTED,
        "ended": STARTED + 121,
        "seconds": total * 0.17,
        "step": total,
        "total_steps": total,
        "device": "cpu",
        "precision": "fp32",
        "versions": {"cornstarch": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2", "python": "3.11.9"},
        "task": "multimodal",
        "command": f"cornstarch train run.yaml loop.steps={total}",
        "parts": [
            {
                "name": name,
                "kind": kind,
                "parameters": parameters,
                "trainable": trainable,
                "bytes": 4 * parameters + 12 * trainable,
                "train": train,
                "learning_rate": rate,
                "weight_decay": 0.01 if rate else None,
                "flops": flops,
            }
            for name, kind, parameters, trainable, train, rate, flops in parts
        ],
        "data": {
            "train": [
                "data/digits/train.json: llava, 1,437 samples, weight 2",
                "data/spoken/train.json: llava, 1,200 samples",
            ],
            "evaluation": ["data/digits/test.json: llava, 360 samples", "data/spoken/test.json: llava, 300 samples"],
        },
        "evaluation": evaluation_line(total, total),
        "shuffled": [write_shuffled_line(total, total, modality) for modality in ("vision", "audio")],
        "best": {"step": total, "metric": "accuracy", "name": f"step_{total:08d}"},
        "skipped": {"broken": 2, "too_long": 1},
        "answers": answers,
    }


def digit_image(digit: int) -> Image.Image:
    """Return a grey digit of 8 by 8 pixels."""
    large = Image.new("L", (32, 32))
    ImageDraw.Draw(large).text((16, 16), str(digit), fill=255, anchor="mm", font_size=30)
    return large.resize((8, 8), Image.Resampling.BOX)


def photo(width: int, height: int) -> Image.Image:
    """Return a picture with soft colours, as large as a photograph."""
    y, x = numpy.mgrid[0:height, 0:width]
    channels = [128 + 90 * numpy.sin(x / 61 + phase) * numpy.cos(y / 47 - phase) for phase in (0.0, 0.9, 1.8)]
    return Image.fromarray(numpy.stack(channels, axis=-1).astype(numpy.uint8))


def write_sound(path: Path, pitch: float) -> None:
    """Write a third of a second of a tone."""
    times = numpy.arange(2667) / 8000
    tone = numpy.sin(2 * math.pi * pitch * times) * numpy.hanning(len(times)) * 20_000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(tone.astype("<i2").tobytes())


def write_features(path: Path, pitch: float) -> None:
    """Write 48 frames of 20 features."""
    frames, bins = numpy.mgrid[0:48, 0:20]
    centre = 10 + 6 * numpy.sin(frames / 48 * math.pi * pitch / 300)
    numpy.save(path, (numpy.exp(-((bins - centre) ** 2) / 8) * 4 - 2).astype(numpy.float32))


def write_answers(folder: Path, count: int = 8) -> list[dict[str, Any]]:
    """Write the media of some samples and return their answers: images, sounds and features in turn."""
    (folder / "samples").mkdir()
    answers = []
    for index in range(count):
        number = (index * 7 + 4) % 10
        said = number if index != 5 else (number + 2) % 10
        name = f"samples/{index}_0.{('png', 'wav', 'png', 'npy')[index % 4]}"
        kind = "image" if name.endswith("png") else "audio"
        if kind == "image":
            digit_image(number).save(folder / name)
        elif name.endswith("wav"):
            write_sound(folder / name, 220 + 40 * number)
        else:
            write_features(folder / name, 220 + 40 * number)
        asked = "Which digit is this? " if kind == "image" else "Which digit is spoken? "
        answers.append(
            {
                "id": f"test.json:{index + 4}",
                "source": "digits" if kind == "image" else "spoken digits",
                "question": [{"text": asked}, {kind: name}],
                "truth": NUMBERS[number],
                "answer": NUMBERS[said],
                "right": said == number,
            }
        )
    return answers


def write_run(folder: Path, total: int = 600, log_every: int = 2, evaluate_every: int = 60) -> Path:
    """Write a whole run folder and return it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    answers = write_answers(folder)
    (folder / "run.json").write_text(json.dumps(summary(total, answers)))
    lines = metrics(total, log_every, evaluate_every)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def change_summary(folder: Path, **changes: Any) -> None:
    """Replace keys of run.json."""
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
