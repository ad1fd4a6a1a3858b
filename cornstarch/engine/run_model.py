"""`RunModel`: the model of a run as this rank trains it; `TrainState`: the model with its optimizer, shared by all.

Both are built once. Trainer, evaluator and checkpointer share the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.checkpoint.save import PER_RANK
from cornstarch.checkpoint.shards import Tensorlike
from cornstarch.checkpoint.state_values import flatten_values, seed_all, unflatten_values
from cornstarch.config import RunConfig
from cornstarch.data.collate import ChatCollator
from cornstarch.data.loader import RunData
from cornstarch.engine.acceleration import accelerate_model, compiles, find_uncompiled_modules
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.failure import out_of_memory
from cornstarch.engine.feature_cache import FeatureCache, build_encoder_prefetch, use_feature_cache
from cornstarch.engine.memory_tracker import MemoryTracker
from cornstarch.engine.model_parts import ModelPart, cast_parts, choose_masters, split_into_parts
from cornstarch.engine.optimizer import (
    ELEMENTWISE,
    AveragedWeights,
    LearningRate,
    highest_rate,
    make_optimizer,
    make_plain_optimizer,
    scale_rates,
)
from cornstarch.engine.parallelize import ParallelizeOptions, ParallelModel, parallelize
from cornstarch.engine.plan_requirements import needs_whole_parameters
from cornstarch.engine.recompute import Recomputation, fit_activations
from cornstarch.engine.sharded_loading import ShardedLoading, features_need_weights
from cornstarch.engine.step_counter import RunFlops
from cornstarch.engine.train_step import TrainStep
from cornstarch.errors import ConfigError
from cornstarch.kernels.compile_cache import CompileCache
from cornstarch.metrics.attribution import LOSS
from cornstarch.metrics.profiler import record_range
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.import_hf.decompose import UndividedModel
from cornstarch.models.multimodal_language_model.preprocessing.hf_processor import WholeModelProcessor
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel import distributed
from cornstarch.parallel.ddp_fsdp import reshard
from cornstarch.parallel.device import DevicePlacement, is_out_of_memory
from cornstarch.parallel.encoder_balancing import has_encoder_balancing
from cornstarch.parallel.expert import measure_balance
from cornstarch.parallel.low_bandwidth import ReplicaSync, build_replica_sync
from cornstarch.parallel.passes import explain_full_reads
from cornstarch.pipeline.split import analyze_model
from cornstarch.plan.validation import as_data
from cornstarch.tasks.conversation import ConversationTask
from cornstarch.tasks.task import Task

_KEY = "exchange"  # of what a checkpoint has of each rank's sync
_COMPILED_FROM = ("model", "parallel", "precision", "attention", "compile", "fp8")  # in the config


class RunModel:
    """The model of a run's task: cast, parallelized, compiled. All ranks must build it.

    The activation budget, and the analysis of a user's own module, need some of the data; `loading` knows which weights
    this rank has read, `resources` takes what must be closed when the run ends, and `verify_plan` refuses a plan that
    computes something else: it is called while the model is whole.
    """

    parallel: ParallelModel
    parts: list[ModelPart]
    """The local shard of each part of the model."""
    all_parts: list[ModelPart]
    """The parts of the whole model; without weights, where they are sharded."""
    memory_tracker: MemoryTracker
    recomputation: Recomputation | None
    """Which layers recompute their activations, if there is a memory budget for them."""
    flops: RunFlops
    compile_cache: CompileCache | None
    """Where compiled code is kept for the next start, if layers are compiled."""
    features: FeatureCache | None
    """The cache of what frozen encoders put out, if the run has one."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        context: DistributedContext,
        data: RunData,
        loading: ShardedLoading,
        resources: ExitStack,
        log: Callable[[str], None],
        verify_plan: Callable[[nn.Module], None],
    ) -> None:
        self._task, self._config, self._context, self._data = task, config, context, data
        self._resources, self._log = resources, log
        self.module: nn.Module = task.model
        self.parts = self.all_parts = []
        is_distributed = context.world_size > 1
        self.compile_cache = open_compile_cache(config, context, log)
        if self.compile_cache is not None:
            self.compile_cache.load()  # before the activation budget compiles a layer of each kind
        # A module of the user's own, of which no config says how it is made, is run to find where it can be cut.
        is_own = not isinstance(unwrap(self.module), MultimodalModel | PreTrainedModel | nn.Sequential)
        if context.is_pipeline and is_own and (batch := data.peek_batch(task.collator)) is not None:
            analyze_model(self.module, lambda twin: batch.inputs)
        self.parallel = self._parallelize(loading, verify_plan)
        # Not a method: a trainer would hold itself, and its claim on the run folder would outlive it.
        self.parallel.set_call(partial(_compute_loss, task, context.placement))
        if is_distributed:
            task.wrapped = self.parallel.wrapped
            if self.parallel.bucket_size is not None:
                log(f"gradients travel in {self.parallel.bucket_size}.")
            # Sharded parameters are new objects, and with FSDP1 of other shapes.
            parts = split_into_parts(self.module, config.model, config.optimizer, is_stage=context.is_pipeline)
            self.parts = [replace(part, shapes=self._shapes) for part in parts]
            # Ranks with different tokens drop out different values; those that compute the same draw the same.
            seed_all(config.seed + context.replica.token_shard)
        whole, fraction = find_uncompiled_modules(context.plan, context.world_size), config.loop.activation_fraction
        stages = None if self.parallel.pipeline is None else self.parallel.pipeline.models
        self.acceleration = accelerate_model(
            self.module, context.device, config.compile, fraction, whole, log, config.fp8, stages
        )
        if self.parallel.pipeline is None and isinstance(self.module, MultimodalModel):
            for encoder in self.module.encoders.values():
                encoder.enable_inference_mode()
        if self.acceleration.compiled and isinstance(task.collator, ChatCollator):
            task.collator.expect_compiled()
        self.prefetch = None
        """Runs frozen encoders once for the images of several microbatches, where that is possible."""
        if not has_encoder_balancing(self.module):  # balanced encoders run once for each microbatch, on every replica
            self.prefetch = build_encoder_prefetch(task, config, context.placement)

    def _parallelize(self, loading: ShardedLoading, verify_plan: Callable[[nn.Module], None]) -> ParallelModel:
        config = self._config
        options = ParallelizeOptions(
            microbatches=config.loop.microbatches,
            packed=config.data.packing,
            balance_encoders=self._balances_encoders(),
            activation_checkpointing=config.loop.activation_checkpointing,
            stand_ins=self._set_stand_ins,
            stages=loading.stages,
            keep_whole=features_need_weights(self.module, config),
        )
        try:
            return parallelize(
                self.module, self._context, options,
                cast_weights=self._cast_weights, inspect_whole_model=lambda: self._inspect_whole_model(verify_plan),
            )  # fmt: skip
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(error, self.module, self.parts, config, self._context.placement) from None

    def measure_experts(self) -> dict[str, float]:
        """Return how evenly tokens were sent to the ranks that share experts out with this one, since the last call."""
        pipeline = self.parallel.pipeline
        models = [self.module] if pipeline is None else pipeline.models
        balance = measure_balance(module for model in models for module in model.modules())
        return {} if balance is None else {"expert_balance": round(balance, 4)}

    def _cast_weights(self) -> None:
        self.parts = self.all_parts = split_into_parts(self.module, self._config.model, self._config.optimizer)
        context = self._context
        masters = choose_masters(self._config, context.device.type, context.placement.dtype, context.world_size)
        cast_parts(self.parts, context.placement.dtype, masters)

    def _inspect_whole_model(self, verify_plan: Callable[[nn.Module], None]) -> None:
        """Take from the whole model what cannot be seen once it is sharded; all ranks must call it."""
        config, context = self._config, self._context
        self.memory_tracker = MemoryTracker(self.module, config, context)
        self.recomputation = fit_activations(
            self.module, config, context.placement, self._data.train, context.replica.count, self._log
        )
        self.flops = RunFlops(self._task, config, self._log)
        self.features = self._resources.enter_context(use_feature_cache(self._task, config, context.placement))
        self._shapes = {name: one.shape for part in self.parts for name, one in part.parameters.items()}
        if context.world_size > 1:
            self.all_parts = [part.without_storage() for part in self.parts]
            for warning in context.layout.warnings:
                self._log(warning)
            if isinstance(self.module, UndividedModel):
                self._log(f"The model is trained in one piece, by its own forward. {self.module.reason}")
            for name, reason in explain_full_reads(self.module, context.layout).items():
                self._log(f"{name} was read whole by every process before it was cut: {reason}.")
            verify_plan(self.module)

    def _set_stand_ins(self, model: nn.Module) -> None:
        if not isinstance(self._task, ConversationTask):
            return
        processor = self._task.collator.processor
        if isinstance(model, UndividedModel) and isinstance(processor, WholeModelProcessor):
            model.keep_encoders_running(processor.stand_in_rows())
        elif self._task.model.encoders:
            self._task.model.keep_encoders_running(processor.stand_ins())

    def _balances_encoders(self) -> bool:
        context = self._context
        if not self._config.data.balance_encoders or context.world_size == 1 or context.is_pipeline:
            return False
        if not isinstance(self._task, ConversationTask) or not self._task.model.encoders:
            raise ConfigError(
                "data.balance_encoders = true: replicas share the images and sounds of conversations among their "
                "encoders; this model has no encoder, or another task.\n  Leave it out."
            )
        if context.layout.dp > 1:
            self._log("Replicas share their images evenly among their encoders (data.balance_encoders).")
        return context.layout.dp > 1


