"""An interpreter that does not wait for torch: what it runs is forked from a process that has imported it.

Commands start processes with `sys.executable`. Where a test puts `interpreter()` in its place, `python -m MODULE` and
`python SCRIPT` begin at once; variables, files, the signals that are sent and the exit code are those of any process.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

from tests import forked

_CLIENT = Path(__file__).with_name("warm_client.py")
_HIGH = 256  # file descriptors from here on are nobody's


@lru_cache
def interpreter(prepare: Callable[[], None] | None = None) -> str:
    """Return the path of such an interpreter; it serves as long as this process lives.

    Args:
        prepare: A function that the process calls from which others are forked, before the first of them.
    """
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    address, path = Path(folder.name, "socket"), Path(folder.name, "python")
    path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", str(_CLIENT), str(address)])} "$@"\n')
    path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        server = forked.process(_serve, listening, prepare)
        server.start()

    def close() -> None:
        server.terminate()
        server.join()
        folder.cleanup()

    atexit.register(close)
    return str(path)


@contextmanager
def used(path: str) -> Iterator[None]:
    """Start processes with this interpreter, in a block."""
    with mock.patch.object(sys, "executable", path):
        yield


# ------------------------------------------------------------------------------------------------ the server


def _serve(listening: socket.socket, prepare: Callable[[], None] | None) -> None:
    """Fork a process for each request, until the process that asks has ended."""
    if prepare is not None:
        prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.sentinel not in wait([listening, parent.sentinel]):
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(connection)
            os._exit(0)
        connection.close()


def _keep(connection: socket.socket) -> None:
    """Run what is asked for in a process; pass signals on to it, and say how it ended. It dies with who asked."""
    size, files, _, _ = socket.recv_fds(connection, 4, 64)
    request = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    child = os.fork()
    if child == 0:
        connection.close()
        _become(request, files)
    with suppress(OSError):
        os.setpgid(child, child)  # as it does itself: it may be killed before it comes to that
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    while ended not in wait([connection, ended]):
        if number := connection.recv(1):
            os.kill(child, number[0])
        else:
            os.killpg(child, signal.SIGKILL)
            return
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        connection.sendall(code.to_bytes(4, "big", signed=True))


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Be `python -m MODULE ARGUMENTS`, or `python SCRIPT ARGUMENTS`."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files]
    for place, file in zip(request["files"], high, strict=True):
        os.dup2(file, place)
    os.closerange(_HIGH, max(high) + 1)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = request["arguments"]
    code = _run(sys.argv[0], request["is_module"])
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(name: str, is_module: bool) -> int:
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it is imported already: that is meant
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(name))
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        atexit._run_exitfuncs()
    return 0
