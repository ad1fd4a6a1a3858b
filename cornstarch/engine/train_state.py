"""`TrainState`: everything that a run trains with, built once and shared by its trainer, evaluator and checkpointer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from cornstarch.config import RunConfig
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.optimizer import AveragedWeights, make_optimizer, scale_rates
from cornstarch.engine.replica_sync import RunReplicaSync
from cornstarch.engine.run_model import RunModel
from cornstarch.engine.train_step import TrainStep
from cornstarch.parallel.data import OwnedParameters
from cornstarch.parallel.low_bandwidth import build_replica_sync
from cornstarch.tasks.task import Task


@dataclass(frozen=True)
class TrainState:
    """A run that is ready for its first step."""

    config: RunConfig
    context: DistributedContext
    task: Task
    model: RunModel
    step: TrainStep
    """The optimizer, and what goes with it."""
    exchange: RunReplicaSync
    """Keeps replicas together over slow links; does nothing where torch does that alone."""
    total_steps: int

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over the local shards."""
        assert self.step.optimizer is not None
        return self.step.optimizer

    @property
    def wrapped_module(self) -> nn.Module:
        """The module whose parameters are saved: wrapped by data parallelism, if it is."""
        return self.task.wrapped or self.task.model


def build_train_state(
    config: RunConfig, context: DistributedContext, task: Task, model: RunModel, total_steps: int
) -> TrainState:
    """Build the optimizer over the local shards of a model, and what goes with it; all ranks must call it."""
    trained = {name: one for part in model.parts for name, one in part.trained.items()}
    pipeline, data = model.parallel.pipeline, context.plan.data
    owned = None
    if context.world_size > 1 and data.kind == "zero1":
        group = None if pipeline is None else pipeline.data_group
        owned = OwnedParameters(trained, group, is_stage=pipeline is not None)
    optimizer = make_optimizer(config.optimizer, model.parts, None if owned is None else owned.names)
    scale_rates(optimizer, config.optimizer.scale_rate, context.replica.count)
    step = TrainStep(
        model.parallel,
        list(trained.values()),
        optimizer,
        max_grad_norm=config.optimizer.max_grad_norm,
        loss_scale=context.placement.loss_scale(),
        loss_shards=context.loss_shards,
        owned=owned,
        averages=AveragedWeights(trained, config.loop.ema_decay) if config.loop.ema_decay else None,
    )
    exchange = None
    if context.world_size > 1 and model.parallel.wrapped is not None:
        mesh, wrapped = context.meshes.data, model.parallel.wrapped
        exchange = build_replica_sync(model.module, wrapped, mesh, data, optimizer, step.scaler)
    exchanging = RunReplicaSync(exchange, data, trained, model.module, optimizer)
    return TrainState(config, context, task, model, step, exchanging, total_steps)
