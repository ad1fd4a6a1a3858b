"""Launch small scripts without torch, from a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 150.0  # seconds; the machine may be busy

# The beginning of every script. Workers synchronize by files, never by time.
PRELUDE = """
import os, signal, sys, time
from pathlib import Path

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
here = Path(__file__).parent

def publish(name, text=""):
    (here / f"{name}.part{rank}").write_text(text)
    (here / f"{name}.part{rank}").rename(here / name)

def until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)

def await_file(name):
    until((here / name).exists)
    return (here / name).read_text()

def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
"""

_LAUNCHER = """
import os, sys
from pathlib import Path
from cornstarch.launch import launch, local_launcher, worker_group

{before}

worker_group.GRACE_SECONDS = worker_group.REFUSAL_SECONDS = {grace}
local_launcher.core_count = lambda: 64  # no warning about cores
sys.exit(launch([sys.executable, {script!r}, *{arguments}], {nproc!r}, Path({logs!r})))
"""


@dataclass
class Launched:
    """A launch that is running, or has ended."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def log(self, rank: int) -> str:
        """Return the log of a rank, without its title."""
        title, _, text = (self.logs / f"rank_{rank}.log").read_text().partition("\n")
        assert title.startswith("--- ")
        return text

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the launch is running."""
        wait_until(lambda: condition() or self.process.poll() is not None)
        assert condition(), self.process.communicate()

    def wait(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit code, stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, stdout, stderr


def start(
    folder: Path,
    script: str,
    nproc: int | str,
    *arguments: str,
    grace: float = 30.0,
    before: str = "",
    environment: dict[str, str] | None = None,
    stdout: int | IO[Any] = subprocess.PIPE,
) -> Launched:
    """Start a launch of a script."""
    path = folder / "worker.py"
    path.write_text(PRELUDE + textwrap.dedent(script))
    code = _LAUNCHER.format(
        before=before, grace=grace, script=str(path), nproc=nproc, logs=str(folder / "logs"), arguments=arguments
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, env=variables, cwd=folder
    )
    return Launched(process, folder)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; it may not have been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
