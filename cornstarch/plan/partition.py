"""Where to cut layers so that the slowest stage is as fast as can be: dynamic programming; no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def best_cut(times: Sequence[float] | NDArray[np.float64], stages: int, before: float = 0.0) -> tuple[int, ...]:
    """Return the first layer of each stage such that the slowest stage is as fast as can be, and the rest alike.

    Args:
        times: Of each layer. A frozen one before which nothing is trained has its forward only.
        stages: How many, each of one layer at least.
        before: What the first stage does besides: encoders that run inside it.
    """
    count = len(times)
    assert 1 <= stages <= count, (stages, count)
    if stages == 1:
        return (0,)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(times, dtype=np.float64))])
    runs = sums[None, :] - sums[:, None]  # runs[start, end]
    runs[np.tril_indices(count + 1)] = np.inf
    first = runs[0] + before
    limit = _least(runs, first, stages, np.maximum)[0] * (1 + 1e-9)
    squares = np.where(runs <= limit, runs, np.inf) ** 2
    # Among all cuts that keep to the limit, the one whose stages differ least.
    return _least(squares, np.where(first <= limit, first, np.inf) ** 2, stages, np.add)[1]


def best_parts(
    times: Sequence[float] | NDArray[np.float64], stages: int, virtual: int, before: float = 0.0
) -> tuple[int, ...]:
    """Return the first layer of each of stages × virtual parts, which are dealt out to the stages in turn.

    Two cuts are compared, and the one whose slowest stage is the faster is taken: that in which the slowest part is as
    fast as can be, and that in which each stage gets the layers that it would have if there were one part to each.

    Args:
        times: Of each layer.
        stages: Places; part i is on place i modulo this.
        virtual: Parts of each.
        before: What the first part does besides.
    """
    plain = best_cut(times, stages * virtual, before)
    if virtual == 1:
        return plain
    whole = best_cut(times, stages, before)
    counts = np.diff([*whole, len(times)]).tolist()
    if min(counts) < virtual:
        return plain
    # The first place has most to do in its first part already, if there is something before it.
    sizes = [
        count // virtual + (((virtual - 1 - part) if place == 0 and before else part) < count % virtual)
        for part in range(virtual)
        for place, count in enumerate(counts)
    ]
    dealt = (0, *np.cumsum(sizes)[:-1].tolist())
    better = _busiest(times, dealt, stages, before) < _busiest(times, plain, stages, before) * (1 - 1e-9)
    return dealt if better else plain


def _busiest(
    times: Sequence[float] | NDArray[np.float64], starts: tuple[int, ...], stages: int, before: float
) -> float:
    """Return what the busiest stage does."""
    parts = np.add.reduceat(np.asarray(times, dtype=np.float64), starts)
    parts[0] += before
    return float(parts.reshape(-1, stages).sum(axis=0).max())


def _least(
    runs: NDArray[np.float64], first: NDArray[np.float64], stages: int, combine: np.ufunc
) -> tuple[float, tuple[int, ...]]:
    """Return the least cost of a cut, and its first layers; best[end]: of the first `end` layers in so many stages."""
    best = first
    choices = []
    for _ in range(stages - 1):
        costs = combine(best[:, None], runs)
        starts = costs.argmin(axis=0)
        choices.append(starts)
        best = costs[starts, np.arange(len(starts))]
    end, found = len(first) - 1, []
    for starts in reversed(choices):
        end = int(starts[end])
        found.append(end)
    return float(best[-1]), (0, *reversed(found))
