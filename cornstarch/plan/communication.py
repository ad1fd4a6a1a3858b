"""Links, and the time of collectives over them: the alpha-beta model of rings and messages; arithmetic only, no torch.

A message of n bytes takes `link.latency + n / link.bandwidth` (alpha + beta n). A ring of N ranks runs in rounds, in
each of which every rank sends a part of 1/N to the next one: N - 1 rounds bring each part to all ranks (all-gather), or
to one rank, summed (reduce-scatter); an all-reduce is both. The bandwidth is that of one rank, one way, over the
slowest link of the group. `size` is that of the whole tensor: the output of an all-gather or an all-reduce, the input
of a reduce-scatter or an all-to-all. A link that was measured for each collective has its own figures for each
(`Link.of`).

Source of the model: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005);
of the bytes per rank, which no algorithm can lower: Patarasuk and Yuan, "Bandwidth optimal all-reduce" (2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Literal, NamedTuple, get_args

from cornstarch.errors import ConfigError

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


@dataclass(frozen=True)
class Link:
    """The path of a rank's messages: a message of n bytes takes `latency + n / bandwidth`."""

    bandwidth: float
    """Bytes per second that one rank sends while it receives as many."""
    latency: float
    """Seconds per message, independent of its size."""
    collectives: tuple[tuple[Collective, Link], ...] = ()
    """The figures of each collective that was measured by itself."""
    reached: float = 1.0
    """The fraction of the bandwidth that messages reach. 1: the bandwidth is one that was measured."""

    def of(self, kind: Collective) -> Link:
        """Return the link as a collective experiences it."""
        return dict(self.collectives).get(kind, self)

    @property
    def rate(self) -> float:
        """Bytes per second of large messages."""
        return self.bandwidth * self.reached


# Seconds per round of a ring, as in NCCL's own model: `hwLat` (Ring, Simple) in src/graph/tuning.cc.
_NVLINK_LATENCY = 3.4e-6
_PCI_LATENCY = 5.7e-6
_NETWORK_LATENCY = 14e-6

# NCCL's own figures for a link of 25 GB/s, `SM90_NVLINK_BW` and its like in src/graph/topo.h: 20.6 (NVLink 4), 20.0
# (NVLink 2 and 3), 40.1 of 50 (NVLink 5), and `PCI_BW`: 12 of 16 (PCIe 3).
_NVLINK_4_REACHED, _NVLINK_REACHED, _PCI_REACHED = 0.824, 0.8, 0.75

# Vendors state both directions together; these are one direction, half of it.
LINKS = {
    "NVLink 5": Link(900e9, _NVLINK_LATENCY, reached=_NVLINK_REACHED),
    "NVLink 4": Link(450e9, _NVLINK_LATENCY, reached=_NVLINK_4_REACHED),
    "NVLink 3": Link(300e9, _NVLINK_LATENCY, reached=_NVLINK_REACHED),
    "NVLink 2": Link(150e9, _NVLINK_LATENCY, reached=_NVLINK_REACHED),
    "Infinity Fabric": Link(448e9, _NVLINK_LATENCY, reached=_NVLINK_REACHED),
    "PCIe 5": Link(64e9, _PCI_LATENCY, reached=_PCI_REACHED),
    "PCIe 4": Link(32e9, _PCI_LATENCY, reached=_PCI_REACHED),
    "PCIe 3": Link(16e9, _PCI_LATENCY, reached=_PCI_REACHED),
    "InfiniBand 400": Link(50e9, _NETWORK_LATENCY),
    "loopback": Link(1.69e9, 83e-6),  # gloo between two processes of one machine, measured
}
"""The catalogue; docs/clusters.md has the sources."""
BETWEEN_NODES = "InfiniBand 400"
"""The default between nodes: 400 Gbit/s for each device, as in a DGX H100."""


def all_gather_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-gather: all parts but its own, (N - 1) / N × size."""
    assert ranks >= 1, ranks
    return (ranks - 1) * size / ranks


reduce_scatter_bytes = all_to_all_bytes = all_gather_bytes


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce: a reduce-scatter, then an all-gather."""
    return reduce_scatter_bytes(size, ranks) + all_gather_bytes(size, ranks)


def send_bytes(size: float) -> float:
    """Return the bytes that one rank sends to another."""
    return size


def collective_seconds(kind: Collective, size: float, ranks: int, link: Link) -> float:
    """Return the seconds of a collective over a link; an all-to-all is N - 1 messages of each rank, `send` is one."""
    own = link.of(kind)
    if kind == "send":
        return own.latency + send_bytes(size) / own.rate
    passes = 2 if kind == "all_reduce" else 1
    return passes * (ranks - 1) * own.latency + passes * all_gather_bytes(size, ranks) / own.rate


