"""Which failure of a run is shown: the first one, without the errors that follow from it. No torch in this process.

When one process fails, its connections close and the others fail a moment later with errors that explain nothing. So a
failing process records when its error was raised (`record_failure`), rank 0's stderr reaches the terminal with a delay
(`DelayedStderr`), and the error of the first process to fail is read from its log (`read_logged_error`).
"""

from __future__ import annotations

import builtins
import json
import os
import re
import select
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cornstarch.files import open_regular

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's variable: the file in which a process records why and when it failed."""
_RECORDED = "cornstarch_recorded"  # set on an error once it is recorded

_DELAY = 1.0  # seconds; longer than from an error in one process until its exit is noticed
_CHUNK = 64 * 1024
_STDERR = 2

_TAIL_BYTES = 128 * 1024
# Messages of failures that may not occur again, although the command ends as it does after a user's mistake: ranks
# that did not find each other, and ranks that hang, are out of step or hold other weights.
_NO_MISTAKE = re.compile(r"(?:RendezvousError|RankError): ")
_MAX_LINES = 30
_LINES_WITHOUT_ERROR = 8

_TRACEBACK = "Traceback (most recent call last):"
# `ConfigError: …` as the command line prints it, or the last line of a traceback of one of our own errors.
_MESSAGE = re.compile(r"^(?:cornstarch(?:\.\w+)+\.)?(?P<name>[A-Z]\w*Error): ")
_OWN_ERROR = re.compile(r"^cornstarch(?:\.\w+)+\.[A-Z]\w*Error: ")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
# torch's C++ side: lines of its log, and the stacks it adds to messages.
_NOISE = re.compile(r"^\[[EWIF]\d{4} |^frame #\d+|^Exception raised from |^<omitting python")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before every line of a traceback
_COLOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def record_failure(error: BaseException) -> None:
    """Record why and when this process failed, where torchrun and `LocalLauncher` look for it. Once per error."""
    path = os.environ.get(ERROR_FILE)
    if not path or _RECORDED in error.__dict__:
        return
    error.__dict__[_RECORDED] = True
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    record = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(record, file)


class DelayedStderr:
    """Copies a process's stderr to its log at once, and to the terminal a second later.

    If another process fails first, rank 0's own error is only a consequence. By the time it would be printed, the first
    failure is known, and rank 0's is left out. Once a process has recorded its failure in the folder `records`, nothing
    more is printed until `flush`.
    """

    def __init__(self, log: Path, records: Path) -> None:
        self._records = records
        self._source, self.write_end = os.pipe()
        self._log = os.fdopen(open_regular(log, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)
        self._pending: deque[tuple[float, bytes]] = deque()
        self._lock = threading.Lock()
        self._is_paused = False
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        """Begin to copy. Call it after the process has inherited `write_end`."""
        os.close(self.write_end)  # or the pipe would never reach its end of file
        self._thread.start()

    def pause(self) -> None:
        with self._lock:
            self._is_paused = True

    def drain(self) -> None:
        """Read the rest of the output of a process that has ended."""
        self._thread.join(_DELAY)  # bounded: children of the process may keep the pipe open

    def flush(self) -> None:
        """Print everything that is pending. The process has ended."""
        self.drain()
        with self._lock:
            self._print_until(float("inf"))

    def _copy(self) -> None:
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        while True:
            with self._lock:
                next_ms = None  # until there is something to read
                if self._pending and not self._is_paused:
                    next_ms = 1000 * max(0.0, self._pending[0][0] + _DELAY - time.time())
            ready = poll.poll(next_ms)
            data = os.read(self._source, _CHUNK) if ready else b""
            if ready and not data:
                break
            with self._lock:
                if data:
                    self._log.write(data)
                    self._pending.append((time.time(), data))
                with suppress(OSError):  # the folder is removed at the end of the launch
                    self._is_paused = self._is_paused or any(self._records.glob("*.json"))
                if not self._is_paused:
                    self._print_until(time.time() - _DELAY)
        self._log.close()
        os.close(self._source)

    def _print_until(self, until: float) -> None:
        while self._pending and self._pending[0][0] <= until:
            data = self._pending.popleft()[1]
            with suppress(OSError):  # nobody reads our stderr any more
                while data:
                    data = data[os.write(_STDERR, data) :]


@dataclass(frozen=True)
class LoggedError:
    text: str  # the error, or the last lines if the log has none
    is_message: bool = False  # whether the error is a message for the user, without a traceback

    @property
    def is_fault(self) -> bool:
        """Whether the message is about the processes and not about what the user wants: a restart may help."""
        return self.is_message and _NO_MISTAKE.match(self.text) is not None


def read_logged_error(log: Path, start: int = 0) -> LoggedError:
    """Return the error at the end of a log, from byte `start` on."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return LoggedError(f"({log} cannot be read: {error.strerror})")
    return find_error(text)


def find_error(text: str) -> LoggedError:
    """Return the error at the end of a process's output."""
    # Lines as a terminal would show them: after the last carriage return, without colors.
    shown = (_COLOR.sub("", line.rstrip("\r").rsplit("\r", 1)[-1]) for line in text.split("\n"))
    lines = [_RANK_PREFIX.sub("", line).rstrip() for line in shown]
    lines = [line for line in lines if not _NOISE.match(line)]
    last_traceback = max((i for i, line in enumerate(lines) if line.strip() == _TRACEBACK), default=None)
    message = max((i for i, line in enumerate(lines) if _MESSAGE.match(line)), default=None)
    if last_traceback is None:
        if message is None:
            return LoggedError("\n".join([line for line in lines if line.strip()][-_LINES_WITHOUT_ERROR:]))
        return LoggedError(_shorten(lines[message:]), is_message=True)
    raised = next((i for i in range(last_traceback + 1, len(lines)) if _EXCEPTION.match(lines[i])), len(lines))
    if message is not None and message >= raised:
        name = _MESSAGE.match(lines[message])["name"]  # type: ignore[index]
        # A message may quote one of Python's own errors on a line by itself; that line is no error of its own.
        if _OWN_ERROR.match(lines[message]) or (message > raised and not hasattr(builtins, name)):
            shortened = _shorten(lines[message:])
            return LoggedError(shortened[shortened.index(name) :], is_message=True)
    return LoggedError(_shorten(lines[last_traceback:]))


def _shorten(lines: list[str]) -> str:
    """Join lines to a text; of a long one keep the beginning and, above all, the end."""
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    if len(lines) > _MAX_LINES:
        lines = [*lines[:2], "  …", *lines[3 - _MAX_LINES :]]
    return "\n".join(lines)
