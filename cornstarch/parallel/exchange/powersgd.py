"""Gradients that travel as products of two thin matrices: torch's PowerSGD hook, kept in order and saved."""

# Annotations are not postponed here: torch looks at those of a communication hook, and knows no texts.

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from cornstarch.compat import without_futures
from cornstarch.parallel.exchange.hooks import Line, MeetingGradients
from cornstarch.plan.exchange import FACTOR_RATE, Compression

_KEPT: list[dist.ProcessGroup] = []
# Where gloo carries tensors of GPUs, its own thread does what the hook does last. If it were also the last to let go of
# the group, it would have to wait for its own end, and torch would abort the process: so groups are kept.

_Hook = Callable[[PowerSGDState, dist.GradBucket], torch.futures.Future[Tensor]]
_hook_in_step: _Hook = without_futures(powerSGD_hook)

FIRST = 2
"""The step from which on torch's hook compresses, at the earliest."""


class FactoredBuckets(MeetingGradients):
    """The buckets of DDP, in torch's hook for PowerSGD, one after the other.

    The hook sends what it has in several rounds, each when the one before has arrived. Those of two buckets could
    overtake one another, and differently in each process: so a bucket waits until the one before is done. On a CPU all
    of it is done by a thread of its own.

    Args:
        wrapped: The model in DDP, made so that its buckets stay as they are (`find_unused_parameters`).
        how: The rank of the factors, and from when on.
        group: The processes.
    """

    def __init__(self, wrapped: DistributedDataParallel, how: Compression, group: dist.ProcessGroup) -> None:
        super().__init__()
        _KEPT.append(group)
        self._how, self._ranks = how, dist.get_world_size(group)
        self._state = PowerSGDState(
            group,
            matrix_approximation_rank=how.rank,
            start_powerSGD_iter=max(how.warmup, FIRST),
            min_compression_rate=FACTOR_RATE,
            use_error_feedback=how.error_feedback,
            orthogonalization_epsilon=1e-8,  # a gradient of zeros, of what no sample needed, must not become NaN
            random_seed=how.seed,
        )
        self._line: Line | None = None
        self._before: torch.futures.Future[Tensor] | None = None
        self._restored_on: torch.device | None = None
        wrapped.register_comm_hook(self, _bucket_hook)

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to bring a bucket together, when the one before is."""
        device = bucket.buffer().device
        if device.type == "cpu":
            if self._line is None:
                self._line = Line(device)
            return self._line.put(lambda: self._begun(bucket, _hook_in_step).wait())
        if self._before is not None:
            self._before.wait()
        self._before = self._begun(bucket, powerSGD_hook)
        return self._before

    def _begun(self, bucket: dist.GradBucket, hook: _Hook) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer()
        if self._restored_on is not None and self._restored_on != flat.device:
            self._move(flat.device)
        how = Compression() if self._state.iter < self._state.start_powerSGD_iter else self._how
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        self.bytes_sent += how.sent(flat.numel(), flat.element_size(), self._ranks, shapes)
        return hook(self._state, bucket)

    def finish(self) -> None:
        """End the thread."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was not sent yet and the factors, by bucket."""
        name, keys, position, *_ = self._state.rng.get_state()
        memories = {key: {str(n): t for n, t in getattr(self._state, key).items()} for key in _MEMORIES}
        rng = {"kind": name, "keys": np.asarray(keys).tolist(), "position": int(position)}
        return {"bytes_sent": self.bytes_sent, "rounds": self._state.iter, "rng": rng, **memories}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.bytes_sent, self._state.iter = int(state["bytes_sent"]), int(state["rounds"])
        rng = state["rng"]
        keys = np.array(rng["keys"], dtype=np.uint32)
        self._state.rng.set_state((rng["kind"], keys, rng["position"], 0, 0.0))
        for key in _MEMORIES:
            setattr(self._state, key, {int(number): tensor for number, tensor in state[key].items()})
        self._restored_on = torch.device("cpu")  # as a checkpoint's tensors are

    def _move(self, device: torch.device) -> None:
        for key in _MEMORIES:
            memory = getattr(self._state, key)
            memory.update({number: tensor.to(device) for number, tensor in memory.items()})
        self._restored_on = None


_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


def _bucket_hook(exchange: FactoredBuckets, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return exchange.exchange(bucket)


__all__ = ["FactoredBuckets"]
