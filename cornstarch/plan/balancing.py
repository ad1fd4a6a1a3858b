"""Load balancing: which replica computes which samples, and which rank encodes which items; no torch.

A step has phases: each encoder, then the language model. Replicas wait for one another in every phase, so the work of
each phase must be even, not only the total. The time of a step is the sum over phases of the slowest replica's work.

Every rank computes the assignment by itself and must get the same result: work is compared as integers, never as
floats.

Shapes: D phases, the language model last; N samples; R replicas; M microbatches of each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cornstarch.errors import ConfigError

Integers = NDArray[np.int64]
SampleCosts = NDArray[np.float64]
SampleAssignment = tuple[tuple[Integers, ...], ...]
"""[replica][microbatch]: ascending indices of samples in the batch."""

_TOTAL = 1 << 28  # the integer that the work of a step is scaled to: its square still fits 64 bits
_MAX_EXCHANGES = 100  # samples that are moved or swapped after the greedy assignment
_MIN_GAIN = 2000  # an exchange must shorten the step by more than 1/2000
_MAX_PAIRS = 20_000  # pairs of samples that one exchange considers
_UNIT = 1 << 10  # fixed-point 1.0
_PART = 8  # a sample of a small phase counts for at most 1/8 of a bin's even part
_EVEN = 1.005  # slowest over mean work at which nothing is left to gain
_MIN_REDUCTION = 0.05  # moving items must reduce the largest load by this fraction


def assign_largest_first(sizes: Sequence[float], owners: int) -> list[int]:
    """Return an owner for each size: largest first, to the owner with the smallest load; ties go to the lower index."""
    load: list[tuple[float, int]] = [(0, owner) for owner in range(owners)]  # a heap already
    assigned = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        least, owner = load[0]
        assigned[index] = owner
        heapq.heapreplace(load, (least + sizes[index], owner))
    return assigned


def assign_surplus(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each owner's items, the rank that computes each of them: the owner, or a less loaded rank.

    An owner keeps its largest items up to an even part of the total, and at least one item. The rest goes, largest
    first, to the rank with the smallest load. If that does not reduce the largest load by 5 %, nothing moves.
    """
    unmoved = [[owner] * len(own) for owner, own in enumerate(sizes)]
    before = [sum(own) for own in sizes]
    takers, loads, surplus = [list(own) for own in unmoved], [0] * len(sizes), []
    for owner, own in enumerate(sizes):
        for index in sorted(range(len(own)), key=lambda index: (-own[index], index)):
            if loads[owner] and (loads[owner] + own[index]) * len(sizes) > sum(before):
                surplus.append((-own[index], owner, index))
            else:
                loads[owner] += own[index]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for negative, owner, index in sorted(surplus):
        while heap[0][0] != loads[heap[0][1]]:  # stale: that rank has received an item and has a newer entry
            heapq.heappop(heap)
        least, taker = heap[0]
        taker = owner if loads[owner] == least else taker
        takers[owner][index] = taker
        loads[taker] -= negative
        heapq.heappush(heap, (loads[taker], taker))
    return takers if max(loads, default=0) <= (1 - _MIN_REDUCTION) * max(before, default=0) else unmoved


