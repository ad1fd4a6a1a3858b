"""Step time over a slow network with each way to synchronize replicas; arithmetic only, no torch.

The bytes that a rank sends are exact (`Compression.count_sent_bytes`); their time follows the alpha-beta model
(`cornstarch.plan.communication`); compression costs memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isqrt, prod

from cornstarch.errors import ConfigError
from cornstarch.plan.cluster_file import parse_quantity
from cornstarch.plan.communication import Link
from cornstarch.plan.data_options import UNSYNCHRONIZED, Compression, Gossip, Local
from cornstarch.plan.plan import DataPlan

TCP_LATENCY = 100e-6
"""Default seconds of a message over Ethernet and TCP."""
NEAR = 1.25
"""A step up to this factor slower than the fastest is preferred if it changes training less."""
SMALLEST_BUCKET = 64 * 2**10
"""Bytes; smaller buckets do not pay for a call."""
_DDP_BUCKET = 25 * 2**20  # DDP's default, in bytes
_LATENCY_FRACTION = 0.1  # of the time of a bucket
_MIN_BUCKETS = 4

# Memory traffic of compression and decompression, in multiples of the gradients' bytes.
_TRAFFIC = {"none": 0.0, "bf16": 3.0, "fp16": 3.0, "quantize": 12.0, "topk": 16.0, "randomk": 3.0, "powersgd": 8.0}


def parse_network_link(text: str, latency: float = TCP_LATENCY) -> Link:
    """Return the link of a rate such as `1Gbit`, `100 Mbit/s` or `12.5 MB/s`, per rank and direction."""
    wanted = text.strip()
    try:
        return Link(parse_quantity(wanted if wanted.endswith("/s") else f"{wanted}/s", "B/s"), latency)
    except ValueError:
        raise ConfigError(
            f"network {text!r}: expected the rate at which each rank can send, such as 100Mbit, 1Gbit or 12.5MB/s."
        ) from None


def choose_bucket_bytes(link: Link, ranks: int, size: int) -> int:
    """Return the bytes of a DDP bucket for gradients of `size` bytes.

    Small buckets leave less to send after the last gradient, but each costs the latency of a ring's 2 (N - 1) messages:
    a tenth of a bucket's time here. A bucket is at most a quarter of all gradients, so that communication can overlap.
    """
    fitting = (1 / _LATENCY_FRACTION - 1) * ranks * link.latency * link.bandwidth
    return max(SMALLEST_BUCKET, int(min(fitting, size / _MIN_BUCKETS)))


@dataclass(frozen=True)
class SyncedParameters:
    """The trained parameters, which replicas keep in sync."""

    shapes: tuple[tuple[int, ...], ...]
    itemsize: int = 4
    """Bytes per number."""

    @property
    def numbers(self) -> int:
        return sum(map(prod, self.shapes))

    @property
    def size(self) -> int:
        return self.numbers * self.itemsize


def count_sent_per_step(plan: DataPlan, what: SyncedParameters, ranks: int) -> float:
    """Return the mean bytes that a rank sends in a step, after the warm-up of a compression."""
    if ranks == 1:
        return 0.0
    whole = plan.compression.count_sent_bytes(what.numbers, what.itemsize, ranks, what.shapes)
    match plan.kind:
        case "local_sgd" | "diloco":
            return whole / plan.local.every
        case "gossip":
            return count_neighbours(plan.gossip, ranks) * what.size
        case "async" if plan.asynchronous.staleness:
            return (ranks - 1) * what.size
        case _:
            return whole


def count_neighbours(gossip: Gossip, ranks: int) -> float:
    """Return the mean number of ranks that a rank sends its weights to in a step."""
    match gossip.graph:
        case "ring":
            return min(2, ranks - 1)
        case "torus":
            rows = next(rows for rows in range(isqrt(ranks), 0, -1) if ranks % rows == 0)
            return min(2, rows - 1) + min(2, ranks // rows - 1)
        case "exponential":
            hops = [1 << power for power in range(max(1, (ranks - 1).bit_length()))]
            return sum(1 if 2 * hop % ranks == 0 else 2 for hop in hops) / len(hops)
        case "random_pairs":
            return (ranks - ranks % 2) / ranks


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of one rank, without communication."""

    forward: float
    backward: float
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class SyncOption:
    """One way to synchronize replicas, and its cost."""

    label: str
    plan: DataPlan
    effect: str
    """The effect on training."""
    sent: float
    """Mean bytes per rank and step."""
    exchange: float
    """Mean seconds of communication in a step."""
    compress: float
    """Mean seconds of compression and decompression in a step."""
    seconds: float
    """Seconds of a whole step."""


