"""Workers of further attempts, forked with imports done: the supervisor's side of `fork_server`. No torch here."""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cornstarch.launch.exec_worker import EXEC_WORKER
from cornstarch.launch.fork_server import READY, SIZE_BYTES

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_PATIENCE = 10.0  # seconds for the server to fork; then processes are started instead
_ALMOST = 2.0  # seconds that it is worth to wait for the last imports
_OWN = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a server does not have: they are those of one worker."""
_THREADS = "OMP_NUM_THREADS"  # read once, by the libraries that are imported


class ForkedProcess:
    """A child that was not started by `subprocess`, with what `WorkerGroup` needs of its `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end; return the exit code, or the negative number of the signal that killed it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class WarmWorkers:
    """Starts the process from which the workers of further attempts are forked, and has it fork them.

    It starts when the workers of an attempt have done their first steps and said what they have imported, so that it
    costs neither a run without restarts nor the start of one. What goes wrong with it costs time only: workers are
    started without it then.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._threads: str | None = None
        self._is_ready = False

    @property
    def is_running(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def prepare(self, modules: Path, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Start the server if it does not run and workers have said what they import; return whether it runs.

        Args:
            modules: The file in which a worker has listed its modules; it may not exist yet.
            command: That of the workers.
            environment: The variables of a worker.
        """
        if self.is_running:
            return True
        if sys.platform != "linux" or list(command[1:2]) != ["-m"]:
            return False
        try:
            names = modules.read_bytes()
        except OSError:
            return False
        self.close()
        _become_subreaper(True)
        self._connection, theirs = socket.socketpair()
        self._threads = environment.get(_THREADS)
        arguments = [EXEC_WORKER, str(os.getpid()), command[0], "-m", "cornstarch.launch.fork_server"]
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-I", "-S", *arguments, str(os.getpid()), str(theirs.fileno())],
                env={name: value for name, value in environment.items() if name not in _OWN},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], process_group=0,
            )  # fmt: skip
        with suppress(OSError):  # it has ended: the next attempt finds out
            self._send(names, [])
        return True

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int, store: int | None
    ) -> ForkedProcess | None:
        """Return a worker that has done its imports; None if there is no server, or it is not ready.

        Args:
            command: `PYTHON -m MODULE ARGUMENTS`.
            environment: The variables of the worker.
            stdout: The file descriptor of its output.
            stderr: That of its errors.
            store: The socket that it inherits, if it is rank 0.
        """
        if not self.is_running or environment.get(_THREADS) != self._threads or list(command[1:2]) != ["-m"]:
            return None
        assert self._connection is not None
        request = {"command": list(command), "environment": dict(environment), "supervisor": os.getpid()}
        files = [stdout, stderr, *([] if store is None else [store])]
        # A worker that is forked too late, when another has been started in its place, must not begin.
        begin, order = os.pipe()
        try:
            if not self._is_ready:
                if not select.select([self._connection], [], [], _ALMOST)[0] or self._connection.recv(1) != READY:
                    return None
                self._is_ready = True
            self._send(json.dumps(request).encode(), [begin, *files])
            answer = self._connection.recv(SIZE_BYTES, socket.MSG_WAITALL)
            if len(answer) == SIZE_BYTES:
                os.write(order, READY)
                return ForkedProcess(int.from_bytes(answer, "big"))
        except OSError:
            pass
        finally:
            os.close(begin)
            os.close(order)
        self.close()
        return None

    def reap_strangers(self) -> None:
        """Forget processes that have ended and were inherited: children of workers that were killed. None run now."""
        if self._server is None:
            return
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == self._server.pid:
                    return  # `Popen` waits for it
                os.waitpid(ended.si_pid, 0)

    def close(self) -> None:
        """End the server."""
        if self._connection is not None:
            self._connection.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self.reap_strangers()
            _become_subreaper(False)
        self._server = self._connection = None
        self._is_ready = False

    def _send(self, content: bytes, files: list[int]) -> None:
        assert self._connection is not None
        self._connection.settimeout(_PATIENCE)
        socket.send_fds(self._connection, [len(content).to_bytes(SIZE_BYTES, "big")], files)
        self._connection.sendall(content)


def _become_subreaper(is_one: bool) -> None:
    """Inherit the children of children that end, in place of the first process of the machine."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_one), 0, 0, 0)
