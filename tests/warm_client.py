"""Asks a process that has imported torch to be `python -m MODULE` or `python SCRIPT`, and ends so. Run as a file."""

import json
import os
import signal
import socket
import sys
from contextlib import suppress


def main() -> None:
    """Be the interpreter: the first argument says where the server is, those behind it are the interpreter's own."""
    address, arguments = sys.argv[1], sys.argv[2:]
    what = arguments[1:] if arguments[:1] == ["-u"] else arguments  # lines are written one by one anyway
    is_module = what[:1] == ["-m"]
    if not is_module and not what[0].endswith(".py"):
        os.execv(sys.executable, [sys.executable, *arguments])
    files = _open_files()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        place = {"folder": os.getcwd(), "variables": dict(os.environ), "files": files}
        request = json.dumps({"arguments": what[is_module:], "is_module": is_module, **place}).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], files)
        server.sendall(request)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        code = int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big", signed=True)
    if code < 0:
        with suppress(OSError):  # some cannot be caught anyway
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _open_files() -> "list[int]":
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            os.fstat(int(name))  # not that of the list itself, which is closed by now
            found.append(int(name))
    return found


if __name__ == "__main__":
    main()
