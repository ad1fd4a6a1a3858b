"""Word of what went wrong first in any process of a pipeline: whoever waits for others is woken, and says the same."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.compat import default_store

_EVERY = 1.0  # seconds between two looks of one who listens
_PATIENCE = 1.0  # seconds that word may take longer than the end of a connection
_NOBODYS = 2**20  # a tag that no message has
_PREFIX = "cornstarch/pipeline"


class Line(Protocol):
    """What messages travel over: a process group, or the part of one that does the work."""

    def rank(self) -> int:
        """Return the number of this process."""
        ...

    def size(self) -> int:
        """Return the number of processes."""
        ...

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Begin to send."""
        ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Begin to receive."""
        ...


class Alarm:
    """What a process says to the others, in the store that all share, when something went wrong.

    All processes must make theirs in the same order: one alarm for one pipeline.

    Args:
        wake: A method that is called with what another process has said, by a thread, while this one listens.
    """

    def __init__(self, wake: Callable[[str], None]) -> None:
        self._store = default_store()
        self.number = self._store.add(f"{_PREFIX}/made/{dist.get_rank()}", 1)
        """Of the pipeline; the same in all processes."""
        self._key = f"{_PREFIX}/failure/{self.number}"
        self._wake = weakref.WeakMethod(wake)
        self._listens = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def sound(self, words: str, is_echo: bool) -> str:
        """Say what went wrong; return what was said first, here or elsewhere.

        Args:
            words: What this process knows of it.
            is_echo: Whether a line to another process was cut, which then has probably said why.
        """
        end = time.monotonic() + _PATIENCE
        while is_echo and self.heard() is None and time.monotonic() < end:
            time.sleep(0.02)
        with suppress(RuntimeError):  # the process that has the store has gone
            return self._store.compare_set(self._key, "", words).decode()
        return words

    def heard(self) -> str | None:
        """Return what some process has said, if any has."""
        with suppress(RuntimeError):
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None
        return None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Run a block that may wait for others, and is woken if something goes wrong with them."""
        if self._thread is None:
            arguments = (weakref.ref(self), self._ended)
            self._thread = threading.Thread(target=_listen, args=arguments, name="pipeline-alarm", daemon=True)
            self._thread.start()
        self._listens = True
        try:
            yield
        finally:
            self._listens = False

    def end(self) -> None:
        """Listen no more."""
        self._ended.set()


def _listen(reference: weakref.ref[Alarm], ended: threading.Event) -> None:
    while not ended.wait(_EVERY):
        alarm = reference()
        if alarm is None:
            return
        wake = alarm._wake()
        if alarm._listens and wake is not None and (words := alarm.heard()) is not None:
            wake(words)
            return
        del alarm, wake


def cut(group: Line) -> None:
    """End all waiting in a group: here, and, because its lines are cut, in all other processes that wait for this one.

    To destroy a group does not do that: its lines stay as long as anything, a thread or a traceback, knows a message.
    """
    if isinstance(group, dist.ProcessGroup) and "nccl" in dist.get_backend_config(group):
        with suppress(RuntimeError):
            group.abort()
        return
    # Gloo cannot abort; but when a wait has timed out, it closes all lines. Some may have been closed by others before,
    # and raise at once: then the next one is tried.
    for other in range(group.size()):
        with suppress(RuntimeError):
            if other != group.rank():
                group.recv([torch.empty(1)], other, _NOBODYS).wait(timedelta(milliseconds=1))


__all__ = ["Alarm", "Line", "cut"]
