"""How long a step takes over a slow network, with each way to keep replicas together; arithmetic only, no torch.

    link = network_link("1Gbit")
    found = choices(Exchanged(shapes, itemsize=4), Step(0.1, 0.2, 0.01), ranks=4, link=link, bandwidth=2e12)
    recommended(found).label

What a rank sends is exact (`cornstarch.plan.exchange`); how long that takes is the alpha-beta model's
(`cornstarch.plan.communication`); compressing counts as memory that is read and written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isqrt, prod
from typing import Any

from cornstarch.errors import ConfigError
from cornstarch.plan.exchange import Compression, CompressionKind, Gossip, Local
from cornstarch.plan.links import Link
from cornstarch.plan.plan import DataPlan
from cornstarch.plan.quantities import quantity

TCP_LATENCY = 100e-6
"""Seconds of a message over Ethernet and TCP, where nothing else is said."""
NEAR = 1.25
"""A step this many times the quickest one's is as good, if it changes training less."""
SMALLEST_BUCKET = 64 * 2**10
"""Bytes; less is not worth a call."""
_BUCKET = 25 * 2**20  # bytes that DDP sends together, by default
_WAITED = 0.1  # of the time of a bucket, at most, goes into the latency of its messages
_LEAST_BUCKETS = 4

# How often compressing and unpacking reads or writes as many bytes as the gradients have, all passes together.
_TRAFFIC = {"none": 0.0, "bf16": 3.0, "fp16": 3.0, "quantize": 12.0, "topk": 16.0, "randomk": 3.0, "powersgd": 8.0}


def network_link(text: str, latency: float = TCP_LATENCY) -> Link:
    """Return the link that `1Gbit`, `100 Mbit/s` or `12.5 MB/s` stands for: what one rank sends, while it receives."""
    wanted = text.strip()
    try:
        return Link(quantity(wanted if wanted.endswith("/s") else f"{wanted}/s", "B/s"), latency)
    except ValueError:
        raise ConfigError(
            f"network {text!r}: expected what each rank can send in a second, such as 100Mbit, 1Gbit or 12.5MB/s."
        ) from None


def bucket_bytes(link: Link, ranks: int, size: int) -> int:
    """Return how many bytes of gradients DDP should send together, of `size` in all.

    The smaller, the sooner the first leaves and the less is left after the last gradient; but each costs a ring's
    messages, 2 (N - 1) times the latency. The bucket is chosen in which that is a tenth of its time: 9 N alpha / beta
    bytes. More than a quarter of all would leave too little to overlap.
    """
    fitting = (1 / _WAITED - 1) * ranks * link.latency * link.bandwidth
    return max(SMALLEST_BUCKET, int(min(fitting, size / _LEAST_BUCKETS)))


# ------------------------------------------------------------------------------------------------ bytes


@dataclass(frozen=True)
class Exchanged:
    """What replicas have to keep equal."""

    shapes: tuple[tuple[int, ...], ...]
    """Of the parameters that are trained."""
    itemsize: int = 4
    """Bytes of one of their numbers."""

    @property
    def numbers(self) -> int:
        """How many numbers that is."""
        return sum(map(prod, self.shapes))

    @property
    def size(self) -> int:
        """How many bytes."""
        return self.numbers * self.itemsize


def sent_per_step(plan: DataPlan, what: Exchanged, ranks: int) -> float:
    """Return the bytes that a rank sends in a step, on average and after the warm-up of a compression."""
    if ranks == 1:
        return 0.0
    whole = plan.compression.sent(what.numbers, what.itemsize, ranks, what.shapes)
    match plan.kind:
        case "local_sgd" | "diloco":
            return whole / plan.local.every
        case "gossip":
            return neighbours(plan.gossip, ranks) * what.size
        case "async" if plan.asynchronous.staleness:
            return (ranks - 1) * what.size
        case _:
            return whole