def open_compile_cache(
    config: RunConfig, context: DistributedContext, log: Callable[[str], None]
) -> CompileCache | None:
    """Return where this rank's compiled code is kept; None if nothing is compiled, or nothing is to be kept."""
    if config.compile_cache == "off" or not compiles(config.compile, context.device):
        return None
    layout = context.layout

    def place(rank: int) -> tuple[Any, ...]:  # ranks at equal places run equal graphs; a graph names its device
        return (*layout.place(rank)[:2], rank % layout.ranks_per_node)

    key = {name: as_data(getattr(config, name)) for name in _COMPILED_FROM}
    key |= {"versions": (torch.__version__, transformers.__version__), "place": place(context.rank)}
    device = context.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    key |= {"device": (str(device), name), "budget": config.loop.activation_budget}
    return CompileCache(
        config.compile_cache or config.folder.absolute().parent / "compile_cache",
        key,
        is_writer=all(place(rank) != place(context.rank) for rank in range(context.rank)),
        log=log,
    )


def _compute_loss(task: Task, placement: DevicePlacement, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return the mean loss of a microbatch, computed by the model or by the stage that takes its place."""
    before, task.wrapped = task.wrapped, model
    try:
        moved = placement.move_batch(inputs)
        with record_range(LOSS), placement.forward_context():
            return task.loss(moved)
    finally:
        task.wrapped = before


@dataclass(frozen=True)
class TrainState:
    """A run that is ready for its first step."""

    config: RunConfig
    context: DistributedContext
    task: Task
    model: RunModel
    step: TrainStep
    """The optimizer, and what goes with it."""
    trained: Mapping[str, nn.Parameter]
    """The parameters that this rank's optimizer steps, by name; with ZeRO-1 its shards of them."""
    replica_sync: ReplicaSync
    """Keeps replicas together over slow links."""
    rates: LearningRate
    total_steps: int

    @property
    def optimizer(self) -> torch.optim.Optimizer:
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

    def capture_sync(self) -> tuple[dict[str, Tensorlike], dict[str, Any]]:
        """Return the tensors and data that this rank alone adds to a checkpoint; call it before averaging weights."""
        tensors: dict[str, Tensorlike] = {}
        if isinstance(self.replica_sync, _NoSync):
            return tensors, {}
        own: dict[str, Any] = {"kind": self.context.plan.data.kind, "state": self.replica_sync.state_dict()}
        if self.context.is_unsynchronized:
            # While the mean is saved these weights are replaced by it, so they are copied.
            own["weights"] = {name: parameter.detach().clone() for name, parameter in self.trained.items()}
            own["buffers"] = dict(self.model.module.named_buffers())
            own["optimizer"] = {name: dict(self.optimizer.state.get(one, {})) for name, one in self.trained.items()}
        packed = flatten_values(own, f"{_KEY}/{distributed.rank()}", tensors)
        return tensors, {PER_RANK: {_KEY: packed}}

    def restore_sync(self, tensors: Mapping[str, Any], data: Mapping[str, Any], log: Callable[[str], None]) -> None:
        """Restore this rank's own state from a checkpoint; if it has none, the common state stays."""
        if isinstance(self.replica_sync, _NoSync):
            return
        saved = {rank: one[_KEY] for rank, one in data.get(PER_RANK, {}).items() if _KEY in one}
        own = saved.get(str(distributed.rank()))
        if own is None or len(saved) != distributed.world_size() or own["kind"] != self.context.plan.data.kind:
            log("What each process alone remembered of exchanges is left behind: the run is spread otherwise now.")
            return
        found = unflatten_values(own, tensors)
        if self.context.is_unsynchronized:
            self._restore_weights(found)
        self.replica_sync.load_state_dict(found["state"])

    @torch.no_grad()
    def _restore_weights(self, found: Mapping[str, Any]) -> None:
        for name, buffer in self.model.module.named_buffers():
            buffer.copy_(found["buffers"].get(name, buffer))
        for name, parameter in self.trained.items():
            parameter.copy_(found["weights"][name])
            held = self.optimizer.state.get(parameter, {})
            for key, value in found["optimizer"][name].items():
                is_tensor = isinstance(value, Tensor) and isinstance(held.get(key), Tensor)
                held[key] = held[key].copy_(value) if is_tensor else value


class _NoSync(ReplicaSync):
    """Weights are the same on all ranks, and gradients are synchronized in the backward pass, by torch alone."""

    def figures(self) -> dict[str, float]:
        return {}


def build_train_state(
    config: RunConfig, context: DistributedContext, task: Task, model: RunModel, total_steps: int
) -> TrainState:
    """Build the optimizer over the local shards of a model, and what goes with it; all ranks must call it."""
    trained = {name: one for part in model.parts for name, one in part.trained.items()}
    wrapped, data = model.parallel.wrapped, context.plan.data
    is_tried = data.kind == "zero1" and config.optimizer.name.lower() not in ELEMENTWISE
    needs_whole = is_tried and needs_whole_parameters(partial(make_plain_optimizer, config.optimizer))
    stepped = model.parallel.shard_states(trained, context, needs_whole)
    optimizer = make_optimizer(config.optimizer, model.parts, stepped)
    scale_rates(optimizer, config.optimizer.scale_rate, context.replica.count)
    step = TrainStep(
        model.parallel,
        list(stepped.values()),
        optimizer,
        max_grad_norm=config.optimizer.max_grad_norm,
        loss_scale=context.placement.loss_scale(),
        loss_shards=context.loss_shards,
        averages=AveragedWeights(trained, config.loop.ema_decay, optimizer) if config.loop.ema_decay else None,
        needs_norm=config.loop.on_bad_loss != "stop",
    )
    sync = None
    if context.world_size > 1 and wrapped is not None:
        sync = build_replica_sync(model.module, wrapped, context.meshes.data, data, optimizer, step.scaler)
    highest = highest_rate(config.optimizer, model.all_parts, context.replica.count)
    rates = LearningRate(optimizer, config.schedule, total_steps, highest)
    return TrainState(config, context, task, model, step, stepped, sync or _NoSync(), rates, total_steps)
