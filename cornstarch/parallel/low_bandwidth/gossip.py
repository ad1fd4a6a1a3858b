"""Gossip: replicas average their weights with a few neighbours only.

In a step rank i, with weights w_i before it and a change u_i by the optimizer, comes to

    w_i + u_i + sum over its neighbours j of W (w_j - w_i),     W = 1 / (neighbours + 1)

which is the average over itself and its neighbours, plus u_i: with plain SGD, minus the learning rate times the
gradient at w_i. Both ends of an edge have equally many neighbours in each step. So what i gains by an edge the other
end loses, and the mean over all ranks moves by the u_i alone.

Weights travel while gradients are computed. With `wait` a rank waits until those of the same step are there. Otherwise
it continues, and applies W (w_j - w_i) when w_j has come, with the w_i that it sent itself in that swap; the edge is
left out meanwhile. The mean is preserved just the same, and a slow neighbour slows nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isqrt
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.parallel.low_bandwidth.compression import CompressedMean
from cornstarch.parallel.low_bandwidth.peers import BackgroundTask, Peer, new_gloo_group, wait_all
from cornstarch.parallel.low_bandwidth.replica_sync import FlatWeights, ReplicaSync, distance
from cornstarch.plan.compression import Compression
from cornstarch.plan.kinds import GossipGraph
from cornstarch.plan.plan import DataPlan


def find_neighbours(graph: GossipGraph, rank: int, ranks: int, step: int, seed: int = 0) -> tuple[int, ...]:
    """Return the ranks that a rank swaps weights with in a step, in order, without itself; the same on every rank.

    Args:
        graph: ring: the two beside it; torus: the four around it, in the squarest grid; exponential: those 1, 2, 4, …
            to either side, one distance after the other; random_pairs: one, drawn anew in each step. Of an odd number
            one is left alone.
        rank: The rank.
        ranks: The number of ranks.
        step: Counted from 1.
        seed: Of random pairs.
    """
    match graph:
        case "ring":
            found = {rank - 1, rank + 1}
        case "torus":
            rows = next(rows for rows in range(isqrt(ranks), 0, -1) if ranks % rows == 0)
            columns = ranks // rows
            row, column = divmod(rank, columns)
            found = {row * columns + (column + move) % columns for move in (-1, 1)}
            found |= {(row + move) % rows * columns + column for move in (-1, 1)}
        case "exponential":
            hop = 1 << (step - 1) % max(1, (ranks - 1).bit_length())
            found = {rank - hop, rank + hop}
        case "random_pairs":
            order = list(range(ranks))
            Random(f"{seed} {step}").shuffle(order)  # a string is hashed alike in every process
            place = order.index(rank) ^ 1
            found = {order[place]} if place < ranks else set()
    return tuple(sorted({one % ranks for one in found} - {rank}))


@dataclass(frozen=True)
class WeightSwap:
    """The weights of two neighbours in flight to each other, in CPU memory."""

    own: Tensor
    """The weights that this rank sent."""
    others: Tensor
    """The weights that it receives."""
    weight: float
    """The weight of the neighbour in the average."""
    works: list[dist.Work]
    """The transfers that nobody has waited for; gloo would wait for another message if it was asked again."""
    watcher: BackgroundTask[None] | None
    """A thread that waits for them, where ranks do not wait for one another."""

    @property
    def is_over(self) -> bool:
        """Whether it can be applied without waiting."""
        return self.watcher is not None and self.watcher.is_over

    def wait(self) -> None:
        """Wait until both weights have arrived."""
        if self.watcher is not None:
            self.watcher.result()
        else:
            wait_all(self.works)
            self.works.clear()


class GossipUpdates(ReplicaSync):
    """The kind `gossip`; all ranks of the group must create it."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, plan: DataPlan) -> None:
        self._weights, self._mean = FlatWeights(parameters), CompressedMean(Compression(), group)
        self._plan = plan.gossip
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group = new_gloo_group(group) if self._ranks > 1 else group
        self._swaps: dict[int, WeightSwap] = {}
        self._swap_counts = [0] * self._ranks
        """How many swaps have begun with each rank."""
        self._spare: list[Tensor] = []
        self._step = 0
        self._is_in_step = False
        self._sent = 0
        self._distances: dict[str, float] = {}

    def before_step(self) -> None:
        """Begin to swap weights with the neighbours of this step."""
        if self._is_in_step:  # the step before was skipped, and has changed nothing
            return
        self._is_in_step = True
        plan = self._plan
        others = find_neighbours(plan.graph, self._rank, self._ranks, self._step + 1, plan.seed)
        self._begin_swaps({other: 1 / (len(others) + 1) for other in others if other not in self._swaps})
        if plan.wait and not plan.overlap:
            self._wait()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Average with the neighbours whose weights have arrived."""
        assert self._is_in_step, "before_step comes first"
        self._step, self._is_in_step = step, False
        self._apply([other for other, swap in self._swaps.items() if self._plan.wait or swap.is_over])

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        """Run a block with the mean of all weights."""
        self._settle()
        own = self._weights.read()
        mean = own.clone()
        self._mean(mean, None, 0)
        self._distances["consensus_distance"] = distance(own, mean)
        with self._weights.use(mean):
            yield

    def finish(self) -> None:
        """Wait for all swaps."""
        self._settle()
        self._wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps; swaps in flight are applied first."""
        self._settle()
        return {"step": self._step, "bytes_sent": self._sent + self._mean.bytes_sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; the weights are restored already."""
        self._step = int(state["step"])
        self._sent = int(state["bytes_sent"]) - self._mean.bytes_sent

    def figures(self) -> dict[str, float]:
        """Return the bytes sent, and the distances to the neighbours' average and to the mean of all.

        The latter is known since the last `use_averaged_weights`.
        """
        return {"bytes_sent": float(self._sent + self._mean.bytes_sent), **self._distances}

    def _begin_swaps(self, weights: Mapping[int, float]) -> None:
        """Begin to swap weights with some ranks, given with their weights in the average."""
        if not weights:
            return
        own = self._weights.read().cpu()
        for other, weight in weights.items():
            peer, room = Peer(self._group, other), self._spare.pop() if self._spare else torch.empty_like(own)
            works = [peer.begin_receive(room), peer.begin_send(own)]
            watcher = None if self._plan.wait else BackgroundTask(partial(wait_all, works))
            self._swaps[other] = WeightSwap(own, room, weight, works, watcher)
            self._swap_counts[other] += 1
            self._sent += own.nbytes

    def _wait(self) -> None:
        for swap in self._swaps.values():
            swap.wait()

    def _apply(self, others: Sequence[int]) -> None:
        """Move towards some ranks, in rank order so that sums are reproducible."""
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
        """Finish and apply all swaps that one of two ranks has begun; with `wait` there are none."""
        if self._plan.wait or self._ranks == 1:
            return
        weights = [self._swaps[other].weight if other in self._swaps else 0.0 for other in range(self._ranks)]
        mine = torch.tensor([self._swap_counts, weights], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(found, mine, group=self._group)
        counts, weight = torch.stack(found)[:, :, self._rank].unbind(1)
        behind = [other for other in range(self._ranks) if counts[other] > self._swap_counts[other]]
        # A rank that has begun the next swap has ended the one before, which may not have been applied here.
        self._apply([other for other in behind if other in self._swaps])
        self._begin_swaps({other: float(weight[other]) for other in behind})
        self._apply(list(self._swaps))
        self._is_in_step = False
