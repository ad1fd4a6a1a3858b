"""The config of a run, its section `parallel`, and the checks across sections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cornstarch.config import run_sections, sections
from cornstarch.config.fields import Also, Section, false_as_off
from cornstarch.plan.data_options import LANGUAGE_MODEL, REGISTERED, SPLIT_BACKWARD, WHOLE_MODEL, Precision
from cornstarch.plan.plan import ModulePlan, Plan, fill_empty
from cornstarch.plan.validation import NotNegative, Positive, Switch, or_registered, section

_DEVICE = re.compile(r"auto|cpu|(cuda|mps|xpu|hpu|npu)(:\d+)?")
_OTHER_DEVICES = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "metal": "mps"}
Conflict = tuple[object, str]


@section
class ParallelConfig(Plan):
    """How the run is parallelized over the processes that it is started with.

    `parallel: auto` is short for `parallel: {auto: true}`. Until the plan is chosen, nothing is parallelized.
    """

    verify: Literal["auto", "always", "never"] = "auto"
    """Try the plan on a tiny twin of the model before training. auto: if no test has parallelized such a model so."""
    auto: Switch = False
    """Choose the plan when the run is started, for the processes that there are; then only `verify`, `cluster` and
    `costs` are given."""
    cluster: str | None = None
    """What the processes run on, a name or a file (docs/clusters.md): `auto` chooses for it, and the steps of the run
    are compared with what is predicted for it. Default of `auto`: this machine, by the catalogue."""
    costs: str | None = None
    """A file of `cornstarch profile` to predict with. Default: the costs of layers are estimated."""

    def __post_init__(self) -> None:
        if not self.modules:
            object.__setattr__(self, "modules", {WHOLE_MODEL: ModulePlan()})
        super().__post_init__()

    @model_validator(mode="after")
    def _check_auto(self) -> ParallelConfig:
        usual = Plan()
        chosen = ("modules", "data", "ranks", "schedule")
        given = [name for name in chosen if getattr(self, name) != getattr(usual, name)]
        if self.auto and given:
            names = " and ".join(f"`{name}`" for name in given)
            raise ValueError(f"`auto` chooses {names} itself; leave one of them out")
        if self.costs is not None and not self.auto and self.cluster is None:
            raise ValueError("`costs` is for predictions; write `auto: true` or `cluster` beside it, or leave it out")
        return self


class RunConfig(Section):
    """The config of a run."""

    name: Annotated[str, Field(pattern=r"^[\w.-]*[\w-][\w.-]*$"), Also("run_name")] = "run"
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
    compile: Annotated[Literal["auto", "layers", "off"], Also("torch_compile"), false_as_off] = "auto"
    """layers: every layer is compiled; auto: on a GPU, where that is possible; off: nothing is compiled."""
    compile_cache: Annotated[Literal["off"] | Path | None, false_as_off] = None
    """The folder that keeps compiled code for the next start. Files that another user or machine has written are used
    with `--allow-code <folder>` only. Default: `compile_cache` beside the run's folder; off: nothing is kept."""
    fp8: Annotated[Literal["off", "rowwise", "tensorwise"], false_as_off] = "off"
    """Multiply in 8 bits in the large linear layers of the trained parts (Ada, Hopper and newer GPUs). rowwise: a scale
    for each row, closer to bf16; tensorwise: one for each matrix, faster."""
    attention: Annotated[Literal["auto", "flex", "sdpa", "cudnn", "varlen"], or_registered(REGISTERED["attention"])] = (
        "auto"
    )
    """The attention kernels on a GPU. auto: the fastest that respect the mask."""
    model: sections.ModelConfig
    """The model to train."""
    data: sections.DataConfig
    """The data to train on."""
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    schedule: sections.ScheduleConfig = sections.ScheduleConfig()
    loop: sections.LoopConfig = sections.LoopConfig()
    checkpoint: run_sections.CheckpointConfig = run_sections.CheckpointConfig()
    launch: run_sections.LaunchConfig = run_sections.LaunchConfig()
    logging: run_sections.LoggingConfig = run_sections.LoggingConfig()
    features: run_sections.FeaturesConfig = run_sections.FeaturesConfig()
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
        return "layers" if value is True else value

    @field_validator("parallel", mode="before")
    @classmethod
    def _read_parallel(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return fill_empty(value)
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        """Refuse options of several sections that make no sense together, the first that is found."""
        parts = (
            self._fp8_conflicts, self._loop_conflicts, self._balance_conflicts, self._recomputation_conflicts,
            self._feature_cache_conflicts, self._bad_loss_conflicts,
        )  # fmt: skip
        for is_conflict, problem in chain.from_iterable(part() for part in parts):
            if is_conflict:
                raise ValueError(problem)
        return self

    # Each of these yields (whether options are in conflict, what to say of it).
    # fmt: off

    def _fp8_conflicts(self) -> Iterator[Conflict]:
        plan = self.parallel
        given: dict[str, str | None] = {"precision": self.precision}
        given |= {f"parallel.modules.{name}.precision": one.precision for name, one in plan.modules.items()}
        for key, precision in given.items():
            yield self.fp8 != "off" and precision not in ("auto", "bf16", None), (
                f"`fp8` = {self.fp8} with `{key}` = {precision}: what is not multiplied in fp8 is computed in bf16 "
                "then. Use bf16 or auto, or set `fp8` to off"
            )
        yield self.fp8 != "off" and plan.is_pipeline and plan.schedule in SPLIT_BACKWARD, (
            f"`fp8` = {self.fp8} with `parallel.schedule` = {plan.schedule}: it takes apart the gradients of "
            "inputs and of weights, which layers in fp8 compute together. Use 1f1b or interleaved, or set `fp8` to "
            "off"
        )

    def _loop_conflicts(self) -> Iterator[Conflict]:
        encoders, named = self.model.encoders, set(self.parallel.modules)
        known = {*encoders, LANGUAGE_MODEL} if encoders else {WHOLE_MODEL, LANGUAGE_MODEL}
        wrong, missing = sorted(named - known - {WHOLE_MODEL}), sorted(known - named)
        yield wrong, (
            f"`parallel.modules` has {', '.join(wrong)}; the model has {', '.join(sorted(known))}"
            f"{', or `model` for all of them alike' if encoders else ''}"
        )
        yield encoders and named != {WHOLE_MODEL} and missing, (
            f"`parallel.modules` says nothing about {', '.join(missing)}; say it for every module, or for `model`, "
            "which stands for all of them"
        )
        stops, option = self.loop.early_stopping, "`loop.early_stopping` ends a run whose evaluations do not get better"
        yield stops is not None and not self.data.evaluation, (
            f"{option}, and `data.evaluation` has no data. Give it some, or leave early_stopping out"
        )
        yield stops is not None and self.loop.evaluate_every is None, (
            f"{option}, and without `loop.evaluate_every` there is one, at the end. Set it to a number of steps, "
            "or leave early_stopping out"
        )

    def _balance_conflicts(self) -> Iterator[Conflict]:
        plan, option, lends = self.parallel, "`data.balance_encoders` = true", self.data.balance_encoders
        kind, is_unsynchronized = f"`parallel.data.kind` = {plan.data.kind}", plan.data.is_unsynchronized
        yield self.data.balance != "off" and is_unsynchronized, (
            f"`data.balance` = {self.data.balance} with {kind}: a process trains on batches of its own between "
            "exchanges, and long samples would come together in them. Set `data.balance` to off"
        )
        yield lends and is_unsynchronized, (
            f"{option} with {kind}: processes train by themselves between exchanges, and would have to wait for one "
            "another's images. Set `data.balance_encoders` to false"
        )
        yield lends and plan.is_pipeline, (
            f"{option} with stages, or encoders on ranks of their own: replicas of a pipeline do not encode at the "
            "same moment. Put all modules on the same ranks (`parallel.ranks` = shared, one stage), or set "
            "`data.balance_encoders` to false"
        )
        encoders = [name for name in plan.modules if name != LANGUAGE_MODEL or len(plan.modules) == 1]
        cut = sorted(name for name in encoders if plan.modules[name].cp > 1)
        yield lends and cut, (
            f"{option} with cp > 1 for {', '.join(cut)}: the ranks of a replica share out its images already. Use "
            "cp = 1 for encoders, with `parallel.ranks` = shared, or set `data.balance_encoders` to false"
        )
        yield lends and self.features.cache, (
            f"{option} with `features.cache`: what is kept needs no encoder, and processes that have all of their "
            "images would not take part. Leave one of them out"
        )
        yield lends and self._has_no_encoders, f"{option} lends what encoders read; `model` has none"
        yield is_unsynchronized and self.loop.ema_decay is not None, (
            f"`loop.ema_decay` with {kind}: each process has weights of its own, and would average others over time "
            "than are saved. Leave `loop.ema_decay` out: the mean over processes is saved"
        )
        yield is_unsynchronized and self.precision == "fp16", (
            f"`precision` = fp16 with {kind}: each process would scale its losses otherwise, and leave out other "
            "steps. Use bf16 or fp32"
        )

    def _recomputation_conflicts(self) -> Iterator[Conflict]:
        plan, loop = self.parallel, self.loop
        yield loop.activation_checkpointing and plan.schedule in SPLIT_BACKWARD and plan.is_pipeline, (
            f"`loop.activation_checkpointing` with `parallel.schedule` = {plan.schedule}: activations would be "
            "computed again for the gradients of inputs, and once more for those of each matrix, which zero_bubble "
            "takes apart; use 1f1b or interleaved"
        )
        has_budget, option = loop.activation_bytes is not None, f"`loop.activation_budget` = {loop.activation_budget}"
        yield has_budget and self._shares_samples, (
            f"{option}: what stages of a pipeline and parts of layers (tp, cp) keep is not estimated yet. Set "
            "`parallel.modules.<name>.activation_checkpointing`, which computes every layer of a module again"
        )
        for name in sorted(name for name, module in plan.modules.items() if module.activation_checkpointing):
            yield has_budget, (
                f"{option} chooses which layers are computed again, and `parallel.modules.{name}."
                "activation_checkpointing` says all of them; give one of them"
            )

    def _feature_cache_conflicts(self) -> Iterator[Conflict]:
        cache = self.features.cache
        trained = sorted(name for name, part in self.model.encoders.items() if part.train in ("full", "lora"))
        yield cache and trained, (
            f"`features.cache` keeps what frozen encoders make; {', '.join(trained)} is trained, and makes other "
            "features after every step. Set its `train` to projector or frozen, or leave the cache out"
        )
        yield cache and self._has_no_encoders, "`features.cache` keeps what encoders make; `model` has none"
        yield cache and self._shares_samples, (
            "`features.cache` works with data parallelism only: processes that share the samples of a step "
            "(stages, tp, cp) would have to find the same items in the cache at the same moment. Leave it out, or "
            "let every process have samples of its own"
        )

    def _bad_loss_conflicts(self) -> Iterator[Conflict]:
        data, option = self.parallel.data, f"`loop.on_bad_loss` = {self.loop.on_bad_loss}"
        leaves_out = self.loop.on_bad_loss != "stop"
        yield leaves_out and data.is_unsynchronized, (
            f"{option} with `parallel.data.kind` = {data.kind}: processes train by themselves between exchanges, and "
            "one alone would leave out a step that others count. Use stop"
        )
        yield leaves_out and data.compression.kind != "none", (
            f"{option} with `parallel.data.compression.kind` = {data.compression.kind}: compression remembers what it "
            "has not sent yet, also of a step that is left out. Use stop, or no compression"
        )
        yield self.loop.on_bad_loss == "rewind" and self.checkpoint.every is None, (
            f"{option} goes back to the newest checkpoint, and without `checkpoint.every` there is none before the "
            "end. Set it to a number of steps, or use skip"
        )

    # fmt: on

    @property
    def _has_no_encoders(self) -> bool:
        return self.model.language_model is not None and not self.model.encoders

    @property
    def _shares_samples(self) -> bool:
        """Whether several processes compute on the samples of one replica."""
        modules = self.parallel.modules.values()
        return self.parallel.is_pipeline or any(module.tp > 1 or module.cp > 1 for module in modules)

    @property
    def rows_per_step(self) -> int:
        """The rows of a step over all processes; of packed rows without `tokens_per_step`, at most so many."""
        tokens = self.data.tokens_per_step
        return self.loop.batch_size if tokens is None else tokens // self.data.max_length

    @property
    def recomputes(self) -> bool:
        """Whether all of the model recomputes activations in the backward pass."""
        modules = self.parallel.modules.values()
        return self.loop.activation_checkpointing or all(module.activation_checkpointing for module in modules)

    @property
    def folder(self) -> Path:
        return self.output if self.output is not None else Path("runs") / self.name
