"""What ranks exchange, and how long it takes: the alpha-beta model of rings and messages; arithmetic only, no torch.

    all_reduce(size, ranks=8, link)          # seconds
    all_reduce_bytes(size, ranks=8)          # bytes that each rank sends, and receives

A message of n bytes takes `link.latency + n / link.bandwidth` (alpha + beta n). A ring of N ranks goes in rounds, in
each of which every rank sends a part of 1/N to the next one: N - 1 rounds bring each part to everybody (all-gather), or
to one rank, summed (reduce-scatter); an all-reduce is both. The bandwidth is that of one rank, one way, over the
slowest link of the group. `size` is that of the whole tensor: what a rank has after an all-gather or an all-reduce, and
what it has before a reduce-scatter or an all-to-all. Where a link was measured for each collective, its own figures
count (`Link.of`).

Source of the model: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005);
of the bytes per rank, which no algorithm can lower: Patarasuk and Yuan, "Bandwidth optimal all-reduce" (2009).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Link


# ------------------------------------------------------------------------------------------------ bytes per rank


def all_gather_bytes(size: float, ranks: int) -> float:
    """Return what each rank sends until everybody has the parts of all: (N - 1) / N × size."""
    return _others(ranks) * size / ranks


def reduce_scatter_bytes(size: float, ranks: int) -> float:
    """Return what each rank sends until each has one part, summed: (N - 1) / N × size."""
    return _others(ranks) * size / ranks


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Return what each rank sends until everybody has the sum: a reduce-scatter, then an all-gather."""
    return reduce_scatter_bytes(size, ranks) + all_gather_bytes(size, ranks)


def all_to_all_bytes(size: float, ranks: int) -> float:
    """Return what each rank sends where it has a part for everybody: all but its own, (N - 1) / N × size."""
    return _others(ranks) * size / ranks


def send_bytes(size: float) -> float:
    """Return what one rank sends to another."""
    return size


# ------------------------------------------------------------------------------------------------ seconds


def all_gather(size: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-gather: N - 1 rounds."""
    return _seconds(_others(ranks), all_gather_bytes(size, ranks), link.of("all_gather"))


def reduce_scatter(size: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring reduce-scatter: N - 1 rounds."""
    return _seconds(_others(ranks), reduce_scatter_bytes(size, ranks), link.of("reduce_scatter"))


def all_reduce(size: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce: 2 (N - 1) rounds."""
    return _seconds(2 * _others(ranks), all_reduce_bytes(size, ranks), link.of("all_reduce"))


def all_to_all(size: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-to-all: N - 1 messages of each rank, one to every other."""
    return _seconds(_others(ranks), all_to_all_bytes(size, ranks), link.of("all_to_all"))


def send(size: float, link: Link) -> float:
    """Return the seconds of a message from one rank to another."""
    return _seconds(1, send_bytes(size), link.of("send"))


def _seconds(rounds: int, size: float, link: Link) -> float:
    return rounds * link.latency + size / link.bandwidth


def _others(ranks: int) -> int:
    assert ranks >= 1, ranks
    return ranks - 1
