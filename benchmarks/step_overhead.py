"""Measure the overhead of composing: a step of MultimodalModel against a hand-written loop over the same parts.

Both run in this process, on the same weights and batches, in turn, so that other load on the machine affects both.
Reported: the median over rounds of (ours / by hand), forward + backward + optimizer step, in wall time and in CPU time
of this process. A second comparison is packed rows against padded rows over the same samples, in real (not padding)
tokens per second.

    python benchmarks/step_overhead.py            # prints a table, writes benchmarks/results/step_overhead.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

from cornstarch import MultimodalModel
from cornstarch.models.multimodal_language_model.packing import pack

VOCABULARY, IMAGE_TOKEN, PATCHES = 1000, 1000, 17
Batch = dict[str, Tensor]


def build(hidden: int, layers: int) -> MultimodalModel:
    """Compose a vision-language model; `hidden` and `layers` are those of both parts."""
    torch.manual_seed(0)
    common = {"intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 32}
    vision = CLIPVisionModel(CLIPVisionConfig(hidden_size=hidden, image_size=32, patch_size=8, **common))
    text = LlamaConfig(vocab_size=VOCABULARY, hidden_size=hidden, num_key_value_heads=hidden // 64, **common)
    model = MultimodalModel(encoders={"vision": vision}, language_model=LlamaForCausalLM(text))
    model.set_modality_token_ids({"vision": IMAGE_TOKEN})
    return model


def make_batch(rows: int, length: int, seed: int) -> Batch:
    """Rows of text with two images each."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    for start in (1, length // 2):
        input_ids[:, start : start + PATCHES] = IMAGE_TOKEN
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "labels": input_ids.masked_fill(input_ids == IMAGE_TOKEN, -100),
        "pixel_values": torch.randn(2 * rows, 3, 32, 32, generator=generator),
    }


def loss_by_hand(model: MultimodalModel, batch: Batch) -> Tensor:
    """The hand-written step over the same modules."""
    encoder, llm = model.vision_encoder, model.language_model
    features = encoder.projector.projection(encoder.module(pixel_values=batch["pixel_values"]).last_hidden_state)
    mask = batch["input_ids"] == IMAGE_TOKEN
    embeds = llm.get_input_embeddings()(batch["input_ids"].masked_fill(mask, 0))
    embeds = embeds.masked_scatter(mask.unsqueeze(-1), features)
    return llm(inputs_embeds=embeds, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss


@dataclass(frozen=True)
class Seconds:
    """The time of one step."""

    wall: float
    cpu: float  # of this process only: excludes other load on the machine


def timed_step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def measure_overhead(model: MultimodalModel, rows: int, length: int, rounds: int) -> dict[str, float]:
    """Time both contenders in turn, with alternating order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ours: list[Seconds] = []
    by_hand: list[Seconds] = []
    for step in range(rounds + 3):
        batch = make_batch(rows, length, step)
        ways = [
            (ours, lambda batch=batch: model(**batch).loss),
            (by_hand, lambda batch=batch: loss_by_hand(model, batch)),
        ]
        for times, loss in ways if step % 2 else ways[::-1]:
            times.append(timed_step(loss, optimizer))
    pairs = list(zip(ours[3:], by_hand[3:], strict=True))
    return {
        "ours_ms": 1e3 * statistics.median(a.wall for a, _ in pairs),
        "by_hand_ms": 1e3 * statistics.median(b.wall for _, b in pairs),
        "median_ratio": statistics.median(a.wall / b.wall for a, b in pairs),
        "median_ratio_cpu": statistics.median(a.cpu / b.cpu for a, b in pairs),
    }


def ragged_samples(count: int, longest: int) -> list[Batch]:
    """Samples of one row each without batch dimension, with two images and very different lengths."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for seed in range(count):
        length = int(torch.randint(2 * PATCHES + 6, longest, (), generator=generator))
        batch = make_batch(1, length, seed)
        samples.append({name: value if name == "pixel_values" else value[0] for name, value in batch.items()})
    return samples


def padded(samples: list[Batch], longest: int) -> list[Batch]:
    """Rows of one sample each, padded to the length limit, four rows per batch."""
    return [padded_batch(samples[start : start + 4], longest) for start in range(0, len(samples), 4)]


def padded_batch(samples: list[Batch], longest: int) -> Batch:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    batch = {
        name: torch.stack([nn.functional.pad(s[name], (0, longest - len(s[name])), value=value) for s in samples])
        for name, value in fill.items()
    }
    return {**batch, "pixel_values": torch.cat([s["pixel_values"] for s in samples])}


def packed(samples: list[Batch], longest: int) -> list[Batch]:
    """The same samples, packed into rows of the same limit, four rows per batch."""
    return split_rows(pack(samples, max_length=longest), 4)


def split_rows(batch: Batch, rows: int) -> list[Batch]:
    """Split a batch into batches with a given number of rows, each with its images."""
    images = (batch["input_ids"] == IMAGE_TOKEN).sum(1) // PATCHES
    batches, first_image = [], 0
    for start in range(0, len(batch["input_ids"]), rows):
        part = {name: value[start : start + rows] for name, value in batch.items() if name != "pixel_values"}
        count = int(images[start : start + rows].sum())
        part["pixel_values"] = batch["pixel_values"][first_image : first_image + count]
        first_image += count
        batches.append(part)
    return batches


def measure_packing(model: MultimodalModel, longest: int, count: int) -> dict[str, float]:
    """Real tokens per second over the same samples, padded and packed, in turn."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    samples = ragged_samples(count, longest)
    tokens = sum(len(s["input_ids"]) for s in samples)
    ways = {"padded": padded(samples, longest), "packed": packed(samples, longest)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(4):
        for name, batches in ways.items():
            elapsed = sum(timed_step(lambda batch=batch: model(**batch).loss, optimizer).wall for batch in batches)
            seconds[name].append(elapsed)
    rates = {f"{name}_tokens_per_s": tokens / statistics.median(times[1:]) for name, times in seconds.items()}
    rows = {f"{name}_rows": float(sum(len(b["input_ids"]) for b in batches)) for name, batches in ways.items()}
    return {**rates, **rows, "speedup": rates["packed_tokens_per_s"] / rates["padded_tokens_per_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "step_overhead.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = build(arguments.hidden, arguments.layers)
    overhead = measure_overhead(model, rows=4, length=256, rounds=arguments.rounds)
    packing = measure_packing(model, longest=256, count=48)
    result = {
        "command": f"python benchmarks/step_overhead.py --rounds {arguments.rounds}",
        "date": date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": f"{platform.machine()} CPU, 1 thread",
        "step": overhead,
        "packing": packing,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
