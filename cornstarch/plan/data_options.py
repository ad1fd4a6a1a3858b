"""The words of a plan, the options of data parallelism over slow links, and which options make no sense together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from math import ceil, prod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from cornstarch.plan import validation
from cornstarch.plan.validation import NotNegative, Path, Positive, Rate, Switch, format_value, section

Precision = Literal["fp32", "bf16", "fp16"]
CpMode = Literal["ring_attn", "all_to_all", "gather"]
CpDistribution = Literal["uniform", "zigzag", "makespan_min", "auto"]
DataKind = Literal["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "hsdp", "local_sgd", "diloco", "async", "gossip"]
RankPlacement = Literal["auto", "shared", "own", "colocated", "first_stage"]
CompressionKind = Literal["none", "bf16", "fp16", "topk", "randomk", "quantize", "powersgd"]
GossipGraph = Literal["ring", "torus", "exponential", "random_pairs"]

ZERO_KINDS: tuple[DataKind, ...] = ("ddp", "zero1", "zero2", "zero3")
"""The kind of each ZeRO stage."""
REPLICATED: tuple[DataKind, ...] = ("ddp", "zero1")
"""Kinds that keep full parameters on every rank: torch's DistributedDataParallel."""
UNSYNCHRONIZED: tuple[DataKind, ...] = ("local_sgd", "diloco", "async", "gossip")
"""Kinds whose ranks keep full parameters of their own: a backward pass communicates nothing."""
COMPRESSIBLE: tuple[DataKind, ...] = (*REPLICATED, "hsdp", "local_sgd", "diloco")
"""Kinds that can compress what they communicate."""
SHARDED: tuple[DataKind, ...] = ("fsdp1", "fsdp2", "zero2", "zero3", "hsdp")
"""Kinds that shard the parameters."""
FULLY_SHARD: tuple[DataKind, ...] = ("fsdp2", "zero2", "zero3", "hsdp")
"""Kinds that torch's `fully_shard` implements."""
SPLIT_BACKWARD: tuple[str, ...] = ("zero_bubble", "auto")
"""Schedules that may compute the gradients of inputs and of weights at different times."""

REGISTERED: dict[str, set[str]] = {
    key: set() for key in ("cp_mode", "compression", "tracker", "task", "data_format", "attention")
}
"""Names that `register_…` functions have added to the literal types of a config (docs/extending.md)."""

