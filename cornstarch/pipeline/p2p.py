"""Point-to-point communication between the processes of two stages, whose tp and cp sizes may differ.

Forward: a process of the later stage receives its payload from one process of the earlier stage. Inside one module
both stages are sharded alike, so the source is the process with the same coordinates. The output of an encoder is the
same in all of its processes, so any of them will do.

Backward: the gradient of an output comes back from the same counterpart. A language model that is sharded over tokens
sends one gradient for each cp rank, and their mean is used, because gradients are averaged over the processes of a
module.

The spec of a payload is sent in front of it only when it is new. Both ends have the inputs of a microbatch and derive
from their shapes which spec to expect.

The first failure of any process is published in the store that all of them share, and wakes every process that waits.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.compat import default_store
from cornstarch.errors import ConfigError
from cornstarch.parallel.activity import here
from cornstarch.parallel.distributed import TensorTransport
from cornstarch.pipeline.message import PayloadSpec, TensorSpec

_MAX_SPECS = 4096  # remembered per edge
_TIMEOUT = timedelta(minutes=30)  # torch's default for process groups; also the longest time that a receive may take
_HEADER, _FORWARD, _BACKWARD, _TAGS = 0, 1, 2, 3
_POLL_SECONDS = 1.0
_GRACE_SECONDS = 1.0  # how much later than a closed connection the reason for it may be published
_ANSWER_SECONDS = 5.0  # that the store's host may take for an answer
_UNUSED_TAG = 2**20
_PREFIX = "cornstarch/pipeline"

P2PGroup = Any  # a process group or one of its backends: it sends and receives


@dataclass(frozen=True)
class Route:
    """The pairs of ranks between which an edge sends messages."""

    forward: tuple[tuple[int, int], ...]  # (source rank, target rank)
    backward: tuple[tuple[int, int], ...]

    @classmethod
    def between(cls, source: np.ndarray, target: np.ndarray, is_same_module: bool) -> Route:
        """Return the route between two stages, each given by its ranks [cp, tp]."""
        if is_same_module:
            pairs = tuple(zip(source.ravel().tolist(), target.ravel().tolist(), strict=True))
            return cls(pairs, tuple((b, a) for a, b in pairs))
        sources, targets = source.ravel().tolist(), target.ravel().tolist()
        forward = [(sources[j * len(sources) // len(targets)], one) for j, one in enumerate(targets)]
        cp, tp = target.shape
        backward = [(int(target[c, a * tp // len(sources)]), one) for a, one in enumerate(sources) for c in range(cp)]
        return cls(tuple(forward), tuple(backward))


def compute_shape_signature(inputs: Mapping[str, Any], training: bool, by_value: Collection[str] = ()) -> Hashable:
    """Return a key for the shapes between stages: the shapes of the inputs, and the values of those that are sizes."""
    # by_value: inputs with one number per token whose values also determine sizes.
    ids = inputs.get("input_ids")
    tokens = tuple(ids.shape) if isinstance(ids, Tensor) else None
    values = tuple(_hash_input(inputs.get(name), None) for name in by_value)
    return training, torch.is_grad_enabled(), _hash_input(inputs, tokens), values


def _hash_input(value: Any, tokens: tuple[int, ...] | None) -> Hashable:
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        if value.is_floating_point() or shape == tokens:
            return shape, str(value.dtype)
        # Integers that are not one per token are sizes (image grids, lengths): their values determine shapes.
        return shape, str(value.dtype), zlib.crc32(value.detach().cpu().contiguous().numpy().data)
    if isinstance(value, Mapping):
        return tuple((key, _hash_input(value[key], tokens)) for key in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(_hash_input(one, tokens) for one in value)
    return value if isinstance(value, Hashable) else str(type(value))


# ---------------------------------------------------------------------------------------------------- failures


class FailureSignal:
    """The first failure of a job, published in the store that all processes share.

    All processes must create their signals in the same order, one for each pipeline. Inside `watch`, a thread calls the
    method `wake` with the message of another process's failure.
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
        """Publish a failure; return the first one that any process has published."""
        # An echo is a connection that another process closed, which probably publishes the reason.
        deadline = time.monotonic() + _GRACE_SECONDS
        while is_echo and self.get_report() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._ask(lambda: self._store.compare_set(self._key, "", message).decode()) or message

    def get_report(self) -> str | None:
        return self._ask(lambda: self._store.get(self._key).decode() if self._store.check([self._key]) else None)

    def _ask(self, question: Callable[[], str | None]) -> str | None:
        """Ask the store; None if the process that hosts it is gone, or does not answer."""
        answers: list[str | None] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        # In a thread: torch's store waits for ever for a host that is stopped.
        thread = threading.Thread(target=ask, name="ask-store", daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS)
        return answers[0] if answers else None

    @contextmanager
    def watch(self) -> Iterator[None]:
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
    """End all waiting in a group: in this process, and, by closed connections, in those that wait for this one."""
    # Destroying the group is not enough: connections stay open as long as a thread or a traceback refers to a message.
    if isinstance(group, dist.ProcessGroup):
        try:
            is_nccl = "nccl" in dist.get_backend_config(group)
        except (TypeError, ValueError):  # torch does not know it any more: another thread has destroyed it
            return
        if is_nccl:
            with suppress(RuntimeError):
                group.abort()
            return
    # Gloo has no abort, but closes all connections of a group when a wait times out. Peers may have closed some before;
    # a receive on those raises immediately, and the next peer is tried.
    for other in range(group.size()):
        with suppress(RuntimeError):
            if other != group.rank():
                group.recv([torch.empty(1)], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))


