"""Measure the gain of the feature cache: an epoch that reads cached encoder outputs, against one that runs the encoder.

A frozen vision tower with a projector and a language model, both trained, processes samples of four photographs, JPEG
files of 1280 × 960 pixels. Two runs of two epochs each are timed as a user runs them, from decoding to the optimizer:
one without a cache, and one with a cache that is filled in the first epoch and read in the second. The benchmark checks
that the losses of both are equal, and reports whether the second epoch reaches the requested speedup.

The tower of Qwen2-VL merges four patches into one token, so the encoder is a large part of a step. SigLIP passes every
patch to the language model, which then takes the larger part.

    python benchmarks/feature_cache.py                              # on a GPU: the real sizes
    python benchmarks/feature_cache.py --sizes small                # on a CPU
    python benchmarks/feature_cache.py --tower siglip --output FILE.json
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, SiglipVisionConfig, SiglipVisionModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from cornstarch.data.collate import ChatCollator
from cornstarch.models.multimodal_language_model import MultimodalModel, MultimodalProcessor
from cornstarch.tasks.conversation import ConversationTask
from cornstarch.train import Trainer, load_config

IMAGES = 4  # of a sample
WARM = 2  # warm-up steps of an epoch
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # of the loss of a step
WANTED = 1.5  # wanted speedup of the second epoch with a cache
WORDS = 512


@dataclass(frozen=True)
class Sizes:
    """All sizes."""

    samples: int
    batch: int
    photo: tuple[int, int]
    tokens: int
    """The maximum number of patches of a photograph in the Qwen2-VL tower."""
    language_model: dict[str, Any]
    qwen2_vl: dict[str, Any]
    siglip: dict[str, Any]


LARGE = Sizes(
    samples=80,
    batch=4,
    photo=(1280, 960),
    tokens=972,
    language_model={
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    qwen2_vl={"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": 2048},
    siglip={
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 384, "patch_size": 14,
    },
)  # fmt: skip
SMALL = Sizes(
    samples=16,
    batch=2,
    photo=(640, 480),
    tokens=48,
    language_model={
        "vocab_size": WORDS + 8, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    qwen2_vl={"depth": 4, "embed_dim": 160, "num_heads": 4, "mlp_ratio": 4, "hidden_size": 128},
    siglip={
        "hidden_size": 160, "intermediate_size": 640, "num_hidden_layers": 6, "num_attention_heads": 4,
        "image_size": 112, "patch_size": 14,
    },
)  # fmt: skip


@dataclass
class Epoch:
    """One pass over the data."""

    seconds: float
    """The times of the counted steps."""
    steps: int
    losses: list[float]
    """Of all steps."""
    hits: int = 0
    misses: int = 0

    @property
    def step(self) -> float:
        """Milliseconds per step."""
        return 1e3 * self.seconds / self.steps

    @property
    def loss(self) -> float:
        """The mean."""
        return sum(self.losses) / len(self.losses)

    def apart(self, other: Epoch) -> float:
        """Return the largest relative difference of losses of the same step."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max(abs(one - another) / abs(one) for one, another in pairs)


