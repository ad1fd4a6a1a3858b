"""The local launcher: several processes of one command on this machine. No torch in this process."""

from __future__ import annotations

import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cornstarch.errors import ConfigError
from cornstarch.files import open_regular
from cornstarch.launch.failure_report import ERROR_FILE, DelayedStderr, LoggedError, read_logged_error
from cornstarch.launch.launcher import World

if TYPE_CHECKING:
    from rich.console import Console

STORE_SOCKET = "CORNSTARCH_STORE_SOCKET"  # a variable of rank 0: the inherited socket that is bound to MASTER_PORT
GRACE_SECONDS = 5.0  # how long the other processes have to end by themselves after one has failed
_KILL_SECONDS = 10.0  # a killed process that takes longer hangs in the kernel, and is given up

_HOST = "127.0.0.1"
_EXEC_WORKER = Path(__file__).with_name("exec_worker.py")
_SHOW_CURSOR = "\x1b[?25h"

# Launchers that start several processes without torchrun's variables: the variables with the number of processes and
# the rank. srun sets SLURM's step variables; a batch script does not have them.
_UNSUPPORTED_LAUNCHERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)

_HINTS: dict[int, str] = {
    signal.SIGKILL: "Usually the machine ran out of memory: use fewer processes, smaller batches, fewer data workers.",
    signal.SIGBUS: "Usually /dev/shm is full: use fewer data workers, or enlarge it (docker run --shm-size=8g).",
    signal.SIGSEGV: "Compiled code crashed; the log shows the Python lines that led there.",
    signal.SIGABRT: "Compiled code aborted, usually CUDA or NCCL; the log shows the reason.",
}


class LocalLauncher:
    """Starts processes on this machine, with torchrun's variables. Active where no other launcher is."""

    def is_active(self, environment: Mapping[str, str]) -> bool:
        return True

    def read_world(self, environment: Mapping[str, str]) -> World:
        """Return a world of one process; refuse other launchers, with which every process would train by itself."""
        for launcher, size, rank in _UNSUPPORTED_LAUNCHERS:
            count = environment.get(size, "")
            if not count.isdecimal() or int(count) < 2:
                continue
            raise ConfigError(
                f"{launcher} has started {count} processes ({size}={count}, {rank}={environment.get(rank, '?')}), and "
                "each would be a run of its own: only torchrun's variables are read.\n"
                "  On one machine, start one task: srun --ntasks=1 cornstarch train run.yaml --nproc 8\n"
                "  On several machines, start one task each: srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES "
                "--nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE:29500 --rdzv-id=$SLURM_JOB_ID "
                "-m cornstarch train run.yaml\n"
                f"  To start independent runs: env -u {size} cornstarch train …"
            )
        return World()

    def launch(
        self, command: Sequence[str], nproc: int | str, logs: Path, environment: Mapping[str, str], console: Console
    ) -> int:
        size, cores = process_count(nproc, console), core_count()
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{logs}: the folder for logs cannot be created: {error.strerror}.") from error
        if size > cores:
            _print(console, f"{size} processes share {cores} core{'s' if cores > 1 else ''}: this works, but is slow.")
        # The socket keeps its port from other processes. It does not listen yet: rank 0 inherits it and listens, so
        # that nobody can take the port in between. It is bound to the loopback address, so that nobody outside can talk
        # to the run. A script can still open a store at MASTER_PORT by itself: torch binds with SO_REUSEADDR.
        with tempfile.TemporaryDirectory(prefix="cornstarch-launch-") as records, socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((_HOST, 0))
            fd, port = bound.fileno(), bound.getsockname()[1]
            workers = WorkerGroup(logs, Path(records))
            with closing(workers), _forward_signals(workers):
                workers.start(command, build_environments(environment, size, port, fd), fd)
                workers.wait()
            return _report_end(workers, size, console)


def process_count(nproc: int | str, console: Console | None = None) -> int:
    """Return the number of processes for `--nproc`; "auto": one per GPU, or 1, because one process uses all cores."""
    if nproc == "auto":
        count = gpu_count()
        if count == 0:
            from rich.console import Console

            text = "nproc = auto: this machine has no GPU; starting one process, which uses all cores."
            _print(console or Console(stderr=True), text)
        return max(1, count)
    try:
        size = int(nproc)
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"nproc = {nproc}: expected a number of processes, at least 1, or auto.")
    return size


