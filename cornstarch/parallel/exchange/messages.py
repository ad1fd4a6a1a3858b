"""Messages between two processes over gloo, and threads that wait for them.

gloo does not say whether a message has come unless one waits for it. Whoever wants to do something else meanwhile lets
a thread wait: it sleeps until then.

gloo begins to send when it has heard that the other process is ready to receive, and that word waits behind what the
other one sends itself. So whoever sends and receives begins to receive first. Else the two take turns, as they do in
gloo's own collectives if one process comes later: a slow link then needs up to twice the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the same processes, for messages alone; all of them must call it."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class Peer:
    """Another process of a group, to send to and to receive from; tensors are on the CPU, without gaps.

    Messages of the same tag arrive in the order in which they were sent.

    Args:
        group: Of gloo; nobody else uses it.
        rank: The other process's number in the group.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.rank = rank
        self._group, self._global_rank = group, dist.get_global_rank(group, rank)

    def begin_send(self, values: Tensor, tag: int = 0) -> dist.Work:
        """Begin to send a tensor, which must stay as it is meanwhile."""
        return _begun(dist.isend(values, self._global_rank, group=self._group, tag=tag))

    def begin_receive(self, values: Tensor, tag: int = 0) -> dist.Work:
        """Begin to receive into a tensor."""
        return _begun(dist.irecv(values, self._global_rank, group=self._group, tag=tag))

    def send(self, values: Tensor, tag: int = 0) -> None:
        """Send a tensor; return when it may be written to again."""
        self.begin_send(values, tag).wait()

    def receive(self, values: Tensor, tag: int = 0) -> None:
        """Receive into a tensor."""
        self.begin_receive(values, tag).wait()


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work


class Inflow:
    """Vectors that another process sends now and then, one after the other; always ready for the next two.

    Args:
        peer: Who sends them.
        numbers: Of a vector.
        dtype: Theirs.
        tag: Theirs alone.
    """

    def __init__(self, peer: Peer, numbers: int, dtype: torch.dtype, tag: int) -> None:
        self._peer, self._tag = peer, tag
        self._coming: deque[tuple[Tensor, dist.Work]] = deque()
        for _ in range(2):
            self._make_room(torch.empty(numbers, dtype=dtype))

    def _make_room(self, values: Tensor) -> None:
        self._coming.append((values, self._peer.begin_receive(values, self._tag)))

    @contextmanager
    def next(self) -> Iterator[Tensor]:
        """Wait for the next vector, and lend it to a block."""
        values, work = self._coming.popleft()
        work.wait()
        yield values
        self._make_room(values)


class Deal:
    """Rows of bytes that each process of a group sends to each other one; begins to receive when it is made.

    Args:
        group: Of gloo. Deals are made, and sent, in the same order everywhere.
        columns: Bytes of a row.
    """

    def __init__(self, group: dist.ProcessGroup, columns: int) -> None:
        ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._peers = [Peer(group, rank) for rank in range(ranks) if rank != self._rank]
        self._received_RE = torch.empty(ranks, columns, dtype=torch.uint8)
        self._works = [peer.begin_receive(self._received_RE[peer.rank]) for peer in self._peers]
        self._rows_RE = self._received_RE

    def send(self, rows_RE: Tensor) -> None:
        """Begin to send row r to process r; rows must have no gaps within."""
        self._rows_RE = rows_RE  # gloo reads them until they are sent
        self._received_RE[self._rank] = rows_RE[self._rank]
        self._works += [peer.begin_send(rows_RE[peer.rank]) for peer in self._peers]

    def wait(self) -> Tensor:
        """Wait until all rows have arrived, here and there; return those of all processes, [R, E]."""
        wait_for(self._works)
        return self._received_RE


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


__all__ = ["Background", "Deal", "Inflow", "Peer", "own_group", "wait_for"]
