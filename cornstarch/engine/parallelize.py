"""Applies a parallel plan to a model: the one place that knows the order of the passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cornstarch.compat import move_present
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.recompute import recompute_activations, recompute_planned
from cornstarch.engine.sharded_loading import apply_mask_attention, check_cp, find_whole_modules
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.import_hf.decompose import UndividedModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel import passes
from cornstarch.parallel.ddp_fsdp import apply_data_parallel, check_data_plan, get_measured_bucket
from cornstarch.parallel.device import DTYPES
from cornstarch.parallel.encoder_balancing import balance_encoders, has_encoder_balancing
from cornstarch.parallel.expert import find_expert_replicas
from cornstarch.parallel.loading import record_full_read
from cornstarch.parallel.zero1 import Zero1
from cornstarch.pipeline.pipeline import Pipeline
from cornstarch.pipeline.stage_program import Call
from cornstarch.pipeline.stages import StageAssignment, release_remote_parameters
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.plan.data_options import REPLICATED, UNSYNCHRONIZED, choose_sharded_dtypes
from cornstarch.plan.plan import LANGUAGE_MODEL


@dataclass
class ParallelModel:
    """A model as this rank trains it, after `parallelize`."""

    module: nn.Module
    """The model, changed in place. Parameters keep their names."""
    wrapped: nn.Module | None = None
    """The DDP or FSDP module to call instead; None if there is none, or if the model is split into stages."""
    pipeline: Pipeline | None = None
    """This rank's stages, if the model is split into stages."""
    zero1: Zero1 | None = None
    """With ZeRO-1: reduces gradients to shards, and gathers the parameters that other ranks have stepped."""
    call: Call = field(default=lambda model, inputs: model(**inputs))
    """Runs the model, or the stage that takes its place, on a microbatch; the result goes to the loss."""

    def set_call(self, call: Call) -> None:
        """Set how the model is run on a microbatch: a function of the model and its inputs."""
        self.call = call
        if self.pipeline is not None:
            self.pipeline.set_call(call)

    @property
    def callable_module(self) -> nn.Module:
        """The module to call on a rank that has all of the model."""
        return self.module if self.wrapped is None else self.wrapped

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss: every rank does, except early stages of a pipeline."""
        return self.pipeline is None or self.pipeline.has_loss

    @property
    def bucket_size(self) -> str | None:
        """The size of DDP's gradient buckets, if it was measured for the link."""
        measured = None if self.wrapped is None else get_measured_bucket(self.wrapped)
        return None if measured is None else measured.line

    def shard_states(
        self, trained: Mapping[str, nn.Parameter], context: DistributedContext, keep_whole: bool = False
    ) -> Mapping[str, nn.Parameter]:
        """Return the parameters, by name, that this rank's optimizer steps: with ZeRO-1 its shards of `trained`.

        All ranks must call it, after the model is compiled. With `keep_whole` no parameter is cut.
        """
        data = context.plan.data
        if data.kind != "zero1" or context.world_size == 1:  # before meshes are read, which need a process group
            return trained
        meshes = context.meshes if self.pipeline is None else self.pipeline.meshes
        if meshes.data.size() == 1:
            return trained
        measured = None if self.wrapped is None else get_measured_bucket(self.wrapped)
        size = int(data.bucket_mb * 2**20) if isinstance(data.bucket_mb, int | float) else None
        self.zero1 = Zero1(
            trained,
            meshes.data.get_group(),
            bucket_bytes=size if measured is None else measured.size,
            keep_whole=keep_whole,
            alone=() if self.pipeline is None else self.pipeline.tied_parameters,
            averaged=data.compression.kind != "none",
            is_stage=self.pipeline is not None,
            fewer=find_expert_replicas(self.module),
        )
        if self.pipeline is not None:
            self.pipeline.zero1 = self.zero1
        return self.zero1.shards

    def balance_encoders(self) -> AbstractContextManager[Any]:
        """Return the context in which replicas share the work of their encoders, if the plan asks for it."""
        return balance_encoders(self.module) if has_encoder_balancing(self.module) else nullcontext()


@dataclass(frozen=True)
class ParallelizeOptions:
    """What `parallelize` needs to know besides the plan."""

    microbatches: int = 1
    """Per step."""
    packed: bool = False
    """Whether a row may hold several samples, which must not attend to one another."""
    balance_encoders: bool = False
    """Let replicas share the images and sounds of a step evenly among their encoders."""
    activation_checkpointing: bool = False
    """Recompute the activations of all layers, whatever the plan says about single modules."""
    stand_ins: Callable[[nn.Module], None] | None = None
    """Gives encoders inputs to run on in a microbatch without images or sounds (`keep_encoders_running`)."""
    stages: StageAssignment | None = None
    """The stages that weights were read for. By default they are assigned now."""
    templates: Mapping[str, PipelineTemplate | None] = field(default_factory=dict)
    """By module name, the layers of each stage."""
    keep_whole: Mapping[str, str] = field(default_factory=dict)
    """Modules that every rank needs whole until they are sharded, with the reason."""


