"""Decides about a run's attempts: whether another one follows, and with how many processes. No torch, no processes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cornstarch.launch.attempt_record import FailureLine, append_failure, append_line, close_run

SCALE = "scale"
"""A file in the run's folder: the number of processes on each machine with which an elastic run is to go on."""
SAME_FAULTS = 3  # a fault that occurs so often in the same step would occur for ever
_MAX_MESSAGE = 4000  # characters
_PLACE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")  # addresses, ports, times, ranks: they differ every time


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
        return f"{places[-1] if places else ''} {_NUMBER.sub('…', lines[-1])}", self.step


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
    is_resized: bool = False
    """Whether the supervisor had its workers save and end, to go on with another number of processes."""

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
    def is_elastic(self) -> bool:
        return self.nodes[0] < self.nodes[1] or self.local[0] < self.local[1]

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
    _told: int = 0
    _faults: list[Fault] = field(default_factory=list)
    _size: Size | None = None
    _scale: int | None = None
    _nodes: int = 1

    def choose(self, nodes: int) -> Size | None:
        """Return the size of the next attempt on so many machines; None if none will do.

        That is the largest, or what the file `scale` in the run's folder asks for. After two failures in succession
        without a step in between, it is the next smaller one.
        """
        found = self.range.find_largest(nodes, self._read_scale())
        last = self._faults[-2:]
        is_stuck = len(last) == 2 and (last[1].step or 0) <= (last[0].step or 0)
        if is_stuck and self._size is not None and found is not None and found.world >= self._size.world:
            found = self.range.find_largest(nodes, self._size.local - 1) or found
        return found

    def wants_other_size(self, nodes: int) -> bool:
        """Return whether the attempt that is running is to go on with another size."""
        if not self.range.is_elastic or self._size is None:
            return False
        asked = self._read_scale()
        if asked == self._scale and nodes == self._nodes:
            return False
        self._scale, self._nodes = asked, nodes
        return self.range.find_largest(nodes, asked) not in (None, self._size)

    def _read_scale(self) -> int | None:
        """Return how many processes the file `scale` asks for on each machine; None without a file that can be read."""
        try:
            return int((self.folder / SCALE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def begin(self, size: Size, nodes: int = 1) -> int:
        """Count an attempt of this size, with so many machines there, and return its number."""
        self.attempt += 1
        self._scale, self._nodes = self._read_scale(), nodes
        if self._size not in (None, size):
            append_line(self.folder, {"kind": "resized", "time": time.time(), "ranks": size.world})
        self._size = size
        return self.attempt

    def decide(self, outcomes: list[Outcome], ending_seconds: float | None = None) -> Finish | None:
        """Decide, from how an attempt ended on each machine; None: another attempt follows.

        The first outcome with a fault counts, unless a later one is a crash: that of the others is its consequence.
        """
        if any(one.is_resized for one in outcomes) and not any(one.is_stopped or one.fault for one in outcomes):
            status = _read_status(self.folder)
            return Finish(0) if status == "finished" else None
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

    def describe_restart(self, size: Size) -> str:
        """Say how the run goes on; empty for its first attempt."""
        if self.attempt < 0:
            return ""
        what = f"with {size.world} instead of {self._size.world} processes" if self._size not in (None, size) else ""
        if self._told == self._restarted:
            return f"goes on {what}".rstrip()
        self._told = self._restarted
        return f"restart {self._restarted} of {self.restarts}, from the newest checkpoint {what}".rstrip()

    @property
    def cause(self) -> str:
        """The cause of the last failure."""
        return self._faults[-1].cause if self._faults else ""

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


def _read_status(folder: Path) -> str:
    from cornstarch.config.run_folder import RunFolder

    return str(RunFolder(folder).read_summary().get("status"))
