"""Things of different sizes dealt out evenly."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

_WORTH = 0.05  # what the most that anyone has must fall by, for anything to be lent


def deal_out(sizes: Sequence[int], owners: int) -> list[int]:
    """Return an owner for each size, largest first to whoever has least; ties go to the lower number."""
    load = [(0, number) for number in range(owners)]  # a heap already
    dealt = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        least, owner = load[0]
        dealt[index] = owner
        heapq.heapreplace(load, (least + sizes[index], owner))
    return dealt


def lend_out(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each owner's things, who takes each of them: the owner itself, or one who has less.

    Only surplus moves: of its largest things an owner keeps what fits into an even share, and one in any case. What is
    left over goes, largest first, to whoever has least, which may be the owner. If that does not bring down the most
    that anyone has by a twentieth, nothing moves.

    Args:
        sizes: Of the things of each owner; one who has nothing takes what others lend.
    """
    stay = [[owner] * len(own) for owner, own in enumerate(sizes)]
    before = [sum(own) for own in sizes]
    takers, loads, surplus = [list(own) for own in stay], [0] * len(sizes), []
    for owner, own in enumerate(sizes):
        for index in sorted(range(len(own)), key=lambda index: (-own[index], index)):
            if loads[owner] and (loads[owner] + own[index]) * len(sizes) > sum(before):
                surplus.append((-own[index], owner, index))
            else:
                loads[owner] += own[index]
    heap = [(load, number) for number, load in enumerate(loads)]
    heapq.heapify(heap)
    for negative, owner, index in sorted(surplus):
        while heap[0][0] != loads[heap[0][1]]:  # it was given something since, and has another entry
            heapq.heappop(heap)
        least, taker = heap[0]
        taker = owner if loads[owner] == least else taker
        takers[owner][index] = taker
        loads[taker] -= negative
        heapq.heappush(heap, (loads[taker], taker))
    return takers if max(loads, default=0) <= (1 - _WORTH) * max(before, default=0) else stay
