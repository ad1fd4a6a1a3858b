"""Ranks that compute more slowly than the others, from their heartbeats."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from cornstarch.health.heartbeat import Heartbeat

SLOW = 1.5
"""How many times as long as the median a rank computes that is named."""
_STEPS = 10  # the least in a window
_SHARE = 0.2  # of the time of a step that it must cost


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow."""

    rank: int
    step: int
    seconds: float
    """That it works on a step, without waiting for other ranks."""
    median: float
    """That the median rank does."""

    def describe(self, host: str = "") -> str:
        where = f" ({host})" if host else ""
        return (
            f"rank {self.rank}{where} is slow: it works {1000 * self.seconds:.0f} ms on a step, the median rank "
            f"{1000 * self.median:.0f} ms; the others wait for it"
        )


class StragglerWatch:
    """Compares how long ranks work on steps, window by window of `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began: float | None = None
        self._first: dict[int, Heartbeat] = {}

    def add(self, beats: Iterable[Heartbeat], now: float) -> list[Straggler]:
        """Take the newest heartbeats; return those who were slow, at the end of a window."""
        last = {beat.rank: beat for beat in beats if not beat.has_left and beat.steps}
        if self._began is None or self._first.keys() != last.keys():
            if last:
                self._began, self._first = now, last
            return []
        if now - self._began < self._seconds:
            return []
        steps = {rank: beat.steps - self._first[rank].steps for rank, beat in last.items()}
        if min(steps.values()) < _STEPS:
            return []
        work = {rank: (beat.busy - self._first[rank].busy) / steps[rank] for rank, beat in last.items()}
        elapsed = (now - self._began) / max(steps.values())
        self._began, self._first = now, last
        # The lower one of two: a rank cannot be half again as slow as a mean that it is half of.
        median = statistics.median_low(work.values())
        return [
            Straggler(rank, last[rank].step, seconds, median)
            for rank, seconds in work.items()
            if seconds > SLOW * median and seconds - median > _SHARE * elapsed
        ]
