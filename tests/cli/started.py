"""Commands in processes of their own, with signals and limits, that do not wait for torch each time."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests import forked

_PATIENCE = 120  # seconds, on a machine with other things to do


def _run(
    arguments: list[str],
    folder: str,
    output: str,
    largest_file: int | None,
    environment: Mapping[str, str],
    python: str | None,
) -> None:
    """Be the command."""
    os.chdir(folder)
    sys.executable = python or sys.executable
    os.environ.update(environment)
    if "PYTHONPATH" in environment:  # read when Python starts, which it has
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
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


def start(
    *arguments: str,
    folder: Path,
    largest_file: int | None = None,
    environment: Mapping[str, str] | None = None,
    python: str | None = None,
) -> Started:
    """Start `cornstarch` in a folder.

    Args:
        arguments: The command.
        folder: Where it runs.
        largest_file: No file that it writes may become larger than so many bytes.
        environment: More variables.
        python: What it starts processes with; without it the interpreter of the tests.
    """
    number = sum(1 for _ in folder.glob("output-*.txt"))
    output = folder / f"output-{number}.txt"
    output.touch()
    variables = dict(environment or {})
    process = forked.process(_run, list(arguments), str(folder), str(output), largest_file, variables, python)
    process.start()
    return Started(process, output)


# ------------------------------------------------------------------------------------------------ several processes


@contextmanager
def free_port() -> Iterator[int]:
    """Hold a port that torch may open and nobody else is given."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", **{name: str(n) for name, n in numbers.items()}}


def together(
    *arguments: str,
    folder: Path,
    second: tuple[str, ...] = (),
    second_environment: Mapping[str, str] | None = None,
) -> list[tuple[int, str]]:
    """Run a command in two processes as torchrun would, and return how each ended and what it printed.

    Args:
        arguments: The command.
        folder: Where it runs.
        second: What the second process is told besides.
        second_environment: More variables of the second.
    """
    with free_port() as port:
        started = [
            start(*arguments, folder=folder, environment=variables(0, 2, port)),
            start(
                *arguments, *second, folder=folder, environment={**variables(1, 2, port), **(second_environment or {})}
            ),
        ]
        return [one.ended() for one in started]
