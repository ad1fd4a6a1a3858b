"""Commands in processes of their own, with signals and limits, that do not wait for torch each time.

They are forked from a process that has imported everything already and computed nothing yet.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["cornstarch.cli.train", "cornstarch.train.trainer", "cornstarch.report.page"])
_PATIENCE = 120  # seconds, on a machine with other things to do


def _run(arguments: list[str], folder: str, output: str, largest_file: int | None) -> None:
    """Be the command."""
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["cornstarch", *arguments]
    import torch

    from cornstarch.cli.main import main

    torch.set_num_threads(1)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    main(arguments)


@dataclass
class Started:
    """A command that is running."""

    process: ForkServerProcess
    output: Path

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the command does."""
        end = time.monotonic() + _PATIENCE
        while not condition():
            assert self.process.is_alive(), f"it ended with {self.process.exitcode}:\n{self.output.read_text()}"
            assert time.monotonic() < end, self.output.read_text()
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and all that was printed."""
        self.process.join(_PATIENCE)
        if self.process.exitcode is None:
            self.process.kill()
        assert self.process.exitcode is not None, self.output.read_text()
        return self.process.exitcode, self.output.read_text()


def start(*arguments: str, folder: Path, largest_file: int | None = None) -> Started:
    """Start `cornstarch` in a folder; no file that it writes may become larger than so many bytes."""
    number = sum(1 for _ in folder.glob("output-*.txt"))
    output = folder / f"output-{number}.txt"
    output.touch()
    process = _CONTEXT.Process(target=_run, args=(list(arguments), str(folder), str(output), largest_file))
    process.start()
    return Started(process, output)
