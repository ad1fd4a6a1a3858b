"""Things of different sizes dealt out evenly."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal_out(sizes: Sequence[int], owners: int) -> list[int]:
    """Return an owner for each size, largest first to whoever has least; ties go to the lower number."""
    load = [(0, number) for number in range(owners)]  # a heap already
    dealt = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        least, owner = load[0]
        dealt[index] = owner
        heapq.heapreplace(load, (least + sizes[index], owner))
    return dealt