@dataclass
class Measured:
    """A run."""

    epochs: list[Epoch] = field(default_factory=list)
    precision: str = ""
    disk: int = 0
    """Bytes of the cached features."""


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words; nothing is downloaded."""
    vocabulary = {"<pad>": 0, "<unk>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")


def photographs(folder: Path, sizes: Sizes) -> list[dict[str, Any]]:
    """Write photographs of smooth noise, which JPEG compresses like real ones, and return the samples."""
    random = np.random.default_rng(0)
    rows = []
    coarse = random.integers(0, 256, (sizes.samples, IMAGES, 24, 32, 3), dtype=np.uint8)

    def written(number: int, image: int) -> str:
        picture = Image.fromarray(coarse[number, image]).resize(sizes.photo, Image.Resampling.BICUBIC)
        picture.save(folder / f"{number}-{image}.jpg", quality=90)
        return str(folder / f"{number}-{image}.jpg")

    places = [(number, image) for number in range(sizes.samples) for image in range(IMAGES)]
    with ThreadPoolExecutor() as pool:
        paths = list(pool.map(lambda place: written(*place), places))
    for number in range(sizes.samples):
        files = paths[number * IMAGES : (number + 1) * IMAGES]
        said = " ".join(f"w{one}" for one in random.integers(3, WORDS, 24))
        question = " ".join(["<image>"] * IMAGES + ["w3 w4 w5"])
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
        rows.append({"images": files, "messages": turns})
    return rows


def made_task(tower: str, sizes: Sizes, data: Any, dtype: torch.dtype) -> ConversationTask:
    """Return the model with its processor, with random weights: speed does not depend on them."""
    torch.manual_seed(0)
    # Drawing two billion random weights takes half a minute on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        encoder, images = made_tower(tower, sizes)
        language_model = Qwen3ForCausalLM(Qwen3Config(**sizes.language_model))
        model = MultimodalModel({"vision": encoder.to(dtype)}, language_model, init_projector_type="mlp")
    model.train(encoders_mode={"vision": (False, True)}, llm_mode=True)
    processor = MultimodalProcessor({"vision": images}, words(), model=model, predefined_tokens={"vision": "<image>"})
    return ConversationTask("multimodal", model, ChatCollator(processor, data))


def made_tower(tower: str, sizes: Sizes) -> tuple[Any, Any]:
    """Return a vision tower and its image processor."""
    if tower == "qwen2_vl":
        options = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
        encoder: Any = Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**options, **sizes.qwen2_vl))
        images = transformers.Qwen2VLImageProcessor(max_pixels=sizes.tokens * 28**2, min_pixels=28**2)
    else:
        encoder = SiglipVisionModel(SiglipVisionConfig(**sizes.siglip))
        side = sizes.siglip["image_size"]
        images = transformers.SiglipImageProcessor(size={"height": side, "width": side})
    return encoder, images


def measured(
    folder: Path, rows: list[dict[str, Any]], sizes: Sizes, given: argparse.Namespace, cached: bool
) -> Measured:
    """Train two epochs."""
    described = {
        "output": str(folder / ("cached" if cached else "plain")),
        "model": {"given": "benchmark"},
        "data": {
            "train": [{"path": "rows", "format": "given"}], "max_length": 8192, "workers": given.workers,
            "shuffle": False,
        },
        "loop": {"epochs": 2, "batch_size": sizes.batch},
        "schedule": {"warmup": 0},
        "optimizer": {"learning_rate": 1e-5},
        "logging": {"every": 1000, "progress": "none"},
        "features": {"cache": cached, "folder": str(folder / "features")},
    }  # fmt: skip
    config = load_config(None, base=described)
    on_gpu = torch.cuda.is_available()
    task = made_task(given.tower, sizes, config.data, torch.bfloat16 if on_gpu else torch.float32)
    trainer = Trainer(config, task=task, train_data=rows, console=Console(file=io.StringIO()))
    trainer.setup()
    found = Measured(precision=trainer.placement.precision)
    epochs = found.epochs
    losses: list[Any] = []
    began = time.perf_counter()
    for batch in trainer.batches():
        if batch.index == 0:
            losses = []
        result = trainer.step(batch)
        losses.append(result.loss)
        if batch.index + 1 == WARM:
            began = _now(trainer)
        if batch.index + 1 == trainer.data.steps_of_epoch(batch.epoch):
            seconds = _now(trainer) - began
            epoch = Epoch(seconds, len(losses) - WARM, torch.stack(losses).tolist())
            if trainer.run_model.features is not None:
                trainer.run_model.features.wait()
                epoch.hits = trainer.run_model.features.hits - sum(one.hits for one in epochs)
                epoch.misses = trainer.run_model.features.misses - sum(one.misses for one in epochs)
            epochs.append(epoch)
    if trainer.run_model.features is not None:
        assert trainer.run_model.features.problem is None, trainer.run_model.features.problem
        found.disk = trainer.run_model.features.used
        trainer.run_model.features.close()
    del trainer, task
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return found


def _now(trainer: Trainer) -> float:
    if trainer.placement.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=["qwen2_vl", "siglip"], default="qwen2_vl")
    parser.add_argument(
        "--sizes", choices=["large", "small"], default="large" if torch.cuda.is_available() else "small"
    )
    # Workers prefetch twice as many batches as there are workers: far fewer than an epoch must have.
    parser.add_argument("--workers", type=int, default=4 if torch.cuda.is_available() else 0)
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_args()
    sizes = LARGE if given.sizes == "large" else SMALL
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    began = time.perf_counter()
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = photographs(folder, sizes)
        without = measured(folder, rows, sizes, given, cached=False)
        cached = measured(folder, rows, sizes, given, cached=True)
    (first, plain), (filling, found) = without.epochs, cached.epochs
    disk, precision, items = cached.disk, cached.precision, sizes.samples * IMAGES
    faster, apart = plain.step / found.step, max(first.apart(filling), plain.apart(found))
    print(f"{machine}, {precision}, tower {given.tower} ({given.sizes})")
    print(f"{IMAGES} images per sample, {sizes.batch} samples per step, {given.workers} data workers")
    lines = {"without, 1st": first, "without, 2nd": plain, "with, 1st": filling, "with, 2nd": found}
    for label, epoch in lines.items():
        print(f"{label:14} {epoch.step:8.1f} ms per step {plain.step / epoch.step:6.2f}x", end="")
        print(f"   found {epoch.hits} of {items}, mean loss {epoch.loss:.5f}")
    print(f"disk: {disk / 1e6:,.1f} MB for {items} images, {disk / items / 1e6:.2f} MB each")
    print(f"losses of a step differ by at most {apart:.1e} (allowed: {TOLERANCE[precision]:g})")
    print(f"second epoch: {faster:.2f}x faster, {'as' if faster >= WANTED else 'LESS THAN'} requested ({WANTED}x)")
    print(f"{time.perf_counter() - began:.0f} s in total")
    assert (found.hits, found.misses) == (items, 0), "the second epoch ran the encoder"
    assert apart <= TOLERANCE[precision], (without, cached)
    if given.output is not None:
        result = {
            "command": f"python benchmarks/feature_cache.py --tower {given.tower} --sizes {given.sizes} "
            f"--workers {given.workers}",
            "date": date.today().isoformat(),
            "machine": machine,
            "precision": precision,
            "versions": {"torch": str(torch.__version__), "transformers": transformers.__version__},
            "epochs": {
                label: {**asdict(epoch), "loss": epoch.loss, "step_ms": epoch.step} for label, epoch in lines.items()
            },
            "second_epoch_faster": faster,
            "second_epoch_asked_for": WANTED,
            "losses_apart": apart,
            "bytes_on_disk": disk,
            "items": items,
        }
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
