"""The local launcher: several processes of one command on this machine. No torch in this process."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cornstarch.errors import ConfigError
from cornstarch.launch.launcher import World
from cornstarch.launch.worker_group import StopRequests, WorkerExit, WorkerGroup

if TYPE_CHECKING:
    from rich.console import Console

STORE_SOCKET = "CORNSTARCH_STORE_SOCKET"  # a variable of rank 0: the inherited socket that is bound to MASTER_PORT

LOOPBACK = "127.0.0.1"
_SHOW_CURSOR = "\x1b[?25h"
_RECORDS = "cornstarch-launch-"
_RECORDS_LOCK = "lock"
_STALE_SECONDS = 60.0  # a folder of records that is younger may not be locked yet

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
        size = process_count(nproc, console)
        make_logs(logs, size, console)
        with open_records() as records, closing(StopRequests()) as stops, bind_store(LOOPBACK) as bound:
            fd, port = bound.fileno(), bound.getsockname()[1]
            workers = WorkerGroup(logs, records, stops)
            with closing(workers), stops.collect():
                workers.start(command, build_environments(environment, size, port, fd), fd)
                workers.wait()
            return report_end(workers, size, console)


def make_logs(logs: Path, size: int, console: Console) -> None:
    """Make the folder for logs, and warn if so many processes are more than this machine has cores."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{logs}: the folder for logs cannot be created: {error.strerror}.") from error
    cores = core_count()
    if size > cores:
        print_line(console, f"{size} processes share {cores} core{'s' if cores > 1 else ''}: this works, but is slow.")


def bind_store(host: str) -> socket.socket:
    """Return a socket that keeps a port of this machine from other processes.

    It does not listen yet: rank 0 inherits it and listens, so that nobody can take the port in between. If it is bound
    to the loopback address, nobody outside can talk to the run. A script can still open a store at the port by itself:
    torch binds with SO_REUSEADDR.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, 0))
    return bound


@contextmanager
def open_records() -> Iterator[Path]:
    """Make a temporary folder for the records of workers, and delete those of launchers that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_RECORDS}*"):
        with suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.getuid() or found.st_mtime > time.time() - _STALE_SECONDS or path.is_symlink():
                continue
            with open(path / _RECORDS_LOCK, "rb") as file:  # a lock ends with the process that holds it
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_RECORDS) as folder, open(Path(folder) / _RECORDS_LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(folder)


def process_count(nproc: int | str, console: Console | None = None) -> int:
    """Return the number of processes for `--nproc`; "auto": one per GPU, or 1, because one process uses all cores."""
    if nproc == "auto":
        count = gpu_count()
        if count == 0:
            from rich.console import Console

            text = "nproc = auto: this machine has no GPU; starting one process, which uses all cores."
            print_line(console or Console(stderr=True), text)
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
    common = {**base, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    return build_node_environments(common, range(size), size, (0, 1), store_socket)


def build_node_environments(
    base: Mapping[str, str], ranks: range, size: int, node: tuple[int, int], store_socket: int | None
) -> list[dict[str, str]]:
    """Return the variables of each rank of this machine, which is number `node[0]` of `node[1]`."""
    common = {
        "OMP_NUM_THREADS": str(max(1, core_count() // len(ranks))),
        "PYTHONFAULTHANDLER": "1",
        # The machine's name need not resolve.
        **({"GLOO_SOCKET_IFNAME": "lo"} if base["MASTER_ADDR"] == LOOPBACK else {}),
        "TORCHELASTIC_RESTART_COUNT": "0",
        **base,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GROUP_RANK": str(node[0]),
        "GROUP_WORLD_SIZE": str(node[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    environments = []
    for local_rank, rank in enumerate(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        # A killed process loses what it has not written yet. Rank 0's terminal is line-buffered anyway.
        own |= {STORE_SOCKET: str(store_socket)} if rank == 0 else {"PYTHONUNBUFFERED": "1"}
        environments.append({**common, **own})
    return environments


def find_first_failure(workers: WorkerGroup) -> WorkerExit | None:
    """Return the failure to show: the cause; of the same error of several ranks, that of rank 0, which prints it."""
    failures = workers.find_failures()
    if not failures:
        return None
    first = failures[0]
    error = workers.read_error(first.rank)
    for one in failures:
        if one.rank == 0 and one.code == first.code and workers.read_error(0) == error:
            first = one
    return first


def report_end(workers: WorkerGroup, size: int, console: Console, step: int | None = None) -> int:
    """Report the first failure of the workers, in step `step` if that is known, and return the exit code."""
    if 0 not in workers.exits or workers.exits[0].code < 0:
        with suppress(OSError, ValueError):  # a progress bar hides the cursor; a killed process does not restore it
            if sys.stdout.isatty():
                print(_SHOW_CURSOR, flush=True)
    first = find_first_failure(workers)
    if first is None:
        workers.flush_rank_0()
        return workers.find_stop_code()
    error = workers.read_error(first.rank)
    is_message = error.is_message and first.code > 0
    if first.rank == 0:
        workers.flush_rank_0()
        if is_message:
            return first.exit_code
    where = f" in step {step}" if step else ""
    others = "; the others were stopped." if size > 1 else "."
    print_line(console, f"rank {first.rank} of {size} {first.how}{where}{others}")
    if first.rank != 0 and error.text:
        print_line(console, "\n".join(f"  {line}" for line in error.text.splitlines()))
    if -first.code in _HINTS:
        print_line(console, _HINTS[-first.code])
    elif not is_message and size > 1:
        print_line(console, "If the same happens with --nproc 1, it is easier to debug there.")
    print_line(console, f"{'Stderr' if first.rank == 0 else 'Output'}: {workers.get_log(first.rank)}")
    return first.exit_code


def print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
