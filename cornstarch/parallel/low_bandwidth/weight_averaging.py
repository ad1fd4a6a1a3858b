"""Replicas that average weights now and then: with all (local SGD, DiLoCo), or with a few neighbours (gossip).

Local SGD and DiLoCo: replicas train unsynchronized for a round of several steps, and then average their changes. With x
for the common weights, w_i for those of rank i at the end of a round of H steps, d the mean of all x - w_i:

    local_sgd:  x = x - d, the mean of all w_i
    diloco:     v = m v + d;  x = x - r (d + m v)        Nesterov's momentum m, outer learning rate r

Each rank continues from x. With overlap, d travels during the next round and is applied at its end. Each rank then
continues from x plus its own change of the round, which travels next: nothing is lost, and nothing counts twice.

Gossip: in a step rank i, with weights w_i before it and a change u_i by the optimizer, comes to

    w_i + u_i + sum over its neighbours j of W (w_j - w_i),     W = 1 / (neighbours + 1)

which is the average over itself and its neighbours, plus u_i. Both ends of an edge have equally many neighbours in each
step. So what i gains by an edge the other end loses, and the mean over all ranks moves by the u_i alone.

Weights travel while gradients are computed. With `wait` a rank waits until those of the same step are there. Otherwise
it continues, and applies W (w_j - w_i) when w_j has come, with the w_i that it sent itself in that swap; the edge is
left out meanwhile. The mean is preserved just the same, and a slow neighbour slows nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isqrt
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.parallel.distributed import all_gather
from cornstarch.parallel.low_bandwidth import replicas
from cornstarch.parallel.low_bandwidth.compressed_mean import CompressedMean
from cornstarch.parallel.low_bandwidth.replicas import FlatWeights, ReplicaSync, distance
from cornstarch.plan.data_options import Compression, GossipGraph
from cornstarch.plan.plan import DataPlan


@contextmanager
def _use_mean(weights: FlatWeights, average: CompressedMean) -> Iterator[float]:
    """Run a block with the mean of all weights, given the distance of this rank's own weights to it."""
    own = weights.read()
    mean = own.clone()
    average(mean, None, 0)
    with weights.use(mean):
        yield distance(own, mean)


