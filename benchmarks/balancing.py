"""Measure the efficiency of replicas on a heavy-tailed trace, with samples in order and balanced.

All samples come from one seed (lognormal(median, sigma): e to a normal with that sigma, times the median):

- the kind: 25 % text only, 45 % one image, 15 % several images, 5 % a video, 10 % an audio clip;
- text: lognormal(180 tokens, 1.0), at most 8,192;
- an image: lognormal(1,000 patches, 0.7), 64 to 16,384; four patches are one token of the language model;
- several images: their number is 2 × Pareto(1.5), at most 16;
- a video: lognormal(16 frames, 0.7), at most 64, of 256 patches each;
- an audio clip: lognormal(12 s, 0.8), at most 60 s; 50 frames per second for its encoder, 12.5 tokens.

A sample has at most 8,192 tokens; longer samples are skipped, as in a run. The cost of a sample follows from the sizes
of three modules: two operations per parameter and token, and four per layer, channel and pair of tokens in attention
(twice as many pairs in bidirectional attention). The modules are a vision encoder of 0.4 B parameters and an audio
encoder of 0.6 B, both frozen (forward only), and a language model of 8 B that is trained (forward, and twice that
backward). This gives three phases; processes wait for each other in each of them.

Efficiency is the mean work of a replica over that of the slowest, summed over the phases: 1 if no replica waits. A
sample *dominates* a step if its cost in some phase exceeds the mean work of a replica: then no assignment of whole
samples is balanced. These steps are reported separately.

    python benchmarks/balancing.py --output benchmarks/results/balancing.md
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cornstarch.plan.balancing import (
    SampleAssignment,
    assign_in_order,
    balance,
    compute_efficiency,
    compute_loads,
    find_dominated_phases,
)

PHASES = ("vision", "audio", "language model")
REPLICAS = 32
SAMPLES = (8, 16, 32, 64)
LIMIT = 0.85
LONGEST = 8192

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Module:
    """The size of a module, which determines its work."""

    parameters: float
    layers: int
    width: int
    passes: int
    """1: forward only; 3: forward and backward."""

    def work(self, tokens: Floats, pairs: Floats) -> Floats:
        """Return the operations for a number of tokens and visible pairs of tokens."""
        return self.passes * (2 * self.parameters * tokens + 4 * self.layers * self.width * pairs)


VISION = Module(0.4e9, 24, 1024, 1)
AUDIO = Module(0.6e9, 32, 1280, 1)
LANGUAGE_MODEL = Module(8e9, 32, 4096, 3)


def lognormal(random: np.random.Generator, median: float, spread: float) -> float:
    """Draw a number."""
    return float(median * np.exp(spread * random.standard_normal()))


def sample(random: np.random.Generator) -> tuple[float, list[float], float]:
    """Return the text tokens, image patches and audio seconds of a sample."""
    kind = random.choice(5, p=[0.25, 0.45, 0.15, 0.05, 0.10])
    text = min(lognormal(random, 180, 1.0), LONGEST)
    images, frames = [0, 1, min(int(2 * (1 + random.pareto(1.5))), 16), 0, 0][kind], 0
    patches = [float(np.clip(lognormal(random, 1000, 0.7), 64, 16384)) for _ in range(images)]
    if kind == 3:
        frames = int(np.clip(lognormal(random, 16, 0.7), 1, 64))
        patches = [256.0] * frames
    seconds = min(lognormal(random, 12, 0.8), 60.0) if kind == 4 else 0.0
    return text, patches, seconds


def trace(count: int, seed: int) -> Floats:
    """Return the costs of samples in each phase, [3, count]."""
    random = np.random.default_rng(seed)
    costs = np.zeros((3, count))
    done = 0
    while done < count:
        text, patches, seconds = sample(random)
        many, frames = np.array(patches), np.array([50 * seconds])
        tokens = np.array([text + many.sum() / 4 + 12.5 * seconds])
        if tokens[0] > LONGEST:
            continue
        costs[0, done] = VISION.work(many, many**2).sum()
        costs[1, done] = AUDIO.work(frames, frames**2).sum()
        costs[2, done] = LANGUAGE_MODEL.work(tokens, tokens**2 / 2).sum()
        done += 1
    return costs


@dataclass
class Found:
    """The results for one step size, with an entry for each step."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    phases: list[list[float | None]] = field(default_factory=list)
    """Efficiency of each phase alone, balanced; None if one sample dominates it."""
    padded: list[tuple[float, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def free(self) -> list[float]:
        """Balanced efficiency in steps without a dominating sample in any phase."""
        return [after for after, phases in zip(self.after, self.phases, strict=True) if None not in phases]

    def phase(self, number: int) -> list[float]:
        """Return the efficiency of a phase alone in the steps without a dominating sample."""
        return [one for phases in self.phases if (one := phases[number]) is not None]


def measure(replicas: int, samples: int, microbatches: int, steps: int, seed: int) -> Found:
    """Balance some steps with this number of samples per replica."""
    found = Found()
    for costs in np.split(trace(steps * replicas * samples, seed), steps, axis=1):
        came = assign_in_order(costs.shape[1], replicas, microbatches)
        began = time.perf_counter()
        dealt = balance(costs, replicas, microbatches)
        found.seconds.append(time.perf_counter() - began)
        check(dealt, costs.shape[1])
        work = compute_loads(costs, dealt)
        found.before.append(compute_efficiency(compute_loads(costs, came)))
        found.after.append(compute_efficiency(work))
        by_replica = work.sum(1)
        even = by_replica.mean(0) / by_replica.max(0)
        heavy = find_dominated_phases(costs, replicas)
        found.phases.append([None if h else float(one) for one, h in zip(even, heavy, strict=True)])
        filled, needed = balance(costs, replicas, microbatches, padded=True), float(costs.sum())
        padded = [compute_efficiency(compute_loads(costs, one, padded=True), needed) for one in (came, filled)]
        found.padded.append((padded[0], padded[1]))
    return found


def check(dealt: SampleAssignment, count: int) -> None:
    """Fail unless every sample is assigned exactly once."""
    places = np.sort(np.concatenate([one for microbatches in dealt for one in microbatches]))
    assert np.array_equal(places, np.arange(count)), "samples were lost"


def report(steps: int, replicas: int) -> tuple[str, bool]:
    """Return the page, and whether every phase without a dominating sample meets the limit."""
    lines = [
        "# Waiting time of replicas, with and without balancing",
        "",
        f"Command: `python {shlex.join(sys.argv)}`. {date.today()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}, {os.cpu_count()} CPU cores.",
        "",
        f"{replicas} replicas, {steps} steps per line, samples of a heavy-tailed trace that is described at "
        "the top of the script. *Simulated*: work is counted in operations, not measured.",
        "",
        "Efficiency: mean work of a replica over that of the slowest, by phase; mean over steps (worst step). A phase "
        "alone: in the steps without a dominating sample, and the number of these steps.",
        "",
        "| samples per replica | microbatches | in order | balanced | no sample dominates any phase | "
        f"{' | '.join(f'{phase} alone' for phase in PHASES)} | search time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    padding = [
        "## Padded instead of packed rows",
        "",
        "The same, with the padding to the longest row of a microbatch counted as waste.",
        "",
        "| samples per replica | microbatches | in order | balanced |",
        "|---|---|---|---|",
    ]
    worst = 1.0
    for samples in SAMPLES:
        for microbatches in (1, 4):
            one = measure(replicas, samples, microbatches, steps, seed=samples)
            alone = [one.phase(number) for number in range(len(PHASES))]
            worst = min([worst, *one.free, *(value for values in alone for value in values)])
            phases = " | ".join(map(_counted, alone))
            lines.append(
                f"| {samples} | {microbatches} | {_both(one.before)} | {_both(one.after)} | {_counted(one.free)} "
                f"| {phases} | {1e3 * statistics.median(one.seconds):.0f} ms |"
            )
            before, after = zip(*one.padded, strict=True)
            padding.append(f"| {samples} | {microbatches} | {_both(before)} | {_both(after)} |")
    lines += [
        "",
        f"Without a dominating sample, in a phase alone or in all: at least {worst:.3f} (limit {LIMIT}).",
        "",
        *padding,
        "",
    ]
    return "\n".join(lines), worst >= LIMIT


def _both(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f})" if values else "–"


def _counted(values: Sequence[float]) -> str:
    return f"{_both(values)}, {len(values)} steps" if values else "none"


def main() -> None:
    """Print the page; fail if the limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps per line")
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--output", type=Path, help="also write the page to this file")
    options = parser.parse_args()
    page, good = report(options.steps, options.replicas)
    print(page)
    if options.output:
        options.output.write_text(page, encoding="utf-8")
    if not good:
        raise SystemExit("the limit is not met: see the line below the first table")


if __name__ == "__main__":
    main()