# ---------------------------------------------------------------------------------------------------- messages


class PendingReceive:
    """A receive that was posted: its buffers, and the work to wait for."""

    def __init__(self, channel: P2PChannel, spec: PayloadSpec, rank: int, tag: int) -> None:
        self.spec, self._rank = spec, rank
        group, peer = channel.get_group(rank, sends=False)
        layout = spec.messages
        packed = {index for index, _, _ in layout.packed}
        self._transport = channel.transport
        self._tensors: list[Any] = [
            None if i in packed else self._transport.allocate_receive(one.shape, one.dtype)
            for i, one in enumerate(spec.tensors)
        ]
        # One tag carries several messages, which arrive in the order in which they were sent: separate, then packed.
        self._works = [group.recv([self._tensors[index]], peer, tag) for index in layout.separate]
        self._packed: Tensor | None = None
        if layout.packed:
            self._packed = self._transport.allocate_receive((layout.packed_bytes,), torch.uint8)
            self._works.append(group.recv([self._packed], peer, tag))

    def wait(self) -> list[Tensor]:
        here.begin_wait("a message", self._rank)
        for work in self._works:
            work.wait()
        here.end_wait()
        self._works = []
        self._tensors = [None if one is None else self._transport.finish_receive(one) for one in self._tensors]
        if self._packed is not None:
            packed = self._transport.finish_receive(self._packed)
            for index, begin, end in self.spec.messages.packed:
                one = self.spec.tensors[index]
                # Copy: autograd would count a view as modified when a layer writes to another tensor of the message.
                self._tensors[index] = packed[begin:end].view(one.dtype).view(one.shape).clone()
        self._packed = None
        return self._tensors