class LocalUpdates(ReplicaSync):
    """The kinds `local_sgd` and `diloco`; all ranks of the group must create it, with the same weights."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, plan: DataPlan) -> None:
        local, is_outer = plan.local, plan.kind == "diloco"
        self._weights, self._every = FlatWeights(parameters), local.every
        self._rate, self._momentum = (local.outer_learning_rate, local.outer_momentum) if is_outer else (1.0, 0.0)
        self._overlaps = local.overlap and is_outer
        # Transfers that overlap with training are on the CPU: a GPU's stream would wait for them.
        self._transfer_device = torch.device("cpu") if self._overlaps else self._weights.device
        self._mean = CompressedMean(plan.compression, replicas.new_gloo_group(group) if self._overlaps else group)
        self._exact_mean = CompressedMean(Compression(), group)
        self._common: Tensor | None = None
        self._start: Tensor | None = None
        """Own weights at the beginning of the round; with overlap they are not the common ones."""
        self._velocity = self._weights.zeros() if self._momentum else None
        has_memory = plan.compression.kind != "none" and plan.compression.error_feedback
        self._memory = torch.zeros(self._weights.numbers, device=self._transfer_device) if has_memory else None
        self._in_flight: Future[Tensor] | None = None
        self._rounds = 0
        self._distance: float | None = None

    def before_step(self) -> None:
        if self._common is None:
            self._common = self._weights.read()
            self._start = self._common.clone() if self._overlaps else self._common

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if step % self._every:
            return
        assert self._start is not None, "before_step comes first"
        change = self._start - self._weights.read()
        if self._overlaps:
            # Apply the mean of the round before, and let that of this round travel.
            assert self._common is not None
            if self._in_flight is not None:
                self._step_outer(self._in_flight.result().to(self._weights.device))
            self._start = self._common - change
            self._weights.write(self._start)
            travelling, round_ = change.to(self._transfer_device), self._rounds

            def average() -> Tensor:
                self._mean(travelling, self._memory, round_)
                return travelling

            self._in_flight = replicas.run_in_background(average)
        else:
            mean = change.clone()
            self._mean(mean, self._memory, self._rounds)
            self._distance = distance(change, mean)
            self._weights.write(self._step_outer(mean))
        self._rounds += 1

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        with _use_mean(self._weights, self._exact_mean) as self._distance:
            yield

    def finish(self) -> None:
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
        def copy(name: str, device: torch.device) -> Tensor | None:
            return state[name].detach().to(device, copy=True) if name in state else None

        self._common = copy("common", self._weights.device)
        self._start = copy("start", self._weights.device) if self._overlaps else self._common
        self._velocity = copy("velocity", self._weights.device)
        self._memory = copy("memory", self._transfer_device)
        landed = copy("flight", self._transfer_device)
        self._in_flight = None if landed is None else replicas.run_in_background(lambda: landed)
        self._rounds = int(state["rounds"])
        self._mean.bytes_sent, self._exact_mean.bytes_sent = int(state["bytes_sent"]), 0

    def figures(self) -> dict[str, float]:
        known = {} if self._distance is None else {"consensus_distance": self._distance}
        return {"bytes_sent": float(self._bytes_sent), **known}

    @property
    def _bytes_sent(self) -> int:
        return self._mean.bytes_sent + self._exact_mean.bytes_sent

    def _step_outer(self, mean: Tensor) -> Tensor:
        assert self._common is not None
        if self._velocity is not None:
            self._velocity.mul_(self._momentum).add_(mean)
            mean = mean.add(self._velocity, alpha=self._momentum)
        return self._common.sub_(mean, alpha=self._rate)


def find_neighbours(graph: GossipGraph, rank: int, ranks: int, step: int, seed: int = 0) -> tuple[int, ...]:
    """Return the ranks that a rank swaps weights with in a step, counted from 1, in order, without itself."""
    match graph:
        case "ring":
            found = {rank - 1, rank + 1}
        case "torus":  # the four around it, in the squarest grid
            rows = next(rows for rows in range(isqrt(ranks), 0, -1) if ranks % rows == 0)
            columns = ranks // rows
            row, column = divmod(rank, columns)
            found = {row * columns + (column + move) % columns for move in (-1, 1)}
            found |= {(row + move) % rows * columns + column for move in (-1, 1)}
        case "exponential":  # those 1, 2, 4, … to either side, one distance after the other
            hop = 1 << (step - 1) % max(1, (ranks - 1).bit_length())
            found = {rank - hop, rank + hop}
        case "random_pairs":  # drawn anew in each step; of an odd number one is left alone
            order = list(range(ranks))
            Random(f"{seed} {step}").shuffle(order)  # a string is hashed alike in every process
            place = order.index(rank) ^ 1
            found = {order[place]} if place < ranks else set()
    return tuple(sorted({one % ranks for one in found} - {rank}))


@dataclass(frozen=True)
class WeightSwap:
    """The weights of two neighbours in flight to each other, in CPU memory."""

    own: Tensor  # the weights that this rank sent
    others: Tensor  # the weights that it receives
    weight: float  # the weight of the neighbour in the average
    works: list[dist.Work]
    """The transfers that nobody has waited for; gloo would wait for another message if it was asked again."""
    watcher: Future[None] | None  # a thread that waits for them, where ranks do not wait for one another

    def wait(self) -> None:
        if self.watcher is not None:
            self.watcher.result()
        else:
            replicas.wait_all(self.works)
            self.works.clear()


class GossipUpdates(ReplicaSync):
    """The kind `gossip`; all ranks of the group must create it."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, plan: DataPlan) -> None:
        self._weights, self._mean = FlatWeights(parameters), CompressedMean(Compression(), group)
        self._plan = plan.gossip
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group = replicas.new_gloo_group(group) if self._ranks > 1 else group
        self._swaps: dict[int, WeightSwap] = {}
        self._swap_counts = [0] * self._ranks  # how many swaps have begun with each rank
        self._spare: list[Tensor] = []
        self._step = 0
        self._is_in_step = False
        self._distances: dict[str, float] = {}

    def before_step(self) -> None:
        if self._is_in_step:  # the step before was skipped, and has changed nothing
            return
        self._is_in_step = True
        plan = self._plan
        others = find_neighbours(plan.graph, self._rank, self._ranks, self._step + 1, plan.seed)
        self._begin_swaps({other: 1 / (len(others) + 1) for other in others if other not in self._swaps})
        if plan.wait and not plan.overlap:
            for swap in self._swaps.values():
                swap.wait()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        assert self._is_in_step, "before_step comes first"
        self._step, self._is_in_step = step, False
        self._apply([other for other, swap in self._swaps.items() if swap.watcher is None or swap.watcher.done()])

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        self._settle()
        with _use_mean(self._weights, self._mean) as self._distances["consensus_distance"]:
            yield

    def finish(self) -> None:
        self._settle()
        for swap in self._swaps.values():
            swap.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps; swaps in flight are applied first."""
        self._settle()
        return {"step": self._step, "bytes_sent": self._mean.bytes_sent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._mean.bytes_sent = int(state["step"]), int(state["bytes_sent"])

    def figures(self) -> dict[str, float]:
        """Return the bytes sent, and the distances to the neighbours' average and, if it is known, to the mean."""
        return {"bytes_sent": float(self._mean.bytes_sent), **self._distances}

    def _begin_swaps(self, weights: Mapping[int, float]) -> None:
        """Begin to swap weights with some ranks, given with their weights in the average."""
        if not weights:
            return
        own = self._weights.read().cpu()
        for other, weight in weights.items():
            peer, room = replicas.Peer(self._group, other), self._spare.pop() if self._spare else torch.empty_like(own)
            works = [peer.begin_receive(room), peer.begin_send(own)]
            watcher = None if self._plan.wait else replicas.run_in_background(partial(replicas.wait_all, works))
            self._swaps[other] = WeightSwap(own, room, weight, works, watcher)
            self._swap_counts[other] += 1
            self._mean.bytes_sent += own.nbytes  # it counts all bytes of this rank

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
        counts, weight = torch.stack(all_gather(mine, self._group))[:, :, self._rank].unbind(1)
        behind = [other for other in range(self._ranks) if counts[other] > self._swap_counts[other]]
        # A rank that has begun the next swap has ended the one before, which may not have been applied here.
        self._apply([other for other in behind if other in self._swaps])
        self._begin_swaps({other: float(weight[other]) for other in behind})
        self._apply(list(self._swaps))
        self._is_in_step = False
