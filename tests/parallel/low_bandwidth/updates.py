"""What the tests of replicas that are apart let processes do, and the same formulas in one process."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from threading import Event, local
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.parallel.low_bandwidth import asynchronous
from cornstarch.parallel.low_bandwidth.asynchronous import AsynchronousUpdates
from cornstarch.parallel.low_bandwidth.replicas import Peer, ReplicaSync, new_gloo_group, run_in_background, wait_all
from cornstarch.parallel.low_bandwidth.weight_averaging import GossipUpdates, LocalUpdates
from cornstarch.plan import Compression, DataPlan
from tests import zoo

RATE = 0.05


class Small(nn.Module):
    """Two layers, and one between them that is frozen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
        self.layers[2].requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return a loss."""
        return (self.layers(rows) - rows[:, :2]).square().mean()


def small(dtype: torch.dtype = torch.float64) -> Small:
    """Return the model, always with the same weights."""
    with zoo.reproducible(0):
        return Small(dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return one whose states matter."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.5)


def learn(model: Small, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Do one step on what a rank has in it."""
    rows = torch.randn(3, 4, generator=zoo.generator(100 * step + rank)).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    model(rows).backward()
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    """Return what is trained."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def put(model: nn.Module, values: Tensor) -> None:
    """Replace what is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter, part in zip(trained, values.split([p.numel() for p in trained]), strict=True):
        parameter.data.copy_(part.view_as(parameter))


def exchange_for(model: nn.Module, plan: DataPlan) -> ReplicaSync:
    """Return how the processes of this job keep together."""
    kinds: dict[str, Callable[..., ReplicaSync]] = {"async": AsynchronousUpdates, "gossip": GossipUpdates}
    group = dist.group.WORLD
    return kinds.get(plan.kind, LocalUpdates)(list(model.parameters()), group, plan)


# ------------------------------------------------------------------------------------------------ several processes


def train_run(
    plan: Mapping[str, Any], steps: int, dtype: torch.dtype = torch.float64, left_out: int = 0
) -> dict[str, Any]:
    """Train; return the weights after each step, what they are inside `averaged`, and figures.

    The step before `left_out` has nothing to train on.
    """
    model = small(dtype)
    optimizer, exchange = optimizer_of(model), exchange_for(model, DataPlan(**plan))
    history = []
    for step in range(1, steps + 1):
        exchange.before_step()
        if step == left_out:
            exchange.before_step()
        learn(model, optimizer, dist.get_rank(), step)
        exchange.after_step(step)
        history.append(flat(model))
    with exchange.use_averaged_weights():
        mean = flat(model)
    after = flat(model)
    exchange.finish()
    return {"history": history, "mean": mean, "after": after, "figures": exchange.figures()}


def resume(plan: Mapping[str, Any], first: int, steps: int) -> tuple[Tensor, Tensor, float, float]:
    """Train without a break, and with one in which all is made anew; return the weights and bytes of both."""
    rank = dist.get_rank()

    def train(model: Small, optimizer: Any, exchange: ReplicaSync, begin: int, end: int) -> None:
        for step in range(begin, end + 1):
            exchange.before_step()
            learn(model, optimizer, rank, step)
            exchange.after_step(step)

    whole = small(torch.float32)
    optimizer, exchange = optimizer_of(whole), exchange_for(whole, DataPlan(**plan))
    train(whole, optimizer, exchange, 1, steps)
    exchange.finish()
    before = small(torch.float32)
    old, earlier = optimizer_of(before), exchange_for(before, DataPlan(**plan))
    train(before, old, earlier, 1, first)
    state = copy.deepcopy([before.state_dict(), old.state_dict(), earlier.state_dict()])
    train(before, old, earlier, first + 1, steps)  # who goes on must not change what was saved
    earlier.finish()
    after = Small(torch.float32)
    after.layers[2].load_state_dict(whole.layers[2].state_dict())
    new, later = optimizer_of(after), exchange_for(after, DataPlan(**plan))
    after.load_state_dict(state[0])
    new.load_state_dict(state[1])
    later.load_state_dict(state[2])
    train(after, new, later, first + 1, steps)
    later.finish()
    assert torch.equal(flat(before), flat(whole))
    return flat(whole), flat(after), exchange.figures()["bytes_sent"], later.figures()["bytes_sent"]


class Marked(nn.Module):
    """Weights of which one for each rank counts that rank's steps, and others that learn."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        with zoo.reproducible(0):
            self.learned = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.counts = nn.Parameter(torch.zeros(ranks, dtype=torch.float64))

    def loss(self, rank: int, step: int) -> Tensor:
        """Return a loss whose gradient is the number of ranks where the rank counts its steps."""
        target = torch.randn(3, generator=zoo.generator(100 * step + rank), dtype=torch.float64)
        counted = self.counts[rank] * -(len(self.counts) / RATE)
        return (self.learned - target).square().sum() + counted - counted.detach()


def mark_step(model: Marked, rank: int, step: int) -> Tensor:
    """Do one step of plain SGD; return the change."""
    before = flat(model)
    gradients = torch.autograd.grad(model.loss(rank, step), list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=RATE)
    return flat(model) - before


def delayed(
    plan: Mapping[str, Any], steps: int, seed: int, longest: float, slow: int = 1, late: int = 0, saved: int = 0
) -> dict[str, Any]:
    """Train while each step takes a random time, of rank 0 so many times as long; return what was seen when.

    However that goes, rank 0 has made a step before rank 1 makes its first, and has `late` steps of another to apply
    after its second. After the step `saved` all come together, as they do for a checkpoint.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Marked(ranks)
    exchange = exchange_for(model, DataPlan(**plan))
    chance, never, go = Random(1000 * seed + rank), Event(), torch.zeros(1)
    seen, changes, staleness = [flat(model)], [], []
    for step in range(1, steps + 1):
        exchange.before_step()
        if rank == 1 and step == 1:
            dist.recv(go, 0)
        never.wait(chance.uniform(0, longest) * (slow if rank == 0 else 1))  # what computing takes
        while rank == 0 and step == 2 and late and not _have_arrived(exchange, late):
            never.wait(0.001)
        changes.append(mark_step(model, rank, step))
        exchange.after_step(step)
        if rank == 0 and step == 1:
            dist.send(go, 1)
        if step == saved:
            exchange.state_dict()
        seen.append(flat(model))
        staleness.append(exchange.figures().get("staleness", 0.0))
    with exchange.use_averaged_weights():
        mean = flat(model)
    exchange.finish()
    return {"seen": seen, "changes": changes, "staleness": staleness, "mean": mean, "end": flat(model)}


