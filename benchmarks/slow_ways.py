"""The methods that slow_network.py compares: torch's own, and ours by their plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from cornstarch.parallel import apply_data_parallel
from cornstarch.parallel.low_bandwidth import ReplicaSync, build_replica_sync
from cornstarch.plan.data_options import Asynchronous, Compression, Gossip, Local
from cornstarch.plan.low_bandwidth_cost import SyncedParameters, count_sent_per_step
from cornstarch.plan.plan import DataPlan

WARMUP = 10  # warm-up steps of powersgd
ONE_BUCKET = 1000.0  # megabytes: torch's PowerSGD hook hangs with several on gloo

Made = tuple[nn.Module, ReplicaSync | None]


@dataclass(frozen=True)
class Way:
    """One method to synchronize replicas."""

    words: str
    plan: DataPlan
    """What it sends; and what it is, if it is ours."""
    by_torch: Callable[[nn.Module], nn.Module] | None = None
    """Wraps a model with torch only."""

    @property
    def is_ours(self) -> bool:
        """Whether the method is ours."""
        return self.by_torch is None

    def made(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Made:
        """Return the wrapped model, and the object that the loop notifies of its steps."""
        if self.by_torch is not None:
            return self.by_torch(model), None
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        wrapped = apply_data_parallel(model, mesh, self.plan)
        return wrapped, build_replica_sync(model, wrapped, mesh, self.plan, optimizer)

    def sent(self, model: nn.Module, ranks: int) -> float:
        """Return the bytes per step of a rank by the formula, on average and after the warm-up."""
        shapes = tuple(tuple(parameter.shape) for parameter in model.parameters())
        return count_sent_per_step(self.plan, SyncedParameters(shapes), ranks)


# ------------------------------------------------------------------------------------------------ torch's own


def ddp(model: nn.Module) -> nn.Module:
    """Wrap a model with torch's defaults."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def ddp_bf16(model: nn.Module) -> nn.Module:
    """Wrap a model like torch's `bf16_compress_hook`, which itself requires CUDA."""

    def hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
        work = dist.all_reduce(half, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))

    hook.__annotations__.update({"bucket": dist.GradBucket, "return": Future[torch.Tensor]})  # DDP compares classes
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def ddp_powersgd(model: nn.Module) -> nn.Module:
    """Wrap a model with torch's PowerSGD."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=ONE_BUCKET)
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=WARMUP)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped


# ------------------------------------------------------------------------------------------------ all of them


def _compressed(kind: str, **options: Any) -> DataPlan:
    return DataPlan(compression=Compression(kind=kind, **options))  # type: ignore[arg-type]


def _powersgd(rank: int) -> DataPlan:
    return replace(_compressed("powersgd", rank=rank, warmup=WARMUP), bucket_mb=ONE_BUCKET)


WAYS: dict[str, Way] = {
    "ddp": Way("torch DDP", DataPlan(), ddp),
    "torch-bf16": Way("torch DDP, bf16 hook", _compressed("bf16"), ddp_bf16),
    "torch-powersgd": Way("torch DDP, PowerSGD hook, rank 4", _powersgd(4), ddp_powersgd),
    "none": Way("ddp", DataPlan()),
    "bf16": Way("bf16", _compressed("bf16")),
    "int8": Way("quantize, 8 bits", _compressed("quantize")),
    "int4": Way("quantize, 4 bits", _compressed("quantize", bits=4)),
    "sign": Way("quantize, 1 bit", _compressed("quantize", bits=1)),
    "topk": Way("topk 1 %", _compressed("topk", warmup=WARMUP)),
    "randomk": Way("randomk 10 %", _compressed("randomk", ratio=0.1, warmup=WARMUP)),
    "powersgd": Way("powersgd, rank 16", _powersgd(16)),
    "powersgd-32": Way("powersgd, rank 32", _powersgd(32)),
    "topk-5": Way("topk 5 %", _compressed("topk", ratio=0.05, warmup=WARMUP)),
    "local": Way("local_sgd, every 16", DataPlan(kind="local_sgd", local=Local(every=16))),
    "local-int8": Way(
        "local_sgd, every 4, 8 bits",
        DataPlan(kind="local_sgd", local=Local(every=4), compression=Compression(kind="quantize")),
    ),
    "diloco": Way("diloco, every 16", DataPlan(kind="diloco", local=Local(every=16))),
    "diloco-int8": Way(
        "diloco, every 16, overlapped, 8 bits",
        DataPlan(kind="diloco", local=Local(every=16, overlap=True), compression=Compression(kind="quantize")),
    ),
    "async": Way("async", DataPlan(kind="async", asynchronous=Asynchronous())),
    "gossip": Way("gossip, ring", DataPlan(kind="gossip", gossip=Gossip())),
    "gossip-now": Way("gossip, ring, without waiting", DataPlan(kind="gossip", gossip=Gossip(wait=False))),
}
