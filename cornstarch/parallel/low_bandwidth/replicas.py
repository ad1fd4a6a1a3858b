"""What all ways to synchronize replicas share: their interface, weights as one vector, messages between two ranks.

gloo does not tell whether a message has come unless one waits for it. To do something else meanwhile, let a thread
wait: it sleeps until then.

gloo begins to send when it has heard that the other rank is ready to receive, and that word waits behind what the other
rank sends itself. So a rank that sends and receives posts its receives first. Otherwise the two take turns, as in
gloo's own collectives if one rank comes later: a slow link then needs up to twice the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import reduce
from threading import Thread
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.parallel.distributed import to_local_tensor

T = TypeVar("T")


class ReplicaSync:
    """Keeps replicas together. All ranks make the same calls in the same order.

    The loop calls `before_step`, runs forward and backward, steps the optimizer, and calls `after_step`:

        sync.before_step()
        loss.backward()
        optimizer.step()
        sync.after_step(step)

    Evaluate and save inside `use_averaged_weights`. A skipped step (nothing to train on) is not reported.

    The methods here do nothing, which is right where weights are the same on all ranks and gradients are synchronized
    in the backward pass.
    """

    def before_step(self) -> None:
        """Prepare for a step, before its first forward pass."""

    def after_step(self, step: int) -> None:
        """Exchange weights, or begin to, after the `step`-th step of the optimizer, counted from 1."""

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        """Run a block with the mean of all weights on every rank; afterwards each rank has its own again."""
        yield

    averaged = property(lambda self: self.use_averaged_weights)  # its name in earlier releases

    def finish(self) -> None:
        """Wait for everything in flight and end threads: no step follows."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank alone remembers, for a checkpoint: nested dictionaries of tensors, numbers, strings.

        Everything in flight arrives first. Tensors are not copied. Weights and optimizer states are not included: if
        replicas are unsynchronized, the loop saves those of each rank after this call.
        """
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue bit for bit from a `state_dict`; weights and optimizer are restored already."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        """Return the metrics of the last step by name.

        bytes_sent: by this rank since the beginning; staleness: by how many steps the oldest change that was applied is
        behind; consensus_distance: of this rank's weights to the mean, if it is known.
        """
        raise NotImplementedError


class FlatWeights:
    """The trained parameters of a rank as one vector in float32 or wider; frozen parameters are left out."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._sizes = [to_local_tensor(parameter).numel() for parameter in self._parameters]
        # In bfloat16, a mean would lose small changes of the weights.
        self.dtype = reduce(torch.promote_types, (parameter.dtype for parameter in self._parameters), torch.float32)
        self.device = self._parameters[0].device if self._parameters else torch.device("cpu")

    @property
    def numbers(self) -> int:
        return sum(self._sizes)

    @torch.no_grad()
    def read(self) -> Tensor:
        if not self._parameters:
            return self.zeros()
        return torch.cat([to_local_tensor(one).reshape(-1).to(self.dtype) for one in self._parameters])

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        for parameter, part in zip(self._parameters, values.split(self._sizes), strict=True):
            local = to_local_tensor(parameter.detach())
            local.copy_(part.view_as(local))

    def zeros(self) -> Tensor:
        return torch.zeros(self.numbers, dtype=self.dtype, device=self.device)

    @contextmanager
    def use(self, values: Tensor) -> Iterator[None]:
        """Run a block with other weights; afterwards the weights are restored bit for bit."""
        own = self.read()
        self.write(values)
        try:
            yield
        finally:
            self.write(own)


def new_gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks, for messages alone; all of them must call it."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


class Peer:
    """Another rank of a gloo group that nobody else uses; messages, in CPU memory, stay in order within a tag."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.rank = rank
        self._group, self._global_rank = group, dist.get_global_rank(group, rank)

    def begin_send(self, values: Tensor, tag: int = 0) -> dist.Work:
        """Begin to send a tensor, which must not change meanwhile."""
        return cast(dist.Work, dist.isend(values, self._global_rank, group=self._group, tag=tag))

    def begin_receive(self, values: Tensor, tag: int = 0) -> dist.Work:
        return cast(dist.Work, dist.irecv(values, self._global_rank, group=self._group, tag=tag))

    def send(self, values: Tensor, tag: int = 0) -> None:
        """Send a tensor; return when it may be changed again."""
        self.begin_send(values, tag).wait()

    def receive(self, values: Tensor, tag: int = 0) -> None:
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
    """An all-to-all of rows of bytes over gloo; receives are posted when it is created, in the same order on all."""

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


def run_in_background(work: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread: mostly waiting, during which other threads run."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def distance(values: Tensor, others: Tensor) -> float:
    """Return the Euclidean distance of two vectors."""
    return float(torch.linalg.vector_norm(values - others))
