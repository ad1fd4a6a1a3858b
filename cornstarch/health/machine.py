"""What the operating system says of processes and threads: stopped, running, how much CPU time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def identify_processes() -> str:
    """Return what is the same for two processes that see one another in /proc."""
    with suppress(OSError):
        return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


class ProcessState(NamedTuple):
    """A process as /proc shows it."""

    letter: str
    """R: runs; S: sleeps; D: waits for a disk; T: stopped by a signal; empty: it has ended."""
    cpu: float
    """Seconds of CPU time."""


def read_process(pid: int) -> ProcessState:
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ProcessState("", 0.0)
    fields = content[content.rindex(")") + 2 :].split()  # the name before may contain anything
    letter = "" if fields[0] in "ZX" else fields[0].upper()
    return ProcessState(letter, (int(fields[11]) + int(fields[12])) / _TICKS)


class ThreadTimes(NamedTuple):
    """Seconds of a thread since it began."""

    cpu: float
    delayed: float
    """That it was ready to run and had to wait for a core."""


class ThreadClock:
    """Reads the times of a thread of this process, by its native id; the file stays open, because it is read often."""

    def __init__(self, thread: int) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> ThreadTimes:
        """Return the times; zeros where the system does not tell them."""
        if self._file is not None:
            with suppress(OSError, ValueError):
                cpu, delayed, _ = os.pread(self._file, 128, 0).split()
                return ThreadTimes(int(cpu) / 1e9, int(delayed) / 1e9)
        return ThreadTimes(0.0, 0.0)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
