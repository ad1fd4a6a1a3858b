"""Becomes a worker that dies with its parent. Run as a file, with a bare interpreter: it costs 15 ms.

The parent could arrange this between fork and exec, but Python code there can deadlock if the parent has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; it outlives exec
_CANNOT_START = 127  # as a shell says it


def main() -> None:
    """Run the command that follows the parent's process id."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            sys.exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"Cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(_CANNOT_START)


if __name__ == "__main__":
    main()
