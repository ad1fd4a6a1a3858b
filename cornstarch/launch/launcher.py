"""Launchers: how the processes of a run start, and which rank this process is. torch is not imported here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes in the run."""

    rank: int = 0
    """The rank over all machines, from 0."""
    local_rank: int = 0
    """The rank on this machine, from 0."""
    size: int = 1
    """Processes on all machines."""
    local_size: int = 1
    """Processes on this machine."""

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise ConfigError(
                f"rank {self.rank} of {self.size}, local rank {self.local_rank} of {self.local_size}: impossible. "
                "Ranks count from 0 to size - 1, and one machine cannot have more processes than the run."
            )


class Launcher(Protocol):
    """Starts the processes of a run, and tells each process its rank."""

    def is_active(self, environment: Mapping[str, str]) -> bool:
        """Return whether a process with these environment variables belongs to this launcher."""

    def read_world(self, environment: Mapping[str, str]) -> World:
        """Return the rank of this process; raise ConfigError if the variables contradict one another."""

    def launch(
        self, command: Sequence[str], nproc: int | str, logs: Path, environment: Mapping[str, str], console: Console
    ) -> int:
        """Run `nproc` processes of `command`, report a failure on `console`, and return the exit code."""


LAUNCHERS: dict[str, Launcher] = {}


def register_launcher(name: str, launcher: Launcher) -> None:
    """Add a launcher, or replace the one of that name. The launcher that was added last is asked first."""
    LAUNCHERS.pop(name, None)
    LAUNCHERS[name] = launcher


def find_launcher(environment: Mapping[str, str]) -> Launcher:
    """Return the active launcher; without a scheduler that is the local one, which is always active."""
    return next(launcher for launcher in reversed(LAUNCHERS.values()) if launcher.is_active(environment))


def current_world(environment: Mapping[str, str] | None = None) -> World:
    """Return the rank of this process from the launcher's environment variables; without them, rank 0 of 1.

    Raises ConfigError if only some of the variables are set, if they contradict one another, or if a launcher that is
    not supported has started several processes.
    """
    variables = os.environ if environment is None else environment
    return find_launcher(variables).read_world(variables)


def launch(
    command: Sequence[str],
    nproc: int | str,
    logs: Path,
    *,
    environment: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> int:
    """Run `nproc` processes of one command and return the exit code.

    Rank 0 writes to the terminal. The other ranks write to `logs/rank_k.log`; rank 0's stderr is copied there too.
    SIGTERM and SIGINT are forwarded, so that every process can save. When one process fails, the others are stopped and
    the first failure is shown. If this process is killed, its workers die too.

    Args:
        command: The command, for example `[sys.executable, "-m", "cornstarch", "train", "run.yaml"]`.
        nproc: The number of processes, or "auto" for one per GPU.
        logs: The folder for logs. It is created if needed; existing logs are continued.
        environment: The environment variables of the processes. Default: those of this process.
        console: Where a failure is reported. Default: stderr.

    Returns:
        0 if all processes succeeded; else the exit code of the first failure, 128 + N if signal N ended it.
    """
    from rich.console import Console

    variables = dict(os.environ if environment is None else environment)
    return find_launcher(variables).launch(command, nproc, logs, variables, console or Console(stderr=True))


class TorchrunLauncher:
    """Processes that torchrun, `LocalLauncher` or another launcher with torchrun's variables has started."""

    def is_active(self, environment: Mapping[str, str]) -> bool:
        return any(name in environment for name in _RANK_VARIABLES)

    def read_world(self, environment: Mapping[str, str]) -> World:
        names = (*_RANK_VARIABLES, *_MASTER_VARIABLES)
        missing = [name for name in names if not environment.get(name)]
        if missing:
            present = ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name))
            raise ConfigError(
                f"{', '.join(missing)} not set, but {present or 'empty variables'} found. torchrun and --nproc set all "
                "of them; for a single process, unset all of them."
            )
        numbers = {name: parse_number(name, environment[name]) for name in (*_RANK_VARIABLES, "MASTER_PORT")}
        if not 0 < numbers["MASTER_PORT"] < 2**16:
            raise ConfigError(f"MASTER_PORT={numbers['MASTER_PORT']}: a port is a number from 1 to 65535.")
        try:
            return World(*(numbers[name] for name in _RANK_VARIABLES))
        except ConfigError as error:
            found = ", ".join(f"{name}={numbers[name]}" for name in _RANK_VARIABLES)
            raise ConfigError(f"{found}: {error}") from None

    def launch(
        self, command: Sequence[str], nproc: int | str, logs: Path, environment: Mapping[str, str], console: Console
    ) -> int:
        """Refuse: the processes exist already. A single process under torchrun may start local ones."""
        if environment.get("WORLD_SIZE", "1") == "1":
            return LAUNCHERS["local"].launch(command, nproc, logs, environment, console)
        raise ConfigError(
            f"This process is already rank {environment.get('RANK', '?')} of {environment['WORLD_SIZE']}, started by "
            "torchrun or a similar launcher; each of these processes would start more. Remove --nproc."
        )


def parse_number(name: str, text: str) -> int:
    """Return an environment variable as a number; ConfigError if it is none."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a whole number.") from None
