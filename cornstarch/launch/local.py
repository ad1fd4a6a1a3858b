"""Several processes of one command on this machine. No torch in this process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cornstarch.errors import ConfigError
from cornstarch.launch.workers import End, Workers
from cornstarch.launch.world import STORE_SOCKET

if TYPE_CHECKING:
    from rich.console import Console

_HOST = "127.0.0.1"
_SHOW_CURSOR = "\x1b[?25h"

_HINTS: dict[int, str] = {
    signal.SIGKILL: "Most often the machine ran out of memory: fewer processes, smaller batches, fewer data workers.",
    signal.SIGBUS: "Most often /dev/shm is full: fewer data workers, or a larger one (docker run --shm-size=8g).",
    signal.SIGSEGV: "A crash in compiled code; the log has the Python lines that led there.",
    signal.SIGABRT: "Compiled code gave up, most often CUDA or NCCL; the log has its reason.",
}


def launch(
    command: Sequence[str],
    nproc: int | str,
    logs: Path,
    *,
    environment: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> int:
    """Run `nproc` processes of one command as torchrun would, and return the exit code.

    Rank 0 speaks to the terminal. The others write to `logs/rank_k.log`, and so does rank 0 what it says on stderr.
    SIGTERM and SIGINT are passed on, so that every process can save. When one fails, the others are ended and it is
    shown which was the first, and why. If this process is killed, they die.

    Args:
        command: What to run: `[sys.executable, "-m", "cornstarch", "train", "run.yaml"]`.
        nproc: How many, or "auto": one for each GPU.
        logs: A folder; it is made. Logs that are there are continued.
        environment: The variables of the processes; without it those of this process.
        console: Where to tell of a failure; without it stderr.

    Returns:
        0 if all ended with 0; else the exit code of the first that failed, 128 + its number if a signal ended it.
    """
    console = console or _stderr_console()
    base = dict(os.environ if environment is None else environment)
    if base.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"This is rank {base.get('RANK', '?')} of {base['WORLD_SIZE']} already, started by torchrun or the like; "
            "each of them would start more. Leave --nproc out."
        )
    size, cores = process_count(nproc, console), _core_count()
    _make_folder(logs)
    if size > cores:
        _say(console, f"{size} processes share {cores} core{'s' if cores > 1 else ''}: that works, and is slow.")
    with tempfile.TemporaryDirectory(prefix="cornstarch-launch-") as records, _reserved_port() as (held, port):
        workers = Workers(logs, Path(records))
        with closing(workers), _signals_to(workers):
            workers.start(command, _environments(base, size, port, held), held)
            workers.wait()
        return _told(workers, size, console)


def process_count(nproc: int | str, console: Console | None = None) -> int:
    """Return how many processes `--nproc` means: a number, or "auto" for one for each GPU.

    Without a GPU "auto" is 1: one process uses all cores already.
    """
    console = console or _stderr_console()
    if nproc == "auto":
        count = _gpu_count()
        if count == 0:
            _say(console, "nproc = auto: no GPU here, so one process, which uses all cores.")
        return max(1, count)
    try:
        size = int(nproc)
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"nproc = {nproc}: expected a number of processes, at least 1, or auto.")
    return size


def _gpu_count() -> int:
    """Return how many GPUs torch sees. Another process asks it: here it would take memory as long as the run lasts."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return 0
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    return int(answer[-1]) if answer else 0


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: a folder for logs cannot be made there: {error.strerror}.") from error


# ---------------------------------------------------------------------------------------------------- starting


@contextmanager
def _reserved_port() -> Iterator[tuple[int, int]]:
    """Yield a socket and its port, which nobody else is given as long as the socket is open.

    It is bound, not listening. Rank 0 inherits it and makes it listen, so there is no moment at which another process
    could take the port; and it is bound to this machine's own address, so nobody outside can talk to the run. A script
    that opens a store at MASTER_PORT by itself may do so too: torch binds with SO_REUSEADDR.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_HOST, 0))
        yield held.fileno(), held.getsockname()[1]


def _environments(base: Mapping[str, str], size: int, port: int, held: int) -> list[dict[str, str]]:
    """Return each process's variables: torchrun's, and what suits processes on one machine."""
    shared = {
        "OMP_NUM_THREADS": str(max(1, _core_count() // size)),
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
        # What a killed process has not written yet is lost; rank 0's terminal takes line by line anyway.
        own |= {STORE_SOCKET: str(held)} if rank == 0 else {"PYTHONUNBUFFERED": "1"}
        environments.append({**shared, **own})
    return environments


@contextmanager
def _signals_to(workers: Workers) -> Iterator[None]:
    """Pass signals on to the workers while a block runs. The terminal's end is passed on as SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        workers.signalled(signal.SIGTERM if number == signal.SIGHUP else number)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # not under nohup
        numbers.append(signal.SIGHUP)
    before: dict[int, Any] = {number: signal.signal(number, note) for number in numbers}
    # Whoever started us may ignore it, and then children vanish without a trace.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------- telling


def _told(workers: Workers, size: int, console: Console) -> int:
    """Show what there is to know about the end, and return the exit code."""
    if workers.is_killed(0):
        _restore_terminal()
    failures = workers.failures()
    if not failures:
        workers.show_rank_0()
        stopped = workers.stopped_by()
        return 0 if stopped is None else 128 + stopped
    first = failures[0]
    words = workers.last_words(first.rank)
    for end in failures:  # an error that every process finds is told as a single one tells it
        if end.rank == 0 and end.code == first.code and workers.last_words(0) == words:
            first = end
    is_told = words.is_told and first.code > 0
    if first.rank == 0:
        workers.show_rank_0()
        if is_told:
            return first.exit_code
    _say(console, f"{_ending(first, size)}{'; the others were stopped.' if size > 1 else '.'}")
    if first.rank != 0 and words.text:
        _say(console, "\n".join(f"  {line}" for line in words.text.splitlines()))
    if -first.code in _HINTS:
        _say(console, _HINTS[-first.code])
    elif not is_told and size > 1:
        _say(console, "If it is the same with --nproc 1, it is easier to look into there.")
    _say(console, f"Its {'messages' if first.rank == 0 else 'output'}: {workers.logs / f'rank_{first.rank}.log'}")
    return first.exit_code


def _ending(end: End, size: int) -> str:
    who = f"rank {end.rank} of {size}"
    if end.code >= 0:
        return f"{who} failed with exit code {end.code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"{who} was killed by {names.get(-end.code, f'signal {-end.code}')}"


def _restore_terminal() -> None:
    """Show the cursor again: a progress bar hides it, and a process that is killed does not bring it back."""
    with suppress(OSError, ValueError):
        if sys.stdout.isatty():
            print(_SHOW_CURSOR, flush=True)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)
