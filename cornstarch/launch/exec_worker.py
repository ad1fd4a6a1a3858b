"""Replace this process by a worker that dies with its parent. Run as a file, in a bare interpreter: it costs 15 ms.

The parent could do this between fork and exec (`preexec_fn`), but Python code there can deadlock if the parent has
threads.
"""

import ctypes
import os
import signal
import sys

EXEC_WORKER = __file__
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; the setting survives exec
_CANNOT_START = 127  # the shell's exit code for a command that cannot be started


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, which should be that process, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call: no signal would come any more
            os._exit(128 + signal.SIGKILL)


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"Cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(_CANNOT_START)


if __name__ == "__main__":
    main()
