"""Forks workers from a process that has done their imports: `python -m cornstarch.launch.fork_server PARENT SOCKET`.

`WarmWorkers` starts one on each machine. It has no process group, no CUDA context and no thread when it forks, and
nothing of the run's folder is open in it. A worker that it forks becomes a child of the supervisor.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import json
import os
import runpy
import socket
import sys
import threading
import time
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Any, TextIO

from cornstarch.launch.exec_worker import die_with_parent
from cornstarch.launch.local_launcher import STORE_SOCKET

READY = b"+"
SIZE_BYTES = 8
_MOST_FILES = 8
_NICENESS = 10  # a busy machine must not starve it for minutes
# Modules of these packages are imported ahead: not the code of a user, which may do anything when it is imported.
_PACKAGES = (
    "cornstarch", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "PIL", "peft",
)  # fmt: skip
_LEFT_OUT = ("torch._inductor",)  # starts processes that compile


def main() -> None:
    """Import what workers need, then fork one for each request, until the supervisor closes the socket."""
    supervisor, connection = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    connection.set_inheritable(False)
    if os.getppid() != supervisor:
        return  # started through another program: the supervisor would not inherit what is forked here
    names = json.loads(_receive(connection)[0])
    thread = threading.Thread(target=_import_all, args=(names,))
    thread.start()
    thread.join()
    if threading.active_count() > 1 or _has_children():
        return  # a fork would lack the threads, and have the children of another process
    connection.sendall(READY)
    while True:
        content, files = _receive(connection)
        if not content:
            os._exit(0)  # nothing that was imported has anything to end here
        worker = _fork_worker(supervisor)
        if worker == 0:
            break
        for file in files:
            os.close(file)
        connection.sendall(worker.to_bytes(SIZE_BYTES, "big"))
    connection.close()
    _be_worker(json.loads(content), files)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next request and its open files; an empty one at the end."""
    size, files, _, _ = socket.recv_fds(connection, SIZE_BYTES, _MOST_FILES)
    return connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL) if size else b"", list(files)


def _import_all(names: list[str]) -> None:
    """Import modules in a thread of low priority: a process could not raise its own again."""
    with suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
    # CUDA is not asked whether there are GPUs: a process that has asked cannot be forked.
    os.environ.update(PYTORCH_NVML_BASED_CUDA_CHECK="1", TORCH_WARM_POOL="0")
    gc.disable()  # what is imported stays
    for name in names:
        if name.partition(".")[0] in _PACKAGES and not name.startswith(_LEFT_OUT):
            with suppress(Exception):  # whoever needs it says what is wrong with it
                import_module(name)
    gc.collect()
    gc.enable()
    gc.freeze()  # or collecting would touch, and so copy, what all workers share


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _fork_worker(supervisor: int) -> int:
    """Fork a child of the supervisor; return its process id, and 0 in the child itself.

    The process in between ends at once, and the supervisor, a subreaper, inherits its child.
    """
    answers, answer = os.pipe()
    between = os.fork()
    if between == 0:
        worker = os.fork()
        if worker:
            with suppress(OSError):
                os.setpgid(worker, worker)
            os.write(answer, worker.to_bytes(SIZE_BYTES, "big"))
            os._exit(0)
        parent = os.getppid()
        os.close(answers)
        os.close(answer)
        with suppress(OSError):  # its parent may have done so
            os.setpgid(0, 0)
        while parent != supervisor and os.getppid() == parent:
            time.sleep(0.0005)  # until the process in between has ended
        return 0
    os.close(answer)
    worker = int.from_bytes(os.read(answers, SIZE_BYTES), "big")
    os.close(answers)
    os.waitpid(between, 0)  # from here on the worker is the supervisor's child
    return worker


def _be_worker(request: dict[str, Any], files: list[int]) -> None:
    """Become `python -m MODULE ARGUMENTS` with the variables and files of the request."""
    die_with_parent(request["supervisor"])
    begin, stdout, stderr, *store = files
    if not os.read(begin, 1):
        os._exit(1)  # another worker was started instead
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for file in (begin, stdout, stderr):
        os.close(file)
    variables = request["environment"]
    if store:
        os.set_inheritable(store[0], True)
        variables[STORE_SOCKET] = str(store[0])
    os.environ.clear()
    os.environ.update(variables)
    command = request["command"]
    if _has_met_cuda():
        os.execvpe(command[0], command, variables)
    is_unbuffered = bool(variables.get("PYTHONUNBUFFERED"))
    sys.stdout = _open_output(1, sys.stdout, is_unbuffered)
    sys.stderr = _open_output(2, sys.stderr, is_unbuffered)
    if variables.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)
    if "numpy" in sys.modules:  # what draws without a seed draws other numbers in every process
        sys.modules["numpy"].random.seed()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it is imported already, as it is meant
    sys.argv = command[2:]
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


def _open_output(number: int, usual: TextIO, is_unbuffered: bool) -> io.TextIOWrapper:
    """Return a stream of a file descriptor as the interpreter makes it when it starts; `usual` has its encoding."""
    is_by_line = number == 2 or is_unbuffered or os.isatty(number)
    file = open(number, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
    encoding, errors = usual.encoding, usual.errors
    return io.TextIOWrapper(file, encoding, errors, line_buffering=is_by_line, write_through=is_unbuffered)


def _has_met_cuda() -> bool:
    """Return whether CUDA cannot be used here, because something has used it before the fork."""
    if "torch" not in sys.modules:
        return False
    from cornstarch.compat import is_forked_after_cuda

    return is_forked_after_cuda()


if __name__ == "__main__":
    main()
