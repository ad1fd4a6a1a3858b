"""The error at the end of a log, without the lines around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornstarch.launch.failure_report import LoggedError, find_error, read_logged_error

TRACEBACK = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: boom
  with more"""

LOADER = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "b.py", line 1, in g
ValueError: boom"""

CASES = [
    ("nothing", "", LoggedError("")),
    ("no error", "\n".join(map(str, range(20))) + "\n\n", LoggedError("\n".join(map(str, range(12, 20))))),
    ("a message", "warming up\nConfigError: a = 3\n  Use 4.\n", LoggedError("ConfigError: a = 3\n  Use 4.", True)),
    ("a traceback", f"before\n{TRACEBACK}\n", LoggedError(TRACEBACK)),
    ("the last traceback", f"KeyError\n{TRACEBACK}\nDuring …\n\n{TRACEBACK}\n", LoggedError(TRACEBACK)),
    (
        "our own error, raised",
        "Traceback (most recent call last):\n  File …\ncornstarch.train.failure.TrainingError: NaN\n  Try: less.\n",
        LoggedError("TrainingError: NaN\n  Try: less.", True),
    ),
    ("a message after a traceback", f"{TRACEBACK}\nConfigError: a = 3\n", LoggedError("ConfigError: a = 3", True)),
    ("an error in an error", LOADER, LoggedError(LOADER)),
    (
        "torch's marks and stacks",
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File …\n[rank1]: RuntimeError: no\n"
        "[rank1]:[W1115 07:40:59.1 ProcessGroup.cpp:1] warning\n[E1115 07:40:59.1 socket.cpp:1] error\n"
        "Exception raised from f (most recent call first):\nframe #0: c10::Error\n",
        LoggedError("Traceback (most recent call last):\n  File …\nRuntimeError: no"),
    ),
    ("a progress bar", "10%\r20%\r\x1b[32m30%\x1b[0m\r\nend\r\n", LoggedError("30%\nend")),
]


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_find_error(text: str, expected: LoggedError) -> None:
    assert find_error(text) == expected


def test_long_errors_are_shortened_in_the_middle() -> None:
    frames = [f'  File "a.py", line {number}, in f' for number in range(1000)]
    text = find_error("\n".join(["Traceback (most recent call last):", *frames, "RecursionError: too deep"])).text
    assert len(text.splitlines()) == 30
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("in f\nRecursionError: too deep")


def test_only_the_end_of_the_latest_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "rank_1.log"
    log.write_bytes(b"ConfigError: of an earlier start\n" + b"\xff\xfe\n" * 200_000 + b"the end\n")
    assert read_logged_error(log).text.endswith("the end")
    assert not read_logged_error(log, start=33).is_message
    assert read_logged_error(log, start=log.stat().st_size) == LoggedError("")
    assert "cannot be read: No such file" in read_logged_error(tmp_path / "none").text
