"""Signals that end a run: after the step that is running, so that it can save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopSignal:
    """Whether this process was told to end."""

    def __init__(self) -> None:
        self._signal: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether there was a signal."""
        return self._signal is not None

    @property
    def by_keyboard(self) -> bool:
        """Whether it was Ctrl-C."""
        return self._signal == signal.SIGINT

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Note SIGTERM, and the first Ctrl-C, while a block runs; a second Ctrl-C ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = number

        before: dict[int, Any] = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
