"""Which replica computes which samples of a step, and in which portion; pure NumPy, the same on every machine.

    dealt = balance(costs, ranks=32, portions=4)
    dealt[rank][portion]                      # places in the batch
    efficiency(loads(costs, dealt))           # 1: nobody waits

A step has phases: each encoder, then the language model. Processes wait for one another in every phase, so the work of
each phase should be even, not only their sum. The time of a step is the sum over phases of the slowest replica's work.

All processes must come to the same result, each for itself: work is compared as whole numbers, never as floats.

Shapes: D phases, the language model last; N samples; R replicas; P portions of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cornstarch.errors import ConfigError

Integers = NDArray[np.int64]
Costs = NDArray[np.float64]
Dealt = tuple[tuple[Integers, ...], ...]
"""[replica][portion]: the places of samples in the batch, ascending."""

_WHOLE = 1 << 28  # what all work of a step is counted as: its square still fits 64 bits
_EXCHANGES = 100  # samples that are moved or swapped at most, after all have been dealt out
_GAIN = 2000  # an exchange that shortens a step by less than one part in so many is left out
_TRIED = 20_000  # pairs of samples that are looked at for one exchange
_UNIT = 1 << 10  # what 1 is, where a factor is a whole number
_PART = 8  # of a bin's even share that a sample of a small phase may count for
_EVEN = 1.005  # slowest over mean work, at which there is nothing left to gain


def deal(count: int, ranks: int, portions: int, size: int | None = None) -> Dealt:
    """Return samples dealt out as they come: each portion is the next `size` samples, in as many pieces as replicas.

    Args:
        count: Samples of the step.
        ranks: Replicas.
        portions: Portions of each.
        size: Samples of a portion, over all replicas. Default: as many as make them even.
    """
    size = size or max(-(-count // portions), 1)
    pieces = [np.array_split(np.arange(count)[p * size : (p + 1) * size], ranks) for p in range(portions)]
    return tuple(tuple(pieces[p][r].astype(np.int64) for p in range(portions)) for r in range(ranks))


def balance(costs: Costs, ranks: int, portions: int = 1, padded: bool = False) -> Dealt:
    """Return samples dealt out so that every phase is as even as can be, over replicas first, then over portions.

    Each portion has at least one sample, if there are enough. The heaviest portions of all replicas come first, so that
    they are computed at the same time.

    Args:
        costs: [D, N], what each sample costs in each phase, in any unit.
        ranks: Replicas.
        portions: Portions of each replica.
        padded: Whether rows of the language model are filled up to the longest of their portion: all then cost as much
            as the dearest.
    """
    _check(costs, ranks, portions)
    work = _whole_numbers(costs, padded)
    dealt = _padded(work, ranks, portions) if padded else _packed(work, ranks, portions)
    plain = deal(len(work), ranks, portions)  # where samples are nearly alike, that may be as good as it gets
    return plain if _time(work, plain, padded) < _time(work, dealt, padded) else dealt


def _packed(work: Integers, ranks: int, portions: int) -> Dealt:
    of_rank = _spread(work, ranks, portions)
    dealt = []
    for rank in range(ranks):
        mine = np.flatnonzero(of_rank == rank)
        inner = _spread(work[mine], portions, 1)
        dealt.append([mine[inner == portion] for portion in range(portions)])
    return tuple(_heaviest_first(own, [int(work[places].sum()) for places in own]) for own in dealt)


def _padded(work: Integers, ranks: int, portions: int) -> Dealt:
    owners = _padded_owners(work, ranks * portions)
    rows = [np.flatnonzero(owners == row) for row in range(ranks * portions)]
    filled = np.array([_filled_up(work[places]) for places in rows])
    of_rank = _spread(filled, ranks, portions)
    mine = [np.flatnonzero(of_rank == rank) for rank in range(ranks)]
    return tuple(_heaviest_first([rows[n] for n in own], [int(filled[n].sum()) for n in own]) for own in mine)


def _heaviest_first(portions: Sequence[Integers], sums: Sequence[int]) -> tuple[Integers, ...]:
    return tuple(portions[n] for n in sorted(range(len(portions)), key=lambda n: (-sums[n], n)))


def _filled_up(work: Integers) -> Integers:
    """Return the work of one portion, [D], whose rows are filled up to the longest."""
    found = work.sum(0)
    found[-1] = len(work) * work[:, -1].max(initial=0)
    return found


def _time(work: Integers, dealt: Dealt, padded: bool) -> int:
    """Return `step_work`, in whole numbers."""
    each = [[_filled_up(work[p]) if padded else work[p].sum(0) for p in portions] for portions in dealt]
    return int(np.array(each).sum(1).max(0).sum())


def loads(costs: Costs, dealt: Dealt, padded: bool = False) -> NDArray[np.float64]:
    """Return the work of each replica in each portion and phase, [R, P, D], padding included."""
    found = np.array([[costs[:, places].sum(1) for places in portions] for portions in dealt])
    if padded:
        longest = [[len(p) * costs[-1, p].max(initial=0.0) for p in portions] for portions in dealt]
        found[..., -1] = longest
    return found


def step_work(work: NDArray[np.float64], every_portion: bool = False) -> float:
    """Return how long a step takes, in units of work: in each phase as long as the slowest replica.

    Args:
        work: [R, P, D], of `loads`.
        every_portion: Whether replicas wait for one another in each portion (sharded parameters), and not only at the
            end of a step.
    """
    return float(work.max(0).sum() if every_portion else work.sum(1).max(0).sum())


def efficiency(work: NDArray[np.float64], needed: float | None = None) -> float:
    """Return the mean work over that of the slowest, phase by phase: 1 if nobody waits.

    Args:
        work: [R, P, D], of `loads`.
        needed: What the samples need without padding. Default: what there is.
    """
    time = step_work(work)
    return (float(work.sum()) if needed is None else needed) / len(work) / time if time else 1.0


def dominated(costs: Costs, ranks: int) -> list[bool]:
    """Say for each phase whether one sample alone is more than a replica's even share: no dealing out evens that."""
    return [bool(one.max(initial=0.0) * ranks > one.sum()) for one in costs]


