"""What the tests of compression let several processes do; each function runs in every one of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from cornstarch.parallel import apply_data_parallel, data_mesh
from cornstarch.parallel.ddp_fsdp import defer_gradient_sync
from cornstarch.parallel.distributed import to_full_tensor, to_local_tensor
from cornstarch.parallel.low_bandwidth import CompressedMean, ReplicaSync, build_replica_sync
from cornstarch.parallel.low_bandwidth import compressed_mean as mean_module
from cornstarch.plan import Compression, DataPlan
from tests import zoo
from tests.parallel.work import build_layers

STEPS, RATE = 4, 0.05


def vectors(ranks: int, numbers: int, steps: int = STEPS) -> list[list[Tensor]]:
    """Return what each rank has in each step; some numbers are much larger than others, one block is all zeros."""
    chance = zoo.generator(5)
    size = torch.logspace(-3, 1, numbers)[torch.randperm(numbers, generator=chance)]
    found = torch.randn(steps, ranks, numbers, generator=chance) * size
    found[..., : min(16, numbers // 2)] = 0
    return [list(step) for step in found]


def average(how: Mapping[str, Any], numbers: int, dtype: str = "float32") -> dict[str, Any]:
    """Take the mean of one vector after the other."""
    mean = CompressedMean(Compression(**how), dist.new_group())
    memory = torch.zeros(numbers) if mean.how.error_feedback else None
    found = []
    for step, given in enumerate(vectors(dist.get_world_size(), numbers)):
        flat = given[dist.get_rank()].to(getattr(torch, dtype))
        sent = mean(flat, memory, step)
        found.append((flat, sent))
    return {"means": [flat for flat, _ in found], "sent": [sent for _, sent in found], "memory": memory}


def average_in_pieces(how: Mapping[str, Any], numbers: int, piece: int) -> dict[str, Any]:
    """Take the same means, so many numbers at a time."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(mean_module, "PIECE", piece)
        return average(how, numbers)


def rows(step: int) -> Tensor:
    """Return the samples of all ranks in a step."""
    return torch.randn(12, 6, generator=zoo.generator(100 + step))


def train_run(
    plan: Mapping[str, Any],
    steps: int = STEPS,
    microbatches: int = 1,
    state: Mapping[str, Any] | None = None,
    scaled: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train a few steps together; go on from a state, if there is one."""
    given = DataPlan(**plan)
    model = build_layers().to(device)
    mesh = data_mesh(device, given.replicate if given.kind == "hsdp" else None)
    wrapped = apply_data_parallel(model, mesh, given)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2) if scaled else None
    exchange = build_replica_sync(model, wrapped, mesh, given, optimizer, scaler)
    assert exchange is not None
    start = 0
    if state is not None:
        start = int(state["step"])
        own = state["own"]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _local(parameter).copy_(own["weights"][name])
        exchange.load_state_dict(own["exchange"])
    for step in range(start, start + steps):
        mine = rows(step)[dist.get_rank() :: dist.get_world_size()].to(device)
        _step(wrapped, optimizer, exchange, step, mine.chunk(microbatches), scaler)
    own = {"weights": {n: _local(p).cpu().clone() for n, p in model.named_parameters()}, "exchange": _copy(exchange)}
    exchange.finish()
    return {
        "weights": {name: to_full_tensor(p.detach()).cpu().clone() for name, p in model.named_parameters()},
        "step": start + steps,
        "own": own,
        "figures": exchange.figures(),
    }


def leave_to_torch() -> bool:
    """Say whether torch's DDP is all there is of a plan that compresses nothing: no hook, no call in a step."""
    model, mesh, plan = build_layers(), data_mesh("cpu", None), DataPlan()
    wrapped = apply_data_parallel(model, mesh, plan)
    assert isinstance(wrapped, DistributedDataParallel)
    exchange = build_replica_sync(model, wrapped, mesh, plan, torch.optim.SGD(model.parameters(), lr=RATE))
    wrapped.register_comm_hook(None, allreduce_hook)  # torch refuses a second one
    return exchange is None


def threads_of_powersgd(plan: Mapping[str, Any]) -> set[str]:
    """Train with torch's hook; return the names of the threads that have ended a step of it."""
    found = set()
    increase = PowerSGDState.maybe_increase_iter

    def noted(state: PowerSGDState, bucket: dist.GradBucket) -> None:
        found.add(threading.current_thread().name)
        increase(state, bucket)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(PowerSGDState, "maybe_increase_iter", noted)
        train_run(plan)
    return found


def _step(
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    exchange: ReplicaSync,
    step: int,
    microbatches: Sequence[Tensor],
    scaler: Any,
) -> None:
    exchange.before_step()
    for number, microbatch in enumerate(microbatches, start=1):
        with defer_gradient_sync(wrapped, number < len(microbatches)):
            loss = wrapped(microbatch) / len(microbatches)
            (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    exchange.after_step(step + 1)


def interrupted(plan: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Train, and train with a stop in between; return what both came to."""
    whole = train_run(plan, steps=6, device=device)
    first = train_run(plan, steps=3, device=device)
    return {"whole": whole, "resumed": train_run(plan, steps=3, state=first, device=device)}


def _local(parameter: Tensor) -> Tensor:
    return to_local_tensor(parameter.detach())


def _copy(exchange: ReplicaSync) -> dict[str, Any]:
    def copied(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: copied(one) for key, one in value.items()}
        return value.cpu().clone() if isinstance(value, Tensor) else value

    return dict(copied(exchange.state_dict()))
