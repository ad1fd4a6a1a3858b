"""Compare losses: float32 weights, bf16 weights with float32 masters, and bf16 weights alone.

The same `cornstarch train` run three times, from the same weights with the same batches, computed in bf16: a SigLIP and
a Qwen3 with random weights, all of them trained, on ragged conversations with JPEG images (`ragged.py`).

- float32: trained weights are float32, and autocast converts them (`optimizer.master_weights: false`);
- masters: bf16 weights with float32 masters in AdamW (`true`), the default on one GPU;
- bf16: bf16 weights that AdamW steps directly, with its states in bf16. No option of Cornstarch does this: the weights
  are rounded before the first step.

The deviation of a step is |loss / loss with float32 weights - 1|.

    python benchmarks/master_weights.py --output benchmarks/results/master_weights.md
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import shlex
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import ragged
import torch
import transformers
from rich.console import Console

from cornstarch.train import RunConfig, Trainer, load_config
from cornstarch.trainer.callbacks import Callback

WAYS = {
    "float32": "float32 weights, autocast",
    "masters": "bf16 weights, float32 masters",
    "bf16": "bf16 weights, no masters",
}
SHOWN = (1, 20, 50, 100)

# By the size of the models: image size, vision, language model, words per sample, maximum length.
SIZES: dict[str, tuple[int, dict[str, Any], dict[str, Any], int, int]] = {
    "tiny": (
        56,
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
        {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 24},
        100,
        256,
    ),
    "small": (
        224,
        {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6},
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
         "head_dim": 64},
        700,
        2048,
    ),
}  # fmt: skip


class RoundWeights(Callback):
    """Rounds trained weights to bf16 before the first step, so that the optimizer steps what is left of them."""

    def on_train_begin(self, trainer: Trainer) -> None:
        for part in trainer.run_model.parts:
            for weight in part.trained.values():
                weight.data = weight.data.to(torch.bfloat16)


def build_config(folder: Path, way: str, size: str, steps: int, batch: int, rate: float) -> RunConfig:
    """Return the run of a way; data and the tokenizer are written if they are not there."""
    side, vision, language, words, longest = SIZES[size]
    if not (folder / "rows.json").exists():
        images = ragged.write_images(folder / "images", 64)
        tokens = (side // 14) ** 2
        ragged.write_conversations(folder / "rows.json", images, steps * batch, tokens, most_words=words)
        ragged.build_tokenizer().save_pretrained(folder / "tokenizer")
    model = {
        "encoders": {
            "vision": {
                "token": "<image>",
                "train": "full",
                "config": {"model_type": "siglip_vision_model", "image_size": side, "patch_size": 14,
                           "vision_use_head": False, **vision},
                "processor_config": {
                    "class_name": "SiglipImageProcessor", "size": {"height": side, "width": side},
                },
            }
        },
        "language_model": {
            "tokenizer": str(folder / "tokenizer"),
            "train": "full",
            "config": {"model_type": "qwen3", "vocab_size": 8192, "num_key_value_heads": 2, **language},
        },
    }  # fmt: skip
    rows = {"path": str(folder / "rows.json"), "media": str(folder / "images")}
    base = {
        "model": model, "data": {"train": [rows], "max_length": longest}, "precision": "bf16",
        "optimizer": {"learning_rate": rate, "master_weights": way == "masters"},
        "loop": {"steps": steps, "batch_size": batch}, "logging": {"every": 1, "progress": "none", "samples": 0},
        "output": str(folder / way),
    }  # fmt: skip
    return load_config(None, base=base)


def train(config: RunConfig, way: str) -> dict[int, float]:
    """Train; return the loss of each step."""
    callbacks = [RoundWeights()] if way == "bf16" else []
    trainer = Trainer(config, console=Console(file=io.StringIO()), callbacks=callbacks)
    assert trainer.fit().status == "finished"
    kinds = {weight.dtype for part in trainer.run_model.parts for weight in part.trained.values()}
    assert kinds == {torch.float32 if way == "float32" else torch.bfloat16}, kinds
    lines = map(json.loads, (Path(config.output) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def render_table(losses: dict[str, dict[int, float]]) -> str:
    right = losses["float32"]
    shown = [step for step in SHOWN if step in right]
    heads = ["weights", *(f"loss, step {step}" for step in shown), "largest deviation", "mean deviation"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for way, title in WAYS.items():
        off = [abs(losses[way][step] / right[step] - 1) for step in right]
        columns = [title, *(f"{losses[way][step]:.4f}" for step in shown)]
        columns += ["", ""] if way == "float32" else [f"{max(off):.3%}", f"{sum(off) / len(off):.3%}"]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--size", choices=SIZES, default="small" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate")
    given = parser.parse_args()
    losses: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for way in WAYS:
            config = build_config(Path(name), way, given.size, given.steps, given.batch, given.rate)
            losses[way] = train(config, way)
            print(way, {step: round(loss, 4) for step, loss in losses[way].items() if step in SHOWN}, flush=True)
    text = render_table(losses)
    print(text)
    if given.output is not None:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
        head = (
            f"# Losses with float32 masters\n\nCommand: `python {shlex.join(sys.argv)}`. {date.today()}, {machine}, "
            f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}. "
            f"The *{given.size}* models of the script, {given.steps} steps of {given.batch} samples, learning rate "
            f"{given.rate:g}, computed in bf16. Deviation: |loss / loss with float32 weights - 1| of a step.\n\n"
        )
        given.output.write_text(head + text + "\n")


if __name__ == "__main__":
    main()
