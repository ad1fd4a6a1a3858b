"""Measure how full packed rows are, by the number of samples of a step, on lengths like those of LLaVA's data.

Lengths come from one seed. An image has 729 tokens, text 50 to 2,500; rows have 4,096, and longer samples are skipped.

- mostly one image: 94 % of the samples have an image, 6 % none; text: lognormal(300, 0.8);
- 0 to 4 images, short texts: equally often 0 to 4 images; text: lognormal(250, 0.9);
- 0 to 4 images, any texts: the same with text between 50 and 2,500, each equally often. More than half of these samples
  are longer than half a row, of which only one fits into a row: this limits what any packing can reach.

*before* packs the samples of each step alone, as many rows as first-fit-decreasing needs.

    python benchmarks/packing.py --output benchmarks/results/packing.md
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np

from cornstarch.config import DataConfig
from cornstarch.data.packing_plan import build_packed_order
from cornstarch.data.sampler import EpochOrder
from cornstarch.models.multimodal_language_model.packing import first_fit_decreasing

LIMIT, IMAGE, SAMPLES = 4096, 729, 20_000


def draw_lengths() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def draw_text(median: float, sigma: float) -> np.ndarray:
        return np.clip(np.exp(random.normal(np.log(median), sigma, SAMPLES)), 50, 2500).astype(np.int64)

    images = random.integers(0, 5, SAMPLES) * IMAGE
    found = {
        "mostly one image": (random.random(SAMPLES) < 0.94) * IMAGE + draw_text(300, 0.8),
        "0 to 4 images, short texts": images + draw_text(250, 0.9),
        "0 to 4 images, any texts": images + random.integers(50, 2501, SAMPLES),
    }
    return {name: lengths[lengths <= LIMIT] for name, lengths in found.items()}


def measure(lengths: np.ndarray, batch_size: int) -> list[str]:
    """Return the columns of a number of samples: rows of a step, fill before and now, and the time of the plan."""
    data = DataConfig.model_validate({"train": "none", "packing": True, "max_length": LIMIT})
    order = EpochOrder([len(lengths)], [1.0], 0, True)
    numbers = order.order(0)
    steps = [lengths[numbers[start : start + batch_size]] for start in range(0, len(numbers), batch_size)]
    before = sum(len(first_fit_decreasing(step.tolist(), LIMIT)) for step in steps)
    began = time.perf_counter()
    packed = build_packed_order(order, lengths.__getitem__, data, batch_size)
    count = packed.steps(0)
    seconds = time.perf_counter() - began
    rows = [row for step in range(count) for row in packed.step(0, step)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    total = int(lengths.sum())
    return [
        str(packed.rows_per_step),
        f"{len(lengths) / count:.1f}",
        f"{total / before / LIMIT:.1%}",
        f"{total / len(rows) / LIMIT:.1%}",
        f"{seconds / len(lengths) * 1e6:.1f} µs",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    heads = ["lengths", "mean", "most possible", "batch_size", "rows per step", "samples per step", "before", "now"]
    lines = [f"| {' | '.join([*heads, 'time to plan, per sample'])} |", "|---" * (len(heads) + 1) + "|"]
    for name, lengths in draw_lengths().items():
        needed = max(lengths.sum() / LIMIT, (lengths > LIMIT // 2).sum())
        best = f"{lengths.sum() / LIMIT / needed:.1%}"
        for batch_size in (2, 4, 8, 32):
            columns = [name, f"{lengths.mean():,.0f}", best, str(batch_size), *measure(lengths, batch_size)]
            lines.append(f"| {' | '.join(columns)} |")
    text = "\n".join(lines)
    print(text)
    if options.output is not None:
        head = (
            f"# How full packed rows are\n\nCommand: `python {shlex.join(sys.argv)}`. {date.today()}, Python "
            f"{platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} CPU core(s).\n\n"
            f"Real tokens in rows of {LIMIT:,}, over an epoch of {SAMPLES:,} samples drawn as the top of the script "
            "says, with the default `packing_buffer` of 1,024. *before*: the samples of each step packed alone. *Most "
            "possible*: samples longer than half a row need a row each.\n\n"
        )
        options.output.write_text(head + text + "\n")


if __name__ == "__main__":
    main()
