"""Messages between two processes over gloo, in pieces, and threads that wait for them.

gloo does not say whether a message has come unless one waits for it. Whoever wants to do something else meanwhile lets
a thread wait: it sleeps until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Generic, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_PIECE = 4 * 1024 * 1024
"""Bytes of a piece. Two processes that send each other one long message nearly take turns; with pieces of this size
both directions are used at once."""


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the same processes, for messages alone; all of them must call it."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class Peer:
    """Another process of a group, to send to and to receive from; tensors are on the CPU, without gaps.

    Args:
        group: Of gloo; nobody else uses it.
        rank: The other process's number in the group.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._group, self._rank = group, dist.get_global_rank(group, rank)

    def begin_send(self, values: Tensor) -> list[dist.Work]:
        """Begin to send a tensor, which must stay as it is meanwhile."""
        return [_begun(dist.isend(piece, self._rank, group=self._group)) for piece in _pieces(values)]

    def begin_receive(self, values: Tensor) -> list[dist.Work]:
        """Begin to receive into a tensor."""
        return [_begun(dist.irecv(piece, self._rank, group=self._group)) for piece in _pieces(values)]

    def send(self, values: Tensor) -> None:
        """Send a tensor; return when it may be written to again."""
        wait_for(self.begin_send(values))

    def receive(self, values: Tensor) -> None:
        """Receive into a tensor."""
        wait_for(self.begin_receive(values))


def _pieces(values: Tensor) -> Sequence[Tensor]:
    assert values.is_contiguous()
    return values.view(-1).split(max(1, _PIECE // values.itemsize)) if values.numel() else ()


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work


def wait_for(works: Sequence[dist.Work]) -> None:
    """Wait for transfers, in the order in which they began."""
    for work in works:
        work.wait()


class Background(Generic[T]):
    """Something that a thread does while this one goes on; it does not keep the process from ending.

    Args:
        work: What is done: mostly waiting, in which other threads run.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._over = work, Event()
        self._found: T | None = None
        self._error: BaseException | None = None
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._found = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether it is done, or has failed."""
        return self._over.is_set()

    def result(self) -> T:
        """Wait for it; return what it returned, or raise what it raised."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return cast(T, self._found)


__all__ = ["Background", "Peer", "own_group", "wait_for"]
