"""Plugins: the parallelism of each module, with the arguments of Cornstarch 0.0.5, from which a `Plan` is built.

plugin = MultimodalParallelPlugin(
    encoder_plugins={"vision": ModalParallelPlugin(tp_size=2)},
    language_model_plugin=ModalParallelPlugin(tp_size=4, sp_size=2, pipeline_template=template),
    num_microbatches=8,
)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader, Dataset

from cornstarch.api.microbatches import build_replica_loader
from cornstarch.engine.context import build_layout
from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed
from cornstarch.parallel.gradients import LossScale
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.plan.data_options import LANGUAGE_MODEL, ZERO_KINDS, CpDistribution, CpMode, Precision, RankPlacement
from cornstarch.plan.layout import Layout, check_executable
from cornstarch.plan.plan import DataPlan, ModulePlan, Plan
from cornstarch.schedule.policies import Policy

LossWeight = Literal["auto", "tokens", "samples"]


class ModalParallelPlugin:
    """The parallelism of one module: an encoder with its projector, or the language model.

    Args:
        tp_size: The number of tensor-parallel ranks.
        sp_size: The number of context-parallel ranks, which share each sequence, or the items of an encoder.
        sequence_parallelism_mode: How attention reaches the tokens of other ranks: "ring_attn" (the default),
            "all_to_all" or "gather". Ignored if `sp_size` is 1.
        pipeline_template: The layers of each pipeline stage. Default: one stage.
        cpu_offload: Only False.
        custom_policy: Only None: no model needs a policy.
        sequence_parallelism: The old name of `sequence_parallelism_mode`.
        context_parallel_distribution_mode: Which tokens each rank gets: "uniform", "zigzag", "makespan_min", or "auto".
        pp_size: Instead of a template: the number of stages, balanced by cost.
        virtual_stages: The number of stages on each rank, for the schedule "interleaved"; a template then has
            stages × virtual_stages.
        activation_checkpointing: Recompute activations in the backward pass instead of keeping them.
    """

    def __init__(
        self,
        tp_size: int = 1,
        sp_size: int = 1,
        sequence_parallelism_mode: CpMode | None = None,
        pipeline_template: PipelineTemplate | None = None,
        cpu_offload: bool = False,
        custom_policy: None = None,
        *,
        sequence_parallelism: CpMode | None = None,
        context_parallel_distribution_mode: CpDistribution | Enum = "auto",
        pp_size: int | None = None,
        virtual_stages: int = 1,
        activation_checkpointing: bool = False,
    ) -> None:
        sizes = {"tp_size": tp_size, "sp_size": sp_size, "virtual_stages": virtual_stages}
        for name, size in {**sizes, "pp_size": 1 if pp_size is None else pp_size}.items():
            _check_positive(f"ModalParallelPlugin({name}", size)
        if cpu_offload:
            raise ConfigError("ModalParallelPlugin(cpu_offload=True): parameters stay on their device. Leave it out.")
        if custom_policy is not None:
            raise ConfigError("ModalParallelPlugin(custom_policy=…): models are cut without policies. Leave it out.")
        if pipeline_template is not None and not isinstance(pipeline_template, PipelineTemplate):
            raise ConfigError(
                f"ModalParallelPlugin(pipeline_template={pipeline_template!r}): expected a PipelineTemplate, or None."
            )
        self.tp_size, self.sp_size, self.virtual_stages = tp_size, sp_size, virtual_stages
        self.pipeline_template = pipeline_template
        self.activation_checkpointing = bool(activation_checkpointing)
        self.pp_size = pp_size or 1
        if pipeline_template is not None:
            stages = pipeline_template.num_stages
            if stages % virtual_stages:
                raise ConfigError(
                    f"{pipeline_template!r} cannot be split into {virtual_stages} virtual stages per rank: "
                    f"{virtual_stages} does not divide {stages}."
                )
            self.pp_size = stages // virtual_stages
            if pp_size not in (None, self.pp_size):
                raise ConfigError(
                    f"ModalParallelPlugin(pp_size={pp_size}): {pipeline_template!r} says {self.pp_size}. "
                    "Give one of them."
                )
        self.sequence_parallelism_mode: CpMode | None = None
        mode, old = sequence_parallelism_mode, sequence_parallelism
        if sp_size > 1:
            modes = [one for one in (mode, old) if one is not None] or ["ring_attn"]
            if modes[0] != modes[-1]:
                raise ConfigError(
                    f"sequence_parallelism_mode = {mode!r} and sequence_parallelism = {old!r}, its old name, differ. "
                    "Give one of them."
                )
            self.sequence_parallelism_mode = _check_choice("sequence_parallelism_mode", modes[0], get_args(CpMode))
        self.context_parallel_distribution_mode: CpDistribution = _check_choice(
            "context_parallel_distribution_mode", context_parallel_distribution_mode, get_args(CpDistribution)
        )
        self.module_plan()  # refuses contradictory arguments now

    def module_plan(self) -> ModulePlan:
        return ModulePlan(
            tp=self.tp_size,
            cp=self.sp_size,
            cp_mode=self.sequence_parallelism_mode or "ring_attn",
            cp_distribution=self.context_parallel_distribution_mode if self.sp_size > 1 else "auto",
            stages=self.pp_size,
            virtual_stages=self.virtual_stages,
            activation_checkpointing=self.activation_checkpointing,
        )


@dataclass(frozen=True)
class StageManager:
    """The place of this process in the pipeline."""

    stage: int
    num_stages: int
    """Both within its module."""
    has_loss: bool

    def is_first_stage(self) -> bool:
        """Return whether this is the first stage of its module."""
        return self.stage == 0

    def is_last_stage(self, check_only_in_modal: bool = True) -> bool:
        """Return whether this is the last stage of its module, or, with False, of the whole model."""
        return self.stage == self.num_stages - 1 if check_only_in_modal else self.has_loss


class MultimodalParallelPlugin:
    """The parallelism of a whole model: one plugin for each encoder, and one for the language model.

    Each module is on ranks of its own. The number of replicas (data parallelism) is what fits into all ranks.

    Args:
        encoder_plugins: By the names of the encoders in the `MultimodalModel`.
        language_model_plugin: The plugin of the language model, or of a model without encoders.
        precision: "fp16", "bf16": the autocast dtype; "fp32", None: no autocast. Weights keep their dtype.
        num_microbatches: The number of microbatches of each batch.
        microbatch_size: The samples of each microbatch. With both, batches must have their product.
        initial_scale: fp16: the first loss scale.
        growth_factor: fp16: how the scale grows after `growth_interval` steps without infinite gradients.
        backoff_factor: fp16: how the scale shrinks after `hysteresis` steps with infinite gradients.
        min_scale: fp16: the smallest scale.
        max_scale: fp16: the largest scale.
        max_norm: The largest norm of all gradients together; larger ones are clipped. 0: no clipping.
        zero_stage: 0: DDP; 1: optimizer states are sharded over replicas; 2: gradients, too; 3: parameters, too.
        schedule: The pipeline schedule: "1f1b", "gpipe", "interleaved", "zero_bubble", "naive", "auto".
        ranks: "own": each module on ranks of its own. "colocated": encoders share ranks, the language model has its
            own. "first_stage": encoders run inside the language model's first stage. "shared": every module on every
            rank, without pipeline stages.
        loss_weight: How microbatches are weighed in the loss: by trained "tokens", by "samples", or "auto": by tokens
            if the criterion returns the model's own loss unchanged, else by samples.
        processor: The `MultimodalProcessor`. Needed if replicas communicate inside of passes and some of them may have
            a batch without an image, say.
        packed: Whether batches may have several samples in a row, as `pack` makes them. Needed for pipelines only: the
            language model's attention is chosen before it is split into stages.
        enable_flash_attention: Accepted; the model's `attn_implementation` decides.
        enable_fused_normalization: Accepted without effect.
        enable_jit_fused: Accepted without effect.
        parallel_output: Accepted without effect: logits are whole.
        make_vocab_size_divisible_by: Accepted without effect: vocabularies are not padded.
    """

    ranks: RankPlacement = "own"

    def __init__(
        self,
        encoder_plugins: Mapping[str, ModalParallelPlugin] | None = None,
        language_model_plugin: ModalParallelPlugin | None = None,
        precision: Precision | None = None,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_jit_fused: bool = False,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0,
        parallel_output: bool = True,
        make_vocab_size_divisible_by: int = 64,
        *,
        zero_stage: int = 0,
        schedule: Policy = "1f1b",
        ranks: RankPlacement | None = None,
        loss_weight: LossWeight = "auto",
        processor: Any = None,
        packed: bool = False,
    ) -> None:
        self.encoder_plugins = dict(encoder_plugins or {})
        self.language_model_plugin = language_model_plugin
        self.precision: Precision | None = _check_choice("precision", precision, (*get_args(Precision), None))
        self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or max_norm < 0:
            raise ConfigError(f"max_norm = {max_norm!r}: expected a number above 0, or 0 for any norm.")
        self.max_norm = float(max_norm)
        self.zero_stage, self.schedule, self.processor, self.packed = zero_stage, schedule, processor, bool(packed)
        self.ranks = ranks or type(self).ranks
        self.loss_weight: LossWeight = _check_choice("loss_weight", loss_weight, get_args(LossWeight))
        self.stage_manager: StageManager | None = None
        """The place of this process, once the model is boosted."""
        if num_microbatches is None and microbatch_size is None:
            raise ConfigError(
                f"{type(self).__name__}: into how many parts is a batch cut? Give num_microbatches, or microbatch_size."
            )
        for name, size in {"num_microbatches": num_microbatches, "microbatch_size": microbatch_size}.items():
            if size is not None:
                _check_positive(f"{type(self).__name__}({name}", size)
        self._scale = (
            initial_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale,
        )  # fmt: skip
        self.loss_scale()  # refuses bad values now
        without_effect = {
            "enable_fused_normalization": enable_fused_normalization,
            "enable_jit_fused": enable_jit_fused,
            "enable_flash_attention": enable_flash_attention,
            "parallel_output=False": not parallel_output,
            "make_vocab_size_divisible_by": make_vocab_size_divisible_by != 64,
        }
        for name in (name for name, given in without_effect.items() if given):
            why = ": the models' attn_implementation decides" if name == "enable_flash_attention" else ""
            warnings.warn(f"{type(self).__name__}({name}) has no effect{why}.", stacklevel=2)
        self.plan()  # refuses contradictory arguments now

    def loss_scale(self) -> LossScale | None:
        """Return the loss scale of fp16; None for other precisions."""
        scale = LossScale(*self._scale)
        return scale if self.precision == "fp16" else None

    def _modules(self) -> Iterator[tuple[str, Any]]:
        yield from self.encoder_plugins.items()
        if self.language_model_plugin is None:
            raise ConfigError(f"{type(self).__name__}: language_model_plugin is missing.")
        yield LANGUAGE_MODEL, self.language_model_plugin

    def plan(self) -> Plan:
        modules = {}
        for name, plugin in self._modules():
            if not isinstance(plugin, ModalParallelPlugin):
                where = "language_model_plugin" if name == LANGUAGE_MODEL else f"encoder_plugins[{name!r}]"
                raise ConfigError(f"{where} is a {type(plugin).__name__}; expected a ModalParallelPlugin.")
            modules[name] = plugin.module_plan()
        if self.zero_stage not in range(len(ZERO_KINDS)) or isinstance(self.zero_stage, bool):
            raise ConfigError(f"zero_stage = {self.zero_stage!r}: expected 0, 1, 2 or 3.")
        ranks = self.ranks if self.encoder_plugins else "auto"
        plan = Plan(modules, DataPlan(kind=ZERO_KINDS[self.zero_stage]), ranks, self.schedule)
        check_executable(plan)
        return plan

    def templates(self) -> dict[str, PipelineTemplate]:
        found = {name: plugin.pipeline_template for name, plugin in self._modules()}
        return {name: template for name, template in found.items() if template is not None}

    def layout(self) -> Layout:
        return build_layout(self.plan())

    @property
    def dp_size(self) -> int:
        """The number of replicas."""
        return self.layout().dp

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a loader with the same batches on all ranks of a replica, and other batches on other replicas.

        `batch_size` is that of a replica, `seed` decides the order, and each epoch is shuffled anew. The other
        arguments and `options` are those of `torch.utils.data.DataLoader`.
        """
        given = {"batch_size": batch_size, "drop_last": drop_last, "pin_memory": pin_memory, "num_workers": num_workers}
        layout = self.layout()
        index = layout.place(distributed.rank()).dp
        return build_replica_loader(dataset, index, layout.dp, shuffle, seed, {**given, **options})


class EncodersColocatedPlugin(MultimodalParallelPlugin):
    """All encoders share the same ranks, one after the other; the language model has its own."""

    ranks: RankPlacement = "colocated"


def _check_positive(name: str, size: Any) -> None:
    if type(size) is not int or size < 1:
        raise ConfigError(f"{name}={size!r}): expected a whole number of at least 1.")


def _check_choice(name: str, value: Any, known: tuple[str | None, ...]) -> Any:
    word = value.value if isinstance(value, Enum) else value
    if word not in known:
        raise ConfigError(f"{name} = {word!r}: expected one of {', '.join(filter(None, known))}.")
    return word