def neighbours(gossip: Gossip, ranks: int) -> float:
    """Return how many others a rank sends its weights to in a step, on average over steps and ranks."""
    match gossip.graph:
        case "ring":
            return _beside(ranks)
        case "torus":
            rows = next(rows for rows in range(isqrt(ranks), 0, -1) if ranks % rows == 0)
            return _beside(rows) + _beside(ranks // rows)
        case "exponential":
            hops = [1 << power for power in range(max(1, (ranks - 1).bit_length()))]
            return sum(1 if 2 * hop % ranks == 0 else 2 for hop in hops) / len(hops)
        case "random_pairs":
            return (ranks - ranks % 2) / ranks


def _beside(ranks: int) -> int:
    """Return how many neighbours a rank has in a circle."""
    return min(2, ranks - 1)


# ------------------------------------------------------------------------------------------------ seconds


@dataclass(frozen=True)
class Step:
    """What a step of one rank takes without the others, in seconds."""

    forward: float
    backward: float
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class Choice:
    """One way to keep replicas together, and what it would take."""

    label: str
    plan: DataPlan
    effect: str
    """What it does to training."""
    sent: float
    """Bytes of a rank and step, on average."""
    exchange: float
    """Seconds of a step in which they travel, on average."""
    compress: float
    """Seconds of a step in which they are compressed and unpacked."""
    seconds: float
    """Of a step, all in all."""


def choices(what: Exchanged, step: Step, ranks: int, link: Link, bandwidth: float) -> list[Choice]:
    """Return every way, those that change training least first.

    Args:
        what: The parameters.
        step: What computing takes.
        ranks: Replicas, each with a link of its own.
        link: That.
        bandwidth: Bytes a second of a rank's memory.
    """
    return [_choice(label, plan, effect, what, step, ranks, link, bandwidth) for label, plan, effect in OFFERED]


def recommended(found: Sequence[Choice]) -> Choice:
    """Return the first, and so the mildest, whose step is about as quick as the quickest one's."""
    quickest = min(one.seconds for one in found)
    return next(one for one in found if one.seconds <= NEAR * quickest)


def _choice(
    label: str, plan: DataPlan, effect: str, what: Exchanged, step: Step, ranks: int, link: Link, bandwidth: float
) -> Choice:
    sent = sent_per_step(plan, what, ranks)
    exchange = (sent / link.bandwidth + _waits(plan, what, ranks) * link.latency) if ranks > 1 else 0.0
    often = 1 / plan.local.every if plan.kind in ("local_sgd", "diloco") else 1.0
    compress = often * _TRAFFIC[plan.compression.kind] * what.size / bandwidth if ranks > 1 else 0.0
    return Choice(label, plan, effect, sent, exchange, compress, _seconds(plan, step, exchange, compress))


def _waits(plan: DataPlan, what: Exchanged, ranks: int) -> float:
    """Return how many messages follow one another in a step, on average."""
    rounds = 2 * (ranks - 1)
    match plan.kind:
        case "local_sgd" | "diloco":
            return rounds / plan.local.every
        case "gossip" | "async":
            return 1.0
        case _:
            return rounds * ceil(what.size / _BUCKET)


def _seconds(plan: DataPlan, step: Step, exchange: float, compress: float) -> float:
    """Return how long a step is, given what can travel while something is computed."""
    if plan.kind == "local_sgd" or (plan.kind == "diloco" and not plan.local.overlap):
        return step.seconds + compress + exchange
    if plan.kind in ("diloco", "async") or (plan.kind == "gossip" and plan.gossip.overlap):
        return max(step.seconds + compress, exchange)
    if plan.kind == "gossip":
        return step.seconds + exchange
    # DDP sends buckets while the backward pass goes on.
    return step.forward + max(step.backward + compress, exchange + compress) + step.optimizer


# ------------------------------------------------------------------------------------------------ what is offered


def _compressed(kind: CompressionKind, **options: Any) -> DataPlan:
    return DataPlan(compression=Compression(kind=kind, **options))


_LATE = "what is left out is sent later"
_APART = "replicas drift apart in between"
OFFERED: tuple[tuple[str, DataPlan, str], ...] = (
    ("ddp", DataPlan(), "none: exact"),
    ("ddp, bf16", _compressed("bf16"), "gradients rounded to 8 bits of precision"),
    ("ddp, quantize, 8 bits", _compressed("quantize"), "rounded; " + _LATE),
    ("ddp, quantize, 4 bits", _compressed("quantize", bits=4), "rounded; " + _LATE),
    ("ddp, powersgd, rank 4", _compressed("powersgd"), "few directions; " + _LATE),
    ("ddp, topk, 1 %", _compressed("topk"), "the largest only; " + _LATE),
    ("ddp, quantize, 1 bit", _compressed("quantize", bits=1), "signs; " + _LATE),
    ("local_sgd, every 16", DataPlan(kind="local_sgd"), _APART),
    ("diloco, every 16", DataPlan(kind="diloco"), _APART),
    (
        "diloco, overlapped, 8 bits",
        DataPlan(kind="diloco", local=Local(overlap=True), compression=Compression("quantize")),
        _APART,
    ),
    ("gossip, ring", DataPlan(kind="gossip"), "weights differ between ranks"),
    ("async", DataPlan(kind="async"), "changes arrive late; for ranks of unequal speed"),
)
"""Name, plan and effect of every way, those that change training least first."""
