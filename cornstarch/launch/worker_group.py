"""The workers of one attempt: started, watched and ended together. No torch in this process."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cornstarch.errors import ConfigError
from cornstarch.files import open_regular
from cornstarch.launch.attempt_record import MODULES_FILE, STEP_FILE, read_step
from cornstarch.launch.exec_worker import EXEC_WORKER
from cornstarch.launch.failure_report import ERROR_FILE, DelayedStderr, LoggedError, find_error, read_logged_error

if TYPE_CHECKING:
    from cornstarch.launch.warm_workers import ForkedProcess, WarmWorkers

GRACE_SECONDS = 0.75  # how long the other workers have to end by themselves after one has failed
REFUSAL_SECONDS = 5.0  # the same after a user's mistake, which every worker finds and rank 0 prints
MODULES = "modules.json"
"""The file among the records in which the first worker lists its modules."""
REFUSED = 2  # the exit code of a command that refuses what a user wants
_STDOUT = 1
_KILL_SECONDS = 10.0  # a killed process that takes longer hangs in the kernel, and is given up
_POLL_SECONDS = 0.5  # how often `WorkerGroup.polls` are called


class StopRequests:
    """Signals to this process, in the order of their arrival, which its workers get too."""

    def __init__(self) -> None:
        self._pipe = os.pipe()
        self.received: list[int] = []

    def fileno(self) -> int:
        return self._pipe[0]

    def read(self) -> int:
        """Return the next signal; wait for one if there is none."""
        self.received.append(os.read(self._pipe[0], 1)[0])
        return self.received[-1]

    def is_pending(self) -> bool:
        """Return whether a signal has arrived that was not read."""
        return bool(select.select([self._pipe[0]], [], [], 0)[0])

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect signals while a block runs. A terminal that closes counts as SIGTERM."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            yield
            return

        def collect(number: int, frame: FrameType | None) -> None:
            queued = signal.SIGTERM if number == signal.SIGHUP else number
            os.write(self._pipe[1], bytes([queued]))  # safe in a handler: who waits does the work

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it is ignored, and stays so
            numbers.append(signal.SIGHUP)
        before: dict[int, Any] = {number: signal.signal(number, collect) for number in numbers}
        # If our parent ignores SIGCHLD, we inherit that, and the kernel would discard the exit codes of our children.
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        for fd in self._pipe:
            os.close(fd)


@dataclass(frozen=True)
class WorkerExit:
    rank: int
    code: int  # as in `subprocess`: the negative number of the signal that killed it
    time: float  # when its error was raised, if it recorded that; else when it ended
    is_recorded: bool = False  # whether the worker recorded its error
    by_us: bool = False  # whether the launcher killed it

    @property
    def order(self) -> tuple[bool, float]:
        """A sort key that puts the cause before its consequences.

        A process that is killed or crashes records nothing. Its connections close, and others fail, some time before
        its own exit is seen: a GPU driver may take seconds to clean up. So a crash comes first, unless the process gave
        up by itself: NCCL aborts when another process is gone.
        """
        crashed = self.code < 0 and self.code != -signal.SIGABRT and not self.is_recorded
        return not crashed, self.time

    @property
    def exit_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def how(self) -> str:
        if self.code >= 0:
            return f"failed with exit code {self.code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-self.code, f'signal {-self.code}')}"

    def is_from(self, signals: Sequence[int]) -> bool:
        """Return whether one of these signals ended the worker, directly or through its own handler."""
        return self.exit_code - 128 in signals


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes] | ForkedProcess
    log: Path
    log_start: int
    error_file: Path
    step_file: Path
    exit_fd: int  # a file descriptor that becomes readable when the worker ends
    is_killed: bool = False


@dataclass
class WorkerGroup:
    """The workers that one launcher has started, by rank."""

    logs: Path
    records: Path  # a folder where workers record their failures and steps
    stops: StopRequests
    exits: dict[int, WorkerExit] = field(default_factory=dict)
    on_failure: Callable[[], None] | None = None
    """Called once, when the first worker has failed."""
    polls: list[Callable[[], None]] = field(default_factory=list)
    """Called twice a second while workers run."""
    warm: WarmWorkers | None = None
    """What forks workers whose imports are done; None: each imports everything itself."""
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _watched: dict[int, Callable[[], None]] = field(default_factory=dict)
    _epoll: select.epoll = field(default_factory=select.epoll)
    _stderr: DelayedStderr | None = None
    _deadline: float | None = None
    failed_at: float | None = None
    """When the first failure was noticed."""
    is_resizing: bool = False
    """Whether the workers were told to save and end."""

    def __post_init__(self) -> None:
        self.watch(self.stops.fileno(), self._forward)

    def watch(self, fd: int, react: Callable[[], None]) -> None:
        """Have a function called whenever a file descriptor is readable while `wait` waits."""
        self._watched[fd] = react
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        del self._watched[fd]
        self._epoll.unregister(fd)

    def start(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]], store_socket: int | None
    ) -> None:
        """Start one worker per environment; rank 0 inherits `store_socket`."""
        for local_rank, environment in enumerate(environments):
            rank = int(environment["RANK"])
            log, error_file = self.logs / f"rank_{rank}.log", self.records / f"rank_{rank}.json"
            step_file = self.records / f"rank_{rank}.step"
            try:
                stderr = DelayedStderr(log, self.records) if rank == 0 else None
                with os.fdopen(open_regular(log, os.O_WRONLY | os.O_APPEND), "ab") as file:
                    title = f"--- {datetime.now():%Y-%m-%d %H:%M:%S} rank {rank}: {shlex.join(command)}\n"
                    file.write(title.encode())
                    file.flush()
                    start = file.tell()
                    variables = {**environment, ERROR_FILE: str(error_file), STEP_FILE: str(step_file)}
                    if local_rank == 0 and self.warm is not None:
                        variables[MODULES_FILE] = str(self.records / MODULES)
                    outputs = (file.fileno(), file.fileno()) if stderr is None else (_STDOUT, stderr.write_end)
                    process = self._start_process(command, variables, *outputs, store_socket if rank == 0 else None)
                exit_fd = _open_exit_fd(process.pid)
            except OSError as error:
                size = environment["WORLD_SIZE"]
                raise ConfigError(f"Process {rank} of {size} cannot be started: {error}.") from error
            if stderr is not None:
                self._stderr = stderr
                stderr.start()
            self._workers[rank] = _Worker(rank, process, log, start, error_file, step_file, exit_fd)
            self._epoll.register(exit_fd, select.EPOLLIN)

    def _start_process(
        self, command: Sequence[str], variables: Mapping[str, str], stdout: int, stderr: int, store: int | None
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        if self.warm is not None:
            forked = self.warm.fork(command, variables, stdout, stderr, store)
            if forked is not None:
                return forked
        return subprocess.Popen(
            [sys.executable, "-I", "-S", EXEC_WORKER, str(os.getpid()), *command],
            env=variables,
            # A process in a background group would be stopped by SIGTTIN when it reads from the terminal.
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[] if store is None else [store],
            # A group of its own: Ctrl-C reaches each process once, through us, and its children can be killed too.
            process_group=0,
        )

    def wait(self) -> None:
        """Wait for all workers. After a failure, or the third signal to us, those that still run are killed."""
        while len(self.exits) < len(self._workers):
            remaining = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            for poll in [*self.polls]:
                poll()
            if self.polls:
                remaining = _POLL_SECONDS if remaining is None else min(remaining, _POLL_SECONDS)
            events = self._epoll.poll(remaining)  # in the order in which they happened
            for fd, _ in events:
                if fd in self._watched:
                    self._watched[fd]()
                    continue
                ended = next((one for one in self._list_running() if one.exit_fd == fd), None)
                if ended is not None:  # the last event may have been a signal upon which it was waited for
                    self._reap(ended)
            if not events and self._deadline is not None and time.monotonic() >= self._deadline:
                if all(worker.is_killed for worker in self._list_running()):
                    return
                self.kill()

    def _forward(self) -> None:
        """Pass a signal to us on to the workers, not to their children, which they stop themselves."""
        number = self.stops.read()
        if len(self.stops.received) >= 3:
            self.kill()
        else:
            self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to each worker that runs."""
        for worker in self._list_running():
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, number)

    def save_and_end(self) -> None:
        """Have the workers save and end, so that the run can go on with another number of them."""
        if not self.is_resizing and self._deadline is None:
            self.is_resizing = True
            self.send(signal.SIGTERM)

    def _reap(self, worker: _Worker) -> None:
        now = time.time()
        # WNOWAIT: until the process is waited for, its id cannot become that of another process, which we would kill.
        ended = os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_status != 0:
            _kill_group(worker.process.pid)  # its children, such as data workers
        code = worker.process.wait()
        recorded = None
        if code:
            with suppress(OSError):  # no record: the process was killed, or failed outside of a process group
                recorded = worker.error_file.stat().st_mtime
        by_us = worker.is_killed and code == -signal.SIGKILL
        if by_us and recorded is not None:
            code, by_us = 1, False  # it had failed by itself, and took long to end
        self.exits[worker.rank] = WorkerExit(worker.rank, code, recorded or now, recorded is not None, by_us)
        self._epoll.unregister(worker.exit_fd)
        os.close(worker.exit_fd)
        if self.failed_at is None and (failures := self.find_failures()):
            self.failed_at = now
            is_fault = read_logged_error(worker.log, worker.log_start).is_fault
            self.end_soon(REFUSAL_SECONDS if failures[0].code == REFUSED and not is_fault else GRACE_SECONDS)
            if self.on_failure is not None:
                self.on_failure()

    def end_soon(self, seconds: float) -> None:
        """Give the workers that run a moment to end by themselves; those that do not are killed."""
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds
        if self._stderr:
            self._stderr.pause()

    def find_failures(self) -> list[WorkerExit]:
        """Return failed workers, the cause first, without those that we, or a signal to us, have ended."""
        stops = [*self.stops.received, *([signal.SIGTERM] if self.is_resizing else [])]
        failed = [one for one in self.exits.values() if one.code and not one.by_us and not one.is_from(stops)]
        return sorted(failed, key=lambda one: one.order)

    def find_stop_code(self) -> int:
        """Return 128 + the signal to us that ended a worker, or after which we killed the workers; 0 without one."""
        stops = self.stops.received
        for one in sorted(self.exits.values(), key=lambda one: one.time):
            if one.is_from(stops):
                return one.exit_code
        killed = any(worker.is_killed for worker in self._workers.values())
        return 128 + stops[-1] if stops and killed else 0

    def find_unkillable(self) -> list[int]:
        """Return the ranks of workers that were killed and are still there: they hang in the kernel."""
        return sorted(worker.rank for worker in self._list_running())

    def read_error(self, rank: int) -> LoggedError:
        if rank == 0 and self._stderr:
            self._stderr.drain()
        worker = self._workers[rank]
        error = read_logged_error(worker.log, worker.log_start)
        if not self.exits[rank].is_recorded or error.is_message or "Error" in error.text:
            return error
        # It was killed before it had printed its error.
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(worker.error_file.read_text(encoding="utf-8"))
            return find_error(record["message"]["extraInfo"]["py_callstack"])
        return error

    def find_step(self, rank: int | None = None) -> int | None:
        """Return the step that a worker was in; default: the latest of any. None before the first."""
        ranks = self._workers if rank is None else [rank]
        steps = [step for one in ranks if (step := read_step(self._workers[one].step_file)) is not None]
        return max(steps, default=None)

    def get_log(self, rank: int) -> Path:
        return self._workers[rank].log

    def flush_rank_0(self) -> None:
        if self._stderr:
            self._stderr.flush()

    def close(self) -> None:
        self.on_failure = None
        self.polls.clear()
        if self._list_running():
            self.kill()
            self.wait()
        self._epoll.close()

    def kill(self) -> None:
        """Kill the workers that still run, with their children."""
        for worker in self._list_running():
            worker.is_killed = True
            _kill_group(worker.process.pid)
        self._deadline = time.monotonic() + _KILL_SECONDS

    def _list_running(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.rank not in self.exits]


def _open_exit_fd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # Linux before 5.3: a thread waits
        exit_fd, write_end = os.pipe()

        def wait() -> None:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            os.close(write_end)

        threading.Thread(target=wait, daemon=True).start()
        return exit_fd


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
