"""How much something computes, in turns of a plain loop: the same number on a quick machine and on a slow, busy one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_TURNS = 200_000


def counted(work: Callable[[], T]) -> tuple[T, float]:
    """Return what a call returns, and the processor time that it takes in turns of a loop timed before and after it."""
    before = _seconds_of_a_turn()
    began = time.process_time()
    found = work()
    took = time.process_time() - began
    return found, took / max(before, _seconds_of_a_turn())


def _seconds_of_a_turn() -> float:
    values: dict[int, int] = {}
    began = time.process_time()
    for turn in range(_TURNS):
        values[turn & 1023] = turn
    return (time.process_time() - began) / _TURNS
