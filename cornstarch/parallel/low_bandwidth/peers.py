"""Messages between two ranks over gloo, and threads that wait for them.

gloo does not tell whether a message has come unless one waits for it. To do something else meanwhile, let a thread
wait: it sleeps until then.

gloo begins to send when it has heard that the other rank is ready to receive, and that word waits behind what the other
rank sends itself. So a rank that sends and receives posts its receives first. Otherwise the two take turns, as in
gloo's own collectives if one rank comes later: a slow link then needs up to twice the time.
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


def new_gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks, for messages alone; all of them must call it."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class Peer:
    """Another rank of a gloo group that nobody else uses; tensors are contiguous and on the CPU.

    Messages of the same tag arrive in the order in which they were sent.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.rank = rank
        self._group, self._global_rank = group, dist.get_global_rank(group, rank)

    def begin_send(self, values: Tensor, tag: int = 0) -> dist.Work:
        """Begin to send a tensor, which must not change meanwhile."""
        work = dist.isend(values, self._global_rank, group=self._group, tag=tag)
        assert work is not None, "this rank is not in the group"
        return work

    def begin_receive(self, values: Tensor, tag: int = 0) -> dist.Work:
        """Begin to receive into a tensor."""
        work = dist.irecv(values, self._global_rank, group=self._group, tag=tag)
        assert work is not None, "this rank is not in the group"
        return work

    def send(self, values: Tensor, tag: int = 0) -> None:
        """Send a tensor; return when it may be changed again."""
        self.begin_send(values, tag).wait()

    def receive(self, values: Tensor, tag: int = 0) -> None:
        """Receive into a tensor."""
        self.begin_receive(values, tag).wait()


class ReceiveQueue:
    """Receives vectors that a peer sends now and then; the next two receives are always posted."""

    def __init__(self, peer: Peer, numbers: int, dtype: torch.dtype, tag: int) -> None:
        self._peer, self._tag = peer, tag
        self._posted: deque[tuple[Tensor, dist.Work]] = deque()
        for _ in range(2):
            self._post(torch.empty(numbers, dtype=dtype))

    def _post(self, values: Tensor) -> None:
        self._posted.append((values, self._peer.begin_receive(values, self._tag)))

    @contextmanager
    def next(self) -> Iterator[Tensor]:
        """Wait for the next vector, and run a block with it; its memory is used again afterwards."""
        values, work = self._posted.popleft()
        work.wait()
        yield values
        self._post(values)


class ByteAllToAll:
    """An all-to-all of rows of bytes over gloo; its receives are posted when it is created.

    All ranks create and send them in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, columns: int) -> None:
        ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._peers = [Peer(group, rank) for rank in range(ranks) if rank != self._rank]
        self._received_RE = torch.empty(ranks, columns, dtype=torch.uint8)
        self._works = [peer.begin_receive(self._received_RE[peer.rank]) for peer in self._peers]
        self._rows_RE = self._received_RE

    def send(self, rows_RE: Tensor) -> None:
        """Begin to send row r to rank r; each row must be contiguous."""
        self._rows_RE = rows_RE  # gloo reads them until they are sent
        self._received_RE[self._rank] = rows_RE[self._rank]
        self._works += [peer.begin_send(rows_RE[peer.rank]) for peer in self._peers]

    def wait(self) -> Tensor:
        """Wait until all rows are sent and received; return those of all ranks, [R, E]."""
        wait_all(self._works)
        return self._received_RE


def wait_all(works: Sequence[dist.Work]) -> None:
    """Wait for transfers, in the order in which they began."""
    for work in works:
        work.wait()


class BackgroundTask(Generic[T]):
    """Runs a function in a daemon thread: mostly waiting, during which other threads run."""

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
        """Whether the function has returned or raised."""
        return self._over.is_set()

    def result(self) -> T:
        """Wait for the function; return its result, or raise its exception."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return cast(T, self._found)