def gpu_count() -> int:
    """Return the number of GPUs that torch sees. A child process asks: torch would keep memory for the whole run."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return 0
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return int(answer[-1]) if answer else 0


def core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_environments(base: Mapping[str, str], size: int, port: int, store_socket: int) -> list[dict[str, str]]:
    """Return the variables of each rank: torchrun's, and settings for processes on one machine."""
    common = {
        "OMP_NUM_THREADS": str(max(1, core_count() // size)),
        "GLOO_SOCKET_IFNAME": "lo",  # the machine's name need not resolve
        "PYTHONFAULTHANDLER": "1",
        **base,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    environments = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        # A killed process loses what it has not written yet. Rank 0's terminal is line-buffered anyway.
        own |= {STORE_SOCKET: str(store_socket)} if rank == 0 else {"PYTHONUNBUFFERED": "1"}
        environments.append({**common, **own})
    return environments


@contextmanager
def _forward_signals(workers: WorkerGroup) -> Iterator[None]:
    """Forward signals to the workers while a block runs. A terminal that closes counts as SIGTERM."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return

    def forward(number: int, frame: FrameType | None) -> None:
        queued = signal.SIGTERM if number == signal.SIGHUP else number
        os.write(workers.signal_pipe[1], bytes([queued]))  # safe in a handler: `wait` does the work

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it is ignored, and stays so
        numbers.append(signal.SIGHUP)
    before: dict[int, Any] = {number: signal.signal(number, forward) for number in numbers}
    # If our parent ignores SIGCHLD, we inherit that, and the kernel would discard the exit codes of our children.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report_end(workers: WorkerGroup, size: int, console: Console) -> int:
    if 0 not in workers.exits or workers.exits[0].code < 0:
        with suppress(OSError, ValueError):  # a progress bar hides the cursor; a killed process does not restore it
            if sys.stdout.isatty():
                print(_SHOW_CURSOR, flush=True)
    failures = workers.find_failures()
    if not failures:
        workers.flush_rank_0()
        return workers.find_stop_code()
    first = failures[0]
    error = workers.read_error(first.rank)
    for one in failures:  # an error that every process finds is shown as rank 0 prints it
        if one.rank == 0 and one.code == first.code and workers.read_error(0) == error:
            first = one
    is_message = error.is_message and first.code > 0
    if first.rank == 0:
        workers.flush_rank_0()
        if is_message:
            return first.exit_code
    how = f"failed with exit code {first.code}"
    if first.code < 0:
        names = {number.value: number.name for number in signal.Signals}
        how = f"was killed by {names.get(-first.code, f'signal {-first.code}')}"
    _print(console, f"rank {first.rank} of {size} {how}{'; the others were stopped.' if size > 1 else '.'}")
    if first.rank != 0 and error.text:
        _print(console, "\n".join(f"  {line}" for line in error.text.splitlines()))
    if -first.code in _HINTS:
        _print(console, _HINTS[-first.code])
    elif not is_message and size > 1:
        _print(console, "If the same happens with --nproc 1, it is easier to debug there.")
    _print(console, f"{'Stderr' if first.rank == 0 else 'Output'}: {workers.logs / f'rank_{first.rank}.log'}")
    return first.exit_code


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


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

    def is_from(self, signals: Sequence[int]) -> bool:
        """Return whether one of these signals ended the worker, directly or through its own handler."""
        return self.exit_code - 128 in signals


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    error_file: Path
    exit_fd: int  # a file descriptor that becomes readable when the worker ends
    is_killed: bool = False


@dataclass
class WorkerGroup:
    """The workers of one launch, by rank: started, watched and ended together."""

    logs: Path
    records: Path  # a folder where workers record their failures
    _workers: list[_Worker] = field(default_factory=list)
    exits: dict[int, WorkerExit] = field(default_factory=dict)
    _epoll: select.epoll = field(default_factory=select.epoll)
    signal_pipe: tuple[int, int] = field(default_factory=os.pipe)
    _signals: list[int] = field(default_factory=list)
    _stderr: DelayedStderr | None = None
    _deadline: float | None = None

    def __post_init__(self) -> None:
        self._epoll.register(self.signal_pipe[0], select.EPOLLIN)

    def start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], store_socket: int) -> None:
        """Start one worker per environment; rank 0 inherits `store_socket`."""
        for rank, environment in enumerate(environments):
            log, error_file = self.logs / f"rank_{rank}.log", self.records / f"rank_{rank}.json"
            try:
                stderr = DelayedStderr(log, self.records) if rank == 0 else None
                with os.fdopen(open_regular(log, os.O_WRONLY | os.O_APPEND), "ab") as file:
                    title = f"--- {datetime.now():%Y-%m-%d %H:%M:%S} rank {rank}: {shlex.join(command)}\n"
                    file.write(title.encode())
                    file.flush()
                    start = file.tell()
                    process = subprocess.Popen(
                        [sys.executable, "-I", "-S", str(_EXEC_WORKER), str(os.getpid()), *command],
                        env={**environment, ERROR_FILE: str(error_file)},
                        # A process in a background group would be stopped by SIGTTIN when it reads from the terminal.
                        stdin=subprocess.DEVNULL,
                        stdout=file if stderr is None else None,
                        stderr=file if stderr is None else stderr.write_end,
                        pass_fds=[store_socket] if rank == 0 else [],
                        # A group of its own: Ctrl-C reaches each process once, through us, and its children can be
                        # killed too.
                        process_group=0,
                    )
                exit_fd = _open_exit_fd(process.pid)
            except OSError as error:
                raise ConfigError(f"Process {rank} of {len(environments)} cannot be started: {error}.") from error
            if stderr is not None:
                self._stderr = stderr
                stderr.start()
            self._workers.append(_Worker(rank, process, log, start, error_file, exit_fd))
            self._epoll.register(exit_fd, select.EPOLLIN)

    def wait(self) -> None:
        """Wait for all workers. After a failure, or the third signal to us, those that still run are killed."""
        while len(self.exits) < len(self._workers):
            remaining = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            events = self._epoll.poll(remaining)  # in the order in which they happened
            for fd, _ in events:
                if fd == self.signal_pipe[0]:
                    self._signals.append(os.read(fd, 1)[0])
                    if len(self._signals) >= 3:
                        self.kill()
                        continue
                    for worker in self._list_running():  # not its children, which it stops itself
                        with suppress(ProcessLookupError):
                            os.kill(worker.process.pid, self._signals[-1])
                else:
                    self._reap(next(worker for worker in self._workers if worker.exit_fd == fd))
            if not events:
                if all(worker.is_killed for worker in self._list_running()):
                    return
                self.kill()

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
        self.exits[worker.rank] = WorkerExit(worker.rank, code, recorded or now, recorded is not None, by_us)
        self._epoll.unregister(worker.exit_fd)
        os.close(worker.exit_fd)
        if self._deadline is None and self.find_failures():
            self._deadline = time.monotonic() + GRACE_SECONDS
            if self._stderr:
                self._stderr.pause()

    def find_failures(self) -> list[WorkerExit]:
        """Return failed workers, the cause first, without those that we, or a signal to us, have ended."""
        failed = [one for one in self.exits.values() if one.code and not one.by_us and not one.is_from(self._signals)]
        return sorted(failed, key=lambda one: one.order)

    def find_stop_code(self) -> int:
        """Return 128 + the signal to us that ended a worker, or after which we killed the workers; 0 without one."""
        for one in sorted(self.exits.values(), key=lambda one: one.time):
            if one.is_from(self._signals):
                return one.exit_code
        killed = any(worker.is_killed for worker in self._workers)
        return 128 + self._signals[-1] if self._signals and killed else 0

    def read_error(self, rank: int) -> LoggedError:
        if rank == 0 and self._stderr:
            self._stderr.drain()
        return read_logged_error(self._workers[rank].log, self._workers[rank].log_start)

    def flush_rank_0(self) -> None:
        if self._stderr:
            self._stderr.flush()

    def close(self) -> None:
        self.kill()
        self.wait()
        self._epoll.close()
        for fd in self.signal_pipe:
            os.close(fd)

    def kill(self) -> None:
        """Kill the workers that still run, with their children."""
        for worker in self._list_running():
            worker.is_killed = True
            _kill_group(worker.process.pid)
        self._deadline = time.monotonic() + _KILL_SECONDS

    def _list_running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.rank not in self.exits]


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