def _have_arrived(exchange: ReplicaSync, steps: int) -> bool:
    """Say whether so many steps of another rank wait to be applied."""
    assert isinstance(exchange, AsynchronousUpdates)
    return exchange.pending_steps >= steps


def slow_one(plan: Mapping[str, Any], alone: int, more: int) -> list[float]:
    """Let rank 1 make its first step when rank 0 has made `alone`; return what rank 0 counts of rank 1's then on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Marked(ranks)
    exchange = exchange_for(model, DataPlan(**plan))
    go = torch.zeros(1)
    found = []
    if rank == 1:
        exchange.before_step()
        dist.recv(go, 0)
    for step in range(1, alone + more + 1):
        exchange.before_step()
        if rank == 0 and step == alone + 1:
            dist.send(go, 1)
        mark_step(model, rank, step)
        exchange.after_step(step)
        found.append(model.counts[1].item())
    exchange.finish()
    return found


class SlowLink:
    """A clock on which a message of so many numbers takes a second, and nothing else any time; one for each thread."""

    def __init__(self, numbers: int) -> None:
        self._clock, self._numbers, self._send = local(), numbers, Peer.send

    def now(self) -> float:
        """Return the seconds of this thread."""
        return float(getattr(self._clock, "seconds", 0.0))

    def send(self, peer: Peer, values: Tensor, tag: int = 0) -> None:
        """Send, and let time go by."""
        self._send(peer, values, tag)
        self._clock.seconds = self.now() + (values.numel() == self._numbers)


def over_a_slow_link(plan: Mapping[str, Any], steps: int) -> tuple[int, Tensor]:
    """Train while each message takes longer than all steps; return how many there were, and the weights."""
    model = Marked(1000)  # so that headers are little beside a message
    numbers = flat(model).numel()
    link = SlowLink(numbers)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(asynchronous, "perf_counter", link.now)
        changed.setattr(Peer, "send", lambda *given: link.send(*given))
        exchange = exchange_for(model, DataPlan(**plan))
        for step in range(1, steps + 1):
            exchange.before_step()
            mark_step(model, dist.get_rank(), step)
            exchange.after_step(step)
        exchange.finish()
    together = Compression().count_sent_bytes(numbers, 8, dist.get_world_size())
    return int(exchange.figures()["bytes_sent"] - together) // (8 * numbers), flat(model)


def delayed_over_a_slow_link(plan: Mapping[str, Any], *options: Any) -> dict[str, Any]:
    """Run `delayed` where each message takes longer than all steps, so that changes wait for their sender to wait."""
    link = SlowLink(flat(Marked(dist.get_world_size())).numel())
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(asynchronous, "perf_counter", link.now)
        changed.setattr(Peer, "send", lambda *given: link.send(*given))
        return delayed(plan, *options)


def leave_alone(rank: int, meeting: Path, plan: Mapping[str, Any]) -> None:
    """Let rank 1 end without a word, and rank 0 with 7 if it says so."""
    store = dist.FileStore(str(meeting), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = Marked(2)
    exchange = exchange_for(model, DataPlan(**plan))
    try:
        for step in range(1, 10**6):
            exchange.before_step()
            mark_step(model, rank, step)
            exchange.after_step(step)  # may fail in the first step: rank 1 can be gone before rank 0 waits for it
            if rank == 1:
                os._exit(0)
    except RuntimeError as error:
        sys.exit(7 if "exchange with another process has failed" in str(error) else str(error))


def swap(numbers: int) -> bool:
    """Let two processes send each other vectors; say whether they have arrived."""
    rank = dist.get_rank()
    assert dist.group.WORLD is not None
    peer = Peer(new_gloo_group(dist.group.WORLD), 1 - rank)
    sent = torch.randn(numbers, generator=zoo.generator(rank))
    received = torch.full_like(sent, float("nan"))
    works = [peer.begin_receive(received), peer.begin_send(sent)]
    run_in_background(lambda: wait_all(works)).result()
    return torch.equal(received, torch.randn(numbers, generator=zoo.generator(1 - rank)))


# ------------------------------------------------------------------------------------------------ one process


class Replicas:
    """Replicas in one process, each with an optimizer of its own."""

    def __init__(self, ranks: int, dtype: torch.dtype = torch.float64) -> None:
        self.models = [small(dtype) for _ in range(ranks)]
        self.optimizers = [optimizer_of(model) for model in self.models]

    def learn(self, step: int) -> list[Tensor]:
        """Let each do a step; return the weights."""
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            learn(model, optimizer, rank, step)
        return self.weights

    @property
    def weights(self) -> list[Tensor]:
        """What each has."""
        return [flat(model) for model in self.models]

    def put(self, weights: list[Tensor]) -> None:
        """Give each other weights."""
        for model, one in zip(self.models, weights, strict=True):
            put(model, one)
