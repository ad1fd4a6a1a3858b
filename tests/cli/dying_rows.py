"""Rows whose readers die, or ask for another number of processes, in the steps that files name."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class PlainRows:
    """Rows of a file; reading one takes a while, so that a run lasts longer than its supervisor needs to notice."""

    def __init__(self, path: str, pause: float = 0.0) -> None:
        self._rows, self._pause = json.loads(Path(path).read_text()), pause

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self._pause)
        return self._rows[index]


def rows(path: str, folder: str, pause: float = 0.0) -> PlainRows:
    """Return the rows.

    If there is a file `die_<rank>_<attempt>` in a folder, this process dies by SIGKILL in the step that is its text.
    A file `scale_<rank>_<attempt>` names a step and the number of processes to ask for.
    """
    me = f"{os.environ.get('RANK')}_{os.environ.get('CORNSTARCH_ATTEMPT')}"
    die, scale = Path(folder) / f"die_{me}", Path(folder) / f"scale_{me}"
    if die.exists():
        _do_in_step(int(die.read_text()), lambda: os.kill(os.getpid(), signal.SIGKILL))
    if scale.exists():
        step, size = scale.read_text().split()
        _do_in_step(int(step), lambda: (Path(folder) / "run/scale").write_text(size))
    return PlainRows(path, pause)


def die_when_ready(path: str, folder: str) -> PlainRows:
    """Return the rows; rank 1 dies in step 4 of the first attempt, when the next one can be forked.

    Each rank writes the command that it was started with, by attempt.
    """
    me = f"{os.environ['RANK']}_{os.environ['CORNSTARCH_ATTEMPT']}"
    Path(folder, f"command_{me}").write_text(" ".join(sys.orig_argv))
    if me == "1_0":
        signal.signal(signal.SIGUSR1, lambda *_: _die_when_ready())  # it stops the training thread
        _do_in_step(4, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1))
    return PlainRows(path)


def _die_when_ready() -> None:
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    while not any(map(_is_ready_server, children.read_text().split())):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_ready_server(pid: str) -> bool:
    """Return whether a process forks workers and is waiting to do so: it imports in a thread."""
    is_server = b"cornstarch.launch.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    imported = Path(f"/proc/{pid}/maps").read_text().count("libtorch_python")
    return is_server and imported > 0 and len(os.listdir(f"/proc/{pid}/task")) == 1


def _do_in_step(step: int, do: Callable[[], object]) -> None:
    file = Path(os.environ["CORNSTARCH_STEP_FILE"])

    def wait() -> None:
        while not file.exists() or int(file.read_bytes() or 0) < step:
            time.sleep(0.001)
        do()

    threading.Thread(target=wait, daemon=True).start()


def wait_at(path: str, gate: str) -> PlainRows:
    """Return the rows, after a gate, a file, is gone: set-up stands still."""
    Path(f"{gate}.reached").touch()
    while Path(gate).exists():
        time.sleep(0.01)
    return PlainRows(path)