# ------------------------------------------------------------------------------------------------ dealing out


def _check(costs: Costs, ranks: int, portions: int) -> None:
    if costs.ndim != 2 or ranks < 1 or portions < 1:
        raise ConfigError(
            f"costs {list(costs.shape)}, ranks = {ranks}, portions = {portions}: expected [D, N] and ≥ 1."
        )
    if not np.isfinite(costs).all() or (costs < 0).any():
        raise ConfigError("Costs of samples must be numbers of at least 0.")


def _whole_numbers(costs: Costs, padded: bool) -> Integers:
    """Return costs as whole numbers [N, D], their sum fixed: so that no square is too large."""
    whole = math.fsum(costs.flat)  # exact, whatever the order: NumPy adds in another on another machine
    if padded and costs.size:
        whole = max(whole, costs.shape[1] * float(costs[-1].max()))
    return np.rint(costs.T * (_WHOLE / whole)).astype(np.int64) if whole else np.zeros(costs.T.shape, np.int64)


def _spread(work: Integers, bins: int, least: int) -> Integers:
    """Return a bin for each sample: the heaviest first, each where the sum of squares of loads grows least.

    Then samples are moved and swapped while that makes the slowest phases faster.

    Args:
        work: [N, D].
        bins: How many there are.
        least: Samples that each should get.
    """
    if bins == 1:
        return np.zeros(len(work), np.int64)
    true, work = work, _emphasised(work, bins)
    order = np.argsort(-work.sum(1), kind="stable")
    load, counts = np.zeros((bins, work.shape[1]), np.int64), np.zeros(bins, np.int64)
    owners = np.zeros(len(work), np.int64)
    for done, sample in enumerate(order.tolist()):
        growth = (2 * load + work[sample]) @ work[sample]  # of the sum of squares of all loads
        wanting = counts < least
        if len(order) - done <= int((least - counts[wanting]).sum()):
            growth = np.where(wanting, growth, np.iinfo(np.int64).max)
        # Of equal ones the emptiest: samples that cost nothing are spread, too.
        best = np.flatnonzero(growth == growth.min())
        chosen = int(best[np.argmin(counts[best])])
        owners[sample] = chosen
        load[chosen] += work[sample]
        counts[chosen] += 1
    return _refined(true, _refined(work, owners, bins, least), bins, least)