class P2PChannel:
    """Asynchronous sends and receives over a process group that nothing else uses.

    Sent tensors are kept until they are known to have left. No thread waits for that, because waking one costs as much
    as a message: the runtime releases a payload when an answer to it has arrived. All processes of a replica must
    create the channel together.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.transport = TensorTransport.of(group, device)
        self.failure: str | None = None  # why the channel was aborted or closed, if it was
        self.other_groups: list[dist.ProcessGroup] = []
        """Further groups in which this process may wait for others; they are aborted with the channel."""
        self.failure_signal = FailureSignal(self.abort)
        second: P2PGroup = group
        if dist.get_backend(group) == "gloo":
            # A second group of the same processes, so that data between two ranks flow in one direction per group: a
            # gloo thread spins as long as data arrive on a connection on which the process is writing. Not by
            # `new_group`, which derives the name of a group from the number of groups that this process has created,
            # which differs between processes.
            ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
            store = dist.PrefixStore(f"{_PREFIX}/lines/{self.failure_signal.number}/{ranks}", default_store())
            second = dist.ProcessGroupGloo(store, group.rank(), group.size(), _TIMEOUT)
        self._groups: dict[bool, P2PGroup] = {True: group, False: second}
        self._peers: dict[tuple[int, bool], tuple[P2PGroup, int]] = {}
        self._sent: dict[tuple[int, int], list[tuple[Any, Tensor]]] = {}  # by (tag, microbatch), oldest first
        self._abort_lock = threading.Lock()
        here.asymmetric_groups.add(group.group_name)
        _open_channels.add(self)

    def get_group(self, rank: int, sends: bool) -> tuple[P2PGroup, int]:
        """Return the group for messages to (or from) a rank, and the group rank of that rank."""
        if (rank, sends) not in self._peers:
            peer = dist.get_group_rank(self.group, rank)
            is_upward = (peer > self.group.rank()) == sends
            self._peers[rank, sends] = self._groups[is_upward], peer
        return self._peers[rank, sends]

    def send(self, spec: PayloadSpec, tensors: Sequence[Tensor], rank: int, tag: int, microbatch: int) -> None:
        """Start to send tensors, which must not be changed before they are released."""
        layout = spec.messages
        messages = [self.transport.prepare_send(tensors[index].detach()) for index in layout.separate]
        if layout.packed:
            packed = self.transport.allocate_receive((layout.packed_bytes,), torch.uint8)
            for index, begin, end in layout.packed:
                one = spec.tensors[index]
                packed[begin:end].view(one.dtype).view(one.shape).copy_(tensors[index].detach())
            messages.append(packed)
        if messages:
            group, peer = self.get_group(rank, sends=True)
            sent = self._sent.setdefault((tag, microbatch), [])
            sent += [(group.send([message], peer, tag), message) for message in messages]

    def release(self, tag: int, microbatch: int) -> None:
        """Wait until the messages of a microbatch have left, and free their tensors."""
        here.begin_wait("its messages to be received")
        for work, _ in self._sent.pop((tag, microbatch), ()):
            work.wait()
        here.end_wait()

    def limit_in_flight(self, limit: int) -> None:
        while len(self._sent) > limit:
            self.release(*next(iter(self._sent)))

    def abort(self, reason: str) -> None:
        """End all waiting for other processes, and their waiting for this one."""
        with self._abort_lock:
            if self.failure is None:
                self.failure = reason
                for group in (*self._groups.values(), *self.other_groups):
                    abort_group(group)

    def close(self) -> None:
        self.failure_signal.stop()
        self.failure = self.failure or "it was closed"
        self._sent.clear()
        # The group itself stays registered in torch, which names groups by their number: with one group fewer, the next
        # pipeline's group would get the name of one that still exists.
        with self._abort_lock:
            self._groups, self._peers = {}, {}  # the sockets close with the last reference


_open_channels: weakref.WeakSet[P2PChannel] = weakref.WeakSet()


def abort_channels(reason: str) -> None:
    """End all waiting in the pipelines of this process: they raise the reason."""
    for channel in list(_open_channels):
        channel.abort(reason)


# ---------------------------------------------------------------------------------------------------- edges


class StageEdge:
    """One edge of the stage graph, as a process at one of its ends sees it.

    `number` is the same in all processes and determines the tags; `name` is that of the source stage, for errors.
    """

    def __init__(self, rank: int, route: Route, channel: P2PChannel, number: int, name: str) -> None:
        self.channel, self.number, self.name = channel, number, name
        self.forward_to = [b for a, b in route.forward if a == rank]
        self.forward_from = next((a for a, b in route.forward if b == rank), None)
        self.backward_to = [b for a, b in route.backward if a == rank]
        self.backward_from = [a for a, b in route.backward if b == rank]
        self.specs: dict[Hashable, PayloadSpec] = {}  # those that both ends know, by shape signature

    def _tag(self, kind: int) -> int:
        return self.number * _TAGS + kind

    def send(self, key: Hashable, spec: PayloadSpec, tensors: Sequence[Tensor], microbatch: int) -> PayloadSpec:
        """Send a payload forward; return its spec, or the remembered one that equals it."""
        known = self.specs.get(key)
        if known is None:
            self._remember(key, spec)
            content = torch.frombuffer(bytearray(spec.to_json()), dtype=torch.uint8).to(self.channel.device)
            length = torch.tensor([content.numel()], device=self.channel.device)
            for rank in self.forward_to:
                for one in (length, content):
                    self.channel.send(_vector_spec(one.dtype, len(one)), [one], rank, self._tag(_HEADER), microbatch)
        elif known != spec:
            pairs = zip(spec.tensors, known.tensors, strict=False)
            shapes = [f"{list(a.shape)} instead of {list(b.shape)}" for a, b in pairs if a != b]
            raise ConfigError(
                f"The output of {self.name} has another shape ({[*shapes, 'another structure'][0]}) for a microbatch "
                "whose inputs have the same shapes: the sizes depend on values, and the next stage cannot know them. "
                "Give such sizes as integers among the inputs, or keep the two stages together."
            )
        spec = known or spec
        for rank in self.forward_to:
            self.channel.send(spec, tensors, rank, self._tag(_FORWARD), microbatch)
        return spec

    def post_receive(self, key: Hashable) -> PendingReceive | None:
        spec = self.specs.get(key)
        if spec is None or self.forward_from is None:
            return None
        return PendingReceive(self.channel, spec, self.forward_from, self._tag(_FORWARD))

    def receive(self, key: Hashable, pending: PendingReceive | None) -> tuple[PayloadSpec, list[Tensor]]:
        """Wait for the next payload; return its spec and tensors."""
        assert self.forward_from is not None
        if pending is None and key not in self.specs:
            source, tag = self.forward_from, self._tag(_HEADER)
            (length,) = PendingReceive(self.channel, _vector_spec(torch.int64, 1), source, tag).wait()
            (content,) = PendingReceive(self.channel, _vector_spec(torch.uint8, int(length)), source, tag).wait()
            self._remember(key, PayloadSpec.from_json(bytes(content.cpu().numpy())))
        pending = pending or self.post_receive(key)
        assert pending is not None
        return self.specs[key], pending.wait()

    def _remember(self, key: Hashable, spec: PayloadSpec) -> None:
        if len(self.specs) >= _MAX_SPECS:  # both ends see the same keys in the same order, and so forget the same
            self.specs.pop(next(iter(self.specs)))
        self.specs[key] = spec

    def send_gradients(self, spec: PayloadSpec, gradients: Sequence[Tensor], microbatch: int) -> None:
        for rank in self.backward_to:
            self.channel.send(spec.gradients, gradients, rank, self._tag(_BACKWARD), microbatch)

    def release_payload(self, microbatch: int) -> None:
        self.channel.release(self._tag(_HEADER), microbatch)
        self.channel.release(self._tag(_FORWARD), microbatch)

    def release_gradients(self, microbatch: int) -> None:
        self.channel.release(self._tag(_BACKWARD), microbatch)

    def post_gradient_receives(self, spec: PayloadSpec) -> list[PendingReceive]:
        tag = self._tag(_BACKWARD)
        return [PendingReceive(self.channel, spec.gradients, rank, tag) for rank in self.backward_from]


def _vector_spec(dtype: torch.dtype, length: int) -> PayloadSpec:
    return PayloadSpec(None, (TensorSpec(dtype, (length,), False),))
