"""What this rank is doing now: plain attributes that the training thread writes and the heartbeat thread reads.

A write costs some 30 ns and takes no lock. Nothing here needs a process group.
"""

from __future__ import annotations

import threading
import zlib
from typing import Any

_MASK = 2**61 - 1
_REMEMBERED = 8  # collectives that a message can show


class Activity:
    """Where the training thread is. One for each process: `here`."""

    __slots__ = (
        "phase", "step", "stage", "microbatch", "operation", "waits", "peer", "progress", "steps", "seconds",
        "data_seconds", "thread", "collectives", "last_collectives", "asymmetric_groups",
    )  # fmt: skip

    def __init__(self) -> None:
        self.phase = "setup"
        """setup, data, step, pause (an evaluation or a save), between, end."""
        self.step = 0
        """The step that is running, or was done last."""
        self.stage: int | None = None
        self.microbatch: int | None = None
        self.operation = ""
        """What it does itself, in words: `forward`."""
        self.waits = ""
        """The operation of several ranks that it waits in; empty while it waits for none."""
        self.peer: int | None = None
        """The one rank that it waits for, if it is one."""
        self.progress = 0
        """Grows with everything that is done."""
        self.steps = 0
        """Steps since the start of this process."""
        self.seconds = 0.0
        """The median of the last steps."""
        self.data_seconds = 0.0
        """Seconds since the start that it waited for data."""
        self.thread = threading.get_ident()
        self.collectives = 0
        """A rolling hash of the collectives of all ranks, with their shapes, in order."""
        self.last_collectives: list[str] = []
        self.asymmetric_groups: set[str] = set()
        """Names of process groups in which ranks do not do the same: those that carry single messages."""

    def begin_run(self, step: int) -> None:
        """Forget an earlier run of this process, in which other ranks may not have taken part."""
        self.step, self.steps, self.seconds = step, 0, 0.0
        self.collectives, self.last_collectives = 0, []

    def enter(self, phase: str) -> None:
        """Begin another phase."""
        self.phase, self.operation = phase, ""
        self.stage = self.microbatch = None
        self.progress += 1

    def begin_action(self, operation: str, stage: int, microbatch: int) -> None:
        """Begin an action of a pipeline's schedule."""
        self.operation, self.stage, self.microbatch = operation, stage, microbatch
        self.progress += 1

    def begin_wait(self, operation: str, peer: int | None = None) -> None:
        """Say that this rank waits for others, or for one of them, from here to `end_wait`."""
        self.waits, self.peer = operation, peer

    def end_wait(self) -> None:
        self.waits = ""
        self.progress += 1

    def note_collective(self, name: str, size: int) -> None:
        """Remember a collective in which all ranks of the run take part."""
        text = f"{name} [{size}]"
        self.collectives = (self.collectives * 1_000_003 + zlib.crc32(text.encode())) & _MASK
        self.last_collectives.append(text)
        del self.last_collectives[:-_REMEMBERED]

    def describe(self) -> dict[str, Any]:
        """Return what a heartbeat says of it."""
        names = ("phase", "step", "stage", "microbatch", "operation", "waits", "peer", "steps", "seconds")
        return {name: getattr(self, name) for name in names}


here = Activity()
"""Of this process."""
