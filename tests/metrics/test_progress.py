"""What is shown fits its place: one line in a terminal of any width, plain lines in a file."""

from __future__ import annotations

import io
import math
import re
import time
from typing import Any

import pytest
from rich.console import Console

from cornstarch.metrics.progress import Progress

RECORD = {
    "kind": "train",
    "step": 120,
    "loss": 0.12341,
    "learning_rate": 9.1e-5,
    "grad_norm": None,
    "tokens_per_second": 12345.4,
    "items_per_second": {"vision": 310.2},
    "memory": 1_200_000_000,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Stream(io.StringIO):
    """Notes how much was written when it was last flushed."""

    flushed = 0

    def flush(self) -> None:
        self.flushed = self.tell()


def file_console() -> tuple[Stream, Console]:
    stream = Stream()
    return stream, Console(file=stream, force_terminal=False)


def terminal(width: int) -> tuple[Stream, Console]:
    stream = Stream()
    return stream, Console(file=stream, force_terminal=True, width=width, color_system=None, legacy_windows=False)


def run(progress: Progress, clock: Clock, record: dict[str, Any] | None = None) -> None:
    """Do twenty steps in 2.4 seconds, then show metrics."""
    for step in range(101, 121):
        clock.now += 0.12
        progress.step(step)
    progress.metrics(RECORD if record is None else record)


def test_lines_without_a_terminal() -> None:
    stream, console = file_console()
    clock = Clock()
    with Progress("auto", 400, 100, console, clock) as progress:
        assert progress.mode == "lines"
        run(progress, clock)
        assert stream.flushed == len(stream.getvalue()) > 0  # who reads a log file sees it now
        progress.log("saved [step_120] :smile:")
    line = "step 120/400  loss 0.1234  lr 9.1e-05  12,345 tokens/s  310 images/s  1.2 GB  eta 0:34"
    assert stream.getvalue() == f"{line}\nsaved [step_120] :smile:\n"


LINES: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "nothing known": ({}, None, "step 120"),
    "only a loss": ({"loss": 2}, None, "step 120  loss 2.0000"),
    "lost": ({"loss": math.nan, "learning_rate": 0.0}, None, "step 120  loss nan  lr 0"),
    "huge": ({"loss": 123456.0}, None, "step 120  loss 1.23e+05"),
    "modalities": (
        {"items_per_second": {"audio": 3.21, "vision": 12.6, "depth": 0}},
        None,
        "step 120  3.2 audio/s  13 images/s  0 depth/s",
    ),
    "not numbers": ({"loss": None, "memory": "?", "items_per_second": None}, None, "step 120"),
    "a long way": ({}, 1_000_000, "step 120/1,000,000  eta 33:19:46"),
    "done": ({}, 120, "step 120/120  eta 0:00"),
    "beyond": ({}, 100, "step 120/100  eta 0:00"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_shows_the_given_metrics(name: str) -> None:
    record, total, expected = LINES[name]
    stream, console = file_console()
    clock = Clock()
    with Progress("lines", total, 100, console, clock) as progress:
        run(progress, clock, record)
    assert stream.getvalue() == expected + "\n"


def test_long_texts_are_not_wrapped() -> None:
    stream, console = file_console()
    with Progress("lines", 5, 0, console) as progress:
        progress.log("w" * 500)
    assert stream.getvalue() == "w" * 500 + "\n"


def frames(written: str) -> list[str]:
    """Return what stood in the bar's place, one after the other, without codes for the terminal."""
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame) for frame in re.split(r"[\r\n]", written)]


SHOWN = {
    12: r"step 120/40",
    20: r"step 120/400",
    40: r"step 120/400  ━+─+  loss 0.1234",
    60: r"step 120/400  ━+─+  loss 0.1234  lr 9.1e-05  eta 0:34",
    80: r"step 120/400  ━+─+  loss 0.1234  lr 9.1e-05  12,345 tokens/s  eta 0:34",
    200: r"step 120/400  ━{12}─{28}  loss 0.1234  lr 9.1e-05  12,345 tokens/s  310 images/s  1.2 GB  eta 0:34",
}


@pytest.mark.parametrize("soft_wrap", [False, True])
@pytest.mark.parametrize("width", SHOWN)
def test_the_bar_is_one_line(width: int, soft_wrap: bool) -> None:
    stream, console = terminal(width)
    console.soft_wrap = soft_wrap
    clock = Clock()
    with Progress("auto", 400, 100, console, clock) as progress:
        assert progress.mode == "bar"
        run(progress, clock)
        progress.log("a note")
    shown = [frame for frame in frames(stream.getvalue()) if frame]
    assert max(map(len, shown)) < width
    assert re.fullmatch(SHOWN[width], shown[-1])
    assert stream.getvalue().count("\n") == 2  # the note, and the last bar


def test_without_a_total_there_is_no_bar() -> None:
    stream, console = terminal(60)
    clock = Clock()
    with Progress("bar", None, 100, console, clock) as progress:
        run(progress, clock)
    assert frames(stream.getvalue())[-2] == "step 120  loss 0.1234  lr 9.1e-05  12,345 tokens/s  1.2 GB"


def test_a_terminal_without_unicode_gets_an_ascii_bar() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=stream, force_terminal=True, width=60, color_system=None, legacy_windows=False)
    with Progress("bar", 4, 0, console) as progress:
        progress.step(2)
    stream.flush()
    stream.seek(0)
    assert "step 2/4  " + "#" * 19 + "-" * 20 + "  eta" in stream.read()


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert Progress("auto", 4, 0, terminal(60)[1]).mode == "lines"


def test_mode_none_prints_nothing() -> None:
    for stream, console in (file_console(), terminal(60)):
        clock = Clock()
        with Progress("none", 400, 100, console, clock) as progress:
            run(progress, clock)
            progress.log("a note")
        assert stream.getvalue() == ""


def test_eta_follows_the_last_minute() -> None:
    stream, console = file_console()
    clock = Clock()
    with Progress("lines", 1000, 0, console, clock) as progress:
        for step in range(1, 11):
            clock.now += 100  # slow at first
            progress.step(step)
        for step in range(11, 211):
            clock.now += 1
            progress.step(step)
        progress.metrics({"step": 210})
    assert stream.getvalue() == "step 210/1,000  eta 13:10\n"


@pytest.mark.parametrize("mode", ["lines", "none", "bar"])
def test_a_step_is_fast(mode: Any) -> None:
    _, console = terminal(80)
    with Progress(mode, 10_000, 0, console) as progress:
        start = time.process_time()
        for step in range(10_000):
            progress.step(step)
        assert (time.process_time() - start) / 10_000 < 30e-6


def test_the_cursor_comes_back_when_the_run_fails() -> None:
    stream, console = terminal(60)
    with pytest.raises(KeyError), Progress("bar", 4, 0, console):
        raise KeyError
    assert stream.getvalue().endswith("\x1b[?25h")


def test_flops_have_the_largest_fitting_unit() -> None:
    stream, console = file_console()
    with Progress("lines", 200, console=console) as progress:
        progress.metrics({**RECORD, "flops_per_second": 3.421e14, "mfu": 0.3459})
        progress.metrics({**RECORD, "flops_per_second": 5.2e6})
    first, second = stream.getvalue().splitlines()
    assert "12,345 tokens/s  34.6% MFU  342 TFLOP/s" in first
    assert "5.2 MFLOP/s" in second and "MFU" not in second
