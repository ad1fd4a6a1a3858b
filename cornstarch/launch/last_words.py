"""What a process that failed said last: its error out of its log, without what surrounds it."""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass
from pathlib import Path

_READ = 128 * 1024  # bytes from the end of a log
_LINES = 30
_WITHOUT_ERROR = 8

_TRACEBACK = "Traceback (most recent call last):"
# `ConfigError: …` as the command line prints it, or the last line of a traceback of one of our own errors.
_TOLD = re.compile(r"^(?:cornstarch(?:\.\w+)+\.)?(?P<name>[A-Z]\w*Error): ")
_OWN = re.compile(r"^cornstarch(?:\.\w+)+\.[A-Z]\w*Error: ")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
# torch's C++ side: lines of its log, and the stacks it adds to messages.
_NOISE = re.compile(r"^\[[EWIF]\d{4} |^frame #\d+|^Exception raised from |^<omitting python")
_RANK_MARK = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before every line of a traceback
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class LastWords:
    """The end of a log."""

    text: str
    """The error, or the last lines if none is to be seen."""
    is_told: bool = False
    """Whether it is a message that was written for the user, without a traceback."""


def read_last_words(log: Path, start: int = 0) -> LastWords:
    """Return what a log says last, from byte `start` on."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - _READ))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return LastWords(f"({log} cannot be read: {error.strerror})")
    return last_words(text)


def last_words(text: str) -> LastWords:
    """Return what a process said last."""
    lines = [_cleaned(line) for line in text.split("\n")]
    lines = [line for line in lines if not _NOISE.match(line)]
    traceback = max((i for i, line in enumerate(lines) if line.strip() == _TRACEBACK), default=None)
    told = max((i for i, line in enumerate(lines) if _TOLD.match(line)), default=None)
    if traceback is None:
        if told is None:
            return LastWords("\n".join([line for line in lines if line.strip()][-_WITHOUT_ERROR:]))
        return LastWords(_joined(lines[told:]), is_told=True)
    raised = next((i for i in range(traceback + 1, len(lines)) if _EXCEPTION.match(lines[i])), len(lines))
    if told is not None and told >= raised and (_OWN.match(lines[told]) or (told > raised and _is_ours(lines[told]))):
        message = _joined(lines[told:])
        return LastWords(message[message.index(_name(message)) :], is_told=True)
    return LastWords(_joined(lines[traceback:]))


def _cleaned(line: str) -> str:
    """Return a line as a terminal would show it: after the last return of the carriage, without colours."""
    return _RANK_MARK.sub("", _COLOUR.sub("", line.rstrip("\r").rsplit("\r", 1)[-1])).rstrip()


def _name(line: str) -> str:
    found = _TOLD.match(line)
    return found["name"] if found else ""


def _is_ours(line: str) -> bool:
    """Whether it is no error of Python's own, such as a message may quote on a line by itself."""
    return not hasattr(builtins, _name(line))


def _joined(lines: list[str]) -> str:
    """Return lines as a text; of a long one the beginning and, above all, the end."""
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    if len(lines) > _LINES:
        lines = [*lines[:2], "  …", *lines[3 - _LINES :]]
    return "\n".join(lines)
