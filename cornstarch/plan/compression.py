"""What replicas send one another over slow links, and how many bytes that is; arithmetic only, no torch.

    Compression(kind="topk", ratio=0.01).count_sent_bytes(numbers=25_000_000, itemsize=4, ranks=8)  # per rank and step

`numbers` are those that are sent together: a bucket of gradients. For several buckets, add up the bytes of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence, Set
from math import ceil, prod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from cornstarch.plan.kinds import REGISTERED, CompressionKind, GossipGraph
from cornstarch.plan.validation import (
    NotNegative,
    Path,
    Positive,
    Rate,
    Switch,
    check_conflicts,
    format_value,
    not_bool,
    or_registered,
    section,
)

_SCALE_BYTES = 4  # of a block's scale, a float32
_VALUE_BYTES = 2  # of a value that topk sends, a bfloat16
FACTOR_RATE = 2
"""powersgd sends a matrix as it is if its factors are not smaller by this much: torch's default."""
LARGEST_BLOCK = 65_536
"""An offset within a block has 16 bits."""


def _check_ratio(ratio: float) -> float:
    if not 0 < ratio <= 1:
        raise ValueError("expected a fraction above 0, at most 1: 0.01 for 1 %")
    return ratio


def _check_block(block: int) -> int:
    if block % 8 or not 8 <= block <= LARGEST_BLOCK:
        limit = f"at most {LARGEST_BLOCK:,}"
        raise ValueError(f"expected a multiple of 8, {limit}: signs are packed by eight, offsets have 16 bits")
    return block


# By option of a compression: the kinds that have it.
_OPTION_KINDS: dict[str, tuple[CompressionKind, ...]] = {
    "ratio": ("topk", "randomk"),
    "bits": ("quantize",),
    "block": ("topk", "quantize"),
    "rank": ("powersgd",),
    "stochastic": ("quantize",),
    "error_feedback": ("bf16", "fp16", "topk", "randomk", "quantize", "powersgd"),
    "warmup": ("bf16", "fp16", "topk", "randomk", "quantize", "powersgd"),
}


