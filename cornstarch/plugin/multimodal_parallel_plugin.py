"""How each part of a model is spread, in the words of Cornstarch 0.0.5; a `Plan` is made of it, and nothing else.

plugin = MultimodalParallelPlugin(
    encoder_plugins={"vision": ModalParallelPlugin(tp_size=2)},
    language_model_plugin=ModalParallelPlugin(tp_size=4, sp_size=2, pipeline_template=template),
    num_microbatches=8,
)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader, Dataset

from cornstarch.errors import ConfigError
from cornstarch.parallel import processes
from cornstarch.parallel.loss_scale import LossScale
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.plan.layout import Layout, check_executable
from cornstarch.plan.plan import LANGUAGE_MODEL, DataKind, DataPlan, ModulePlan, Plan, Precision, Ranks
from cornstarch.plugin.loaders import replica_loader
from cornstarch.schedule.policies import Policy

Mode = Literal["ring_attn", "all_to_all", "gather"]
Distribution = Literal["uniform", "zigzag", "makespan_min", "auto"]
LossWeight = Literal["auto", "tokens", "samples"]

_KINDS: tuple[DataKind, ...] = ("ddp", "zero1", "zero2", "zero3")


class ModalParallelPlugin:
    """How one module is spread: an encoder with its projector, or the language model.

    Args:
        tp_size: Ranks that each matrix is cut over (tensor parallelism).
        sp_size: Ranks that each sequence, or an encoder's items, are dealt out to (context parallelism).
        sequence_parallelism_mode: How attention then sees the tokens of other ranks: "ring_attn" (the default),
            "all_to_all" or "gather". Ignored if `sp_size` is 1.
        pipeline_template: The pipeline stages of the module, and what each has. Default: one stage.
        cpu_offload: Only False.
        custom_policy: Only None: no model needs a policy.
        sequence_parallelism: The old name of `sequence_parallelism_mode`.
        context_parallel_distribution_mode: Which tokens each rank gets: "uniform", "zigzag", "makespan_min", or "auto".
        pp_size: Instead of a template: so many stages, that weigh the same.
        virtual_stages: Parts that each stage's ranks hold, for the schedule "interleaved"; a template then has
            stages × virtual_stages.
        activation_checkpointing: Compute activations again in the backward pass instead of keeping them.
    """

    def __init__(
        self,
        tp_size: int = 1,
        sp_size: int = 1,
        sequence_parallelism_mode: Mode | None = None,
        pipeline_template: PipelineTemplate | None = None,
        cpu_offload: bool = False,
        custom_policy: None = None,
        *,
        sequence_parallelism: Mode | None = None,
        context_parallel_distribution_mode: Distribution | Enum = "auto",
        pp_size: int | None = None,
        virtual_stages: int = 1,
        activation_checkpointing: bool = False,
    ) -> None:
        sizes = {"tp_size": tp_size, "sp_size": sp_size, "virtual_stages": virtual_stages}
        for name, size in {**sizes, "pp_size": 1 if pp_size is None else pp_size}.items():
            _check_whole(f"ModalParallelPlugin({name}", size)
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
        self.pp_size = self._stages(pp_size)
        self.sequence_parallelism_mode = self._mode(sequence_parallelism_mode, sequence_parallelism)
        self.context_parallel_distribution_mode: Distribution = _word(
            "context_parallel_distribution_mode", context_parallel_distribution_mode, get_args(Distribution)
        )
        self.module_plan()  # what makes no sense together is refused now

    def _stages(self, pp_size: int | None) -> int:
        if self.pipeline_template is None:
            return pp_size or 1
        stages, parts = self.pipeline_template.num_stages, self.virtual_stages
        if stages % parts:
            raise ConfigError(
                f"{self.pipeline_template!r} cannot be dealt out in {parts} virtual stages per rank: "
                f"{parts} does not divide {stages}."
            )
        if pp_size is not None and pp_size * parts != stages:
            raise ConfigError(
                f"ModalParallelPlugin(pp_size={pp_size}): {self.pipeline_template!r} says {stages // parts}. "
                "Give one of them."
            )
        return stages // parts

    def _mode(self, mode: Any, old: Any) -> Mode | None:
        if self.sp_size <= 1:
            return None
        if mode is not None and old is not None and mode != old:
            raise ConfigError(
                f"sequence_parallelism_mode = {mode!r} and sequence_parallelism = {old!r}, its old name, differ. "
                "Give one of them."
            )
        chosen = mode if mode is not None else old
        return _word("sequence_parallelism_mode", "ring_attn" if chosen is None else chosen, get_args(Mode))

    def module_plan(self) -> ModulePlan:
        """Return what this says, as a part of a plan."""
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
    """Where this process stands in the pipeline."""

    stage: int
    """Of its module."""
    num_stages: int
    has_loss: bool

    def is_first_stage(self) -> bool:
        """Say whether it is the first stage of its module."""
        return self.stage == 0

    def is_last_stage(self, check_only_in_modal: bool = True) -> bool:
        """Say whether it is the last stage of its module, or, with False, of the whole model: the one with the loss."""
        return self.stage == self.num_stages - 1 if check_only_in_modal else self.has_loss


class MultimodalParallelPlugin:
    """How a whole model is spread: one plugin for each encoder, and one for the language model.

    Each module stands on ranks of its own. The number of replicas (data parallelism) is what fits into all ranks.

    Args:
        encoder_plugins: By the names that the encoders have in the `MultimodalModel`.
        language_model_plugin: That of the language model, or of a model that is not composed.
        precision: "fp16", "bf16": computed in it (autocast), with weights as they are; "fp32", None: as they are.
        num_microbatches: Parts that each batch is cut into.
        microbatch_size: Samples of each part. Give one of the two, or both: then batches must have their product.
        initial_scale: fp16: what losses are multiplied with at first, so that small gradients do not vanish.
        growth_factor: fp16: by how much that grows after `growth_interval` steps without infinite gradients.
        backoff_factor: fp16: what it is multiplied with after `hysteresis` steps with infinite gradients.
        min_scale: fp16: the least it can be.
        max_scale: fp16: the most it can be.
        max_norm: The largest norm of all gradients together; larger ones are scaled down. 0: any.
        zero_stage: 0: everything whole on every replica; 1: optimizer states sharded over replicas; 2: gradients, too;
            3: parameters, too.
        schedule: In which order stages work: "1f1b", "gpipe", "interleaved", "zero_bubble", "naive", "auto".
        ranks: "own": each module on ranks of its own. "colocated": encoders share ranks, the language model has its
            own. "first_stage": encoders run inside the language model's first stage. "shared": everything everywhere;
            no module then has several stages.
        loss_weight: What a microbatch weighs in the loss: "tokens" it trains, "samples", or "auto": tokens if the
            criterion returns the model's own loss as it is, samples for any other.
        processor: The `MultimodalProcessor`. Needed only where replicas must take the same steps and some may have a
            batch without an image, say.
        packed: Whether batches may have several samples in a row, as `pack` makes them. Needed only for a pipeline: the
            language model's attention is chosen before it is cut into stages.
        enable_flash_attention: Accepted; the model's `attn_implementation` decides.
        enable_fused_normalization: Accepted, without effect.
        enable_jit_fused: Accepted, without effect.
        parallel_output: Accepted, without effect: logits are whole.
        make_vocab_size_divisible_by: Accepted, without effect: vocabularies are not padded.
    """

    ranks: Ranks = "own"

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
        ranks: Ranks | None = None,
        loss_weight: LossWeight = "auto",
        processor: Any = None,
        packed: bool = False,
    ) -> None:
        self.encoder_plugins = dict(encoder_plugins or {})
        self.language_model_plugin = language_model_plugin
        self.precision: Precision | None = (
            None if precision is None else _word("precision", precision, get_args(Precision))
        )
        self.num_microbatches, self.microbatch_size = num_microbatches, microbatch_size
        self.max_norm = _checked_norm(max_norm)
        self.zero_stage, self.schedule, self.processor, self.packed = zero_stage, schedule, processor, bool(packed)
        self.ranks = ranks or type(self).ranks
        self.loss_weight: LossWeight = _word("loss_weight", loss_weight, get_args(LossWeight))
        self.stage_manager: StageManager | None = None
        """Where this process stands; known once the model is boosted."""
        self._check_microbatches()
        self._scale = (
            initial_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale,
        )  # fmt: skip
        self.loss_scale()  # checked now
        without_effect = {
            "enable_fused_normalization": enable_fused_normalization,
            "enable_jit_fused": enable_jit_fused,
            "parallel_output=False": not parallel_output,
            "make_vocab_size_divisible_by": make_vocab_size_divisible_by != 64,
        }
        for name in (name for name, given in without_effect.items() if given):
            warnings.warn(f"{type(self).__name__}({name}) has no effect.", stacklevel=2)
        if enable_flash_attention:
            warnings.warn(
                f"{type(self).__name__}(enable_flash_attention) has no effect: the models' attn_implementation "
                "decides.",
                stacklevel=2,
            )
        self.plan()  # what makes no sense together is refused now

    def _check_microbatches(self) -> None:
        if self.num_microbatches is None and self.microbatch_size is None:
            raise ConfigError(
                f"{type(self).__name__}: into how many parts is a batch cut? Give num_microbatches, or microbatch_size."
            )
        for name in ("num_microbatches", "microbatch_size"):
            if (size := getattr(self, name)) is not None:
                _check_whole(f"{type(self).__name__}({name}", size)

    def loss_scale(self) -> LossScale | None:
        """Return what losses are scaled by; None where they are not."""
        scale = LossScale(*self._scale)
        return scale if self.precision == "fp16" else None

    def _modules(self) -> Iterator[tuple[str, Any]]:
        yield from self.encoder_plugins.items()
        if self.language_model_plugin is None:
            raise ConfigError(f"{type(self).__name__}: language_model_plugin is missing.")
        yield LANGUAGE_MODEL, self.language_model_plugin

    def plan(self) -> Plan:
        """Return what all plugins say, as a plan."""
        modules = {}
        for name, plugin in self._modules():
            if not isinstance(plugin, ModalParallelPlugin):
                where = "language_model_plugin" if name == LANGUAGE_MODEL else f"encoder_plugins[{name!r}]"
                raise ConfigError(f"{where} is a {type(plugin).__name__}; expected a ModalParallelPlugin.")
            modules[name] = plugin.module_plan()
        if self.zero_stage not in range(len(_KINDS)) or isinstance(self.zero_stage, bool):
            raise ConfigError(f"zero_stage = {self.zero_stage!r}: expected 0, 1, 2 or 3.")
        ranks = self.ranks if self.encoder_plugins else "auto"
        plan = Plan(modules, DataPlan(kind=_KINDS[self.zero_stage]), ranks, self.schedule)
        check_executable(plan)
        return plan

    def templates(self) -> dict[str, PipelineTemplate]:
        """Return the templates that were given, by module."""
        found = {name: plugin.pipeline_template for name, plugin in self._modules()}
        return {name: template for name, template in found.items() if template is not None}

    def layout(self) -> Layout:
        """Return who of all processes holds what."""
        size = processes.size()
        return Layout.of(self.plan(), size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))

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
        """Return a loader whose batches are the same in all ranks of a replica, and others in other replicas.

        Args:
            dataset: With numbered samples.
            batch_size: Samples of a replica's batch.
            shuffle: Whether each pass has an order of its own.
            seed: What the order depends on.
            drop_last: Leave out a last batch that is smaller.
            pin_memory: As in torch.
            num_workers: As in torch.
            options: More of `torch.utils.data.DataLoader`.
        """
        given = {"batch_size": batch_size, "drop_last": drop_last, "pin_memory": pin_memory, "num_workers": num_workers}
        layout = self.layout()
        index = layout.place(processes.rank()).dp
        return replica_loader(dataset, index, layout.dp, shuffle, seed, {**given, **options})


class EncodersColocatedPlugin(MultimodalParallelPlugin):
    """All encoders on the same ranks, one after the other, and the language model on its own."""

    ranks: Ranks = "colocated"


def _check_whole(name: str, size: Any) -> None:
    if type(size) is not int or size < 1:
        raise ConfigError(f"{name}={size!r}): expected a whole number of at least 1.")


def _checked_norm(most: Any) -> float:
    if isinstance(most, bool) or not isinstance(most, int | float) or most < 0:
        raise ConfigError(f"max_norm = {most!r}: expected a number above 0, or 0 for any norm.")
    return float(most)


def _word(name: str, value: Any, known: tuple[str, ...]) -> Any:
    word = value.value if isinstance(value, Enum) else value
    if word not in known:
        raise ConfigError(f"{name} = {word!r}: expected one of {', '.join(known)}.")
    return word


__all__ = ["EncodersColocatedPlugin", "ModalParallelPlugin", "MultimodalParallelPlugin", "StageManager"]
