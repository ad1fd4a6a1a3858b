"""Processes of one run on this machine: started, watched, and ended together."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cornstarch.errors import ConfigError
from cornstarch.launch.held_back import HeldBack
from cornstarch.launch.last_words import LastWords, read_last_words
from cornstarch.launch.world import ERROR_FILE

_STARTER = Path(__file__).with_name("starter.py")
GRACE = 5.0  # seconds that the others have to end by themselves after one has failed
_KILLING = 10.0  # seconds until a killed process is given up: it hangs in the kernel


@dataclass(frozen=True)
class End:
    """How a process ended."""

    rank: int
    code: int
    """As `subprocess` says it: the negative number of the signal that killed it."""
    time: float
    """When its error was raised, if it said so; else when it ended."""
    is_said: bool = False
    """Whether it said so."""
    killed: bool = False
    """Whether it was us."""

    @property
    def order(self) -> tuple[bool, float]:
        """A key that puts what was the cause before what followed.

        A process that is killed or crashes says nothing, and its connections close, and others fail, some time before
        it is seen to have ended: the driver of a GPU may take seconds to tidy up. So such a one comes first, unless it
        gave up by itself: NCCL aborts when another process is gone.
        """
        crashed = self.code < 0 and self.code != -signal.SIGABRT and not self.is_said
        return not crashed, self.time

    @property
    def exit_code(self) -> int:
        """As a shell says it."""
        return self.code if self.code >= 0 else 128 - self.code

    def is_by(self, signals: Sequence[int]) -> bool:
        """Whether one of these signals ended it, directly or by its own handler."""
        return self.exit_code - 128 in signals


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    error_file: Path
    end_file: int
    """A file that becomes readable when it ends."""
    killed: bool = False


@dataclass
class Workers:
    """The processes, by rank. Rank 0 speaks to the terminal; the others write to `logs/rank_k.log`."""

    logs: Path
    records: Path
    """A folder for what they say about their failures."""
    _workers: list[_Worker] = field(default_factory=list)
    _ends: dict[int, End] = field(default_factory=dict)
    _news: select.epoll = field(default_factory=select.epoll)
    _signal_pipe: tuple[int, int] = field(default_factory=os.pipe)
    _signals: list[int] = field(default_factory=list)
    _stderr: HeldBack | None = None
    _deadline: float | None = None

    def __post_init__(self) -> None:
        self._news.register(self._signal_pipe[0], select.EPOLLIN)

    # ------------------------------------------------------------------ starting

    def start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], store_socket: int) -> None:
        """Start one process for each environment; rank 0 is given a socket."""
        for rank, environment in enumerate(environments):
            log = self.logs / f"rank_{rank}.log"
            error_file = self.records / f"rank_{rank}.json"
            full = {**environment, ERROR_FILE: str(error_file)}
            try:
                process, start = self._started(rank, command, full, log, store_socket)
            except OSError as error:
                raise ConfigError(f"Process {rank} of {len(environments)} cannot be started: {error}.") from error
            worker = _Worker(rank, process, log, start, error_file, _end_of(process.pid))
            self._workers.append(worker)
            self._news.register(worker.end_file, select.EPOLLIN)

    def _started(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path, store_socket: int
    ) -> tuple[subprocess.Popen[bytes], int]:
        full = [sys.executable, "-I", "-S", str(_STARTER), str(os.getpid()), *command]
        with log.open("ab") as file:
            title = f"--- {datetime.now():%Y-%m-%d %H:%M:%S} rank {rank}: {shlex.join(command)}\n"
            file.write(title.encode())
            file.flush()
            start = file.tell()
            if rank == 0:
                self._stderr = HeldBack(log, self.records)
            process = subprocess.Popen(
                full,
                env=environment,
                # Nobody could type to a process of another group: reading would stop it.
                stdin=subprocess.DEVNULL,
                stdout=None if self._stderr and rank == 0 else file,
                stderr=self._stderr.end if self._stderr and rank == 0 else file,
                pass_fds=[store_socket] if rank == 0 else [],
                # Its own group: Ctrl-C reaches each process once, through us, and its children can be killed with it.
                process_group=0,
            )
        if self._stderr and rank == 0:
            self._stderr.start()
        return process, start

    # ------------------------------------------------------------------ watching

    def signalled(self, number: int) -> None:
        """Note a signal to pass on, in a signal handler."""
        os.write(self._signal_pipe[1], bytes([number]))

    def wait(self) -> None:
        """Come back when all have ended. When one fails, the others have `GRACE` seconds, and are killed then."""
        while len(self._ends) < len(self._workers):
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            # What has happened meanwhile comes in the order in which it happened.
            news = self._news.poll(left)
            for file, _ in news:
                if file == self._signal_pipe[0]:
                    self._pass_on(os.read(file, 1)[0])
                else:
                    self._reap(next(worker for worker in self._workers if worker.end_file == file))
            if not news:
                if all(worker.killed for worker in self._running()):
                    return
                self.kill()

    def _reap(self, worker: _Worker) -> None:
        now = time.time()
        # Until it is waited for, its number cannot become another process's.
        ended = os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_status != 0:
            _kill_group(worker.process.pid)  # what it has started
        code = worker.process.wait()
        said = _failure_time(worker.error_file) if code else None
        killed = worker.killed and code == -signal.SIGKILL
        self._ends[worker.rank] = End(worker.rank, code, said or now, said is not None, killed)
        self._news.unregister(worker.end_file)
        os.close(worker.end_file)
        if self._deadline is None and self.failures():
            self._deadline = time.monotonic() + GRACE
            if self._stderr:
                self._stderr.hold()

    def failures(self) -> list[End]:
        """Return those that ended in an error, the first first: not those that we or a signal to us have ended."""
        ends = [end for end in self._ends.values() if end.code and not end.killed and not end.is_by(self._signals)]
        return sorted(ends, key=lambda end: end.order)

    def stopped_by(self) -> int | None:
        """Return the signal to us that has ended one of them, or that ended with us killing them."""
        for end in sorted(self._ends.values(), key=lambda end: end.time):
            if end.is_by(self._signals):
                return end.exit_code - 128
        killed = any(worker.killed for worker in self._workers)
        return self._signals[-1] if self._signals and killed else None

    def is_killed(self, rank: int) -> bool:
        """Whether a signal ended a process before it could tidy up."""
        return rank not in self._ends or self._ends[rank].code < 0

    def last_words(self, rank: int) -> LastWords:
        """Return what a process that has ended said last."""
        if rank == 0 and self._stderr:
            self._stderr.drain()
        return read_last_words(self._workers[rank].log, self._workers[rank].log_start)

    def show_rank_0(self) -> None:
        """Show what rank 0 said, as far as it was held back."""
        if self._stderr:
            self._stderr.release()

    # ------------------------------------------------------------------ ending

    def close(self) -> None:
        """Kill what still runs, and give back what was opened."""
        self.kill()
        self.wait()
        self._news.close()
        for file in self._signal_pipe:
            os.close(file)

    def _pass_on(self, number: int) -> None:
        """Tell every process, and not its children; after the third signal, kill them all."""
        self._signals.append(number)
        if len(self._signals) >= 3:
            self.kill()
            return
        for worker in self._running():
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, number)

    def kill(self) -> None:
        """Kill every process that still runs, with all it has started."""
        for worker in self._running():
            worker.killed = True
            _kill_group(worker.process.pid)
        self._deadline = time.monotonic() + _KILLING

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.rank not in self._ends]


def _end_of(pid: int) -> int:
    """Return a file that becomes readable when a process ends."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # Linux before 5.3: a thread waits
        end, held = os.pipe()

        def wait() -> None:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            os.close(held)

        threading.Thread(target=wait, daemon=True).start()
        return end


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _failure_time(error_file: Path) -> float | None:
    with suppress(OSError):  # it has not said anything
        return error_file.stat().st_mtime
    return None
