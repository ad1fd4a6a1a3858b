"""`TrainState`: everything that a run trains with, built once and shared by its trainer, evaluator and checkpointer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.checkpoint.save import PER_RANK
from cornstarch.checkpoint.shards import Tensorlike
from cornstarch.checkpoint.state_values import flatten_values, unflatten_values
from cornstarch.config import RunConfig
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.optimizer import AveragedWeights, LearningRate, highest_rate, make_optimizer, scale_rates
from cornstarch.engine.run_model import RunModel
from cornstarch.engine.train_step import TrainStep
from cornstarch.parallel import distributed
from cornstarch.parallel.ddp_fsdp import OwnedParameters, reshard
from cornstarch.parallel.low_bandwidth import ReplicaSync, build_replica_sync
from cornstarch.plan.data_options import UNSYNCHRONIZED
from cornstarch.tasks.task import Task

_KEY = "exchange"  # of what a checkpoint has of each rank's sync


@dataclass(frozen=True)
class TrainState:
    """A run that is ready for its first step."""

    config: RunConfig
    context: DistributedContext
    task: Task
    model: RunModel
    step: TrainStep
    """The optimizer, and what goes with it."""
    replica_sync: RunReplicaSync
    rates: LearningRate
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

    @contextmanager
    def use_evaluation_weights(self) -> Iterator[None]:
        """Run a block with weights averaged over ranks and over time, where the run has such."""
        with self.replica_sync.use_averaged_weights(), self.step.use_averages():
            try:
                yield
            finally:
                # Before the trained weights return: parameters that are still gathered would keep the averaged ones,
                # and the next step would be computed with them.
                reshard(self.wrapped_module)


def build_train_state(
    config: RunConfig, context: DistributedContext, task: Task, model: RunModel, total_steps: int
) -> TrainState:
    """Build the optimizer over the local shards of a model, and what goes with it; all ranks must call it."""
    trained = {name: one for part in model.parts for name, one in part.trained.items()}
    pipeline, wrapped, data = model.parallel.pipeline, model.parallel.wrapped, context.plan.data
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
    sync = None
    if context.world_size > 1 and wrapped is not None:
        sync = build_replica_sync(model.module, wrapped, context.meshes.data, data, optimizer, step.scaler)
    replica_sync = RunReplicaSync(sync, data.kind, trained, model.module, optimizer)
    highest = highest_rate(config.optimizer, model.all_parts, context.replica.count)
    rates = LearningRate(optimizer, config.schedule, total_steps, highest)
    return TrainState(config, context, task, model, step, replica_sync, rates, total_steps)


class RunReplicaSync:
    """Keeps the replicas of a run together over slow links; without a `sync`, torch does that alone.

    Args:
        sync: How replicas exchange gradients or weights.
        kind: The run's kind of data parallelism.
        parameters: The trained parameters of this rank, by name.
        model: The model that they belong to.
        optimizer: Changes them.
    """

    def __init__(
        self,
        sync: ReplicaSync | None,
        kind: str,
        parameters: Mapping[str, nn.Parameter],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._sync, self._kind = sync, kind
        self._parameters, self._model, self._optimizer = parameters, model, optimizer
        self.is_unsynchronized = sync is not None and kind in UNSYNCHRONIZED
        """Whether ranks train by themselves, so that weights and the optimizer's states differ."""

    def before_step(self) -> None:
        """Prepare for the gradients of a step."""
        if self._sync is not None:
            self._sync.before_step()

    def after_step(self, step: int) -> None:
        """Exchange weights, or begin to."""
        if self._sync is not None:
            self._sync.after_step(step)

    def use_averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which every rank has the mean of all weights."""
        return nullcontext() if self._sync is None else self._sync.use_averaged_weights()

    def finish(self) -> None:
        """Wait for everything that is in flight, and end threads."""
        if self._sync is not None:
            self._sync.finish()

    def figures(self) -> dict[str, float]:
        """Return what is to be logged."""
        return {} if self._sync is None else self._sync.figures()

    def capture(self) -> tuple[dict[str, Tensorlike], dict[str, Any]]:
        """Return the tensors and the data that this rank adds to a checkpoint; call it before averaging weights."""
        tensors: dict[str, Tensorlike] = {}
        if self._sync is None:
            return tensors, {}
        own: dict[str, Any] = {"kind": self._kind, "state": self._sync.state_dict()}
        if self.is_unsynchronized:
            # While the mean is saved these weights are replaced by it, so they are copied.
            own["weights"] = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            own["buffers"] = dict(self._model.named_buffers())
            own["optimizer"] = {name: dict(self._optimizer.state.get(p, {})) for name, p in self._parameters.items()}
        packed = flatten_values(own, f"{_KEY}/{distributed.rank()}", tensors)
        return tensors, {PER_RANK: {_KEY: packed}}

    def restore(self, tensors: Mapping[str, Any], data: Mapping[str, Any], log: Callable[[str], None]) -> None:
        """Restore this rank's own state from a checkpoint; if it has none, the common state stays."""
        if self._sync is None:
            return
        saved = {rank: one[_KEY] for rank, one in data.get(PER_RANK, {}).items() if _KEY in one}
        own = saved.get(str(distributed.rank()))
        if own is None or len(saved) != distributed.world_size() or own["kind"] != self._kind:
            log("What each process alone remembered of exchanges is left behind: the run is spread otherwise now.")
            return
        found = unflatten_values(own, tensors)
        if self.is_unsynchronized:
            self._restore_weights(found)
        self._sync.load_state_dict(found["state"])

    @torch.no_grad()
    def _restore_weights(self, found: Mapping[str, Any]) -> None:
        for name, buffer in self._model.named_buffers():
            if name in found["buffers"]:
                buffer.copy_(found["buffers"][name])
        for name, parameter in self._parameters.items():
            parameter.copy_(found["weights"][name])
            held = self._optimizer.state.get(parameter, {})
            for key, value in found["optimizer"][name].items():
                if isinstance(value, Tensor) and isinstance(held.get(key), Tensor):
                    held[key].copy_(value)
                else:
                    held[key] = value
