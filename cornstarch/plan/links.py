"""What joins devices: bytes a second after a wait, and how both are found from measured times; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple, get_args

from cornstarch.errors import ConfigError
from cornstarch.plan import communication

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
"""What ranks exchange, by the names of `cornstarch.plan.communication`."""


@dataclass(frozen=True)
class Link:
    """What a rank sends through: a message of n bytes takes `latency + n / bandwidth`."""

    bandwidth: float
    """Bytes a second that one rank sends, while it receives as many."""
    latency: float
    """Seconds that a message takes beside its bytes."""
    collectives: tuple[tuple[Collective, Link], ...] = ()
    """Where they were measured one by one: what the link is for a collective, which may differ from the rest."""

    def of(self, kind: Collective) -> Link:
        """Return what the link is for a collective."""
        return dict(self.collectives).get(kind, self)


# Seconds for each round of a ring, as NCCL itself reckons with them: `hwLat` (Ring, Simple) in src/graph/tuning.cc.
_NVLINK_LATENCY = 3.4e-6
_PCI_LATENCY = 5.7e-6
_NETWORK_LATENCY = 14e-6

# Makers give both directions together; these are one direction, half of it.
LINKS = {
    "NVLink 5": Link(900e9, _NVLINK_LATENCY),
    "NVLink 4": Link(450e9, _NVLINK_LATENCY),
    "NVLink 3": Link(300e9, _NVLINK_LATENCY),
    "NVLink 2": Link(150e9, _NVLINK_LATENCY),
    "Infinity Fabric": Link(448e9, _NVLINK_LATENCY),
    "PCIe 5": Link(64e9, _PCI_LATENCY),
    "PCIe 4": Link(32e9, _PCI_LATENCY),
    "PCIe 3": Link(16e9, _PCI_LATENCY),
    "InfiniBand 400": Link(50e9, _NETWORK_LATENCY),
    "loopback": Link(1.69e9, 83e-6),  # gloo between two processes of one machine, measured
}
"""The catalogue; docs/clusters.md has the sources."""
BETWEEN_NODES = "InfiniBand 400"
"""What is assumed between nodes: 400 Gbit/s for each device, as in a DGX H100."""


# ------------------------------------------------------------------------------------------------ fitting


class Timing(NamedTuple):
    """How long one exchange took."""

    kind: Collective
    size: float
    """Bytes of the whole tensor, as `cornstarch.plan.communication` counts them."""
    ranks: int
    seconds: float


def fit_link(timings: Sequence[Timing]) -> Link:
    """Return the link whose times are nearest to measured ones, by least squares of the relative errors.

    Relative, because times from microseconds to seconds count alike then. Where the best latency or bandwidth would be
    negative, which only noise can bring about, the latency is 0 and the bandwidth is fitted alone.
    """
    if not timings:
        raise ConfigError("A link cannot be fitted to no times at all: measure with at least 2 processes.")
    if wrong := [one for one in timings if not (one.seconds > 0 and one.size > 0 and one.ranks > 1)]:
        raise ConfigError(
            f"A link cannot be fitted to {wrong[0]}: times, sizes and numbers of other ranks are positive."
        )
    # Each row: rounds / seconds × alpha + bytes / seconds × beta = 1.
    rows = [(_parts(one, 0.0, 1.0) / one.seconds, _parts(one, one.size, 0.0) / one.seconds) for one in timings]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if alpha >= 0 and beta > 0:
            return Link(1 / beta, alpha)
    return Link(bb / b, 0.0)


def fit_links(timings: Sequence[Timing]) -> Link:
    """Return the link that fits all of the times together, with one for each collective that was measured."""
    kinds = [kind for kind in COLLECTIVES if any(one.kind == kind for one in timings)]
    each = tuple((kind, fit_link([one for one in timings if one.kind == kind])) for kind in kinds)
    together = fit_link(timings)
    return Link(together.bandwidth, together.latency, each)


def fit_error(timings: Sequence[Timing], link: Link) -> float:
    """Return how far a link's times are from measured ones: the median of the relative errors."""
    return median(abs(seconds_of(one.kind, one.size, one.ranks, link) / one.seconds - 1) for one in timings)


def seconds_of(kind: Collective, size: float, ranks: int, link: Link) -> float:
    """Return how long an exchange takes over a link."""
    if kind == "send":
        return communication.send(size, link)
    times: dict[str, Callable[[float, int, Link], float]] = {
        "all_reduce": communication.all_reduce,
        "all_gather": communication.all_gather,
        "reduce_scatter": communication.reduce_scatter,
        "all_to_all": communication.all_to_all,
    }
    return times[kind](size, ranks, link)


def _parts(timing: Timing, size: float, latency: float) -> float:
    """Return rounds (no bytes, a latency of 1) or bytes (no latency, a bandwidth of 1) of what was timed."""
    return seconds_of(timing.kind, size, timing.ranks, Link(1.0, latency))
