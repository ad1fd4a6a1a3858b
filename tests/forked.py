"""Processes of their own that do not wait for torch each time: they are forked from one that has imported it.

Python keeps one such server for a process, and what it imports is settled when it starts. So there is one place that
says so, for the pool of workers, for commands, and for processes that are killed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import chdir
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

_ROOT = Path(__file__).resolve().parents[1]
_VARIABLES = dict(os.environ)  # as they are before any test changes them


def context() -> ForkServerContext:
    """Return the context whose processes are forked; its server is started if need be."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.imported"])
    # The server looks for modules where it starts, and keeps its variables, whichever test happens to be the first.
    with chdir(_ROOT), mock.patch.dict(os.environ, _VARIABLES, clear=True):
        forkserver.ensure_running()
    return found


def process(target: Callable[..., None], *arguments: Any, daemon: bool = False) -> ForkServerProcess:
    """Return a process that calls a function; it is not started yet."""
    usual = multiprocessing.get_start_method()
    return context().Process(target=_as_usual, args=(usual, target, *arguments), daemon=daemon)


def run_in_child(action: Callable[[], None]) -> int:
    """Run something in a process of its own and return its exit status (-9: killed)."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _as_usual(method: str, target: Callable[..., None], *arguments: Any) -> None:
    """Call a function, in a process that starts others as any process does.

    By itself it would start them as it was started, from a server of its own, which would import everything anew.
    """
    multiprocessing.set_start_method(method, force=True)
    target(*arguments)