@section
class Compression:
    """How gradients, or changes of weights, are compressed before they are sent."""

    SHOWN_AS: ClassVar[Path] = ("compression",)

    kind: Annotated[CompressionKind, or_registered(REGISTERED["compression"])] = "none"
    """bf16, fp16: numbers of half the size; topk: the largest of each block; randomk: some, the same on all ranks;
    quantize: few bits each; powersgd: two thin matrices for each matrix (torch's hook)."""
    ratio: Annotated[float, Field(strict=True), AfterValidator(_check_ratio)] = 0.01
    """topk, randomk: the fraction of the numbers that is sent."""
    bits: Annotated[Literal[8, 4, 1], not_bool] = 8
    """quantize: bits of each number; 1: the sign alone."""
    block: Annotated[int, Field(strict=True), AfterValidator(_check_block)] = 1024
    """topk, quantize: how many numbers have their largest chosen together, or one scale together."""
    rank: Positive = 4
    """powersgd: columns of the thin matrices."""
    error_feedback: Switch = True
    """Remember what was not sent, and add it in the next step."""
    stochastic: Switch = True
    """quantize with 8 or 4 bits: round up or down at random, unbiased."""
    warmup: NotNegative = 0
    """Steps at the beginning that send everything; at least 2 with powersgd."""
    seed: NotNegative = 0
    """Seed of random choices and of stochastic rounding."""

    _check = model_validator(mode="after")(check_conflicts)

    def conflicts(self, broken: Set[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
        """Yield (path, message) for every option that the kind does not have."""
        for option, kinds in _OPTION_KINDS.items():
            is_known = ("kind",) not in broken and (option,) not in broken
            if is_known and self.kind not in kinds and getattr(self, option) != getattr(Compression, option):
                text = f"It goes with {' or '.join(kinds)}; the kind of compression is {self.kind}.\nLeave it out."
                yield (option,), text

    # ------------------------------------------------------------------------------------------ the wire format

    @property
    def kept(self) -> int:
        """topk: how many numbers of a block are sent."""
        return max(1, round(self.ratio * self.block))

    @property
    def cell(self) -> int:
        """randomk: the length of a run of numbers of which one is sent."""
        return max(1, round(1 / self.ratio))

    @property
    def offset_bytes(self) -> int:
        """topk: bytes of a number's offset in its block."""
        return 1 if self.block <= 256 else 2

    def count_encoded_bytes(self, numbers: int, itemsize: int = 4) -> int:
        """Return the bytes of `numbers` encoded numbers; an incomplete block counts as a whole one."""
        blocks = ceil(numbers / self.block)
        match self.kind:
            case "bf16" | "fp16":
                return 2 * numbers
            case "topk":
                return blocks * self.kept * (_VALUE_BYTES + self.offset_bytes)
            case "quantize":
                return blocks * (self.block * self.bits // 8 + _SCALE_BYTES)
            case "randomk":
                return ceil(numbers / self.cell) * itemsize
            case _:
                return numbers * itemsize

    def uses_all_gather(self, ranks: int) -> bool:
        """Return whether every rank sends everything to all others at once, which between two is as few bytes.

        Among more ranks, each first reduces one part of the numbers and then sends the mean of that part on.
        """
        return ranks <= 2 and self.kind in ("bf16", "fp16", "topk", "quantize")

    def shard_size(self, numbers: int, ranks: int) -> int:
        """Return how many of the numbers one rank reduces: whole blocks, equally many on every rank."""
        unit = self.block if self.kind in ("topk", "quantize") else 1
        return ceil(ceil(numbers / unit) / ranks) * unit

    def count_sent_bytes(self, numbers: int, itemsize: int, ranks: int, shapes: Sequence[tuple[int, ...]] = ()) -> int:
        """Return the bytes that one rank sends to average the `numbers` numbers that each of `ranks` ranks has.

        With E(n) for `encoded(n)` and p for `part(numbers, ranks)`: (N - 1) E(numbers) if it `uses_all_gather`, else
        2 (N - 1) E(p). Uncompressed, and powersgd: the ring of an all-reduce, 2 (N - 1) times a part of 1/N.

        Args:
            numbers: How many are sent together.
            itemsize: Bytes of an uncompressed number.
            ranks: N.
            shapes: Shapes of their parameters, which powersgd must know.
        """
        others = ranks - 1
        if self.uses_all_gather(ranks):
            return others * self.count_encoded_bytes(numbers, itemsize)
        if self.kind == "randomk":
            return 2 * others * ceil(ceil(numbers / self.cell) / ranks) * itemsize
        if self.kind == "powersgd":
            assert sum(map(prod, shapes)) == numbers, "powersgd sends factors of matrices: give all shapes"
            numbers = sum(_count_factors(shape, self.rank) for shape in shapes)
        if self.kind in ("none", "powersgd"):
            return 2 * others * ceil(numbers / ranks) * itemsize
        return 2 * others * self.count_encoded_bytes(self.shard_size(numbers, ranks), itemsize)


def _count_factors(shape: tuple[int, ...], rank: int) -> int:
    """Return how many numbers powersgd sends for a parameter: two thin matrices where that saves enough."""
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[0], prod(shape[1:])
    thin = (rows + columns) * min(rows, columns, rank)
    return thin if thin * FACTOR_RATE < rows * columns else rows * columns


@section
class Local:
    """local_sgd, diloco: ranks train by themselves for some steps, then average their weights."""

    SHOWN_AS: ClassVar[Path] = ("local",)

    every: Positive = 16
    """Steps between two exchanges."""
    outer_learning_rate: Rate = 0.7
    """diloco: how far the weights go along the mean change; 1 without momentum is the mean itself."""
    outer_momentum: Rate = 0.9
    """diloco: of the outer optimizer, Nesterov's."""
    overlap: Switch = False
    """diloco: keep training while changes are sent; they are applied when the next exchange begins."""


@section
class Asynchronous:
    """async: each rank applies the changes that have arrived, and waits only where a change would come too late."""

    SHOWN_AS: ClassVar[Path] = ("asynchronous",)

    staleness: NotNegative = 4
    """How old a change may be when it is applied: the steps that the rank which applies it has done since the weights
    that the change was computed from. A rank that is up to this many times slower delays nobody; 0: all go in step."""
    scale_learning_rate: Switch = True
    """Apply a change that is s steps old with 1 / (1 + s) of its weight."""


@section
class Gossip:
    """gossip: each rank averages its weights with a few neighbours only."""

    SHOWN_AS: ClassVar[Path] = ("gossip",)

    graph: GossipGraph = "ring"
    """Who the neighbours are: ring: the two beside; torus: the four around; exponential: those 1, 2, 4, … ahead, in
    turn; random_pairs: one at random."""
    overlap: Switch = True
    """Send weights while the next gradients are computed."""
    wait: Switch = True
    """Wait for the neighbours' weights of the same step, so that the same run has the same results; false: average with
    the weights that have arrived, so that a slow neighbour slows nobody."""
    seed: NotNegative = 0
    """random_pairs: seed of the pairs."""


def describe_options(part: Any) -> str:
    """Return the options that differ from their defaults, on one line."""
    given = [(one.name, value) for one in dataclasses.fields(part) if (value := getattr(part, one.name)) != one.default]
    words = [str(value) if name in ("kind", "graph") else f"{name} {format_value(value)}" for name, value in given]
    return " ".join([*words[:1], *([f"({', '.join(words[1:])})"] if words[1:] else [])])
