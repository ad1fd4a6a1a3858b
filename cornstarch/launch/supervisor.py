"""The supervisor of a run on one machine: starts its workers, and starts them again when one has failed. No torch here.

One attempt ends before the next begins: all workers are gone, so that no two processes ever write to the run's folder.
Every attempt has a rendezvous of its own. What follows an attempt is decided by `RunDirector`; with several machines it
is asked through a `NodeLink`.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cornstarch.launch.attempt_record import ATTEMPT
from cornstarch.launch.launcher import find_launcher
from cornstarch.launch.local_launcher import (
    LOOPBACK,
    LocalLauncher,
    bind_store,
    build_node_environments,
    find_first_failure,
    make_logs,
    open_records,
    print_line,
    report_end,
)
from cornstarch.launch.run_director import Fault, Finish, Outcome, RunDirector, Size, SizeRange
from cornstarch.launch.warm_workers import WarmWorkers
from cornstarch.launch.worker_group import MODULES, REFUSED, StopRequests, WorkerGroup

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Job:
    """What a supervisor runs."""

    command: tuple[str, ...]
    folder: Path
    """The run's folder."""
    range: SizeRange
    restarts: int = 0
    """How often the run starts again after a failure."""
    prepare: Callable[[Size, int], list[str]] = lambda size, attempt: []
    """Called with the size and the number of an attempt before it starts, on the first machine. Returns further
    arguments of the command."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


class Start(NamedTuple):
    """The part of one machine in an attempt."""

    attempt: int
    node: int
    """The number of this machine among those of the attempt."""
    size: Size
    host: str
    port: int
    """Where rank 0 hosts the store."""
    restart: str = ""
    """What to print before it starts; empty for the first attempt."""
    arguments: Sequence[str] = ()
    """Further arguments of the command."""


class SupervisorLink(Protocol):
    """Where a supervisor learns what to do next."""

    @property
    def store_socket(self) -> socket.socket | None:
        """The socket that rank 0 inherits, on its machine."""

    def advance(self, outcome: Outcome | None, ending_seconds: float | None, stops: StopRequests) -> Start | Finish:
        """Tell how the last attempt ended here; return what follows. It may wait for other machines."""

    def attach(self, workers: WorkerGroup) -> None:
        """Have failures on other machines end these workers, and tell the others of a failure here."""

    def close(self) -> None:
        """Leave, after the run has ended."""


class LocalLink:
    """The link of a run on one machine: the decisions are made here."""

    def __init__(self, job: Job) -> None:
        self._job, self._director = job, RunDirector(job.folder, job.range, job.restarts)
        self.store_socket: socket.socket | None = None

    def advance(self, outcome: Outcome | None, ending_seconds: float | None, stops: StopRequests) -> Start | Finish:
        if outcome is not None:
            finish = self._director.decide([outcome], ending_seconds)
            if finish is not None:
                return finish
        if self.store_socket is not None:
            self.store_socket.close()
        self.store_socket = bind_store(LOOPBACK)
        size = self._director.choose(1)
        if size is None:
            return Finish(2, self._job.range.describe_refusal(1))
        restart = self._director.describe_restart(size)
        arguments = self._job.prepare(size, self._director.attempt + 1)
        attempt = self._director.begin(size)
        return Start(attempt, 0, size, LOOPBACK, self.store_socket.getsockname()[1], restart, arguments)

    def attach(self, workers: WorkerGroup) -> None:
        def poll() -> None:
            if self._director.wants_other_size(1):
                workers.save_and_end()

        if self._job.range.is_elastic:
            workers.polls.append(poll)

    def close(self) -> None:
        if self.store_socket is not None:
            self.store_socket.close()


def starts_here(environment: Mapping[str, str]) -> bool:
    """Return whether the processes of a run are started by Cornstarch itself, not by a registered launcher."""
    launcher = find_launcher(environment)
    return isinstance(launcher, LocalLauncher) or environment.get("WORLD_SIZE") == "1"


def supervise(job: Job, link: SupervisorLink | None = None, console: Console | None = None) -> int:
    """Run a job to its end and return the exit code, as `launch` does; restart it after failures."""
    from rich.console import Console

    console = console or Console(stderr=True)
    link = link or LocalLink(job)
    logs = job.folder / "logs"
    make_logs(logs, job.range.local[1], console)
    outcome, ending = None, None
    warm = WarmWorkers() if job.restarts else None
    with closing(StopRequests()) as stops, closing(link), closing(warm) if warm else nullcontext(), stops.collect():
        while True:
            order = link.advance(outcome, ending, stops)
            if isinstance(order, Finish):
                if order.reason:
                    print_line(console, order.reason)
                return order.code
            if stops.is_pending():
                number = stops.read()
                name = signal.Signals(number).name
                print_line(console, f"{name}: the run ends here; the same command resumes it.")
                return 128 + number
            if order.restart:
                print_line(console, order.restart)
            outcome, ending = _run_attempt(job, order, link, logs, stops, warm, console)


def _run_attempt(
    job: Job,
    start: Start,
    link: SupervisorLink,
    logs: Path,
    stops: StopRequests,
    warm: WarmWorkers | None,
    console: Console,
) -> tuple[Outcome, float | None]:
    """Run this machine's workers of one attempt; return how it ended, and how long ending took after a failure."""
    variables = {
        **job.environment,
        "MASTER_ADDR": start.host,
        "MASTER_PORT": str(start.port),
        "TORCHELASTIC_RESTART_COUNT": str(start.attempt),
        ATTEMPT: str(start.attempt),
    }
    first, world = start.node * start.size.local, start.size.world
    fd = None if link.store_socket is None else link.store_socket.fileno()
    node = (start.node, start.size.nodes)
    environments = build_node_environments(variables, range(first, first + start.size.local), world, node, fd)
    with open_records() as records:
        workers = WorkerGroup(logs, records, stops, warm=warm)
        command = [*job.command, *start.arguments]
        with closing(workers):
            link.attach(workers)
            if warm is not None:
                _prepare_restart(workers, warm, partial(warm.prepare, records / MODULES, command, environments[0]))
            workers.start(command, environments, fd)
            workers.wait()
            ending = None if workers.failed_at is None else time.time() - workers.failed_at
            unkillable = workers.find_unkillable()
        fault = _describe_fault(workers, world)
        step = workers.find_step()
        code = report_end(workers, world, console, None if fault is None else fault.step)
    is_stopped = bool(stops.received)
    is_resized = workers.is_resizing and fault is None
    return Outcome(code, fault, is_stopped, unkillable, step, is_resized), ending


def _prepare_restart(workers: WorkerGroup, warm: WarmWorkers, prepare: Callable[[], bool]) -> None:
    """Have the workers of the next attempt made ready as soon as these have done their first steps."""

    def poll() -> None:
        if prepare():
            workers.polls.remove(poll)

    warm.reap_strangers()
    workers.polls.append(poll)


def _describe_fault(workers: WorkerGroup, world: int) -> Fault | None:
    first = find_first_failure(workers)
    if first is None:
        return None
    error = workers.read_error(first.rank)
    step = workers.find_step(first.rank)
    is_crash = not first.order[0]
    is_refusal = first.code == REFUSED and not error.is_fault
    cause = f"rank {first.rank} of {world} {first.how}"
    if error.is_fault:  # the rank that says so is not the culprit
        cause = error.text.splitlines()[0].partition(": ")[2].rstrip(".")
    return Fault(
        first.rank, first.exit_code, cause, error.text,
        step if step is not None or is_refusal else workers.find_step(), is_refusal, is_crash,
    )  # fmt: skip
