"""Data parallelism over slow links: compressed gradients, local SGD, asynchronous updates, and gossip."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import ConfigError
from cornstarch.parallel.low_bandwidth.asynchronous import AsynchronousUpdates
from cornstarch.parallel.low_bandwidth.compressed_mean import CompressedMean, register_compression
from cornstarch.parallel.low_bandwidth.gradient_hooks import get_gradient_sync
from cornstarch.parallel.low_bandwidth.replicas import ReplicaSync
from cornstarch.parallel.low_bandwidth.weight_averaging import GossipUpdates, LocalUpdates
from cornstarch.plan.plan import DataPlan

_WEIGHT_SYNCS = {
    "local_sgd": LocalUpdates,
    "diloco": LocalUpdates,
    "async": AsynchronousUpdates,
    "gossip": GossipUpdates,
}


def build_replica_sync(
    model: nn.Module,
    wrapped: nn.Module,
    mesh: DeviceMesh,
    plan: DataPlan,
    optimizer: torch.optim.Optimizer,
    scaler: Any = None,
) -> ReplicaSync | None:
    """Return the object that the training loop calls to synchronize replicas; None if DDP or FSDP does it all.

    All ranks must call it, with the same weights.

    Args:
        model: The trained model.
        wrapped: The result of `apply_data_parallel` for it.
        mesh: The ranks, as they were passed there.
        plan: The kind of synchronization.
        optimizer: The optimizer of the model.
        scaler: The gradient scaler, if there is one; its `get_scale` returns the loss scale.
    """
    if plan.kind in _WEIGHT_SYNCS:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return _WEIGHT_SYNCS[plan.kind](parameters, mesh.get_group(), plan)
    sync = get_gradient_sync(wrapped)
    if sync is not None and scaler is not None:
        if plan.compression.kind == "powersgd" and plan.compression.error_feedback:
            raise ConfigError(
                "parallel.data.compression.kind = powersgd\n  torch's hook remembers gradients as they were scaled, "
                "and precision = fp16 scales them otherwise in other steps. Use bf16, or error_feedback: false."
            )
        sync.scale = scaler.get_scale
    return sync


# Names in the documentation of earlier releases.
Exchange, exchange_of = ReplicaSync, build_replica_sync

__all__ = ["CompressedMean", "Exchange", "ReplicaSync", "build_replica_sync", "exchange_of", "register_compression"]
