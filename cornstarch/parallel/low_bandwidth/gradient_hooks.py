"""Compressed gradients in the backward pass: between the replicas of DDP, or between the replicas of HSDP."""

# Annotations are not postponed here: torch inspects those of a communication hook, and does not evaluate strings.

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from cornstarch.compat import without_futures
from cornstarch.parallel.low_bandwidth.compressed_mean import SCHEMES, CastCodec, CompressedMean, register_compression
from cornstarch.parallel.low_bandwidth.replicas import ReplicaSync
from cornstarch.plan.data_options import FACTOR_RATE, Compression


class GradientSync(ReplicaSync):
    """Synchronizes gradients in the backward pass; weights are the same on all ranks."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.scale: Callable[[], float] = lambda: 1.0  # returns the loss scale; set it where there is a gradient scaler

    def state_dict(self) -> dict[str, Any]:
        return {"bytes_sent": self.bytes_sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bytes_sent = int(state["bytes_sent"])

    def figures(self) -> dict[str, float]:
        return {"bytes_sent": float(self.bytes_sent)}


_ATTACHED: WeakKeyDictionary[nn.Module, GradientSync] = WeakKeyDictionary()


def attach_compression(wrapped: nn.Module, mesh: DeviceMesh, how: Compression) -> nn.Module:
    """Compress the gradients of a wrapped model on the wire, over a mesh of one axis or the replicas of HSDP's."""
    if how.kind == "none":
        return wrapped
    members = dist.get_process_group_ranks((mesh["replicate"] if mesh.ndim == 2 else mesh).get_group())
    # A group of its own: a thread sends in it, whose messages must not mix with those of the loop.
    group = dist.new_group(members, use_local_synchronization=True)
    build: Callable[..., GradientSync] = CompressedHSDPShards
    if isinstance(wrapped, DistributedDataParallel):
        build = SCHEMES[how.kind].build_ddp_sync or CompressedDDPBuckets
    _ATTACHED[wrapped] = build(wrapped, how, group)
    return wrapped


def get_gradient_sync(wrapped: nn.Module | None) -> GradientSync | None:
    """Return the gradient synchronization that is attached to a model, if any."""
    return None if wrapped is None else _ATTACHED.get(wrapped)


class DDPBucketSync(GradientSync):
    """Reduces DDP's buckets, one after the other. They must not change from step to step (`find_unused_parameters`)."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        super().__init__()
        self._worker: OrderedWorker | None = None
        wrapped.register_comm_hook(self, _reduce_bucket)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        raise NotImplementedError

    def _submit(self, device: torch.device, work: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        if self._worker is None:
            self._worker = OrderedWorker(device)
        return self._worker.put(work)

    def finish(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _reduce_bucket(sync: DDPBucketSync, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return sync.reduce(bucket)


class CompressedDDPBuckets(DDPBucketSync):
    """Compresses buckets in a thread (CPU) or on a stream (GPU); nothing else is sent in the group."""

    def __init__(self, wrapped: DistributedDataParallel, how: Compression, group: dist.ProcessGroup) -> None:
        super().__init__(wrapped)
        self.mean = CompressedMean(how, group)
        self._names = {id(parameter): name for name, parameter in wrapped.module.named_parameters()}
        self._buckets: dict[int, tuple[list[str], list[int], Tensor | None]] = {}
        """Of each bucket: the names and sizes of its parameters, and the error memory."""
        self._restored: dict[str, Tensor] = {}  # errors by parameter: buckets may differ after a restart
        self._rounds = 0

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat, number, step, scale = bucket.buffer(), bucket.index(), self._rounds, self.scale()
        if number not in self._buckets:
            names = [self._names[id(parameter)] for parameter in bucket.parameters()]
            sizes = [parameter.numel() for parameter in bucket.parameters()]
            has_memory = self.mean.how.error_feedback and self.mean.ranks > 1
            errors = torch.zeros(flat.numel(), device=flat.device) if has_memory else None
            for name, part in zip(names, errors.split(sizes), strict=True) if errors is not None else ():
                if (before := self._restored.pop(name, None)) is not None:
                    part.copy_(before)
            self._buckets[number] = names, sizes, errors
        memory = self._buckets[number][2]
        if bucket.is_last():
            self._rounds += 1

        def work() -> Tensor:
            self.bytes_sent += self.mean(flat, memory, step, number, scale)
            return flat

        return self._submit(flat.device, work)

    def state_dict(self) -> dict[str, Any]:
        memory = dict(self._restored)
        for names, sizes, errors in self._buckets.values():
            if errors is not None:
                memory |= dict(zip(names, errors.split(sizes), strict=True))
        return {"rounds": self._rounds, "bytes_sent": self.bytes_sent, "memory": memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; buckets may have other sizes now."""
        self._rounds, self.bytes_sent = int(state["rounds"]), int(state["bytes_sent"])
        self._restored = dict(state["memory"])
        self._buckets = {}


class OrderedWorker:
    """Runs work in the order in which it was submitted, in a thread (CPU) or on a stream (GPU)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.SimpleQueue[tuple[Callable[[], Tensor], Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self._stream is None:
            submitted = self._queue  # the thread must not refer to this object, or it would live forever

            def run() -> None:
                while (one := submitted.get()) is not None:
                    work, future = one
                    try:
                        future.set_result(work())
                    except Exception as error:
                        future.set_exception(error)

            self._thread = threading.Thread(target=run, name="exchange", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)  # a run that fails must not leave the thread behind

    def put(self, work: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        if self._stream is None:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            self._queue.put((work, future))
            return future
        future = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            future.set_result(work())
        return future

    def close(self) -> None:
        """Wait for all work, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


