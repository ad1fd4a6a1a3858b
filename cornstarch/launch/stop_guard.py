"""Answers SIGTERM where the training loop cannot: during set-up, and the second time. No torch here."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from cornstarch.config.run_folder import RunFolder
from cornstarch.errors import ConfigError

STOPPED = 128 + signal.SIGTERM
IN_SETUP = "SIGTERM during set-up: training had not begun and nothing is lost. The same command starts it again."
WITHOUT_SAVING = "A second SIGTERM: ended at once, without saving. The same command resumes from the newest checkpoint."
_PATIENCE = 2.0  # seconds for the training loop to end by itself after the second signal


class StopGuard:
    """Handles SIGTERM of a training process until `StopSignal` does, and ends the process if that hangs.

    A handler in Python runs when the main thread returns to Python. It may not for minutes: it compiles, or waits for
    other ranks. So a thread is told of every signal, too.
    """

    def __init__(self, folder: Path, is_main_process: bool) -> None:
        self._folder, self._is_main_process = RunFolder(folder), is_main_process
        self._process, self._count = os.getpid(), 0
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._end_lock = threading.Lock()

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Answer signals while a block runs."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            yield
            return
        handle = self._handle  # one object: it is compared with what is set
        self._handler = handle
        before = signal.signal(signal.SIGTERM, handle)
        wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        os.set_blocking(self._pipe[0], True)
        threading.Thread(target=self._watch, name="stop-guard", daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, before)
            os.close(self._pipe[1])  # the thread ends

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data worker, which has inherited the handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._end(IN_SETUP)

    def _watch(self) -> None:
        with suppress(OSError):
            while received := os.read(self._pipe[0], 64):
                self._count += received.count(signal.SIGTERM)
                if self._count and signal.getsignal(signal.SIGTERM) is self._handler:
                    self._end(IN_SETUP)
                if self._count >= 2:
                    time.sleep(_PATIENCE)
                    self._end(WITHOUT_SAVING)
        os.close(self._pipe[0])

    def _end(self, reason: str) -> None:
        # The handler and the thread may come here at the same time: one of them speaks, and the other waits for it.
        if not self._end_lock.acquire(blocking=False):
            time.sleep(_PATIENCE)
        elif self._is_main_process:
            with suppress(OSError, ValueError):
                print(reason, file=sys.stderr, flush=True)
            if reason is WITHOUT_SAVING:
                with suppress(ConfigError, OSError):
                    summary = self._folder.read_summary()
                    self._folder.write_summary({**summary, "status": "failed", "ended": time.time(), "cause": reason})
        os._exit(STOPPED)
