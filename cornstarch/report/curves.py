"""What a curve needs before it is drawn: fewer points, a smooth line, and an axis with round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

Point = tuple[float, float]

MOST_POINTS = 1000
LONG = 100  # points; from there on a smooth line is drawn over the raw one
_GAP = math.nan
_LARGEST, _SMALLEST = 1e100, 1e-100  # beyond, the arithmetic of an axis would overflow


def finite(points: Iterable[Point]) -> list[Point]:
    """Return the points that can be drawn."""
    return [point for point in points if abs(point[1]) < _LARGEST]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most so many points: both ends, and the lowest and the highest of each stretch: no spike is lost.

    A stretch with values that are not finite leaves a gap.
    """
    if len(points) <= most:
        return list(points)
    stretches = (most - 2) // 3
    kept: list[Point] = []
    for index in range(stretches):
        stretch = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        drawable = finite(stretch)
        if drawable:
            kept += sorted({min(drawable, key=itemgetter(1)), max(drawable, key=itemgetter(1))})
        if len(drawable) < len(stretch):
            kept.append((stretch[-1][0], _GAP))
    known = finite(points)
    before = [point for point in known[:1] if point not in kept]
    after = [point for point in known[-1:] if point not in kept]
    return sorted(before + kept + after, key=itemgetter(0))


def smooth(points: Sequence[Point], share: float = 0.04, most: int = MOST_POINTS) -> list[Point]:
    """Return the mean over a window around each point, which holds this share of all points and does not lag.

    Of more than `most` points, so many are returned, evenly spread.
    """
    known = finite(points)
    half = max(2, round(len(known) * share / 2))
    sums = list(accumulate((value for _, value in known), initial=0.0))
    count = min(most, len(known))
    smoothed = []
    for index in ((place * (len(known) - 1)) // max(1, count - 1) for place in range(count)):
        # Even on both sides at the beginning, where curves are steep; at the end, where they are flat, it looks back.
        after = min(half, max(index, half // 8), len(known) - 1 - index)
        first, last = index - min(half, index), index + after + 1
        smoothed.append((known[index][0], (sums[last] - sums[first]) / (last - first)))
    return smoothed


@dataclass(frozen=True)
class Axis:
    """The range of an axis, where its marks are, and whether it is logarithmic."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a value stands, from 0 at the low end to 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def shows(self, value: float) -> bool:
        """Say whether a value can stand on this axis at all."""
        return abs(value) < _LARGEST and (value > _SMALLEST or not self.log)


def linear_axis(low: float, high: float, whole: bool = False, unit: float = 1.0, target: int = 5) -> Axis:
    """Return an axis over a range, with marks at round multiples of `unit`; `whole`: it ends at marks."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(low) * 0.5 or 1.0
        low, high = (0.0, low + room) if low >= 0 else (low - room, 0.0)
    step = _round_step((high - low) / unit / target) * unit
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if whole:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        low, high = first * step, last * step
    return Axis(low, high, tuple(index * step for index in range(first, last + 1)))


def log_axis(low: float, high: float) -> Axis:
    """Return a logarithmic axis over a range of positive values, with marks at 1, 2 and 5 where there is room."""
    high = max(high, low * 1.5)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        marks = _log_marks(low, high, factors)
        if len(marks) <= 8:
            break
    every = -(-len(marks) // 8)  # many decades: every second one, every third one, …
    return Axis(min(low, marks[0]), max(high, marks[-1]), tuple(marks[::every]), log=True)


def _log_marks(low: float, high: float, factors: Sequence[int]) -> list[float]:
    """Return the marks from the last one at or below `low` to the first one at or above `high`."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    marks = [factor * 10.0**decade for decade in decades for factor in factors]
    first = max(index for index, mark in enumerate(marks) if mark <= low * (1 + 1e-9))
    last = min((i for i, mark in enumerate(marks) if mark >= high * (1 - 1e-9)), default=len(marks) - 1)
    return marks[first : last + 1]


def _round_step(step: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not smaller than `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