def assign_in_order(count: int, ranks: int, microbatches: int, size: int | None = None) -> SampleAssignment:
    """Return samples in their order: each microbatch is the next `size` (default: an equal part) of all replicas."""
    size = size or max(-(-count // microbatches), 1)
    pieces = [np.array_split(np.arange(count)[m * size : (m + 1) * size], ranks) for m in range(microbatches)]
    return tuple(tuple(pieces[m][r].astype(np.int64) for m in range(microbatches)) for r in range(ranks))


def balance(
    costs: SampleCosts, ranks: int, microbatches: int = 1, padded: bool = False, least: int = 1
) -> SampleAssignment:
    """Return an assignment that makes every phase even, over replicas first, then over microbatches.

    `costs` is [D, N], in any unit. Each microbatch of each of the `ranks` replicas has `least` samples if there are
    enough; if there are no more than that, exactly so many. The heaviest microbatches of all replicas come first, so
    that they run at the same time. `padded`: rows of the language model are padded to the longest of their microbatch,
    so each costs as much as the most expensive one.
    """
    if costs.ndim != 2 or ranks < 1 or microbatches < 1:
        raise ConfigError(
            f"costs {list(costs.shape)}, ranks = {ranks}, microbatches = {microbatches}: expected [D, N] and ≥ 1."
        )
    if not np.isfinite(costs).all() or (costs < 0).any():
        raise ConfigError("Costs of samples must be finite numbers of at least 0.")
    # As integers [N, D] of a fixed sum, so that no square overflows.
    total = math.fsum(costs.flat)  # exact in any order: NumPy's order of addition differs between machines
    if padded and costs.size:
        total = max(total, costs.shape[1] * float(costs[-1].max()))
    work = np.rint(costs.T * (_TOTAL / total)).astype(np.int64) if total else np.zeros(costs.T.shape, np.int64)
    if padded:
        balanced = _balance_padded(work, ranks, microbatches)
    else:
        balanced = _balance_packed(work, ranks, microbatches, least)
    plain = assign_in_order(len(work), ranks, microbatches)  # can be better where samples are nearly equal
    return plain if _step_time(work, plain, padded) < _step_time(work, balanced, padded) else balanced


def compute_loads(costs: SampleCosts, assignment: SampleAssignment, padded: bool = False) -> NDArray[np.float64]:
    """Return the work of each replica in each microbatch and phase, [R, M, D], padding included."""
    loads = np.array([[costs[:, samples].sum(1) for samples in own] for own in assignment])
    if padded:
        loads[..., -1] = [[len(s) * costs[-1, s].max(initial=0.0) for s in own] for own in assignment]
    return loads


def compute_step_work(work: NDArray[np.float64], every_microbatch: bool = False) -> float:
    """Return the time of a step in units of `work` [R, M, D]: in each phase, that of the slowest replica.

    `every_microbatch`: replicas wait for one another in each microbatch (sharded parameters), not only after a step.
    """
    return float(work.max(0).sum() if every_microbatch else work.sum(1).max(0).sum())


def compute_efficiency(work: NDArray[np.float64], needed: float | None = None) -> float:
    """Return the mean of `work` [R, M, D] over the slowest replica's, by phase: 1 if no replica waits.

    `needed` is the work without padding. Default: the sum of `work`.
    """
    time = compute_step_work(work)
    return (float(work.sum()) if needed is None else needed) / len(work) / time if time else 1.0


def find_dominated_phases(costs: SampleCosts, ranks: int) -> list[bool]:
    """Return, by phase, whether one sample alone exceeds a replica's even part: no assignment can balance that."""
    return [bool(phase.max(initial=0.0) * ranks > phase.sum()) for phase in costs]


def _balance_packed(work: Integers, ranks: int, microbatches: int, least: int) -> SampleAssignment:
    owners = _assign_bins(work, ranks, microbatches * least)
    assignment = []
    for rank in range(ranks):
        mine = np.flatnonzero(owners == rank)
        inner = _assign_bins(work[mine], microbatches, least)
        own = [mine[inner == microbatch] for microbatch in range(microbatches)]
        assignment.append(_sort_heaviest_first(own, [int(work[samples].sum()) for samples in own]))
    return tuple(assignment)


def _balance_padded(work: Integers, ranks: int, microbatches: int) -> SampleAssignment:
    owners = _group_by_length(work, ranks * microbatches)
    rows = [np.flatnonzero(owners == row) for row in range(ranks * microbatches)]
    padded = np.array([_pad_work(work[samples]) for samples in rows])
    rank_of = _assign_bins(padded, ranks, microbatches)
    mine = [np.flatnonzero(rank_of == rank) for rank in range(ranks)]
    return tuple(_sort_heaviest_first([rows[n] for n in own], [int(padded[n].sum()) for n in own]) for own in mine)


def _sort_heaviest_first(microbatches: Sequence[Integers], sums: Sequence[int]) -> tuple[Integers, ...]:
    return tuple(microbatches[n] for n in sorted(range(len(microbatches)), key=lambda n: (-sums[n], n)))


def _pad_work(work: Integers) -> Integers:
    """Return the work of one microbatch, [D], whose rows are padded to the longest."""
    padded = work.sum(0)
    padded[-1] = len(work) * work[:, -1].max(initial=0)
    return padded


def _step_time(work: Integers, assignment: SampleAssignment, padded: bool) -> int:
    """Return `compute_step_work` in integers."""
    each = [[_pad_work(work[m]) if padded else work[m].sum(0) for m in own] for own in assignment]
    return int(np.array(each).sum(1).max(0).sum())


def _assign_bins(work: Integers, bins: int, least: int) -> Integers:
    """Return a bin for each sample: heaviest first, each to the bin that increases the sum of squared loads least.

    Samples are then moved and swapped while the slowest phases get faster. Each bin should get `least` samples.
    """
    if bins == 1:
        return np.zeros(len(work), np.int64)
    weighted = _weight_small_phases(work, bins)
    order = np.argsort(-weighted.sum(1), kind="stable")
    load, counts = np.zeros((bins, work.shape[1]), np.int64), np.zeros(bins, np.int64)
    owners = np.zeros(len(work), np.int64)
    for done, sample in enumerate(order.tolist()):
        growth = (2 * load + weighted[sample]) @ weighted[sample]  # of the sum of squares
        short = counts < least
        if len(order) - done <= int((least - counts[short]).sum()):
            growth = np.where(short, growth, np.iinfo(np.int64).max)
        # Ties go to the bin with the fewest samples, so that samples without cost are distributed, too.
        best = np.flatnonzero(growth == growth.min())
        chosen = int(best[np.argmin(counts[best])])
        owners[sample] = chosen
        load[chosen] += weighted[sample]
        counts[chosen] += 1
    return _refine(work, _refine(weighted, owners, bins, least), bins, least)


def _weight_small_phases(work: Integers, bins: int) -> Integers:
    """Return work in which small phases weigh more, so that they are balanced, too, where that is possible.

    A phase with a quarter of the largest phase's work counts as half of it. But none of its samples weighs more than a
    fraction of a bin's even part: a phase that few samples have cannot be even, and must not unbalance the others.
    """
    totals, largest = work.sum(0), work.max(0, initial=0)
    total, most = int(totals.sum()), int(totals.max(initial=0))
    weighted = work.copy()
    for phase in range(work.shape[1]):
        if totals[phase]:
            wanted = math.isqrt(_UNIT * _UNIT * most // int(totals[phase]))
            allowed = _UNIT * total // (bins * _PART * int(largest[phase]))
            weighted[:, phase] = work[:, phase] * max(min(wanted, allowed), _UNIT) // _UNIT
    return weighted


def _group_by_length(work: Integers, bins: int) -> Integers:
    """Return a bin for each sample of padded rows: samples of similar length share a bin.

    Samples are sorted by length and cut into runs, with the lowest limit on the work of a run that needs no more runs
    than bins.
    """
    order = np.argsort(-work[:, -1], kind="stable")
    low, high = 0, int(work[:, :-1].sum() + len(work) * work[:, -1].max(initial=0))
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if len(_cut_runs(work[order], limit, bins)) <= bins else (limit + 1, high)
    runs = _cut_runs(work[order], low, bins)
    while len(runs) < min(bins, len(work)):  # halve the longest run until every bin has one
        longest = max(range(len(runs)), key=lambda number: runs[number][1] - runs[number][0])
        start, end = runs[longest]
        runs[longest : longest + 1] = [(start, (start + end) // 2), ((start + end) // 2, end)]
    owners = np.zeros(len(work), np.int64)
    for number, (start, end) in enumerate(runs):
        owners[order[start:end]] = number
    return owners


def _cut_runs(work: Integers, limit: int, most: int) -> list[tuple[int, int]]:
    """Return runs of sorted samples whose work, padded to their first, stays below a limit; stop after `most` + 1."""
    others = np.concatenate([[0], np.cumsum(work[:, :-1].sum(1))])
    runs: list[tuple[int, int]] = []
    start = 0
    while start < len(work) and len(runs) <= most:
        rows = np.arange(1, len(work) - start + 1)
        total = rows * work[start, -1] + others[start + 1 :] - others[start]  # ascending
        end = start + max(int(np.searchsorted(total, limit, "right")), 1)
        runs.append((start, end))
        start = end
    return runs


def _refine(work: Integers, owners: Integers, bins: int, least: int) -> Integers:
    """Move or swap samples of the slowest bin while the sum of the slowest phases shrinks."""
    owners = owners.copy()
    load = np.zeros((bins, work.shape[1]), np.int64)
    np.add.at(load, owners, work)
    even = _EVEN * load.sum() / bins
    for _ in range(_MAX_EXCHANGES):
        if load.max(0).sum() <= even:
            return owners
        # Phases with the longest wait first.
        waits = load.max(0) * bins - load.sum(0)
        phases = np.argsort(-waits, kind="stable")
        if not any(_exchange_best(work, owners, load, int(load[:, phase].argmax()), least) for phase in phases):
            return owners
    return owners


def _exchange_best(work: Integers, owners: Integers, load: Integers, slowest: int, least: int) -> bool:
    """Apply the exchange of the slowest bin with another that shortens the step most; return whether there is one."""
    mine = np.flatnonzero(owners == slowest)
    others = np.flatnonzero(owners != slowest)
    stride = -(-len(mine) * len(others) // _MAX_PAIRS) or 1
    others = others[::stride]
    bins = np.arange(len(load))
    # A move is a swap with nothing (-1): one for every other bin.
    can_move = len(mine) > least
    partners = np.concatenate([others, np.full(len(bins) - 1, -1)]) if can_move else others
    if not len(mine) or not len(partners):
        return False
    targets = np.concatenate([owners[others], bins[bins != slowest]]) if can_move else owners[others]
    given = np.concatenate([work[others], np.zeros((len(partners) - len(others), work.shape[1]), np.int64)])
    # The largest load of each phase over all bins but the slowest and the partner's, [partners, D].
    rest = np.zeros_like(load)
    if len(load) > 2:
        without = load.copy()
        without[slowest] = -1
        top = np.sort(without, axis=0)
        rest = np.where(bins[:, None] == without.argmax(0)[None, :], top[-2], top[-1])
    rest = rest[targets]
    gain = given[None, :, :] - work[mine][:, None, :]  # [mine, partners, D]: added to the slowest bin
    here, there = load[slowest] + gain, load[targets] - gain
    time = np.maximum(np.maximum(here, there), rest).sum(2)
    best = int(time.argmin())
    now = int(load.max(0).sum())
    if time.flat[best] >= now - now // _MIN_GAIN:
        return False
    own, partner = mine[best // len(partners)], best % len(partners)
    owners[own] = targets[partner]
    if partners[partner] >= 0:
        owners[partners[partner]] = slowest
    load[slowest] += given[partner] - work[own]
    load[targets[partner]] -= given[partner] - work[own]
    return True
