"""What a rank posts of itself: where it is, whether it moves, and if not, in which operation and at which line."""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from cornstarch.compat import list_groups, pending_collectives, sequence_numbers
from cornstarch.health.machine import ThreadClock, ThreadTimes, identify_processes, read_process
from cornstarch.parallel.activity import Activity

State = Literal["moves", "waits", "data", "compiles", "saves", "computes", "stands"]
TICK = 0.25
"""Seconds between looks at this process. A longer gap, without CPU time, is one in which it was stopped."""
_COMPUTING = 0.1  # of the time that the thread ran, or was ready to
_RUNNING = 0.04  # of the time that a neighbour ran: its heartbeat alone takes less
_FRAMES = 4  # of the stack in a message
_COMPILING = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/triton/")
_SAVING = ("/cornstarch/checkpoint/",)
_OTHERS = (f"{os.sep}threading.py", f"{os.sep}contextlib.py")


@dataclass
class Heartbeat:
    """One post of a rank."""

    rank: int
    number: int = 0
    """Grows with every post."""
    phase: str = "setup"
    step: int = 0
    stage: int | None = None
    microbatch: int | None = None
    operation: str = ""
    waits: str = ""
    peer: int | None = None
    steps: int = 0
    seconds: float = 0.0
    """The median of the last steps."""
    idle: float = 0.0
    """Seconds since it last moved."""
    state: State = "moves"
    stack: list[str] = field(default_factory=list)
    """The innermost lines of the training thread, if it does not move."""
    sequences: dict[str, int] = field(default_factory=dict)
    """How many collectives it began, by process group, if it does not move."""
    pending: list[str] = field(default_factory=list)
    """The collectives that it began and that are not complete, if it does not move."""
    busy: float = 0.0
    """Seconds in steps in which it did not wait for other ranks."""
    neighbour: tuple[int, str] | None = None
    """Another rank of the same machine, and the state of its process."""
    has_left: bool = False
    """Whether it needs no watching any more."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, content: bytes | str) -> Heartbeat:
        values = json.loads(content)
        if values["neighbour"] is not None:
            values["neighbour"] = tuple(values["neighbour"])
        return cls(**values)


@dataclass(frozen=True)
class RankProcess:
    """Where a rank runs."""

    host: str
    pid: int
    machine: str
    """Equal for ranks that see one another's processes."""

    @classmethod
    def here(cls) -> RankProcess:
        return cls(os.uname().nodename, os.getpid(), identify_processes())