def compare_sync_options(
    what: SyncedParameters, step: StepTime, ranks: int, link: Link, bandwidth: float
) -> list[SyncOption]:
    """Return every way to synchronize replicas, the mildest first; `bandwidth`: bytes a second of a rank's memory."""
    found, rounds = [], 2 * (ranks - 1)
    for label, plan, effect in SYNC_OPTIONS:
        sent = count_sent_per_step(plan, what, ranks)
        often = 1 / plan.local.every if plan.kind in ("local_sgd", "diloco") else 1.0
        messages: float = rounds * ceil(what.size / _DDP_BUCKET)  # that follow one another in a step
        if plan.kind in UNSYNCHRONIZED:
            messages = 1.0 if plan.kind in ("gossip", "async") else rounds / plan.local.every
        exchange = sent / link.bandwidth + messages * link.latency if ranks > 1 else 0.0
        compress = often * _TRAFFIC[plan.compression.kind] * what.size / bandwidth if ranks > 1 else 0.0
        seconds = _overlap(plan, step, exchange, compress)
        found.append(SyncOption(label, plan, effect, sent, exchange, compress, seconds))
    return found


def recommend(found: Sequence[SyncOption]) -> SyncOption:
    """Return the first, and so the mildest, option that is nearly as fast as the fastest."""
    fastest = min(one.seconds for one in found)
    return next(one for one in found if one.seconds <= NEAR * fastest)


def _overlap(plan: DataPlan, step: StepTime, exchange: float, compress: float) -> float:
    """Return the seconds of a step, given which communication overlaps with computation."""
    if plan.kind == "local_sgd" or (plan.kind == "diloco" and not plan.local.overlap):
        return step.seconds + compress + exchange
    if plan.kind in ("diloco", "async") or (plan.kind == "gossip" and plan.gossip.overlap):
        return max(step.seconds + compress, exchange)
    if plan.kind == "gossip":
        return step.seconds + exchange
    # DDP sends buckets during the backward pass.
    return step.forward + max(step.backward + compress, exchange + compress) + step.optimizer


_LATE = "what is left out is sent later"
_DRIFT = "replicas drift apart in between"
_OVERLAPPED = DataPlan(kind="diloco", local=Local(overlap=True), compression=Compression("quantize"))
SYNC_OPTIONS: tuple[tuple[str, DataPlan, str], ...] = (
    ("ddp", DataPlan(), "none: exact"),
    ("ddp, bf16", DataPlan(compression=Compression("bf16")), "gradients rounded to 8 bits of precision"),
    ("ddp, quantize, 8 bits", DataPlan(compression=Compression("quantize")), "rounded; " + _LATE),
    ("ddp, quantize, 4 bits", DataPlan(compression=Compression("quantize", bits=4)), "rounded; " + _LATE),
    ("ddp, powersgd, rank 4", DataPlan(compression=Compression("powersgd")), "few directions; " + _LATE),
    ("ddp, topk, 1 %", DataPlan(compression=Compression("topk")), "the largest only; " + _LATE),
    ("ddp, quantize, 1 bit", DataPlan(compression=Compression("quantize", bits=1)), "signs; " + _LATE),
    ("local_sgd, every 16", DataPlan(kind="local_sgd"), _DRIFT),
    ("diloco, every 16", DataPlan(kind="diloco"), _DRIFT),
    ("diloco, overlapped, 8 bits", _OVERLAPPED, _DRIFT),
    ("gossip, ring", DataPlan(kind="gossip"), "weights differ between ranks"),
    ("async", DataPlan(kind="async"), "changes arrive late; for ranks of unequal speed"),
)
"""Label, plan and effect of every option, those that change training least first."""
