"""Which exchange a plan means."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import ConfigError
from cornstarch.parallel.exchange.attach import exchange_within
from cornstarch.parallel.exchange.exchange import Exchange
from cornstarch.plan.plan import DataPlan


class Scaler(Protocol):
    """What multiplies losses, so that gradients in fp16 do not vanish."""

    def get_scale(self) -> float:
        """Return by how much."""


def exchange_of(
    model: nn.Module,
    wrapped: nn.Module,
    mesh: DeviceMesh,
    plan: DataPlan,
    optimizer: torch.optim.Optimizer,
    scaler: Scaler | None = None,
) -> Exchange | None:
    """Return what the loop has to call so that replicas keep together; None if torch does it all by itself.

    All processes must call it, when they have the same weights.

    Args:
        model: What is trained.
        wrapped: What `apply_data_parallel` has returned for it.
        mesh: The processes, as they were given there.
        plan: How they keep together.
        optimizer: What changes the weights.
        scaler: What has multiplied the gradients, if something has.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    match plan.kind:
        case "local_sgd" | "diloco":
            from cornstarch.parallel.exchange.local import LocalUpdates

            return LocalUpdates(parameters, mesh.get_group(), plan)
        case "async":
            from cornstarch.parallel.exchange.asynchronous import AsynchronousUpdates

            return AsynchronousUpdates(parameters, mesh.get_group(), plan)
        case "gossip":
            from cornstarch.parallel.exchange.gossip import GossipUpdates

            return GossipUpdates(parameters, mesh.get_group(), plan)
    found = exchange_within(wrapped)
    if found is not None and scaler is not None:
        if plan.compression.kind == "powersgd" and plan.compression.error_feedback:
            raise ConfigError(
                "parallel.data.compression.kind = powersgd\n  torch's hook remembers gradients as they were scaled, "
                "and precision = fp16 scales them otherwise in other steps. Use bf16, or error_feedback: false."
            )
        found.scale = scaler.get_scale
    return found


__all__ = ["exchange_of"]
