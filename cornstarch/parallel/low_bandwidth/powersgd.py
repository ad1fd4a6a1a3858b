"""PowerSGD: gradients as products of two thin matrices, by torch's own hook, run in order and saved in checkpoints."""

# Annotations are not postponed here: torch inspects those of a communication hook, and does not evaluate strings.

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from cornstarch.compat import without_futures
from cornstarch.parallel.low_bandwidth.compression import CastCodec, register_compression
from cornstarch.parallel.low_bandwidth.gradient_hooks import GradientSync, OrderedWorker
from cornstarch.plan.compression import FACTOR_RATE, Compression

_KEPT: list[dist.ProcessGroup] = []
# Where gloo carries GPU tensors, its own thread runs the last part of the hook. If that thread also dropped the last
# reference to the group, it would wait for its own end, and torch would abort the process. So groups are kept.

_Hook = Callable[[PowerSGDState, dist.GradBucket], torch.futures.Future[Tensor]]
_blocking_hook: _Hook = without_futures(powerSGD_hook)
_FIRST_STEP = 2  # torch's hook does not compress earlier
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


class PowerSGDBuckets(GradientSync):
    """Runs torch's PowerSGD hook on DDP's buckets, one after the other.

    The hook communicates in several rounds, each when the one before has arrived. Rounds of two buckets could overtake
    one another, and differently on each rank. So a bucket waits until the one before is done; on a CPU, all of it runs
    in a thread of its own.

    Args:
        wrapped: The model in DDP, with buckets that do not change (`find_unused_parameters`).
        how: The settings.
        group: The ranks.
    """

    def __init__(self, wrapped: DistributedDataParallel, how: Compression, group: dist.ProcessGroup) -> None:
        super().__init__()
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
        self._worker: OrderedWorker | None = None
        self._before: torch.futures.Future[Tensor] | None = None
        self._restored_on: torch.device | None = None
        wrapped.register_comm_hook(self, _reduce_bucket)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to average a bucket when the one before is done."""
        device = bucket.buffer().device
        if device.type == "cpu":
            if self._worker is None:
                self._worker = OrderedWorker(device)
            return self._worker.put(lambda: self._run_hook(bucket, _blocking_hook).wait())
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

    def finish(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def state_dict(self) -> dict[str, Any]:
        """Return errors that were not sent yet, and the factors, by bucket."""
        name, keys, position, *_ = self._state.rng.get_state()
        memories = {key: {str(n): t for n, t in getattr(self._state, key).items()} for key in _MEMORIES}
        rng = {"kind": name, "keys": np.asarray(keys).tolist(), "position": int(position)}
        return {"bytes_sent": self.bytes_sent, "rounds": self._state.iter, "rng": rng, **memories}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.bytes_sent, self._state.iter = int(state["bytes_sent"]), int(state["rounds"])
        rng = state["rng"]
        keys = np.array(rng["keys"], dtype=np.uint32)
        self._state.rng.set_state((rng["kind"], keys, rng["position"], 0, 0.0))
        for key in _MEMORIES:
            setattr(self._state, key, {int(number): tensor for number, tensor in state[key].items()})
        self._restored_on = torch.device("cpu")  # where the tensors of a checkpoint are


def _reduce_bucket(sync: PowerSGDBuckets, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return sync.reduce(bucket)


register_compression("powersgd", lambda how, dtype: CastCodec(dtype), build_ddp_sync=PowerSGDBuckets)
