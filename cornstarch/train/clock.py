"""How long steps take on a device that works behind its process.

A GPU is handed a step long before it is done: the process's clock tells when steps were handed over, not how long they
took. So marks are put between steps on the GPU's own stream, and read when it has passed them. Nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A moment of a device, behind all that it was given before, as a recorded `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Say whether the device has passed it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from here to a later one."""
        ...


@dataclass(frozen=True)
class Timed:
    """What steps took on the device."""

    steps: int
    seconds: float
    """From the end of the step before to the end of the step, added up."""
    waited: float
    """The part of it in which the device had nothing to do because a batch was not there."""


@dataclass(frozen=True)
class _Step:
    before: Mark | None
    """The end of the step before; None after a pause."""
    begin: Mark
    end: Mark
    waited: float


class StepClock:
    """Times steps by marks on a device.

    Args:
        mark: Puts a mark on the device's stream. Without it there is nothing to time: the device is the CPU that the
            process runs on, whose clock tells it.
    """

    def __init__(self, mark: Callable[[], Mark] | None) -> None:
        self._mark = mark
        self._last: Mark | None = None
        self._begun: Mark | None = None
        self._under_way: deque[_Step] = deque()
        self._timed = Timed(0, 0.0, 0.0)

    @classmethod
    def of(cls, device: torch.device) -> StepClock:
        """Return the clock of a device."""
        return cls(partial(_marked, device) if device.type == "cuda" else None)

    def begins(self) -> None:
        """Note that a step is handed over, from here on."""
        self._begun = None if self._mark is None else self._mark()

    def ends(self, waited: float) -> None:
        """Note that a step was handed over.

        Args:
            waited: Seconds that the process waited for its batch. Meanwhile the device may have been busy.
        """
        if self._mark is None or self._begun is None:
            return
        end = self._mark()
        self._under_way.append(_Step(self._last, self._begun, end, waited))
        self._last, self._begun = end, None
        self._collect()

    def rests(self) -> None:
        """Leave out what the device does until the next step."""
        self._last = None

    def read(self) -> Timed | None:
        """Return what was timed since this was last asked, of steps that are done; None if nothing is timed here."""
        if self._mark is None:
            return None
        self._collect()
        timed, self._timed = self._timed, Timed(0, 0.0, 0.0)
        return timed

    def _collect(self) -> None:
        """Add up the steps that the device has done."""
        while self._under_way and self._under_way[0].end.query():
            step, timed = self._under_way.popleft(), self._timed
            # Between two steps it waits for the batch, and for whatever else the process does meanwhile.
            idle = step.waited if step.before is None else step.before.elapsed_time(step.begin) / 1000
            seconds = idle + step.begin.elapsed_time(step.end) / 1000
            self._timed = Timed(timed.steps + 1, timed.seconds + seconds, timed.waited + min(step.waited, idle))


def _marked(device: torch.device) -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(torch.cuda.current_stream(device))
    return mark


__all__ = ["Mark", "StepClock", "Timed"]
