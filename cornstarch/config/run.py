"""The config of a run, and the checks across its sections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cornstarch.config.data import DataConfig
from cornstarch.config.fields import Also, NotNegative, Positive, Precision, Section
from cornstarch.config.model import ModelConfig
from cornstarch.config.parallel import ParallelConfig
from cornstarch.config.training import (
    CheckpointConfig,
    FeaturesConfig,
    LoggingConfig,
    LoopConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from cornstarch.plan.kinds import LANGUAGE_MODEL, SPLIT_BACKWARD, WHOLE_MODEL
from cornstarch.plan.plan import fill_empty

_DEVICE = re.compile(r"auto|cpu|(cuda|mps|xpu|hpu|npu)(:\d+)?")
_OTHER_DEVICES = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps"}


class RunConfig(Section):
    """The config of a run."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$"), Also("run_name")] = "run"
    """The name of the run."""
    output: Annotated[Path | None, Also("output_dir", "default_root_dir")] = None
    """The run's folder. Default: `runs/<name>`."""
    seed: NotNegative = 0
    """Seed of all random numbers."""
    device: str = "auto"
    """auto: a GPU if there is one; cpu; cuda, or cuda:1 for one of several GPUs; mps; xpu."""
    threads: Positive | None = None
    """CPU threads of one process. Default: torch's choice; small models are faster with 1."""
    precision: Precision | Literal["auto"] = "auto"
    """The precision of computation. auto: bf16 on a GPU that has it, else fp32."""
    compile: Annotated[Literal["auto", "layers", "off"], Also("torch_compile")] = "auto"
    """layers: every layer is compiled; auto: on a GPU, where that is possible; off: nothing is compiled."""
    fp8: Literal["off", "rowwise", "tensorwise"] = "off"
    """Multiply in 8 bits in the large linear layers of the trained parts (Ada, Hopper and newer GPUs). rowwise: a scale
    for each row, closer to bf16; tensorwise: one for each matrix, faster."""
    attention: Literal["auto", "flex", "sdpa", "cudnn", "varlen"] = "auto"
    """The attention kernels on a GPU. auto: the fastest that respect the mask."""
    model: ModelConfig
    """The model to train."""
    data: DataConfig
    """The data to train on."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loop: LoopConfig = LoopConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    features: FeaturesConfig = FeaturesConfig()
    parallel: ParallelConfig = ParallelConfig()

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if _DEVICE.fullmatch(value):
            return value
        kind, colon, number = value.lower().partition(":")
        meant = f" Did you mean `{_OTHER_DEVICES[kind]}{colon}{number}`?" if kind in _OTHER_DEVICES else ""
        raise ValueError(f"a run cannot use such a device.{meant} Expected auto, cpu, cuda, cuda:<number>, mps or xpu")

    @field_validator("compile", mode="before")
    @classmethod
    def _read_compile(cls, value: Any) -> Any:
        return {True: "layers", False: "off"}[value] if isinstance(value, bool) else value  # YAML's `off` is false

    @field_validator("parallel", mode="before")
    @classmethod
    def _read_parallel(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return fill_empty(value)
        return {"auto": True} if value == "auto" else value

    @field_validator("fp8", mode="before")
    @classmethod
    def _read_fp8(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML's `off` is false

    @model_validator(mode="after")
    def _check_fp8(self) -> RunConfig:
        if self.fp8 == "off":
            return self
        given: dict[str, str | None] = {"precision": self.precision}
        given |= {f"parallel.modules.{name}.precision": one.precision for name, one in self.parallel.modules.items()}
        for key, precision in given.items():
            if precision not in ("auto", "bf16", None):
                raise ValueError(
                    f"`fp8` = {self.fp8} with `{key}` = {precision}: what is not multiplied in fp8 is computed in bf16 "
                    "then. Use bf16 or auto, or set `fp8` to off"
                )
        plan = self.parallel
        cut = sorted(name for name, module in plan.modules.items() if module.tp > 1)
        if cut:
            raise ValueError(
                f"`fp8` = {self.fp8} with tp > 1 for {', '.join(cut)}: matrices that are cut over ranks are not "
                "multiplied in fp8. Use data parallelism (fsdp2) or stages instead of tp, or set `fp8` to off"
            )
        if plan.is_pipeline and plan.schedule in SPLIT_BACKWARD:
            raise ValueError(
                f"`fp8` = {self.fp8} with `parallel.schedule` = {plan.schedule}: it takes apart the gradients of "
                "inputs and of weights, which layers in fp8 compute together. Use 1f1b or interleaved, or set `fp8` to "
                "off"
            )
        return self

    @model_validator(mode="after")
    def _check_modules(self) -> RunConfig:
        model, named = self.model, set(self.parallel.modules)
        known = {*model.encoders, LANGUAGE_MODEL} if model.encoders else {WHOLE_MODEL, LANGUAGE_MODEL}
        wrong = sorted(named - known - {WHOLE_MODEL})
        if wrong:
            raise ValueError(
                f"`parallel.modules` has {', '.join(wrong)}; the model has {', '.join(sorted(known))}"
                f"{', or `model` for all of them alike' if model.encoders else ''}"
            )
        missing = sorted(known - named)
        if model.encoders and named != {WHOLE_MODEL} and missing:
            raise ValueError(
                f"`parallel.modules` says nothing about {', '.join(missing)}; say it for every module, or for `model`, "
                "which stands for all of them"
            )
        return self

    @model_validator(mode="after")
    def _check_early_stopping(self) -> RunConfig:
        if self.loop.early_stopping is None:
            return self
        option = "`loop.early_stopping` ends a run whose evaluations do not get better"
        if not self.data.evaluation:
            raise ValueError(f"{option}, and `data.evaluation` has no data. Give it some, or leave early_stopping out")
        if self.loop.evaluate_every is None:
            raise ValueError(
                f"{option}, and without `loop.evaluate_every` there is one, at the end. Set it to a number of steps, "
                "or leave early_stopping out"
            )
        return self

    @model_validator(mode="after")
    def _check_balance(self) -> RunConfig:
        if self.data.balance != "off" and self.parallel.data.is_unsynchronized:
            raise ValueError(
                f"`data.balance` = {self.data.balance} with `parallel.data.kind` = {self.parallel.data.kind}: "
                "a process trains on batches of its own between exchanges, and long samples would come together in "
                "them. Set `data.balance` to off"
            )
        return self

    @model_validator(mode="after")
    def _check_balance_encoders(self) -> RunConfig:
        if not self.data.balance_encoders:
            return self
        plan, option = self.parallel, "`data.balance_encoders` = true"
        if plan.data.is_unsynchronized:
            raise ValueError(
                f"{option} with `parallel.data.kind` = {plan.data.kind}: processes train by themselves between "
                "exchanges, and would have to wait for one another's images. Set `data.balance_encoders` to false"
            )
        if plan.is_pipeline:
            raise ValueError(
                f"{option} with stages, or encoders on ranks of their own: replicas of a pipeline do not encode at the "
                "same moment. Put all modules on the same ranks (`parallel.ranks` = shared, one stage), or set "
                "`data.balance_encoders` to false"
            )
        encoders = [name for name in plan.modules if name != LANGUAGE_MODEL or len(plan.modules) == 1]
        if cut := sorted(name for name in encoders if plan.modules[name].cp > 1):
            raise ValueError(
                f"{option} with cp > 1 for {', '.join(cut)}: the ranks of a replica share out its images already. Use "
                "cp = 1 for encoders, with `parallel.ranks` = shared, or set `data.balance_encoders` to false"
            )
        if self.features.cache:
            raise ValueError(
                f"{option} with `features.cache`: what is kept needs no encoder, and processes that have all of their "
                "images would not take part. Leave one of them out"
            )
        if self.model.language_model is not None and not self.model.encoders:
            raise ValueError(f"{option} lends what encoders read; `model` has none")
        return self

    @model_validator(mode="after")
    def _check_unsynchronized(self) -> RunConfig:
        kind = self.parallel.data.kind
        if not self.parallel.data.is_unsynchronized:
            return self
        if self.loop.ema_decay is not None:
            raise ValueError(
                f"`loop.ema_decay` with `parallel.data.kind` = {kind}: each process has weights of its own, and would "
                "average others over time than are saved. Leave `loop.ema_decay` out: the mean over processes is saved"
            )
        if self.precision == "fp16":
            raise ValueError(
                f"`precision` = fp16 with `parallel.data.kind` = {kind}: each process would scale its losses "
                "otherwise, and leave out other steps. Use bf16 or fp32"
            )
        return self

    @model_validator(mode="after")
    def _check_recomputation(self) -> RunConfig:
        schedule = self.parallel.schedule
        if self.loop.activation_checkpointing and schedule in SPLIT_BACKWARD and self.parallel.is_pipeline:
            raise ValueError(
                f"`loop.activation_checkpointing` with `parallel.schedule` = {schedule}: activations would be computed "
                "again for the gradients of inputs, and once more for those of each matrix, which zero_bubble takes "
                "apart; use 1f1b or interleaved"
            )
        return self

    @model_validator(mode="after")
    def _check_activation_budget(self) -> RunConfig:
        if self.loop.activation_bytes is None:
            return self
        plan, option = self.parallel, f"`loop.activation_budget` = {self.loop.activation_budget}"
        if plan.is_pipeline or any(module.tp > 1 or module.cp > 1 for module in plan.modules.values()):
            raise ValueError(
                f"{option}: what stages of a pipeline and parts of layers (tp, cp) keep is not estimated yet. Set "
                "`parallel.modules.<name>.activation_checkpointing`, which computes every layer of a module again"
            )
        if again := sorted(name for name, module in plan.modules.items() if module.activation_checkpointing):
            raise ValueError(
                f"{option} chooses which layers are computed again, and `parallel.modules.{again[0]}."
                "activation_checkpointing` says all of them; give one of them"
            )
        return self

    @property
    def recomputes(self) -> bool:
        """Whether all of the model recomputes activations in the backward pass."""
        modules = self.parallel.modules.values()
        return self.loop.activation_checkpointing or all(module.activation_checkpointing for module in modules)

    @model_validator(mode="after")
    def _check_feature_cache(self) -> RunConfig:
        if not self.features.cache:
            return self
        trained = sorted(name for name, part in self.model.encoders.items() if part.train in ("full", "lora"))
        if trained:
            raise ValueError(
                f"`features.cache` keeps what frozen encoders make; {', '.join(trained)} is trained, and makes other "
                "features after every step. Set its `train` to projector or frozen, or leave the cache out"
            )
        if self.model.language_model is not None and not self.model.encoders:
            raise ValueError("`features.cache` keeps what encoders make; `model` has none")
        plan = self.parallel
        if plan.is_pipeline or any(module.tp > 1 or module.cp > 1 for module in plan.modules.values()):
            raise ValueError(
                "`features.cache` works with data parallelism only: processes that share the samples of a step "
                "(stages, tp, cp) would have to find the same items in the cache at the same moment. Leave it out, or "
                "let every process have samples of its own"
            )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.output if self.output is not None else Path("runs") / self.name
