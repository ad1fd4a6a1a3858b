"""What replicas send one another where links are slow, and how many bytes that is; arithmetic only, no torch.

    Compression(kind="topk", ratio=0.01).sent(numbers=25_000_000, itemsize=4, ranks=8)     # bytes per rank and step

`numbers` are those that are exchanged together: a bucket of gradients. For several, add up what is sent for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import ceil, prod
from typing import Any, Literal

from cornstarch.plan.mistakes import Fields, Mistake, Path, raise_mistakes, read_fields, shown

CompressionKind = Literal["none", "bf16", "fp16", "topk", "randomk", "quantize", "powersgd"]
Graph = Literal["ring", "torus", "exponential", "random_pairs"]

_SCALE = 4  # bytes of a block's scale, a float32
_VALUE = 2  # bytes of a value that topk sends, a bfloat16
FACTOR_RATE = 2
"""powersgd leaves a matrix alone if its factors are not smaller by this much: torch's default."""
LARGEST_BLOCK = 65_536
"""An offset within a block has 16 bits."""


@dataclass(frozen=True)
class Compression:
    """How gradients, or changes of weights, are made smaller for the wire."""

    kind: CompressionKind = "none"
    """bf16, fp16: numbers of half the size; topk: the largest of each block; randomk: some, the same on all ranks;
    quantize: few bits each; powersgd: two thin matrices for each matrix (torch's hook)."""
    ratio: float = field(default=0.01, metadata={"least": 0})
    """topk, randomk: the share of the numbers that is sent."""
    bits: Literal[8, 4, 1] = 8
    """quantize: of each number; 1: the sign alone."""
    block: int = field(default=1024, metadata={"least": 8})
    """topk, quantize: numbers that have their largest chosen together, or one scale together."""
    rank: int = field(default=4, metadata={"least": 1})
    """powersgd: columns of the thin matrices."""
    error_feedback: bool = True
    """Remember what was not sent, and add it in the next step."""
    stochastic: bool = True
    """quantize with 8 or 4 bits: round up or down by chance, right on average."""
    warmup: int = field(default=0, metadata={"least": 0})
    """Steps at the beginning that send everything; at least 2 with powersgd."""
    seed: int = field(default=0, metadata={"least": 0})
    """Of what is chosen or rounded by chance."""

    def __post_init__(self) -> None:
        raise_mistakes(compression_mistakes(read_fields(Compression, vars(self), ("compression",)), ("compression",)))

    # ------------------------------------------------------------------------------------------ the wire format

    @property
    def kept(self) -> int:
        """topk: numbers of a block that are sent."""
        return max(1, round(self.ratio * self.block))

    @property
    def cell(self) -> int:
        """randomk: of so many numbers in a row one is sent."""
        return max(1, round(1 / self.ratio))

    @property
    def offset_bytes(self) -> int:
        """topk: bytes that say where in its block a number stands."""
        return 1 if self.block <= 256 else 2

    def encoded(self, numbers: int, itemsize: int = 4) -> int:
        """Return the bytes that `numbers` numbers become; a block that is begun counts whole."""
        blocks = ceil(numbers / self.block)
        match self.kind:
            case "bf16" | "fp16":
                return 2 * numbers
            case "topk":
                return blocks * self.kept * (_VALUE + self.offset_bytes)
            case "quantize":
                return blocks * (self.block * self.bits // 8 + _SCALE)
            case "randomk":
                return ceil(numbers / self.cell) * itemsize
            case _:
                return numbers * itemsize

    def gathers(self, ranks: int) -> bool:
        """Say whether every rank sends everything it has to all others at once: as few bytes between two as in turns.

        Among more, each rank first brings one part of the numbers together and then sends the mean of that part on.
        """
        return ranks <= 2 and self.kind in ("bf16", "fp16", "topk", "quantize")

    def part(self, numbers: int, ranks: int) -> int:
        """Return how many of the numbers one rank brings together: whole blocks, equally many on every rank."""
        unit = self.block if self.kind in ("topk", "quantize") else 1
        return ceil(ceil(numbers / unit) / ranks) * unit

    def sent(self, numbers: int, itemsize: int, ranks: int, shapes: Sequence[tuple[int, ...]] = ()) -> int:
        """Return the bytes that one rank sends to bring together the `numbers` numbers that each of `ranks` ranks has.

        With E(n) for `encoded(n)` and p for `part(numbers, ranks)`: (N - 1) E(numbers) if it `gathers`, else
        2 (N - 1) E(p). Nothing compressed, powersgd: the ring of an all-reduce, 2 (N - 1) times a part of 1/N.

        Args:
            numbers: That are exchanged together.
            itemsize: Bytes of one of them as it is kept.
            ranks: N.
            shapes: Of the parameters that they belong to; powersgd must know them.
        """
        others = ranks - 1
        if self.gathers(ranks):
            return others * self.encoded(numbers, itemsize)
        if self.kind == "randomk":
            return 2 * others * ceil(ceil(numbers / self.cell) / ranks) * itemsize
        if self.kind in ("none", "powersgd"):
            told = self._factored(numbers, shapes) if self.kind == "powersgd" else numbers
            return 2 * others * ceil(told / ranks) * itemsize
        return 2 * others * self.encoded(self.part(numbers, ranks), itemsize)

    def _factored(self, numbers: int, shapes: Sequence[tuple[int, ...]]) -> int:
        """Return how many numbers powersgd sends: two thin matrices where that saves enough, the rest as it is."""
        assert sum(map(prod, shapes)) == numbers, "powersgd sends factors of matrices: give all shapes"
        return sum(_factors(shape, self.rank) for shape in shapes)


def _factors(shape: tuple[int, ...], rank: int) -> int:
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[0], prod(shape[1:])
    rank = min(rows, columns, rank)
    thin = (rows + columns) * rank
    return thin if thin * FACTOR_RATE < rows * columns else rows * columns


@dataclass(frozen=True)
class Local:
    """local_sgd, diloco: ranks train by themselves for some steps, then bring their weights together."""

    every: int = field(default=16, metadata={"least": 1})
    """Steps between two exchanges."""
    outer_learning_rate: float = field(default=0.7, metadata={"least": 0})
    """diloco: how far the weights go along the mean change; 1 without momentum is the mean itself."""
    outer_momentum: float = field(default=0.9, metadata={"least": 0})
    """diloco: of the outer optimizer, Nesterov's."""
    overlap: bool = False
    """diloco: train on while changes travel; they are applied when the next exchange begins."""

    def __post_init__(self) -> None:
        raise_mistakes(read_fields(Local, vars(self), ("local",)).mistakes)


@dataclass(frozen=True)
class Asynchronous:
    """async: each rank applies what has arrived, and waits only where a change would come too late."""

    staleness: int = field(default=4, metadata={"least": 0})
    """How old a change may be when it is applied: the steps that the rank which applies it has done since the weights
    that the change was computed from. A rank that is up to so many times slower keeps nobody waiting; 0: all go in
    step."""
    scale_learning_rate: bool = True
    """Apply a change that is s steps old with 1 / (1 + s) of its weight."""

    def __post_init__(self) -> None:
        raise_mistakes(read_fields(Asynchronous, vars(self), ("asynchronous",)).mistakes)


@dataclass(frozen=True)
class Gossip:
    """gossip: each rank averages its weights with a few neighbours only."""

    graph: Graph = "ring"
    """Who the neighbours are: the two beside; the four around; those 1, 2, 4, … ahead, in turn; one by chance."""
    overlap: bool = True
    """Let weights travel while the next gradients are computed."""
    wait: bool = True
    """Wait for the neighbours' weights of the same step, so that the same run has the same results; false: average with
    those that have come, so that a slow neighbour slows nobody."""
    seed: int = field(default=0, metadata={"least": 0})
    """random_pairs: of the pairs."""

    def __post_init__(self) -> None:
        raise_mistakes(read_fields(Gossip, vars(self), ("gossip",)).mistakes)


# ------------------------------------------------------------------------------------------------ mistakes

# By option of a compression: the kinds that have it.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "ratio": ("topk", "randomk"),
    "bits": ("quantize",),
    "block": ("topk", "quantize"),
    "rank": ("powersgd",),
    "stochastic": ("quantize",),
    "error_feedback": ("bf16", "fp16", "topk", "randomk", "quantize", "powersgd"),
    "warmup": ("bf16", "fp16", "topk", "randomk", "quantize", "powersgd"),
}


