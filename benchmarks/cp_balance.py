"""Measure how evenly context parallelism distributes the tokens of multimodal rows, and the time it takes to compute.

Rows are random: images of 256 to 4096 tokens with bidirectional attention, between texts, up to the requested fraction
of image tokens; as one document, or packed from documents of 1024 to 16384 tokens. For every row and number of ranks,
each distribution is measured by the largest over the mean work of a rank (1 is balanced), and by the largest over the
mean number of tokens (which determines the memory).

Work is the number of query-key pairs that the mask allows, plus the linear layers: for a width of 4096, a token costs
as much as attention to 24,576 tokens ("with linear layers"), or nothing ("attention alone", which is harder to
balance).

Time is that of `compute_mask_work` and `distribute` together, the median over rounds.

    python benchmarks/cp_balance.py --output benchmarks/results/cp_balance.md
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cornstarch.plan.token_distribution import choose_block_size, compute_mask_work, distribute

LENGTHS = (8192, 16384, 32768, 65536, 131072)
SHARES = (0.2, 0.4, 0.6, 0.8)
RANKS = (4, 8, 16)
WAYS = ("uniform", "zigzag", "makespan_min")
LINEAR = {"attention alone": 0.0, "with linear layers": 6.0 * 4096}
ROUNDS = 7
LIMIT, LIMIT_MS = 1.05, 5.0


@dataclass(frozen=True)
class Row:
    """One row of a batch."""

    packed: bool
    share: float
    documents: NDArray[np.int64]
    spans: NDArray[np.int64]


def row(tokens: int, share: float, packed: bool, seed: int) -> Row:
    """Create a random row."""
    random = np.random.default_rng(seed)
    documents, spans = np.ones(tokens, dtype=np.int64), np.full(tokens, -1, dtype=np.int64)
    if packed:
        lengths = random.integers(1024, 16385, size=tokens // 1024 + 1)
        documents = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:tokens]
    place, number = 0, 0
    while place < tokens:
        image = int(random.choice([256, 576, 1024, 2048, 4096]))
        text = int(image * (1 - share) / share * random.uniform(0.5, 1.5))
        spans[place + text : place + text + image] = number
        place, number = place + text + image, number + 1
    return Row(packed, share, documents, spans)


def rows(tokens: int, seeds: int) -> Iterator[Row]:
    """Yield rows of every kind."""
    for packed in (False, True):
        for share in SHARES:
            for seed in range(seeds):
                yield row(tokens, share, packed, seed)


def worst(tokens: int, ranks: int, linear: float, seeds: int) -> dict[str, tuple[float, float]]:
    """Return for each distribution the worst imbalance of work and of tokens over all rows."""
    found = {way: (1.0, 1.0) for way in WAYS}
    for one in rows(tokens, seeds):
        work = compute_mask_work(one.documents, one.spans, block=choose_block_size(tokens, ranks), linear=linear)
        for way in WAYS:
            dealt = distribute(work, ranks, way)
            found[way] = max(found[way][0], dealt.imbalance), max(found[way][1], dealt.token_imbalance)
    return found


def milliseconds(tokens: int, ranks: int) -> float:
    """Return the time to compute the most balanced distribution."""
    times = []
    for number in range(ROUNDS):
        one = row(tokens, 0.5, True, number)
        begin = time.perf_counter()
        work = compute_mask_work(one.documents, one.spans, block=choose_block_size(tokens, ranks), linear=1.0)
        distribute(work, ranks, "makespan_min")
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


def table(kind: str, linear: float, seeds: int) -> tuple[list[str], float]:
    """Return one table with the worst figure of makespan_min."""
    lines = [
        f"## {kind[0].upper()}{kind[1:]}",
        "",
        "| tokens | ranks | uniform | zigzag | makespan_min | tokens per rank, makespan_min: largest/mean |",
        "|---|---|---|---|---|---|",
    ]
    most = 1.0
    for tokens in LENGTHS:
        for ranks in RANKS:
            found = worst(tokens, ranks, linear, seeds)
            figures = " | ".join(f"{found[way][0]:.3f}" for way in WAYS)
            lines.append(f"| {tokens} | {ranks} | {figures} | {found['makespan_min'][1]:.2f} |")
            most = max(most, found["makespan_min"][0])
    return [*lines, ""], most


def report(seeds: int) -> tuple[str, bool]:
    """Measure everything; return the page, and whether the limits are met."""
    lines = [
        "# Balance of context parallelism",
        "",
        f"Command: `python {' '.join(map(shlex.quote, sys.argv))}`. {date.today()}, "
        f"Python {platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} CPU cores.",
        "",
        f"Worst of {len(SHARES) * 2 * seeds} rows in each line: {', '.join(f'{share:.0%}' for share in SHARES)} image "
        f"tokens, one document and packed, {seeds} of each. Largest over mean work of a rank; 1 is balanced.",
        "",
    ]
    most = 1.0
    for kind, linear in LINEAR.items():
        made, found = table(kind, linear, seeds)
        lines += made
        most = max(most, found)
    lines += ["## Search time", "", "| tokens | 4 ranks | 8 ranks | 16 ranks |", "|---|---|---|---|"]
    slowest = 0.0
    for tokens in LENGTHS:
        times = [milliseconds(tokens, ranks) for ranks in RANKS]
        slowest = max([slowest, *times]) if tokens <= 65536 else slowest
        lines.append(f"| {tokens} | {' | '.join(f'{one:.2f} ms' for one in times)} |")
    lines += ["", f"makespan_min: at most {most:.3f} (limit {LIMIT}); at most {slowest:.2f} ms up to 65536 tokens "
              f"(limit {LIMIT_MS:.0f} ms).", ""]  # fmt: skip
    return "\n".join(lines), most <= LIMIT and slowest <= LIMIT_MS


def main() -> None:
    """Print the page; fail if a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="rows of each kind")
    parser.add_argument("--output", type=Path, help="also write the page to this file")
    options = parser.parse_args()
    page, good = report(options.seeds)
    print(page)
    if options.output:
        options.output.write_text(page, encoding="utf-8")
    if not good:
        raise SystemExit("a limit is not met: see the last line")


if __name__ == "__main__":
    main()
