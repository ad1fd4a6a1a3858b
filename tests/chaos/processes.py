"""Processes of a run: started, found by the folder that they work in, and their reports."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests import forked, warm
from tests.chaos import phases
from tests.cli import started

ROOT = Path(__file__).resolve().parents[2]
_BEHIND = 3  # how much nicer a run is than the harness, which must not miss a moment on a busy machine


@dataclass(frozen=True)
class Line:
    """A line that a process has reported."""

    time: float
    pid: int
    rank: int
    phase: str
    mark: str
    number: int
    text: str = ""


@lru_cache
def warm_interpreter() -> str:
    """Return an interpreter that is forked instead of started, whose trainers report their phases."""
    return warm.interpreter(prepare_server)


def prepare_trainer() -> None:
    """Prepare a process that trains, or from which such processes are forked."""
    os.nice(_BEHIND)
    phases.install()


def prepare_server() -> None:
    """Prepare the process from which those of a run are forked."""
    prepare_trainer()
    run = warm._run

    def run_and_report(name: str, is_module: bool) -> int:
        phases.begin()
        return run(name, is_module)

    warm._run = run_and_report


@lru_cache
def cold_interpreter() -> str:
    """Return an interpreter that imports everything itself."""
    folder = Path(tempfile.mkdtemp(prefix="cold-"))
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.chaos.phases "$@"\n')
    path.chmod(0o700)
    return str(path)


def _be_launcher(arguments: list[str], folder: str, output: str, environment: dict[str, str], python: str) -> None:
    tempfile.tempdir = None  # it may have been asked for before this process was forked
    os.setpgid(0, 0)
    os.nice(_BEHIND)
    started._run(arguments, folder, output, None, environment, python)


@dataclass
class Command:
    """`cornstarch …` in a folder, with a launcher of its own."""

    folder: Path
    arguments: list[str]
    cold: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """Start it; its output is added to `output.txt`, and temporary files are in `tmp`."""
        (self.folder / "reports").mkdir(exist_ok=True)
        (self.folder / "tmp").mkdir(exist_ok=True)
        self.output = self.folder / "output.txt"
        with self.output.open("a") as file:
            file.write(f"$ cornstarch {shlex.join(self.arguments)}\n")
        self.output_start = self.output.stat().st_size
        variables = {
            phases.FOLDER: str(self.folder / "reports"), "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **self.environment,
        }  # fmt: skip
        self._code: int | None = None
        if self.cold:
            python = cold_interpreter()
            script = "import sys; sys.executable = sys.argv.pop(1); from cornstarch.cli.main import main; main()"
            with self.output.open("a") as file:
                popen = subprocess.Popen(
                    [sys.executable, "-c", script, python, *self.arguments],
                    cwd=self.folder, env={**os.environ, **variables, "CHAOS_PYTHON": python}, stdout=file, stderr=file,
                    stdin=subprocess.DEVNULL, process_group=0,
                )  # fmt: skip
            self.pid, self._poll = popen.pid, popen.poll
        else:
            python = warm_interpreter()
            forks = forked.process(
                _be_launcher, self.arguments, str(self.folder), str(self.output), variables, python, daemon=False
            )
            forks.start()
            assert forks.pid is not None
            self.pid, self._poll = forks.pid, lambda: forks.exitcode

    @property
    def code(self) -> int | None:
        """The exit code; None while it is running."""
        return self._poll()

    def said(self) -> str:
        """Return what was printed since the start."""
        with self.output.open(errors="replace") as file:
            file.seek(self.output_start)
            return file.read()

    def wait(self, seconds: float) -> int | None:
        """Wait for the end; return the exit code, or None if it does not come."""
        wait_until(lambda: self.code is not None, seconds)
        return self.code

    def kill_all(self) -> None:
        """End every process of the folder."""
        for pid in find_processes(self.folder):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def append_result(path: Path | None, line: Mapping[str, Any]) -> None:
    """Add a result to a file of JSON lines, with where and when it was found."""
    if path is not None:
        machine = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": round(os.getloadavg()[1], 1)}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "machine": machine}) + "\n")


def wait_until(condition: Callable[[], bool], seconds: float, every: float = 0.005) -> bool:
    """Wait for a condition; return whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(every)
    return True


def find_processes(folder: Path) -> list[int]:
    """Return the processes that work in a folder, whoever started them; those that have ended are none."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                place = os.readlink(f"/proc/{name}/cwd")
                if Path(place).is_relative_to(folder) and int(name) != os.getpid():
                    found.append(int(name))
    return found


def describe_process(pid: int) -> str:
    """Return the command line of a process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "?"


def is_alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def read_reports(folder: Path, without: frozenset[int] = frozenset()) -> list[Line]:
    """Return what processes have reported, but for some of them, in the order of time."""
    lines = []
    for path in (folder / "reports").iterdir():
        if int(path.name) in without:
            continue
        for text in path.read_text().splitlines():
            moment, rank, phase, mark, number, rest = text.split(" ", 5)
            lines.append(Line(float(moment), int(path.name), int(rank), phase, mark, int(number), rest))
    return sorted(lines, key=lambda line: line.time)
