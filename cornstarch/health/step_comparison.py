"""Compares, before the weights of a step change, what all ranks have done: position, samples, collectives in order.

Each rank puts what must be the same everywhere into one number h of a few bits. The sums of h and of h² over all ranks
say whether all are equal: n · Σh² = (Σh)² only then. What must be the same within a replica cancels out in a third sum.
So a step costs one exchange of a few numbers, and details travel only when ranks differ.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from cornstarch.compat import describe_collective, list_groups, read_flight_recorder
from cornstarch.health.comparison_group import ComparisonGroup
from cornstarch.parallel.activity import Activity

_SHARE = 0.005  # of the time that exchanges may take
_MOST = 16  # steps between two of them
_SHOWN = 4
_RECORDED = 64  # collectives of a rank in the details
_EXACT = 53  # bits of a whole number in float64
_SAME_SHAPES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "_allgather_base", "_reduce_scatter_base")


class RankComparison:
    """Compares what ranks did. All ranks must call `check` at the same points.

    Args:
        group: For the exchange.
        activity: What the training thread says of itself.
        replica: The ranks that train on the same samples as this one.
        symmetric: Names of process groups in which all ranks of the run begin the same number of collectives.
    """

    def __init__(
        self, group: ComparisonGroup, activity: Activity, replica: Sequence[int], symmetric: Collection[str]
    ) -> None:
        self._group, self._activity = group, activity
        self._replica, self._symmetric = list(replica), set(symmetric)
        self._bits = min(20, (_EXACT - 2 * group.size.bit_length()) // 2)
        self._latency = float("inf")
        self._every, self._next = 1, 0
        self._samples: list[str] = []
        self._content = 0
        self._position: tuple[int, int, int] = (0, 0, 0)

    def begin_step(self, step: int, epoch: int, batch: int, samples: Sequence[str], content: int) -> None:
        """Say what a step trains on: the samples, and a checksum of what they contain, if there is one."""
        self._position, self._samples, self._content = (step, epoch, batch), list(samples), content

    def is_due(self) -> bool:
        return self._position[0] >= self._next

    def check(self) -> str | None:
        """Compare the ranks; return what differs in words, on all ranks the same."""
        shared = self._hash((self._position, self._activity.collectives, sorted(self._count().items())))
        data = self._hash((self._samples, self._content))
        is_first, others = self._group.rank == self._replica[0], len(self._replica) - 1
        wish = self._choose_interval() if self._group.rank == 0 else 0
        sums = self._group.sum([wish, shared, shared**2, data * others if is_first else -data])
        self._latency = min(self._latency, self._group.seconds)
        self._every, total, squares, difference = map(int, sums)
        self._next = self._position[0] + self._every
        if self._group.size * squares == total**2 and difference == 0:
            return None
        said = describe_differences([dict(one) for one in self._group.gather_json(self._describe())])
        if said is None:  # only groups in which ranks differ rightly
            self._symmetric.clear()
        return said

    def _choose_interval(self) -> int:
        """Return the steps until the next exchange, so that all together take little of the time."""
        step = self._activity.seconds
        if not step or self._latency == float("inf"):
            return 1
        return min(_MOST, max(1, math.ceil(self._latency / (_SHARE * step))))

    def _hash(self, value: Hashable) -> int:
        return zlib.crc32(repr(value).encode()) & ((1 << self._bits) - 1)

    def _count(self) -> dict[str, int]:
        """Return how many collectives this rank began in the groups that can be compared, by their ranks."""
        groups = [(len(ranks), name, count) for name, ranks, count in list_groups() if name in self._symmetric]
        return {f"{number} of {size} ranks": count for number, (size, _, count) in enumerate(groups)}

    def _describe(self) -> dict[str, Any]:
        recorded: dict[str, list[Any]] = {}
        for entry in read_flight_recorder():
            if not str(entry.get("profiling_name", "")).endswith(_SAME_SHAPES):
                continue
            name = str((entry.get("process_group") or [""])[0])
            recorded.setdefault(name, []).append([entry.get("collective_seq_id"), describe_collective(entry)])
        return {
            "replica": self._replica[0],
            "position": self._position,
            "samples": self._samples[:_SHOWN],
            "data": zlib.crc32(repr((self._samples, self._content)).encode()),
            "counts": self._count(),
            "collectives": self._activity.collectives,
            "last": self._activity.last_collectives,
            "recorded": recorded.get("0", [])[-_RECORDED:],  # of the group of all ranks
        }


def describe_differences(ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Return how the ranks differ, of which each says what it did; None if they do not."""
    if (odd := _find_odd(ranks, lambda one: tuple(one["position"]))) is not None:
        rank, other = odd
        (step, epoch, batch), theirs = ranks[rank]["position"], ranks[other]["position"]
        return (
            f"Rank {rank} is out of step: it is at step {step} (epoch {epoch}, batch {batch}), rank {other} at step "
            f"{theirs[0]} (epoch {theirs[1]}, batch {theirs[2]})."
        )
    for first in dict.fromkeys(one["replica"] for one in ranks):
        members = [rank for rank, one in enumerate(ranks) if one["replica"] == first]
        if (odd := _find_odd([ranks[rank] for rank in members], lambda one: one["data"])) is not None:
            rank, other = members[odd[0]], members[odd[1]]
            own, theirs = (", ".join(ranks[one]["samples"]) or "none" for one in (rank, other))
            what = f"the samples {own}, rank {other} {theirs}" if own != theirs else f"other content in {own}"
            return (
                f"Rank {rank} has read other data than rank {other} of the same replica, in step "
                f"{ranks[rank]['position'][0]}: {what}.\n  The files of their machines differ. Compare them."
            )
    if (odd := _find_odd(ranks, lambda one: (one["collectives"], *sorted(one["counts"].items())))) is None:
        return None
    rank, other = odd
    step = ranks[rank]["position"][0]
    text = f"Rank {rank} has taken part in other collectives than rank {other}, up to step {step}"
    counts = ranks[rank]["counts"].items()
    differing = [(name, own, ranks[other]["counts"].get(name, 0)) for name, own in counts
                 if own != ranks[other]["counts"].get(name, 0)]  # fmt: skip
    if not differing and ranks[rank]["collectives"] == ranks[other]["collectives"]:
        return None
    for name, own, theirs in differing[:1]:
        text += f": {own} in group {name}, rank {other} {theirs}"
    if first_differing := _find_first(ranks[rank]["recorded"], ranks[other]["recorded"]):
        number, own, theirs = first_differing
        text += f"; number {number} is {own} on rank {rank} and {theirs} on rank {other}"
    return f"{text}.\n  A branch that only some ranks take has a collective in it: look for calls of torch.distributed."


def _find_odd(values: Sequence[Any], key: Callable[[Any], Hashable]) -> tuple[int, int] | None:
    """Return the first member whose key is not that of the most, and one of the most; None if all are equal."""
    keys = [key(one) for one in values]
    (most, _), *others = Counter(keys).most_common()
    if not others:
        return None
    return next(number for number, one in enumerate(keys) if one != most), keys.index(most)


def _find_first(own: Sequence[Any], theirs: Sequence[Any]) -> tuple[int, str, str] | None:
    """Return the first collective, by its number, that two ranks have recorded differently."""
    known = {number: text for number, text in theirs}
    for number, text in own:
        if known.get(number, text) != text:
            return number, text, known[number]
    return None
