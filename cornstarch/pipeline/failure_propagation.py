"""Failure propagation: the first error of any process is published, and wakes every process that waits for others."""

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

_POLL_SECONDS = 1.0
_GRACE_SECONDS = 1.0  # how much later than a closed connection the reason for it may be published
_UNUSED_TAG = 2**20
_PREFIX = "cornstarch/pipeline"


class P2PGroup(Protocol):
    """The point-to-point operations of a process group, or of one of its backends."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any: ...


class FailureSignal:
    """The first failure of a job, published in the store that all processes share.

    All processes must create their signals in the same order, one for each pipeline.

    Args:
        wake: A method that a thread calls with the message of another process's failure, inside `watch`.
    """

    def __init__(self, wake: Callable[[str], None]) -> None:
        self._store = default_store()
        self.number = self._store.add(f"{_PREFIX}/made/{dist.get_rank()}", 1)
        """The number of the pipeline; the same in all processes."""
        self._key = f"{_PREFIX}/failure/{self.number}"
        self._wake = weakref.WeakMethod(wake)
        self._is_watching = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def report(self, message: str, is_echo: bool) -> str:
        """Publish a failure; return the first one that any process has published.

        Args:
            message: The failure of this process.
            is_echo: Whether it is a connection that another process closed, which probably publishes the reason.
        """
        deadline = time.monotonic() + _GRACE_SECONDS
        while is_echo and self.get_report() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with suppress(RuntimeError):  # the process that hosts the store is gone
            return self._store.compare_set(self._key, "", message).decode()
        return message

    def get_report(self) -> str | None:
        """Return the first failure that was published, if any."""
        with suppress(RuntimeError):
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None
        return None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Run a block that may wait for other processes; call `wake` if one of them publishes a failure."""
        if self._thread is None:
            arguments = (weakref.ref(self), self._stopped)
            self._thread = threading.Thread(target=_poll, args=arguments, name="pipeline-failure", daemon=True)
            self._thread.start()
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()


def _poll(reference: weakref.ref[FailureSignal], stopped: threading.Event) -> None:
    # The thread holds only weak references between polls, so that it keeps neither the signal nor the pipeline alive.
    while not stopped.wait(_POLL_SECONDS):
        signal = reference()
        if signal is None:
            return
        wake = signal._wake()
        if signal._is_watching and wake is not None and (message := signal.get_report()) is not None:
            wake(message)
            return
        del signal, wake


def abort_group(group: P2PGroup) -> None:
    """End all waiting in a group: in this process, and, by closed connections, in those that wait for this one.

    Destroying the group is not enough: connections stay open as long as a thread or a traceback refers to a message.
    """
    if isinstance(group, dist.ProcessGroup) and "nccl" in dist.get_backend_config(group):
        with suppress(RuntimeError):
            group.abort()
        return
    # Gloo has no abort, but closes all connections of a group when a wait times out. Peers may have closed some before;
    # a receive on those raises immediately, and the next peer is tried.
    for other in range(group.size()):
        with suppress(RuntimeError):
            if other != group.rank():
                group.recv([torch.empty(1)], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))