class Pulse:
    """Looks at this process several times a second and makes its heartbeats. Belongs to the heartbeat thread.

    Args:
        activity: What the training thread says.
        rank: This rank.
        native: The native id of the training thread.
    """

    def __init__(self, activity: Activity, rank: int, native: int) -> None:
        self._activity, self._rank = activity, rank
        self._training, self._own = ThreadClock(native), ThreadClock(threading.get_native_id())
        self._number = 0
        self._last_progress: tuple[int, int] = (-1, 0)
        now = time.monotonic()
        self._moved, self._tick = now, now
        self._moved_times = self._times = self._training.read()
        self._own_times = self._own.read()
        self._cpu = time.process_time()
        self._data = activity.data_seconds
        self._busy = 0.0
        self._group_keys: dict[str, str] = {}
        self._neighbour: tuple[int, int] | None = None
        self._neighbour_cpu: deque[tuple[float, float]] = deque(maxlen=5)

    def watch_neighbour(self, rank: int, pid: int) -> None:
        """From now on, say in every heartbeat how the process of another rank of this machine is."""
        self._neighbour = rank, pid

    def close(self) -> None:
        self._training.close()
        self._own.close()

    def tick(self) -> float:
        """Look at this process; return how many seconds it was stopped since the last look."""
        now, cpu = time.monotonic(), time.process_time()
        own, times = self._own.read(), self._training.read()
        gap = now - self._tick - TICK
        stopped = gap - (cpu - self._cpu) - (own.delayed - self._own_times.delayed)
        stopped = stopped if stopped > TICK / 2 else 0.0
        activity = self._activity
        if activity.phase in ("step", "data"):
            self._busy += _add(times) - _add(self._times) + stopped + activity.data_seconds - self._data
        self._tick, self._cpu, self._own_times, self._times = now, cpu, own, times
        self._data = activity.data_seconds
        self._note_progress(now)
        if stopped:  # it could not move
            self._moved = max(self._moved, min(now, self._moved + stopped))
        return stopped

    def _note_progress(self, now: float) -> None:
        progress = self._activity.progress, sum(sequence_numbers())
        if progress != self._last_progress:
            self._last_progress, self._moved, self._moved_times = progress, now, self._times

    def beat(self, stale: float) -> Heartbeat:
        """Return the next heartbeat; with details if the rank has not moved for `stale` seconds."""
        now, activity = time.monotonic(), self._activity
        self._note_progress(now)
        self._number += 1
        idle = now - self._moved
        found = Heartbeat(self._rank, self._number, busy=self._busy, idle=idle, **activity.describe())
        found.neighbour = self._look_at_neighbour(now)
        if idle > stale:
            files, found.stack = read_stack(activity.thread)
            found.sequences, found.pending = self.count_collectives(), pending_collectives()
            ran = (_add(self._training.read()) - _add(self._moved_times)) / idle
            found.state = find_state(activity, files, ran, bool(found.pending))
        return found

    def count_collectives(self) -> dict[str, int]:
        """Return how many collectives this rank began, by a key of the process group that is the same on its ranks."""
        # Names of groups count the groups of a process, which are not the same everywhere.
        found: dict[str, int] = {}
        for name, ranks, count in list_groups():
            if name in self._activity.asymmetric_groups:
                continue
            if name not in self._group_keys:
                key = f"{len(ranks)}/{zlib.crc32(str(ranks).encode()):08x}"
                self._group_keys[name] = f"{key}/{sum(one.startswith(key) for one in self._group_keys.values())}"
            found[self._group_keys[name]] = count
        return found

    def _look_at_neighbour(self, now: float) -> tuple[int, str] | None:
        if self._neighbour is None:
            return None
        rank, pid = self._neighbour
        state = read_process(pid)
        self._neighbour_cpu.append((now, state.cpu))
        letter = state.letter
        if letter == "S":  # the process is named by its first thread: others may run
            (began, before), elapsed = self._neighbour_cpu[0], now - self._neighbour_cpu[0][0]
            letter = "R" if elapsed > 0 and (state.cpu - before) / (now - began) > _RUNNING else "S"
        return rank, letter or "ended"


def _add(times: ThreadTimes) -> float:
    return times.cpu + times.delayed


def find_state(activity: Activity, files: list[str], ran: float, has_pending: bool) -> State:
    """Return what a rank does that has not moved for a while.

    Args:
        activity: What its training thread says.
        files: The files of that thread's stack.
        ran: The fraction of the time that the thread ran, or was ready to.
        has_pending: Whether a collective that it began is not complete.
    """
    if activity.waits:
        return "waits"
    if activity.phase == "data":
        return "data"
    if any(part in name for name in files for part in _COMPILING):
        return "compiles"
    if any(part in name for name in files for part in _SAVING):
        return "saves"
    if ran > _COMPUTING:
        return "computes"
    return "waits" if has_pending else "stands"


def read_stack(thread: int) -> tuple[list[str], list[str]]:
    """Return the files of a thread's stack, and its innermost lines in words."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return [], []
    frames = traceback.extract_stack(frame)
    lines = [f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in reversed(frames)
             if not one.filename.endswith(_OTHERS)]  # fmt: skip
    return [one.filename for one in frames], lines[:_FRAMES]


class StepTimer:
    """The median time of the last steps, for `Activity.seconds`."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last: deque[float] = deque(maxlen=32)

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> float:
        """Return the median, this step included; only a few steps are sorted each time."""
        if self._began is not None:
            self._last.append(time.monotonic() - self._began)
        return statistics.median(self._last) if self._last else 0.0