def described(part: Compression | Local | Asynchronous | Gossip) -> str:
    """Return what differs from the defaults, on one line."""
    given = [(one.name, value) for one in fields(part) if (value := getattr(part, one.name)) != one.default]
    words = [str(value) if name in ("kind", "graph") else f"{name} {shown(value)}" for name, value in given]
    return " ".join([*words[:1], *([f"({', '.join(words[1:])})"] if words[1:] else [])])


def compression_mistakes(read: Fields, path: Path) -> list[Mistake]:
    """Return what is wrong with the options of a compression, alone and together."""
    defaults = {one.name: one.default for one in fields(Compression)}
    values: dict[str, Any] = {
        name: value for name, value in {**defaults, **read.values}.items() if name not in read.broken
    }
    found = list(read.mistakes)
    ratio, block, kind = values.get("ratio"), values.get("block"), values.get("kind")
    if ratio is not None and not 0 < ratio <= 1:
        found.append(Mistake((*path, "ratio"), shown(ratio), "Expected a share above 0, at most 1: 0.01 for 1 %."))
    if block is not None and (block % 8 or block > LARGEST_BLOCK):
        text = f"Expected a multiple of 8, at most {LARGEST_BLOCK:,}: signs are packed by eight, offsets have 16 bits."
        found.append(Mistake((*path, "block"), shown(block), text))
    for option, kinds in _OPTIONS.items():
        if kind is not None and kind not in kinds and option in values and values[option] != defaults[option]:
            text = f"It goes with {' or '.join(kinds)}; the kind of compression is {kind}.\nLeave it out."
            found.append(Mistake((*path, option), shown(values[option]), text))
    return found


__all__ = ["Asynchronous", "Compression", "Gossip", "Local"]
