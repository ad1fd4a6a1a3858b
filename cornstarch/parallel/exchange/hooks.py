"""Gradients that travel compressed: between the replicas of DDP, or between the copies of HSDP."""

# Annotations are not postponed here: torch looks at those of a communication hook, and knows no texts.

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from cornstarch.parallel.exchange.mean import CompressedMean
from cornstarch.plan.exchange import Compression

Scale = Callable[[], float]
"""Returns what the gradients of this step have been multiplied by."""


class MeetingGradients:
    """An exchange that has nothing to do but in backward passes: weights are the same everywhere."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.scale: Scale = lambda: 1.0
        """A gradient scaler's; set it where there is one."""

    def before_step(self) -> None:
        """Do nothing: gradients meet while they are computed."""

    def after_step(self, step: int) -> None:
        """Do nothing: weights are the same everywhere."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Run a block; weights are the same everywhere."""
        yield

    def finish(self) -> None:
        """Do nothing: no gradients are on their way after a backward pass."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be remembered."""
        return {"bytes_sent": self.bytes_sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.bytes_sent = int(state["bytes_sent"])

    def figures(self) -> dict[str, float]:
        """Return what this process has sent."""
        return {"bytes_sent": float(self.bytes_sent)}


# ------------------------------------------------------------------------------------------------ between replicas


class CompressedBuckets(MeetingGradients):
    """The buckets of DDP, compressed, one after the other; backward goes on meanwhile.

    On a CPU a thread of its own encodes, sends and decodes; on a GPU, a stream. The memory of what was not sent yet
    goes by the names of the parameters in a checkpoint.

    Args:
        wrapped: The model in DDP, made so that its buckets stay as they are (`find_unused_parameters`).
        how: What is sent.
        group: The processes, in a group in which nothing else is sent.
    """

    def __init__(self, wrapped: DistributedDataParallel, how: Compression, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.mean = CompressedMean(how, group)
        self._names = {id(parameter): name for name, parameter in wrapped.module.named_parameters()}
        self._buckets: dict[int, _Bucket] = {}
        self._restored: dict[str, Tensor] = {}
        self._rounds = 0
        self._line: Line | None = None
        wrapped.register_comm_hook(self, _bucket_hook)

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to bring a bucket together."""
        flat, number, step, scale = bucket.buffer(), bucket.index(), self._rounds, self.scale()
        if number not in self._buckets:
            self._buckets[number] = self._met(bucket)
        memory = self._buckets[number].memory
        if bucket.is_last():
            self._rounds += 1
        if self._line is None:
            self._line = Line(flat.device)

        def work() -> Tensor:
            self.bytes_sent += self.mean(flat, memory, step, number, scale)
            return flat

        return self._line.put(work)

    def _met(self, bucket: dist.GradBucket) -> "_Bucket":
        """Return the memory of a bucket that is seen for the first time, with what a checkpoint has for it."""
        flat, parameters = bucket.buffer(), bucket.parameters()
        names = [self._names[id(parameter)] for parameter in parameters]
        sizes = [parameter.numel() for parameter in parameters]
        if not self.mean.how.error_feedback or self.mean.ranks == 1:
            return _Bucket(names, sizes, None)
        memory = torch.zeros(flat.numel(), device=flat.device)
        for name, part in zip(names, memory.split(sizes), strict=True):
            if (before := self._restored.pop(name, None)) is not None:
                part.copy_(before)
        return _Bucket(names, sizes, memory)

    def finish(self) -> None:
        """End the thread."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was not sent yet, by parameter, and how many exchanges there were."""
        memory = dict(self._restored)
        for bucket in self._buckets.values():
            if bucket.memory is not None:
                memory |= dict(zip(bucket.names, bucket.memory.split(bucket.sizes), strict=True))
        return {"rounds": self._rounds, "bytes_sent": self.bytes_sent, "memory": memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; buckets may have other sizes now."""
        self._rounds, self.bytes_sent = int(state["rounds"]), int(state["bytes_sent"])
        self._restored = dict(state["memory"])
        self._buckets = {}


class _Bucket:
    """A bucket as it was met first."""

    def __init__(self, names: list[str], sizes: list[int], memory: Tensor | None) -> None:
        self.names, self.sizes, self.memory = names, sizes, memory


def _bucket_hook(exchange: CompressedBuckets, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return exchange.exchange(bucket)


class Line:
    """Work that is done in the order in which it was given, while others do theirs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._given: queue.SimpleQueue[tuple[Callable[[], Tensor], Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self._stream is None:
            self._thread = threading.Thread(target=_work_off, args=(self._given,), name="exchange", daemon=True)
            self._thread.start()
            # A run that fails must not leave it behind.
            weakref.finalize(self, self._given.put, None)

    def put(self, work: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """Give work; return what will have its result."""
        if self._stream is None:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            self._given.put((work, future))
            return future
        future = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            future.set_result(work())
        return future

    def close(self) -> None:
        """Wait for all work, and end."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None


def _work_off(given: "queue.SimpleQueue[tuple[Callable[[], Tensor], Any] | None]") -> None:
    while (one := given.get()) is not None:
        work, future = one
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)


# ------------------------------------------------------------------------------------------------ between copies


class CompressedCopies(MeetingGradients):
    """The shards of HSDP: added up in full inside a copy, compressed between copies.

    Portions of a step are added up inside a copy first, and travel once, with the last (`kept`).

    Args:
        wrapped: The model, whose units are sharded over the processes of one copy.
        how: What is sent.
        group: The processes that have the same shard, one in each copy.
    """

    def __init__(self, wrapped: nn.Module, how: Compression, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.mean = CompressedMean(how, group)
        self._units: dict[str, _Unit] = {}
        self._kept = False
        units = [(name, module) for name, module in wrapped.named_modules() if isinstance(module, FSDPModule)]
        for number, (name, module) in enumerate(units):
            self._units[name] = unit = _Unit(number)
            module.set_all_reduce_hook(self._hook(unit))

    def _hook(self, unit: "_Unit") -> Callable[[Tensor], None]:
        def hook(shard: Tensor) -> None:
            flat = shard.view(-1)
            if unit.waiting is not None and unit.waiting.numel() == flat.numel():
                flat.add_(unit.waiting)
                unit.waiting = None
            if self._kept:
                unit.waiting = flat.clone()
                flat.zero_()
                return
            if self.mean.how.error_feedback and (unit.memory is None or unit.memory.numel() != flat.numel()):
                unit.memory = torch.zeros(flat.numel(), device=flat.device)
            if unit.memory is not None:
                unit.memory = unit.memory.to(flat.device)  # a checkpoint's is on the CPU
            self.bytes_sent += self.mean(flat, unit.memory, unit.rounds, unit.number, self.scale())
            unit.rounds += 1

        return hook

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run a block whose gradients wait for those of the portions that follow."""
        self._kept = True
        try:
            yield
        finally:
            self._kept = False

    def state_dict(self) -> dict[str, Any]:
        """Return what was not sent yet, by unit, and how many exchanges there were."""
        units = {name or "model": {"rounds": u.rounds, "memory": u.memory} for name, u in self._units.items()}
        return {"bytes_sent": self.bytes_sent, "units": units}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; units that there were not before begin without memory."""
        self.bytes_sent = int(state["bytes_sent"])
        for name, unit in self._units.items():
            before = state["units"].get(name or "model", {"rounds": 0, "memory": None})
            unit.rounds, unit.memory = int(before["rounds"]), before["memory"]


class _Unit:
    """What is remembered of the shard of one unit."""

    def __init__(self, number: int) -> None:
        self.number, self.rounds = number, 0
        self.memory: Tensor | None = None
        self.waiting: Tensor | None = None


__all__ = ["CompressedBuckets", "CompressedCopies", "Line", "MeetingGradients", "Scale"]