class CompressedHSDPShards(GradientSync):
    """Compresses HSDP's gradient shards between replicas, in groups of ranks with the same shard.

    The microbatches of a step are added up within a replica first, and travel once, with the last one (`defer`).
    """

    def __init__(self, wrapped: nn.Module, how: Compression, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.mean = CompressedMean(how, group)
        self._units: dict[str, _UnitState] = {}
        self._is_deferred = False
        units = [(name, module) for name, module in wrapped.named_modules() if isinstance(module, FSDPModule)]
        for number, (name, module) in enumerate(units):
            self._units[name] = unit = _UnitState(number)
            module.set_all_reduce_hook(partial(self._reduce_shard, unit))

    def _reduce_shard(self, unit: "_UnitState", shard: Tensor) -> None:
        flat = shard.view(-1)
        if unit.waiting is not None and unit.waiting.numel() == flat.numel():
            flat.add_(unit.waiting)
            unit.waiting = None
        if self._is_deferred:
            # FSDP adds what is left here to `grad`; zeros, because the sum is kept until it travels.
            unit.waiting = flat.clone()
            flat.zero_()
            return
        if self.mean.how.error_feedback and (unit.memory is None or unit.memory.numel() != flat.numel()):
            unit.memory = torch.zeros(flat.numel(), device=flat.device)
        if unit.memory is not None:
            unit.memory = unit.memory.to(flat.device)  # a checkpoint's is on the CPU
        self.bytes_sent += self.mean(flat, unit.memory, unit.rounds, unit.number, self.scale())
        unit.rounds += 1

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Run a block whose gradients wait for those of the microbatches that follow."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def state_dict(self) -> dict[str, Any]:
        units = {name or "model": {"rounds": u.rounds, "memory": u.memory} for name, u in self._units.items()}
        return {"bytes_sent": self.bytes_sent, "units": units}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; units that did not exist before begin without memory."""
        self.bytes_sent = int(state["bytes_sent"])
        for name, unit in self._units.items():
            before = state["units"].get(name or "model", {"rounds": 0, "memory": None})
            unit.rounds, unit.memory = int(before["rounds"]), before["memory"]


class _UnitState:
    def __init__(self, number: int) -> None:
        self.number, self.rounds = number, 0
        self.memory: Tensor | None = None
        self.waiting: Tensor | None = None


_KEPT: list[dist.ProcessGroup] = []
# Where gloo carries GPU tensors, its own thread runs the last part of the hook. If that thread also dropped the last
# reference to the group, it would wait for its own end, and torch would abort the process. So groups are kept.

_Hook = Callable[[PowerSGDState, dist.GradBucket], torch.futures.Future[Tensor]]
_blocking_hook: _Hook = without_futures(powerSGD_hook)
_FIRST_STEP = 2  # torch's hook does not compress earlier
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


class PowerSGDBuckets(DDPBucketSync):
    """PowerSGD: gradients as products of two thin matrices, by torch's own hook.

    It communicates in rounds, and those of two buckets could overtake one another. So a bucket waits for the last one.
    """

    def __init__(self, wrapped: DistributedDataParallel, how: Compression, group: dist.ProcessGroup) -> None:
        super().__init__(wrapped)
        _KEPT.append(group)
        self._how, self._ranks = how, dist.get_world_size(group)
        self._state = PowerSGDState(
            group,
            matrix_approximation_rank=how.rank,
            start_powerSGD_iter=max(how.warmup, _FIRST_STEP),
            min_compression_rate=FACTOR_RATE,
            use_error_feedback=how.error_feedback,
            orthogonalization_epsilon=1e-8,  # gradients of zeros, where no sample needed a parameter, must not give NaN
            random_seed=how.seed,
        )
        self._before: torch.futures.Future[Tensor] | None = None
        self._restored_on: torch.device | None = None

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        device = bucket.buffer().device
        if device.type == "cpu":
            return self._submit(device, lambda: self._run_hook(bucket, _blocking_hook).wait())
        if self._before is not None:
            self._before.wait()
        self._before = self._run_hook(bucket, powerSGD_hook)
        return self._before

    def _run_hook(self, bucket: dist.GradBucket, hook: _Hook) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer()
        if self._restored_on is not None and self._restored_on != flat.device:
            for key in _MEMORIES:
                memory = getattr(self._state, key)
                memory.update({number: tensor.to(flat.device) for number, tensor in memory.items()})
            self._restored_on = None
        how = Compression() if self._state.iter < self._state.start_powerSGD_iter else self._how
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        self.bytes_sent += how.count_sent_bytes(flat.numel(), flat.element_size(), self._ranks, shapes)
        return hook(self._state, bucket)

    def state_dict(self) -> dict[str, Any]:
        name, keys, position, *_ = self._state.rng.get_state()
        memories = {key: {str(n): t for n, t in getattr(self._state, key).items()} for key in _MEMORIES}
        rng = {"kind": name, "keys": np.asarray(keys).tolist(), "position": int(position)}
        return {"bytes_sent": self.bytes_sent, "rounds": self._state.iter, "rng": rng, **memories}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bytes_sent, self._state.iter = int(state["bytes_sent"]), int(state["rounds"])
        rng = state["rng"]
        keys = np.array(rng["keys"], dtype=np.uint32)
        self._state.rng.set_state((rng["kind"], keys, rng["position"], 0, 0.0))
        for key in _MEMORIES:
            setattr(self._state, key, {int(number): tensor for number, tensor in state[key].items()})
        self._restored_on = torch.device("cpu")  # where the tensors of a checkpoint are


register_compression("powersgd", lambda how, dtype: CastCodec(dtype), build_ddp_sync=PowerSGDBuckets)