def _emphasised(work: Integers, bins: int) -> Integers:
    """Return work in which small phases count for more, so that they are evened, too, where that is possible.

    A phase with a quarter of another's work counts as half of it. But none of its samples counts for more than a part
    of a bin's even share: where few samples have a phase at all, it cannot be even, and must not cost the others.
    """
    totals, largest = work.sum(0), work.max(0, initial=0)
    whole, most = int(totals.sum()), int(totals.max(initial=0))
    made = work.copy()
    for phase in range(work.shape[1]):
        if totals[phase]:
            wanted = math.isqrt(_UNIT * _UNIT * most // int(totals[phase]))
            allowed = _UNIT * whole // (bins * _PART * int(largest[phase]))
            made[:, phase] = work[:, phase] * max(min(wanted, allowed), _UNIT) // _UNIT
    return made


def _padded_owners(work: Integers, bins: int) -> Integers:
    """Return a bin for each sample where rows are filled up: those of about the same length come together.

    Samples are sorted by length and cut into runs, at the lowest limit for the work of a run that leaves no more runs
    than bins. It is the sum of all phases that is even here: what comes together is decided by lengths.
    """
    order = np.argsort(-work[:, -1], kind="stable")
    low, high = 0, int(work[:, :-1].sum() + len(work) * work[:, -1].max(initial=0))
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if len(_runs(work[order], limit, bins)) <= bins else (limit + 1, high)
    runs = _runs(work[order], low, bins)
    while len(runs) < min(bins, len(work)):  # some are left over: the longest runs are halved
        longest = max(range(len(runs)), key=lambda number: runs[number][1] - runs[number][0])
        start, end = runs[longest]
        runs[longest : longest + 1] = [(start, (start + end) // 2), ((start + end) // 2, end)]
    owners = np.zeros(len(work), np.int64)
    for number, (start, end) in enumerate(runs):
        owners[order[start:end]] = number
    return owners


def _runs(work: Integers, limit: int, most: int) -> list[tuple[int, int]]:
    """Return the runs of sorted samples whose work, filled up to their first, keeps a limit; one more if too many."""
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


# ------------------------------------------------------------------------------------------------ exchanges


def _refined(work: Integers, owners: Integers, bins: int, least: int) -> Integers:
    """Move samples of the slowest bin, or swap them with others, while the sum of the slowest phases shrinks."""
    owners = owners.copy()
    load = np.zeros((bins, work.shape[1]), np.int64)
    np.add.at(load, owners, work)
    even = _EVEN * load.sum() / bins
    for _ in range(_EXCHANGES):
        if load.max(0).sum() <= even:
            return owners
        # The phases in which somebody waits longest are tried first.
        waits = load.max(0) * bins - load.sum(0)
        for phase in np.argsort(-waits, kind="stable"):
            if _exchanged(work, owners, load, int(load[:, phase].argmax()), least):
                break
        else:
            return owners
    return owners


def _exchanged(work: Integers, owners: Integers, load: Integers, slowest: int, least: int) -> bool:
    """Do the one exchange of a bin with another that shortens the step most; say whether there was one."""
    mine = np.flatnonzero(owners == slowest)
    others = np.flatnonzero(owners != slowest)
    stride = -(-len(mine) * len(others) // _TRIED) or 1
    others = others[::stride]
    bins = np.arange(len(load))
    # A move is a swap with nothing: one for every other bin.
    can_move = len(mine) > least
    partners = np.concatenate([others, np.full(len(bins) - 1, -1)]) if can_move else others
    if not len(mine) or not len(partners):
        return False
    elsewhere = np.concatenate([owners[others], bins[bins != slowest]]) if can_move else owners[others]
    given = np.concatenate([work[others], np.zeros((len(partners) - len(others), work.shape[1]), np.int64)])
    rest = _others_slowest(load, slowest)[elsewhere]  # [partners, D]
    gain = given[None, :, :] - work[mine][:, None, :]  # [mine, partners, D], what the slowest gets more
    here, there = load[slowest] + gain, load[elsewhere] - gain
    time = np.maximum(np.maximum(here, there), rest).sum(2)
    best = int(time.argmin())
    now = int(load.max(0).sum())
    if time.flat[best] >= now - now // _GAIN:
        return False
    own, partner = mine[best // len(partners)], best % len(partners)
    owners[own] = elsewhere[partner]
    if partners[partner] >= 0:
        owners[partners[partner]] = slowest
    load[slowest] += given[partner] - work[own]
    load[elsewhere[partner]] -= given[partner] - work[own]
    return True


def _others_slowest(load: Integers, slowest: int) -> Integers:
    """Return, for each bin, the largest load of each phase in all but it and the slowest, [bins, D]."""
    others = load.copy()
    others[slowest] = -1
    if len(load) < 3:
        return np.zeros_like(load)
    top = np.sort(others, axis=0)
    is_top = np.arange(len(load))[:, None] == others.argmax(0)[None, :]
    return np.where(is_top, top[-2], top[-1])


__all__ = ["Costs", "Dealt", "balance", "deal", "dominated", "efficiency", "loads", "step_work"]
