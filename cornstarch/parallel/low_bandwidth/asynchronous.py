"""Asynchronous updates: replicas apply one another's changes when they arrive, and wait only for those too stale.

A step of rank i changes its weights by u_i. All ranks, itself included, apply u_i / N, scaled by 1 / (1 + s) where s
more steps than one of another rank were applied while u_i was computed. The sender decides on the scale, so that every
change has the same weight everywhere: when all have arrived, all ranks have the same weights.

A change is *stale* by as many steps as its receiver has made beyond one since the weights that it was computed from.
For that each message says how many steps of its receiver its sender had applied when it began the oldest step that it
has not sent yet: whatever comes next is computed from there. A rank does not begin a step after which the next message
could be too stale. So a rank that is k times slower than the others makes nobody wait if k - 1, and the steps that a
message takes, are within the bound.

A rank has two threads for each other rank, which sleep until there is something to send or to receive. What a link
cannot carry in time is added up and goes in one message. Where a message takes longer than all the steps that a rank
may make before it waits, it leaves when the rank waits, with all of them in it, and when the one before is applied: if
it left earlier, it would only be in the way of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Condition
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn

from cornstarch.parallel.low_bandwidth import replicas
from cornstarch.parallel.low_bandwidth.compressed_mean import CompressedMean
from cornstarch.parallel.low_bandwidth.replicas import FlatWeights, Peer, ReceiveQueue, ReplicaSync
from cornstarch.plan.data_options import Compression
from cornstarch.plan.plan import DataPlan

_HEADER = 4  # numbers in front of each message: steps, applied, base, whether it is the last; see PeerState
_HEADERS, _CHANGES = 0, 1  # message tags


class ChangeBuffer:
    """Adds up changes, on the CPU, until they are taken out."""

    def __init__(self, numbers: int, dtype: torch.dtype) -> None:
        self._values = torch.empty(numbers, dtype=dtype)
        self.is_filled = False

    def put(self, values: Tensor) -> None:
        if self.is_filled:
            self._values.add_(values)
        else:
            self._values.copy_(values)
        self.is_filled = True

    def swap(self, other: Tensor) -> Tensor:
        """Take everything out; the buffer continues with the memory of `other`."""
        taken, self._values = self._values, other
        self.is_filled = False
        return taken

    def add_to(self, weights: Tensor) -> None:
        """Take everything out, and add it to weights."""
        if self.is_filled:
            weights.add_(self._values.to(weights.device))
        self.is_filled = False


@dataclass
class PeerState:
    """What this rank knows of another one since all were synchronized last; guarded by the lock."""

    peer: Peer
    incoming: ReceiveQueue  # its changes
    out: ChangeBuffer  # changes for it that are not sent yet
    out_base: int = 0  # steps of it that were applied when the oldest of these was computed
    sent: int = 0  # own steps that are there, or in flight
    applied_there: int = 0  # own steps that it has applied
    arrived: int = 0  # steps of it that are here
    applied: int = 0  # steps of it that are applied
    acknowledged: int = 0  # steps of it that it knows to be applied here
    base: int = 0
    """Own steps that the next changes from it are computed from, at least."""
    oldest: int | None = None  # the base of the oldest change that has arrived and is not applied
    transfer_seconds: float = 0.0  # how long the last changes took to reach it
    has_ended: bool = False  # whether it makes no more steps


class AsynchronousUpdates(ReplicaSync):
    """The kind `async`, with bounded staleness; all ranks of the group must create it."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: distributed.ProcessGroup, plan: DataPlan) -> None:
        self._weights, self._mean = FlatWeights(parameters), CompressedMean(Compression(), group)
        self._bound, self._scales = plan.asynchronous.staleness, plan.asynchronous.scale_learning_rate
        self._ranks, rank = group.size(), group.rank()
        self._peers: list[tuple[Peer, ReceiveQueue]] = []
        if self._ranks > 1 and self._bound and self._weights.numbers:
            messages = replicas.new_gloo_group(group)
            for peer in (Peer(messages, other) for other in range(self._ranks) if other != rank):
                self._peers.append((peer, ReceiveQueue(peer, self._weights.numbers, self._weights.dtype, _CHANGES)))
        self._changed = Condition()
        self._others: list[PeerState] = []
        self._before: Tensor | None = None
        self._staleness = 0
        self._step_began = self._step_seconds = 0.0
        """When the current step began, and how long the one before took without waiting."""
        self._reset()

    def before_step(self) -> None:
        if self._before is not None:
            return
        self._before = self._weights.read()
        numbers, dtype = self._weights.numbers, self._weights.dtype
        self._others = [PeerState(peer, incoming, ChangeBuffer(numbers, dtype)) for peer, incoming in self._peers]
        self._running = 2 * len(self._others)
        self._step_began = perf_counter()
        for other in self._others:
            for work in (self._send, self._receive):
                replicas.run_in_background(partial(self._run_thread, work, other))

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Apply what has arrived, send this step's change, and wait if the next step would be too far ahead."""
        assert self._before is not None, "before_step comes first"
        change = self._weights.read().sub_(self._before)
        if not self._peers:
            self._mean(change, None, 0)
            weights = self._before.add_(change)  # a staleness of 0 is synchronous
        else:
            weights = self._exchange(self._before, change)
        self._weights.write(weights)
        self._before = weights

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        """Run a block after all ranks have applied everything, when they have the same weights."""
        self.finish()
        yield

    def state_dict(self) -> dict[str, Any]:
        self.finish()
        return {"bytes_sent": self._mean.bytes_sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mean.bytes_sent, self._before = int(state["bytes_sent"]), None

    def figures(self) -> dict[str, float]:
        """Return the bytes sent, and by how many steps the oldest change of the last step was stale."""
        return {"bytes_sent": float(self._mean.bytes_sent), "staleness": float(self._staleness)}

    @property
    def pending_steps(self) -> int:
        """The most steps of another rank that have arrived and are not applied."""
        return max((other.arrived - other.applied for other in self._others), default=0)

    def _exchange(self, weights: Tensor, change: Tensor) -> Tensor:
        with self._changed:
            self._check()
            self._steps += 1
            self._step_seconds = perf_counter() - self._step_began
            # This change counts less if others have made several steps meanwhile.
            change.mul_((1 / max(1, self.pending_steps) if self._scales else 1.0) / self._ranks)
            for other in self._others:
                if not other.out.is_filled:  # before anything else is applied: this change does not know it
                    other.out_base = other.applied
            self._staleness = self._apply(weights)
            here = change.cpu()
            for other in self._others:
                other.out.put(here)
            self._is_waiting = not self._may_continue()
            self._changed.notify_all()
            while not self._may_continue():
                self._changed.wait_for(lambda: self._inbox.is_filled or self._may_continue())
                self._check()
                self._staleness = max(self._staleness, self._apply(weights))
                self._changed.notify_all()  # the others may wait for the news that their changes are applied
            self._is_waiting = False
            self._step_began = perf_counter()
        return weights.add_(change)

    def _apply(self, weights: Tensor) -> int:
        """Apply what has arrived; return by how many steps the oldest of it is stale."""
        bases = [other.oldest for other in self._others if other.oldest is not None]
        self._inbox.add_to(weights)
        for other in self._others:
            other.applied, other.oldest = other.arrived, None
        return max(0, self._steps - min(bases) - 1) if bases else 0

    def _may_continue(self) -> bool:
        """Return whether nothing can become too stale in the next step."""
        late = (other for other in self._others if not other.has_ended and self._steps - other.base > self._bound)
        return self._error is not None or not any(late)

    def _has_due_changes(self, other: PeerState) -> bool:
        """Return whether there are changes for another rank that should not wait for those of the next steps."""
        is_slow = other.transfer_seconds > self._step_seconds * (self._bound + 1)
        is_due = self._is_ending or (self._is_waiting and other.applied_there == other.sent)
        return other.out.is_filled and (is_due or not is_slow)

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError("The exchange with another process has failed.") from self._error

    def _reset(self) -> None:
        self._steps = self._running = 0
        self._is_waiting = self._is_ending = False
        self._error: BaseException | None = None
        self._inbox = ChangeBuffer(self._weights.numbers if self._peers else 0, self._weights.dtype)

    @torch.no_grad()
    def finish(self) -> None:
        """Let all changes of all ranks arrive, apply them, and give all ranks the same weights."""
        if self._before is None:  # no step since the last time
            return
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or not self._running)
            self._check()
        if self._others:
            self._apply(self._before)
            self._mean(self._before, None, 0)  # ranks added the same changes in different orders, and round differently
            self._weights.write(self._before)
        self._others, self._before = [], None
        self._reset()

    def _run_thread(self, work: Callable[[PeerState], None], other: PeerState) -> None:
        """Run until the end, and pass errors on to the thread that may wait."""
        error: BaseException | None = None
        try:
            work(other)
        except BaseException as found:
            error = found
        with self._changed:
            self._running -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def _send(self, other: PeerState) -> None:
        spare = torch.empty(self._weights.numbers, dtype=self._weights.dtype)
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._has_due_changes(other) or other.applied > other.acknowledged or self._is_ending
                )
                has_changes, is_last = self._has_due_changes(other), self._is_ending
                if has_changes:
                    # The buffer is free for the next steps at once; the lock is not held during the transfer.
                    spare, other.sent = other.out.swap(spare), self._steps
                # Changes that stay here are older than what has been applied since; their receiver must know.
                base = other.out_base if other.out.is_filled else other.applied
                header = torch.tensor([other.sent, other.applied, base, is_last])
                other.acknowledged = other.applied
                self._mean.bytes_sent += header.nbytes + has_changes * spare.nbytes  # it counts all bytes of this rank
            other.peer.send(header, _HEADERS)
            if has_changes:
                began = perf_counter()
                other.peer.send(spare, _CHANGES)
                other.transfer_seconds = perf_counter() - began

    def _receive(self, other: PeerState) -> None:
        header = torch.empty(_HEADER, dtype=torch.int64)
        while not other.has_ended:
            other.peer.receive(header, _HEADERS)
            steps, applied, base, is_last = header.tolist()
            with other.incoming.next() if steps > other.arrived else nullcontext() as values, self._changed:
                if values is not None:
                    self._inbox.put(values)
                    other.oldest = other.base if other.oldest is None else other.oldest
                other.arrived, other.applied_there, other.base = steps, applied, base
                other.has_ended = bool(is_last)
                self._changed.notify_all()