def parallelize(
    model: nn.Module,
    context: DistributedContext,
    options: ParallelizeOptions | None = None,
    *,
    cast_weights: Callable[[], None] = lambda: None,
    inspect_whole_model: Callable[[], None] = lambda: None,
) -> ParallelModel:
    """Apply the plan to a model, in place, and return what trains it. Build the optimizer afterwards.

    All ranks must call it with the same weights. From then on a rank's loss is the sum over its tokens divided by the
    tokens of its replica, and gradients are averaged over ranks.

    Args:
        model: The whole model, or one whose modules were sharded while they were read; `requires_grad` is set.
        context: The plan and this rank's place in it.
        options: See `ParallelizeOptions`.
        cast_weights: Brings weights to the dtype that they are stored in.
        inspect_whole_model: Called when the model is on its device and not sharded yet: for whoever must see all of it.
    """
    options = options or ParallelizeOptions()
    plan, device, placement = context.plan, context.device, context.placement
    precision = placement.precision if placement.dtype == DTYPES[placement.precision] else "fp32"
    data = choose_sharded_dtypes(plan.data, precision, device.type == "cuda")
    _check_undivided(model, context)
    stages = None
    if context.is_pipeline:
        # The assignment that weights were read for is carried over to the real model.
        read = options.stages
        stages = StageAssignment(model, context.layout, options.templates) if read is None else read.bind(model)
        _release_remote(model, stages, options)  # before the move: the device need not hold other stages' weights
    cast_weights()  # before the move, too: in half precision it copies half as much
    if options.activation_checkpointing:
        recompute_activations(model)  # before tp and compile: both wrap the layer that recomputes itself
    else:
        recompute_planned(model, context.layout)
    if stages is None:
        model.to(device)
    else:
        move_present(model, device)
    inspect_whole_model()  # the last moment at which FLOPs, memory and weights of the whole model can be seen
    if context.world_size == 1:
        # Before layers are compiled: the check runs the model with shapes and masks that training never has.
        _route_masks(model, context, None, options.packed)
        return ParallelModel(model)

    check_data_plan(model, plan.data)
    # Stages whose parameters are whole have no collectives in a pass: gradients are reduced after all microbatches.
    has_collectives = not context.is_pipeline or context.layout.exchanges_in_passes
    if options.stand_ins is not None and has_collectives and plan.data.kind not in UNSYNCHRONIZED:
        options.stand_ins(model)  # before FSDP, whose collectives hang if one rank skips an encoder
    pipeline, meshes = None, context.meshes if stages is None else context.stage_groups.meshes
    if stages is None:
        passes.record_unreached_parameters(model, plan.data)  # before tp: it runs the encoders as they are
        local = passes.iter_planned_modules(model, context.layout)
    else:
        local = ((module, module_plan) for _, module, module_plan in stages.here())
        # Refuses microbatches that the schedule cannot run, so before weights are sharded.
        forward = context.placement.forward_context
        pipeline = Pipeline(stages, context.stage_groups, device, options.microbatches, forward)
    for module, module_plan in local:  # while the model is whole: that is when both passes verify that they fit it
        check_cp(module, module_plan, meshes, device)
        passes.apply_tp(module, module_plan, meshes)  # before cp, whose check runs the module as it will be
        passes.apply_cp(module, module_plan, meshes)
        passes.apply_ep(module, module_plan, meshes)  # after both: their checks run the module, not its exchanges
    _route_masks(model, context, stages, options.packed)  # after tp: adapters are sharded like the matrices they adapt
    if pipeline is None:
        if options.balance_encoders and context.layout.dp > 1:
            passes.apply_encoder_balancing(model, context.meshes)  # before FSDP: its hooks must run inside of FSDP's
        if context.meshes.data.size() == 1 and plan.data.kind in REPLICATED:
            return ParallelModel(model, model)  # there is nobody to average with
        return ParallelModel(model, apply_data_parallel(model, context.meshes.data, data))  # last: it owns parameters
    # After tp and cp, which need whole modules; a copy of the model cannot be made once masks are routed.
    pipeline.split(lambda copy: _route_masks(copy, context, stages, options.packed))
    pipeline.shard(data)  # after the split: only local parameters are sharded, and from then on FSDP owns them
    pipeline.connect()  # last: ties are found among the parameters that are left
    return ParallelModel(model, None, pipeline)


def _check_undivided(model: nn.Module, context: DistributedContext) -> None:
    """Refuse a plan that shards a model which can only be trained in one piece."""
    sizes = [max(plan.tp, plan.cp, plan.ep) for plan in context.plan.modules.values()]
    sharded = context.is_pipeline or max(sizes) > 1
    if isinstance(model, UndividedModel) and sharded:
        raise ConfigError(
            f"parallel: {type(unwrap(model.language_model)).__name__} is trained in one piece: it has no stages, and "
            f"neither its matrices nor its tokens are cut, so tp, cp, ep and stages must be 1. {model.reason}"
        )


def _release_remote(model: nn.Module, stages: StageAssignment, options: ParallelizeOptions) -> None:
    """Free the memory of other stages' weights, except of modules that are needed whole until they are sharded."""
    local = stages.local_parameters()
    for name, reason in (find_whole_modules(stages, options.packed) | dict(options.keep_whole)).items():
        part = model
        if isinstance(model, MultimodalModel):
            part = model.language_model if name == LANGUAGE_MODEL else model.encoders[name]
        local.update(map(id, part.parameters()))
        record_full_read(part.module if isinstance(part, ModalEncoderModule) else part, reason)
    release_remote_parameters(model, local)


def _route_masks(model: nn.Module, context: DistributedContext, stages: StageAssignment | None, packed: bool) -> None:
    """Let the language model attend through `MaskSpec`s, if its rows need more than causal masks.

    On all ranks, before parameters are sharded: the check runs the model, and a rank whose batch is the first to need
    masks would wait in it for ranks whose batches do not. Split into stages, a model cannot be changed any more.
    """
    is_local = stages is None or any(map(stages.is_last, stages.place_of_rank.modules))
    if is_local and isinstance(model, MultimodalModel) and passes.needs_mask_attention(model, packed):
        apply_mask_attention(model.language_model, context.device)
