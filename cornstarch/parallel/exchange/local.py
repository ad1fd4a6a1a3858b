"""Replicas that train by themselves for some steps, a round, and then bring their changes together.

With x for the common weights, w_i for those of rank i at the end of a round of H steps, d the mean of all x - w_i:

    local_sgd:  x = x - d, the mean of all w_i
    diloco:     v = m v + d;  x = x - r (d + m v)        Nesterov's momentum m, outer learning rate r

and each rank goes on from x. With overlap d travels during the next round and is applied at its end. Each rank then
goes on from x plus its own change of the round, which travels next: nothing is lost, and nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.parallel.exchange.flat import FlatWeights, distance
from cornstarch.parallel.exchange.mean import CompressedMean
from cornstarch.parallel.exchange.messages import Background, own_group
from cornstarch.plan.exchange import Compression
from cornstarch.plan.plan import DataPlan


class LocalUpdates:
    """`Exchange` of the kinds `local_sgd` and `diloco`.

    Args:
        parameters: Of this process; those that are trained are exchanged.
        group: The replicas, which come with the same weights. All of them must make it.
        plan: Says how often, by which outer optimizer, how compressed, and whether training goes on meanwhile.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, plan: DataPlan) -> None:
        local, is_outer = plan.local, plan.kind == "diloco"
        self._weights, self._every = FlatWeights(parameters), local.every
        self._rate, self._momentum = (local.outer_learning_rate, local.outer_momentum) if is_outer else (1.0, 0.0)
        self._overlaps = local.overlap and is_outer
        # What travels beside training is on the CPU: a GPU's stream would wait for it.
        self._travels_on = torch.device("cpu") if self._overlaps else self._weights.device
        self._mean = CompressedMean(plan.compression, own_group(group) if self._overlaps else group)
        self._whole = CompressedMean(Compression(), group)
        self._common: Tensor | None = None
        self._start: Tensor | None = None
        """Own weights at the beginning of the round; with overlap they are not the common ones."""
        self._velocity = self._weights.zeros() if self._momentum else None
        is_remembered = plan.compression.kind != "none" and plan.compression.error_feedback
        self._memory = torch.zeros(self._weights.numbers, device=self._travels_on) if is_remembered else None
        self._flight: Background[Tensor] | None = None
        self._rounds = 0
        self._distance: float | None = None
        self._sent_before = 0

    # ------------------------------------------------------------------------------------------ the loop's calls

    def before_step(self) -> None:
        """Note the common weights, before the first step."""
        if self._common is None:
            self._common = self._weights.read()
            self._start = self._common.clone() if self._overlaps else self._common

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Bring changes together, if a round is over."""
        if step % self._every:
            return
        assert self._start is not None, "before_step comes first"
        back = self._start - self._weights.read()
        if self._overlaps:
            self._exchange_beside(back)
        else:
            self._exchange_now(back)
        self._rounds += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Run a block with the mean of all weights."""
        own = self._weights.read()
        mean = own.clone()
        self._whole(mean, None, 0)
        self._distance = distance(own, mean)
        with self._weights.replaced(mean):
            yield

    def finish(self) -> None:
        """Wait for what travels."""
        if self._flight is not None:
            self._flight.result()

    def state_dict(self) -> dict[str, Any]:
        """Return the common weights, the outer optimizer, what was not sent yet, and the mean that travels."""
        tensors = {
            "common": self._common,
            "start": self._start if self._overlaps else None,
            "velocity": self._velocity,
            "memory": self._memory,
            "flight": None if self._flight is None else self._flight.result(),
        }
        known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return {**known, "rounds": self._rounds, "bytes_sent": self._bytes_sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was returned."""

        def taken(name: str, device: torch.device) -> Tensor | None:
            return state[name].detach().to(device, copy=True) if name in state else None

        self._common = taken("common", self._weights.device)
        self._start = taken("start", self._weights.device) if self._overlaps else self._common
        self._velocity = taken("velocity", self._weights.device)
        self._memory = taken("memory", self._travels_on)
        landed = taken("flight", self._travels_on)
        self._flight = None if landed is None else Background(lambda: landed)
        self._rounds = int(state["rounds"])
        self._sent_before = int(state["bytes_sent"]) - self._mean.bytes_sent - self._whole.bytes_sent

    def figures(self) -> dict[str, float]:
        """Return the bytes sent, and how far the weights were from the mean when it was last known."""
        known = {} if self._distance is None else {"consensus_distance": self._distance}
        return {"bytes_sent": float(self._bytes_sent), **known}

    @property
    def _bytes_sent(self) -> int:
        return self._sent_before + self._mean.bytes_sent + self._whole.bytes_sent

    # ------------------------------------------------------------------------------------------ a round

    def _exchange_now(self, back: Tensor) -> None:
        """Take the mean of all ways back to the common weights, and go on from where it leads."""
        mean = back.clone()
        self._mean(mean, self._memory, self._rounds)
        self._distance = distance(back, mean)
        self._weights.write(self._moved(mean))

    def _exchange_beside(self, back: Tensor) -> None:
        """Apply the mean of the round before, and let that of this one travel."""
        assert self._common is not None
        if self._flight is not None:
            self._moved(self._flight.result().to(self._weights.device))
        self._start = self._common - back
        self._weights.write(self._start)
        travelling, round_ = back.to(self._travels_on), self._rounds

        def mean() -> Tensor:
            self._mean(travelling, self._memory, round_)
            return travelling

        self._flight = Background(mean)

    def _moved(self, mean: Tensor) -> Tensor:
        """Return the common weights after a step of the outer optimizer."""
        assert self._common is not None
        if self._velocity is not None:
            self._velocity.mul_(self._momentum).add_(mean)
            mean = mean.add(self._velocity, alpha=self._momentum)
        return self._common.sub_(mean, alpha=self._rate)


__all__ = ["LocalUpdates"]