def join_links(inside: Link, between: Link, nodes: int, members: int, one_ring: bool = False) -> Link:
    """Return the link of a group with `members` or more ranks in each of several nodes.

    A ring enters and leaves each node once. Its data is divided over as many rings as there are members, each of which
    crosses through the network card of another member; in all others a rank sends to a neighbour inside its node. A
    part that goes around meets `nodes` hops of the network; the others stay inside. gloo has `one_ring`: it leaves a
    node through the card that its members share, and each other rank sends all of the data to its neighbour.
    """
    if members == 1:
        return between

    def join(near: Link, far: Link) -> Link:
        ranks = nodes * members
        latency = (nodes * far.latency + (ranks - nodes) * near.latency) / ranks
        rings = 1 if one_ring else members / (members - 1)
        return Link(min(near.rate * rings, far.rate * members), latency)

    rings: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    own = dict((*inside.collectives, *between.collectives))
    each = [(kind, join(inside.of(kind), between.of(kind))) for kind in rings if kind in own]
    # Messages to one rank, and to all of them in turn, have the sender's card alone.
    # A message to one rank has the sender's card alone; messages to all of them, what does not stay in the node.
    away = (nodes - 1) * members / (nodes * members - 1)
    near, far = inside.of("all_to_all"), between.of("all_to_all")
    rate = min(far.rate / away, near.rate / (1 - away))
    spread = Link(rate, away * far.latency + (1 - away) * near.latency)
    direct: list[tuple[Collective, Link]] = [("all_to_all", spread), ("send", between.of("send"))]
    return replace(join(inside, between), collectives=(*each, *direct))


all_reduce = partial(collective_seconds, "all_reduce")
all_gather = partial(collective_seconds, "all_gather")
reduce_scatter = partial(collective_seconds, "reduce_scatter")
all_to_all = partial(collective_seconds, "all_to_all")


def send(size: float, link: Link) -> float:
    """Return the seconds of a message from one rank to another."""
    return collective_seconds("send", size, 2, link)


class Timing(NamedTuple):
    """The measured time of one collective."""

    kind: Collective
    size: float
    """Bytes of the whole tensor, as in the functions above."""
    ranks: int
    seconds: float


def fit_link(timings: Sequence[Timing]) -> Link:
    """Return the link that fits measured times best, by least squares of the relative errors.

    Where noise makes the best latency or bandwidth negative, the latency is 0 and the bandwidth is fitted alone.
    """
    if not timings:
        raise ConfigError("A link cannot be fitted without any times: measure with at least 2 processes.")
    if wrong := [one for one in timings if not (one.seconds > 0 and one.size > 0 and one.ranks > 1)]:
        raise ConfigError(
            f"A link cannot be fitted to {wrong[0]}: times and sizes must be positive, with at least 2 ranks."
        )
    # Each row: rounds / seconds × alpha + bytes / seconds × beta = 1. A link without bandwidth costs gives the rounds,
    # one without latency and with a bandwidth of 1 the bytes.
    rounds = [collective_seconds(one.kind, 0.0, one.ranks, Link(1.0, 1.0)) / one.seconds for one in timings]
    sent = [collective_seconds(one.kind, one.size, one.ranks, Link(1.0, 0.0)) / one.seconds for one in timings]
    pairs = ((rounds, rounds), (rounds, sent), (sent, sent))
    aa, ab, bb = (sum(x * y for x, y in zip(*pair, strict=True)) for pair in pairs)
    a, b = sum(rounds), sum(sent)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if alpha >= 0 and beta > 0:
            return Link(1 / beta, alpha)
    return Link(bb / b, 0.0)


def fit_links(timings: Sequence[Timing]) -> Link:
    """Return the link that fits all times together, with one for each collective that was measured."""
    by_kind = {kind: [one for one in timings if one.kind == kind] for kind in COLLECTIVES}
    return replace(fit_link(timings), collectives=tuple((kind, fit_link(own)) for kind, own in by_kind.items() if own))


def fit_error(timings: Sequence[Timing], link: Link) -> float:
    """Return the median relative error of a link's times against measured ones."""
    return median(abs(collective_seconds(one.kind, one.size, one.ranks, link) / one.seconds - 1) for one in timings)


def find_spread(timings: Sequence[Timing], link: Link) -> float:
    """Return the standard deviation of a link's relative errors against measured times."""
    each = (collective_seconds(one.kind, one.size, one.ranks, link) / one.seconds - 1 for one in timings)
    return mean(one**2 for one in each) ** 0.5
