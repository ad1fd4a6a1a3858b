"""Local SGD and DiLoCo: replicas train unsynchronized for a round of several steps, and then average their changes.

With x for the common weights, w_i for those of rank i at the end of a round of H steps, d the mean of all x - w_i:

    local_sgd:  x = x - d, the mean of all w_i
    diloco:     v = m v + d;  x = x - r (d + m v)        Nesterov's momentum m, outer learning rate r

Each rank continues from x. With overlap, d travels during the next round and is applied at its end. Each rank then
continues from x plus its own change of the round, which travels next: nothing is lost, and nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.parallel.low_bandwidth.compression import CompressedMean
from cornstarch.parallel.low_bandwidth.peers import BackgroundTask, new_gloo_group
from cornstarch.parallel.low_bandwidth.replica_sync import FlatWeights, ReplicaSync, distance
from cornstarch.plan.compression import Compression
from cornstarch.plan.plan import DataPlan


class LocalUpdates(ReplicaSync):
    """The kinds `local_sgd` and `diloco`; all ranks of the group must create it, with the same weights."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, plan: DataPlan) -> None:
        local, is_outer = plan.local, plan.kind == "diloco"
        self._weights, self._every = FlatWeights(parameters), local.every
        self._rate, self._momentum = (local.outer_learning_rate, local.outer_momentum) if is_outer else (1.0, 0.0)
        self._overlaps = local.overlap and is_outer
        # Transfers that overlap with training are on the CPU: a GPU's stream would wait for them.
        self._transfer_device = torch.device("cpu") if self._overlaps else self._weights.device
        self._mean = CompressedMean(plan.compression, new_gloo_group(group) if self._overlaps else group)
        self._exact_mean = CompressedMean(Compression(), group)
        self._common: Tensor | None = None
        self._start: Tensor | None = None
        """Own weights at the beginning of the round; with overlap they are not the common ones."""
        self._velocity = self._weights.zeros() if self._momentum else None
        has_memory = plan.compression.kind != "none" and plan.compression.error_feedback
        self._memory = torch.zeros(self._weights.numbers, device=self._transfer_device) if has_memory else None
        self._in_flight: BackgroundTask[Tensor] | None = None
        self._rounds = 0
        self._distance: float | None = None
        self._sent_before = 0

    def before_step(self) -> None:
        """Remember the common weights before the first step."""
        if self._common is None:
            self._common = self._weights.read()
            self._start = self._common.clone() if self._overlaps else self._common

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Average changes at the end of a round."""
        if step % self._every:
            return
        assert self._start is not None, "before_step comes first"
        change = self._start - self._weights.read()
        if self._overlaps:
            self._begin_average(change)
        else:
            mean = change.clone()
            self._mean(mean, self._memory, self._rounds)
            self._distance = distance(change, mean)
            self._weights.write(self._step_outer(mean))
        self._rounds += 1

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        """Run a block with the mean of all weights."""
        own = self._weights.read()
        mean = own.clone()
        self._exact_mean(mean, None, 0)
        self._distance = distance(own, mean)
        with self._weights.use(mean):
            yield

    def finish(self) -> None:
        """Wait for the transfer in flight."""
        if self._in_flight is not None:
            self._in_flight.result()

    def state_dict(self) -> dict[str, Any]:
        """Return the common weights, the outer optimizer, the error that was not sent yet, and the mean in flight."""
        tensors = {
            "common": self._common,
            "start": self._start if self._overlaps else None,
            "velocity": self._velocity,
            "memory": self._memory,
            "flight": None if self._in_flight is None else self._in_flight.result(),
        }
        known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return {**known, "rounds": self._rounds, "bytes_sent": self._bytes_sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""

        def copy(name: str, device: torch.device) -> Tensor | None:
            return state[name].detach().to(device, copy=True) if name in state else None

        self._common = copy("common", self._weights.device)
        self._start = copy("start", self._weights.device) if self._overlaps else self._common
        self._velocity = copy("velocity", self._weights.device)
        self._memory = copy("memory", self._transfer_device)
        landed = copy("flight", self._transfer_device)
        self._in_flight = None if landed is None else BackgroundTask(lambda: landed)
        self._rounds = int(state["rounds"])
        self._sent_before = int(state["bytes_sent"]) - self._mean.bytes_sent - self._exact_mean.bytes_sent

    def figures(self) -> dict[str, float]:
        """Return the bytes sent, and the distance of the weights to the mean when it was last known."""
        known = {} if self._distance is None else {"consensus_distance": self._distance}
        return {"bytes_sent": float(self._bytes_sent), **known}

    @property
    def _bytes_sent(self) -> int:
        return self._sent_before + self._mean.bytes_sent + self._exact_mean.bytes_sent

    def _begin_average(self, change: Tensor) -> None:
        """Apply the mean of the round before, and let that of this round travel."""
        assert self._common is not None
        if self._in_flight is not None:
            self._step_outer(self._in_flight.result().to(self._weights.device))
        self._start = self._common - change
        self._weights.write(self._start)
        travelling, round_ = change.to(self._transfer_device), self._rounds

        def average() -> Tensor:
            self._mean(travelling, self._memory, round_)
            return travelling

        self._in_flight = BackgroundTask(average)

    def _step_outer(self, mean: Tensor) -> Tensor:
        """Return the common weights after a step of the outer optimizer."""
        assert self._common is not None
        if self._velocity is not None:
            self._velocity.mul_(self._momentum).add_(mean)
            mean = mean.add(self._velocity, alpha=self._momentum)
        return self._common.sub_(mean, alpha=self._rate)