LANGUAGE_MODEL = "language_model"
"""The module at which all encoders meet."""
WHOLE_MODEL = "model"
"""The module of a model that is not split into encoders and a language model."""
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

    kind: Annotated[CompressionKind, validation.or_registered(REGISTERED["compression"])] = "none"
    """bf16, fp16: numbers of half the size; topk: the largest of each block; randomk: some, the same on all ranks;
    quantize: few bits each; powersgd: two thin matrices for each matrix (torch's hook)."""
    ratio: Annotated[float, Field(strict=True), AfterValidator(_check_ratio)] = 0.01
    """topk, randomk: the fraction of the numbers that is sent."""
    bits: Annotated[Literal[8, 4, 1], validation.not_bool] = 8
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

    _check = model_validator(mode="after")(validation.check_conflicts)

    def conflicts(self, broken: Set[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
        """Yield (path, message) for every option that the kind does not have."""
        for option, kinds in _OPTION_KINDS.items():
            is_known = ("kind",) not in broken and (option,) not in broken
            if is_known and self.kind not in kinds and getattr(self, option) != getattr(Compression, option):
                words = f"It goes with {' or '.join(kinds)}; the kind of compression is {self.kind}."
                yield (option,), f"{words}\nLeave it out."

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
        """Return whether each rank sends everything to all others; else it reduces a part, and sends its mean on."""
        return ranks <= 2 and self.kind in ("bf16", "fp16", "topk", "quantize")

    def shard_size(self, numbers: int, ranks: int) -> int:
        """Return how many of the numbers one rank reduces: whole blocks, equally many on every rank."""
        unit = self.block if self.kind in ("topk", "quantize") else 1
        return ceil(ceil(numbers / unit) / ranks) * unit

    def count_sent_bytes(self, numbers: int, itemsize: int, ranks: int, shapes: Sequence[tuple[int, ...]] = ()) -> int:
        """Return the bytes that one rank sends to average the `numbers` numbers of a bucket that each of `ranks` has.

        With E(n) for `count_encoded_bytes(n)` and p for `shard_size(numbers, N)`: (N - 1) E(numbers) if it
        `uses_all_gather`, else 2 (N - 1) E(p). Uncompressed, and powersgd: the ring of an all-reduce, 2 (N - 1) times a
        part of 1/N. `itemsize` is that of an uncompressed number; powersgd must know the shapes of the parameters.
        """
        others = ranks - 1
        if self.uses_all_gather(ranks):
            return others * self.count_encoded_bytes(numbers, itemsize)
        if self.kind == "randomk":
            return 2 * others * ceil(ceil(numbers / self.cell) / ranks) * itemsize
        if self.kind == "powersgd":
            assert sum(map(prod, shapes)) == numbers, "powersgd sends factors of matrices: give all shapes"
            numbers = sum(self._count_factors(shape) for shape in shapes)
        if self.kind in ("none", "powersgd"):
            return 2 * others * ceil(numbers / ranks) * itemsize
        return 2 * others * self.count_encoded_bytes(self.shard_size(numbers, ranks), itemsize)

    def _count_factors(self, shape: tuple[int, ...]) -> int:
        """Return how many numbers powersgd sends for a parameter: two thin matrices where that saves enough."""
        rows, columns = shape[0] if shape else 1, prod(shape[1:])
        thin = (rows + columns) * min(rows, columns, self.rank)
        return thin if len(shape) > 1 and thin * FACTOR_RATE < rows * columns else rows * columns


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


def choose_sharded_dtypes(data: Any, precision: str, on_gpu: bool) -> Any:
    """Return a `DataPlan` whose sharded parameters are gathered in the run's precision, unless it says otherwise.

    In bf16 on GPUs, gathers take half the bytes and autocast has nothing to cast; gradients are reduced in float32.
    """
    if not on_gpu or precision != "bf16" or data.kind not in SHARDED or data.param_dtype or data.reduce_dtype:
        return data
    return dataclasses.replace(data, param_dtype="bf16", reduce_dtype="fp32")


def keeps_gathered(kind: str, reshard_after_forward: bool | int | None, is_pipeline: bool) -> bool:
    """Return whether sharded parameters stay gathered until their backward pass.

    In a pipeline they then stay until the last backward pass of a step, so that a step gathers them once, not once for
    every microbatch.
    """
    if reshard_after_forward is None:
        return kind in ("ddp", "zero2") or (is_pipeline and kind in ("fsdp2", "hsdp"))
    return reshard_after_forward is False


_USE_DDP = "Leave it out, or use the kind ddp or zero1."
_WHOLE_PARAMETERS = "{kind} keeps whole parameters on every rank"
_USE_SHARDED = f"Leave it out, or use {', '.join(SHARDED[:-1])} or {SHARDED[-1]}."
_ONE_UNIT = f"{_WHOLE_PARAMETERS}: it wraps the model once, as a whole.\n{_USE_SHARDED}"
_NO_BUCKETS = "{kind} has no buckets: it reduces the gradients of each wrapped unit together.\n" + _USE_DDP

# By option: the kinds that have it, and the message for the others.
_ONLY_WITH: dict[str, tuple[tuple[str, ...], str]] = {
    "replicate": (
        ("hsdp",),
        "Only hsdp keeps several copies of the model, each of them sharded; the kind is {kind}.\n"
        "Leave it out, or use the kind hsdp.",
    ),
    "bucket_mb": (REPLICATED, _NO_BUCKETS),
    "gradient_as_bucket_view": (REPLICATED, _NO_BUCKETS),
    "static_graph": (
        REPLICATED,
        "{kind} does not record the graph of a step; DistributedDataParallel does.\n" + _USE_DDP,
    ),
    "find_unused": (
        REPLICATED,
        "{kind} does not wait for parameters that a step did not use; DistributedDataParallel does.\n" + _USE_DDP,
    ),
    "param_dtype": (
        SHARDED,
        f"{_WHOLE_PARAMETERS}, in the type that they are kept in.\n"
        f"What is computed in is the run's precision (autocast); or use {_USE_SHARDED.partition('use ')[2]}",
    ),
    "reduce_dtype": (SHARDED, f"{_WHOLE_PARAMETERS} and sums gradients in their own type.\n{_USE_SHARDED}"),
    "buffer_dtype": (("fsdp1",), "Only fsdp1 casts buffers; the kind is {kind}.\nLeave it out, or use fsdp1."),
    "offload": (SHARDED, f"{_WHOLE_PARAMETERS}'s device; only shards can wait in the CPU's memory.\n{_USE_SHARDED}"),
    "reshard_after_forward": (
        SHARDED,
        f"{_WHOLE_PARAMETERS}: nothing is gathered, so nothing is freed after forward.\n{_USE_SHARDED}",
    ),
    "prefetch": (
        FULLY_SHARD,
        "How far ahead {kind} fetches cannot be set: ddp and zero1 have nothing to fetch, fsdp1 decides by itself.\n"
        f"Leave it out, or use {', '.join(FULLY_SHARD[:-1])} or {FULLY_SHARD[-1]}.",
    ),
    "wrap": (SHARDED, _ONE_UNIT),
    "wrap_min_parameters": (SHARDED, _ONE_UNIT),
    "compression": (
        COMPRESSIBLE,
        "{kind} has no place for it: FSDP adds up shards of gradients by itself.\n"
        "Leave it out, or use the kind ddp, zero1, or hsdp, which compresses what travels between copies.",
    ),
    "local": (("local_sgd", "diloco"), "It goes with the kind local_sgd or diloco; the kind is {kind}.\nLeave it out."),
    "asynchronous": (("async",), "It goes with the kind async; the kind is {kind}.\nLeave it out."),
    "gossip": (("gossip",), "It goes with the kind gossip; the kind is {kind}.\nLeave it out."),
}
# The message instead for kinds whose ranks are not in step.
_IF_UNSYNCHRONIZED: dict[str, str] = {
    "bucket_mb": "{kind} exchanges no gradients, and so has no buckets of them.\n" + _USE_DDP,
    "gradient_as_bucket_view": "{kind} exchanges no gradients, and so has no buckets of them.\n" + _USE_DDP,
    "static_graph": "{kind} exchanges nothing in a backward pass, and need not know its order.\nLeave it out.",
    "find_unused": "{kind} exchanges nothing in a backward pass, and does not look for what is unused.\nLeave it out.",
    "compression": (
        "{kind} sends whole weights, or changes that are applied one by one.\n"
        "Leave it out, or use the kind local_sgd or diloco, which exchange compressed changes of weights."
    ),
}


def data_conflicts(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (option, message) for options of a `DataPlan` that conflict; `values` lacks those wrong by themselves."""
    kind = values.get("kind")
    if kind is None:
        return
    refused = set()
    for option, (kinds, text) in _ONLY_WITH.items():
        if kind not in kinds and option in values and values[option] != defaults[option]:
            refused.add(option)
            text = _IF_UNSYNCHRONIZED.get(option, text) if kind in UNSYNCHRONIZED else text
            yield option, text.format(kind=kind)
    others = [*_reshard_conflicts(kind, values), *_compression_conflicts(kind, values)]
    if values.get("wrap") == "none":
        one_unit = "With wrap: none the model is one unit, "
        if values.get("wrap_min_parameters") is not None:
            others.append(("wrap_min_parameters", f"{one_unit}whatever its size.\nLeave one of them out."))
        if values.get("prefetch"):
            others.append(("prefetch", f"{one_unit}so there is no next one to fetch.\nUse wrap: auto."))
    yield from ((option, text) for option, text in others if option not in refused)


def _reshard_conflicts(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    reshard = values.get("reshard_after_forward")
    is_size = isinstance(reshard, int) and not isinstance(reshard, bool)
    name = "reshard_after_forward"
    if reshard is None:
        return
    if kind == "zero2" and reshard is not False:
        text = "zero2 keeps gathered parameters until backward; zero3 frees them after forward."
        yield name, f"{text}\nUse zero3 or fsdp2."
    elif kind == "zero3" and reshard is not True:
        yield name, "zero3 frees gathered parameters after forward; zero2 keeps them.\nUse zero2, or fsdp2 to choose."
    elif kind == "fsdp1" and is_size:
        yield name, "fsdp1 shards again over all ranks or not at all.\nUse true, false, or the kind fsdp2."
    elif is_size and reshard < 2:
        yield name, "It is the number of ranks to shard over after forward, at least 2.\nWrite true or false, or 2."


def _compression_conflicts(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    local, compression = values.get("local"), values.get("compression")
    if kind == "local_sgd" and local is not None:
        if (local.outer_learning_rate, local.outer_momentum) != (Local.outer_learning_rate, Local.outer_momentum):
            yield "local", "local_sgd takes the mean of the weights and has no outer optimizer.\nUse the kind diloco."
        if local.overlap:
            yield "local", "local_sgd replaces weights by their mean, so it waits for it.\nUse the kind diloco."
    if compression is None or compression.kind == "none":
        return
    if compression.kind == "powersgd" and kind not in REPLICATED:
        yield (
            "compression",
            f"powersgd sends factors of whole matrices of gradients, which {kind} does not exchange.\n"
            "Use the kind ddp or zero1, or another compression.",
        )
    moving = "With compression the buckets must stay as they are: what was not sent yet belongs to a place in them."
    if kind in REPLICATED and values.get("static_graph"):
        yield "static_graph", f"{moving}\nLeave it out: a static graph lets torch rearrange them after the first step."
    if kind in REPLICATED and values.get("bucket_mb") == "auto":
        yield "bucket_mb", f"{moving}\nGive a number, or leave it out: a run that goes on would measure another size."
    if kind in REPLICATED and values.get("find_unused") is False:
        yield "find_unused", f"{moving}\nLeave it out: without it torch rearranges them after the first step."
