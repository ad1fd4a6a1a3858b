"""A process's messages, passed on a moment later than they come, so that some can still be kept back."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

_DELAY = 1.0  # seconds: longer than it takes from one process's error to the news of its end
_CHUNK = 64 * 1024
_STDERR = 2


class HeldBack:
    """Copies a process's stderr into its log at once, and to ours after a second.

    When another process fails, rank 0 fails too, a moment later, with an error that says nothing. By then it is known
    that it was not the first, and what it said in the end is left out.

    Args:
        log: Its log.
        records: A folder. As soon as a process has written there that it failed, nothing more is passed on.
    """

    def __init__(self, log: Path, records: Path) -> None:
        self._records = records
        self._source, self.end = os.pipe()
        self._log = log.open("ab", buffering=0)
        self._pending: deque[tuple[float, bytes]] = deque()
        self._lock = threading.Lock()
        self._held = False
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        """Begin to copy. The process has its end by now."""
        os.close(self.end)
        self._thread.start()

    def hold(self) -> None:
        """Pass on nothing more before `release`."""
        with self._lock:
            self._held = True

    def drain(self) -> None:
        """Read what a process that has ended still said. Its children may have its stderr: no end of file then."""
        self._thread.join(_DELAY)

    def release(self) -> None:
        """Pass on all that was held back. The process has ended."""
        self.drain()
        with self._lock:
            self._pass_on(float("inf"))

    def _copy(self) -> None:
        news = select.poll()
        news.register(self._source, select.POLLIN)
        while True:
            ready = news.poll(self._wait())
            data = os.read(self._source, _CHUNK) if ready else b""
            if ready and not data:
                break
            with self._lock:
                if data:
                    self._log.write(data)
                    self._pending.append((time.time(), data))
                self._held = self._held or _has_files(self._records)
                if not self._held:
                    self._pass_on(time.time() - _DELAY)
        self._log.close()
        os.close(self._source)

    def _wait(self) -> float | None:
        """Return in how many milliseconds something is to be passed on; None if nothing is."""
        with self._lock:
            if not self._pending or self._held:
                return None
            return 1000 * max(0.0, self._pending[0][0] + _DELAY - time.time())

    def _pass_on(self, until: float) -> None:
        while self._pending and self._pending[0][0] <= until:
            _write(self._pending.popleft()[1])


def _has_files(folder: Path) -> bool:
    with suppress(OSError):  # it is removed when all is over
        return any(folder.iterdir())
    return False


def _write(data: bytes) -> None:
    with suppress(OSError):  # nobody reads our stderr any more
        while data:
            data = data[os.write(_STDERR, data) :]
