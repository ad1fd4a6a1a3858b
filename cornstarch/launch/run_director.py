"""Decides about a run's attempts: whether another one follows, and with how many processes. No torch, no processes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cornstarch.launch.attempt_record import FailureLine, append_failure, append_line, close_run

SAME_FAULTS = 3  # a fault that occurs so often in the same step would occur for ever
_MAX_MESSAGE = 4000  # characters
_PLACE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_VOLATILE = re.compile(r"0x[0-9a-fA-F]+|:\d{2,5}\b|\b\d+(?:\.\d+)? (?:s|ms|seconds)\b|\d{4,}")


@dataclass(frozen=True)
class Fault:
    """Why an attempt ended."""

    rank: int | None
    """None if a whole machine is gone."""
    code: int
    """The exit code, as a shell reports it."""
    cause: str
    message: str = ""
    """The error, as it was printed."""
    step: int | None = None
    """The step that was running; None before the first."""
    is_refusal: bool = False
    """Whether it is a user's mistake, which occurs again."""
    is_crash: bool = False
    """Whether a process was killed or has crashed: what others say then is a consequence."""

    @property
    def signature(self) -> tuple[str, int | None]:
        """What two occurrences of the same fault have in common: where it was raised, the message, and the step."""
        lines = self.message.strip().splitlines()
        places = _PLACE.findall(self.message)
        if self.is_crash or not lines:
            return self.cause, self.step
        return _VOLATILE.sub("…", f"{places[-1] if places else ''} {lines[-1]}"), self.step


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended on one machine."""

    code: int
    fault: Fault | None = None
    is_stopped: bool = False
    """Whether a signal to the supervisor ended it."""
    unkillable: list[int] = field(default_factory=list)
    """Ranks that could not even be killed."""
    step: int | None = None
    """The step that was running; None if training had not begun."""

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Outcome:
        fault = content["fault"]
        return cls(**{**content, "fault": None if fault is None else Fault(**fault)})


class Size(NamedTuple):
    """How many processes an attempt has."""

    nodes: int
    local: int
    """Processes on each machine."""

    @property
    def world(self) -> int:
        return self.nodes * self.local


@dataclass(frozen=True)
class SizeRange:
    """The sizes that a run may have."""

    nodes: tuple[int, int]
    """The least and the most machines."""
    local: tuple[int, int]
    """The least and the most processes on each machine."""
    check: Callable[[Size], str | None] = lambda size: None
    """Returns why the run cannot have a size; None if it can."""

    @property
    def world(self) -> int:
        """The most processes."""
        return self.nodes[1] * self.local[1]

    @classmethod
    def of(cls, size: Size) -> SizeRange:
        return cls((size.nodes, size.nodes), (size.local, size.local))

    def find_largest(self, nodes: int, local: int | None = None) -> Size | None:
        """Return the largest size on so many machines, with at most `local` processes on each."""
        most = self.local[1] if local is None else min(max(local, self.local[0]), self.local[1])
        sizes = [
            Size(n, k)
            for n in range(min(nodes, self.nodes[1]), self.nodes[0] - 1, -1)
            for k in range(most, self.local[0] - 1, -1)
        ]
        for size in sorted(sizes, key=lambda one: -one.world):
            if self.check(size) is None:
                return size
        return None

    def describe_refusal(self, nodes: int) -> str:
        """Return why no size on so many machines will do."""
        largest = Size(min(nodes, self.nodes[1]), self.local[1])
        return f"{largest.world} processes: {self.check(largest)}"


class Finish(NamedTuple):
    """The run is over."""

    code: int
    reason: str = ""
    """Why no other attempt follows, where that must be said."""


@dataclass
class RunDirector:
    """Counts the attempts of one run, and decides after each."""

    folder: Path
    range: SizeRange
    restarts: int
    """How often the run may start again after a failure."""
    attempt: int = -1
    _restarted: int = 0
    _faults: list[Fault] = field(default_factory=list)
    _size: Size | None = None

    def choose(self, nodes: int) -> Size | None:
        """Return the size of the next attempt on so many machines; None if none will do."""
        return self.range.find_largest(nodes)

    def begin(self, size: Size) -> int:
        """Count an attempt of this size, and return its number."""
        self.attempt += 1
        self._size = size
        return self.attempt

    def judge(self, outcomes: list[Outcome], ending_seconds: float | None = None) -> Finish | None:
        """Decide, from how an attempt ended on each machine; None: another attempt follows.

        The first outcome with a fault counts, unless a later one is a crash: that of the others is its consequence.
        """
        stopped = next((one for one in outcomes if one.is_stopped and one.code), None)
        faults = [one.fault for one in outcomes if one.fault is not None]
        if stopped is not None and not faults:
            has_begun = any(one.step is not None for one in outcomes)
            cause = f"A signal ended the run {'before it could save' if has_begun else 'during set-up'}"
            close_run(self.folder, stopped.step, cause, "failed" if has_begun else "stopped")
            return Finish(stopped.code)
        if not faults:
            return Finish(max((one.code for one in outcomes), default=0))
        fault = min(faults, key=lambda one: not one.is_crash)
        assert self._size is not None
        began = time.time() - (ending_seconds or 0.0)
        ending = None if ending_seconds is None else round(ending_seconds, 3)
        where = (self._size.world, fault.rank, fault.step)
        line = FailureLine(self.attempt, began, *where, fault.cause, fault.message[-_MAX_MESSAGE:], ending)
        reason = self._find_reason_to_end(fault, [rank for one in outcomes for rank in one.unkillable])
        is_stopped = any(one.is_stopped for one in outcomes)
        if reason is None and not is_stopped:
            append_failure(self.folder, line)
            self._restarted += 1
            return None
        if fault.is_refusal and fault.step is None and not self._restarted:
            return Finish(fault.code)  # nothing has begun: the folder may be that of another run
        append_failure(self.folder, line)
        if reason:
            append_line(self.folder, {"kind": "end", "time": time.time(), "step": fault.step, "cause": reason})
        at = f" in step {fault.step}" if fault.step is not None else ""
        close_run(self.folder, fault.step, f"{fault.cause}{at}{f'. {reason}' if reason else ''}")
        return Finish(fault.code, reason or "")

    def describe_restart(self) -> str:
        cause = f"{self._faults[-1].cause}: " if self._faults else ""
        return f"{cause}restart {self._restarted} of {self.restarts}, from the newest checkpoint"

    def _find_reason_to_end(self, fault: Fault, unkillable: list[int]) -> str | None:
        """Return why no attempt may follow; "" if that need not be said, None if one may."""
        self._faults.append(fault)
        if fault.is_refusal or not self.restarts:
            return ""
        if unkillable:
            ranks = ", ".join(map(str, unkillable))
            return f"Rank {ranks} cannot be killed, because the kernel holds it: a restart would write beside it."
        latest = [one.signature for one in self._faults[-SAME_FAULTS:]]
        if len(latest) == SAME_FAULTS and len(set(latest)) == 1:
            where = f"step {fault.step}" if fault.step is not None else "set-up"
            return f"The same fault has occurred {SAME_FAULTS} times in {where}: another restart would not help."
        if self._restarted >= self.restarts:
            return f"All {self.restarts} restarts are used up (launch.restarts)."
        return None


