"""Replicas that average their weights with a few neighbours only.

In a step rank i, with weights w_i before it and a change u_i by the optimizer, comes to

    w_i + u_i + sum over its neighbours j of W (w_j - w_i),     W = 1 / (neighbours + 1)

which is the average over itself and its neighbours, plus u_i: with plain SGD, minus the learning rate times the
gradient at w_i. What i gains by an edge the other end loses, so the mean over all ranks moves by the u_i alone.

Weights travel while gradients are computed. With `wait` a rank waits until those of the same step are there. Else it
goes on, and applies W (w_j - w_i) when w_j has come, w_i being what it sent itself in that swap; the edge is left out
meanwhile. The mean is kept just the same, and a slow neighbour slows nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.parallel.exchange.flat import FlatWeights, distance
from cornstarch.parallel.exchange.graphs import neighbours
from cornstarch.parallel.exchange.mean import CompressedMean
from cornstarch.parallel.exchange.messages import Background, Peer, own_group, wait_for
from cornstarch.plan.exchange import Compression
from cornstarch.plan.plan import DataPlan


@dataclass(frozen=True)
class Swap:
    """The weights of two neighbours on their way to each other, in the CPU's memory."""

    own: Tensor
    """What this process sent."""
    others: Tensor
    """What it receives."""
    weight: float
    """What the other counts."""
    works: list[dist.Work]
    """The transfers that nobody has waited for; gloo would wait for another message if it was asked again."""
    watched: Background[None] | None
    """A thread that waits for it, if nobody else does."""

    @property
    def is_over(self) -> bool:
        """Whether it can be applied without waiting."""
        return self.watched is not None and self.watched.is_over

    def wait(self) -> None:
        """Wait until the other's weights are here, and the own ones there."""
        if self.watched is not None:
            self.watched.result()
        else:
            wait_for(self.works)
            self.works.clear()


class GossipUpdates:
    """`Exchange` of the kind `gossip`.

    Args:
        parameters: Of this process; those that are trained are exchanged.
        group: The replicas. All of them must make it.
        plan: Says who the neighbours are, whether weights travel while gradients are computed, and whether to wait.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, plan: DataPlan) -> None:
        self._weights, self._mean = FlatWeights(parameters), CompressedMean(Compression(), group)
        self._plan = plan.gossip
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group = own_group(group) if self._ranks > 1 else group
        self._swaps: dict[int, Swap] = {}
        self._begun = [0] * self._ranks
        """How many swaps have begun with each rank."""
        self._spare: list[Tensor] = []
        self._step = 0
        self._has_begun = False
        self._sent = 0
        self._distances: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------ the loop's calls

    def before_step(self) -> None:
        """Begin to send this process's weights to its neighbours, and to receive theirs."""
        if self._has_begun:  # the step before was left out, and has changed nothing
            return
        self._has_begun = True
        plan = self._plan
        others = neighbours(plan.graph, self._rank, self._ranks, self._step + 1, plan.seed)
        self._swap({other: 1 / (len(others) + 1) for other in others if other not in self._swaps})
        if self._plan.wait and not plan.overlap:
            self._wait()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Average with the neighbours whose weights are here."""
        assert self._has_begun, "before_step comes first"
        self._step, self._has_begun = step, False
        self._apply([other for other, swap in self._swaps.items() if self._plan.wait or swap.is_over])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Run a block with the mean of all weights."""
        self._settle()
        own = self._weights.read()
        mean = own.clone()
        self._mean(mean, None, 0)
        self._distances["consensus_distance"] = distance(own, mean)
        with self._weights.replaced(mean):
            yield

    def finish(self) -> None:
        """Wait for what is on its way."""
        self._settle()
        self._wait()

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps were done; of what is on its way nothing need be known."""
        self._settle()
        return {"step": self._step, "bytes_sent": self._sent + self._mean.bytes_sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on; the weights are restored already."""
        self._step = int(state["step"])
        self._sent = int(state["bytes_sent"]) - self._mean.bytes_sent

    def figures(self) -> dict[str, float]:
        """Return the bytes sent, and how far the weights were from the neighbours' average and from the mean of all.

        The mean is known when somebody has asked for it last: in `averaged`.
        """
        return {"bytes_sent": float(self._sent + self._mean.bytes_sent), **self._distances}

    # ------------------------------------------------------------------------------------------ swaps

    def _swap(self, weights: Mapping[int, float]) -> None:
        """Begin to swap weights with some ranks, each of which counts so much."""
        if not weights:
            return
        own = self._weights.read().cpu()
        for other, weight in weights.items():
            peer, room = Peer(self._group, other), self._spare.pop() if self._spare else torch.empty_like(own)
            works = [peer.begin_receive(room), peer.begin_send(own)]
            watched = None if self._plan.wait else Background(partial(wait_for, works))
            self._swaps[other] = Swap(own, room, weight, works, watched)
            self._begun[other] += 1
            self._sent += own.nbytes

    def _wait(self) -> None:
        for swap in self._swaps.values():
            swap.wait()

    def _apply(self, others: Sequence[int]) -> None:
        """Move towards some ranks, in their order."""
        if not others:
            return
        towards = torch.zeros(self._weights.numbers, dtype=self._weights.dtype)
        for other in sorted(others):
            swap = self._swaps[other]
            swap.wait()
            del self._swaps[other]
            self._spare.append(swap.others)
            towards.add_(swap.others - swap.own, alpha=swap.weight)
        self._distances["neighbour_distance"] = float(torch.linalg.vector_norm(towards))
        self._weights.write(self._weights.read().add_(towards.to(self._weights.device)))

    @torch.no_grad()
    def _settle(self) -> None:
        """Let all swaps end that one of two ranks has begun, and apply them; with waiting, there are none."""
        if self._plan.wait or self._ranks == 1:
            return
        weights = [self._swaps[other].weight if other in self._swaps else 0.0 for other in range(self._ranks)]
        mine = torch.tensor([self._begun, weights], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(found, mine, group=self._group)
        begun, weight = torch.stack(found)[:, :, self._rank].unbind(1)
        behind = [other for other in range(self._ranks) if begun[other] > self._begun[other]]
        # Who has begun the next swap has ended the one before, which may not have been applied here.
        self._apply([other for other in behind if other in self._swaps])
        self._swap({other: float(weight[other]) for other in behind})
        self._apply(list(self._swaps))
        self._has_begun = False


__all__ = ["GossipUpdates"]
