"""`RunModel`: the model of a run as this rank trains it, and what was learned while it was whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.checkpoint.state_values import seed_all
from cornstarch.config import RunConfig
from cornstarch.data.collate import ChatCollator
from cornstarch.data.loader import RunData
from cornstarch.engine.acceleration import accelerate_model, find_uncompiled_modules
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.failure import out_of_memory
from cornstarch.engine.feature_cache import FeatureCache, build_encoder_prefetch, use_feature_cache
from cornstarch.engine.memory_tracker import MemoryTracker
from cornstarch.engine.model_parts import ModelPart, cast_parts, split_into_parts
from cornstarch.engine.parallelize import ParallelizeOptions, ParallelModel, parallelize
from cornstarch.engine.recompute import Recomputation, fit_activations
from cornstarch.engine.sharded_loading import ShardedLoading, features_need_weights
from cornstarch.engine.step_counter import RunFlops
from cornstarch.errors import ConfigError
from cornstarch.metrics.attribution import LOSS
from cornstarch.metrics.profiler import record_range
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.import_hf.decompose import UndividedModel
from cornstarch.models.multimodal_language_model.preprocessing.hf_processor import WholeModelProcessor
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.device import DevicePlacement, is_out_of_memory
from cornstarch.parallel.encoder_balancing import has_encoder_balancing
from cornstarch.parallel.passes import explain_full_reads
from cornstarch.pipeline.split import analyze_model
from cornstarch.tasks.conversation import ConversationTask
from cornstarch.tasks.task import Task


class RunModel:
    """The model of a run: cast, parallelized, compiled. All ranks must build it.

    Args:
        task: Has the model.
        config: The run.
        context: The plan and this rank's place in it.
        data: The run's data; the activation budget and the analysis of a user's own module need a batch of it.
        loading: Which weights this rank has read.
        resources: Takes what must be closed when the run ends.
        log: Prints a line for the user.
        verify_plan: Refuses a plan that computes something else; called while the model is whole.
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
        self.acceleration = accelerate_model(
            self.module,
            context.device,
            config.compile,
            config.loop.activation_fraction,
            find_uncompiled_modules(context.plan, context.world_size),
            log,
            config.fp8,
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
            microbatches=config.loop.gradient_accumulation_steps,
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

    def _cast_weights(self) -> None:
        self.parts = self.all_parts = split_into_parts(self.module, self._config.model, self._config.optimizer)
        cast_parts(self.parts, self._context.placement.dtype)

    def _inspect_whole_model(self, verify_plan: Callable[[nn.Module], None]) -> None:
        """Take from the whole model what cannot be seen once it is sharded; all ranks must call it."""
        config, context = self._config, self._context
        self.memory_tracker = MemoryTracker(self.module, config, context.layout.replicate)
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


def _compute_loss(task: Task, placement: DevicePlacement, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return the mean loss of a microbatch, computed by the model or by the stage that takes its place."""
    before, task.wrapped = task.wrapped, model
    try:
        moved = placement.move_batch(inputs)
        with record_range(LOSS), placement.forward_context():
            return task.loss(moved)
    finally:
        task.wrapped = before
