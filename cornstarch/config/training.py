"""How a model is trained: optimizer, learning rate schedule, loop, checkpoints, logging, feature cache."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cornstarch.config.fields import (
    Also,
    Fraction,
    NotNegative,
    Positive,
    PositiveFloat,
    Rate,
    Section,
    Size,
    parse_size,
)
from cornstarch.plan.validation import as_tuple

OPTIMIZER_NAMES = ["adamw", "sgd"]
"""Short names of optimizers; `register_optimizer` adds to them."""
_OPTIMIZER_CLASSES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip


class OptimizerConfig(Section):
    """The optimizer."""

    name: Annotated[str, Also("optim")] = "adamw"
    """`adamw`, `sgd`, or a class of torch.optim: `torch.optim.Adafactor`."""
    learning_rate: Annotated[PositiveFloat, Also("lr")] = 1e-4
    """The peak of the schedule, for parts without a learning rate of their own."""
    weight_decay: Annotated[Rate, Also("wd")] = 0.0
    """For parts without a weight decay of their own; biases and norms are never decayed."""
    betas: Annotated[tuple[Fraction, Fraction], as_tuple] = (0.9, 0.999)
    """For `adamw`."""
    eps: Annotated[PositiveFloat, Also("adam_epsilon")] = 1e-8
    """For `adamw`."""
    momentum: Fraction = 0.9
    """For `sgd`."""
    max_grad_norm: Annotated[PositiveFloat | None, Also("clip", "gradient_clip_val", "clip_grad_norm")] = 1.0
    """The largest norm of all gradients together; null: no clipping."""
    arguments: dict[str, Any] = {}
    """Further arguments of the optimizer's class."""
    scale_rate: Literal["none", "linear", "sqrt"] = "none"
    """Multiply learning rates by the number of processes, or its square root, if each process gets a whole batch."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        """Refuse a name that torch.optim does not have; classes of other packages are looked up by the run."""
        module, _, name = value.rpartition(".")
        if value.lower() in OPTIMIZER_NAMES or module not in ("", "torch.optim") or name in _OPTIMIZER_CLASSES:
            return value
        if hasattr(import_module("torch.optim"), name):  # a newer torch has more
            return value
        near = get_close_matches(name, [*OPTIMIZER_NAMES, *_OPTIMIZER_CLASSES], n=1)
        meant = f" Did you mean `{near[0]}`?" if near else ""
        raise ValueError(
            f"torch.optim has no `{name[:80]}`.{meant} Expected adamw, sgd, a class of torch.optim such as "
            "torch.optim.Adafactor, or a class of another package with its module, package.module.Class"
        )


class ScheduleConfig(Section):
    """The learning rate schedule."""

    name: Annotated[Literal["cosine", "linear", "constant"], Also("lr_scheduler_type")] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup: Annotated[Rate, Also("warmup_steps", "warmup_ratio")] = 0.03
    """Below 1: a fraction of all steps; else a number of steps."""
    min_lr_ratio: Annotated[Fraction, Also("final")] = 0.0
    """The last learning rate, as a fraction of the peak."""


class EarlyStoppingConfig(Section):
    """Stop when evaluation does not get better."""

    patience: Annotated[Positive, Also("early_stopping_patience")] = 3
    """How many evaluations without improvement."""
    min_delta: Annotated[Rate, Also("least", "early_stopping_threshold")] = 0.0
    """A smaller change does not count as improvement."""


class LoopConfig(Section):
    """How long to train, and in which batches."""

    steps: Annotated[Positive | None, Also("max_steps")] = None
    """Optimizer steps."""
    epochs: Annotated[PositiveFloat | None, Also("num_train_epochs", "num_epochs", "max_epochs")] = None
    """Passes over the data. Default, if `steps` is not given either: 1."""
    batch_size: Annotated[Positive, Also("global_batch_size", "bs")] = 8
    """Samples per step over all processes, packed or not."""
    gradient_accumulation_steps: Annotated[Positive, Also("accumulation", "accumulate_grad_batches", "grad_accum")] = 1
    """Microbatches that a batch is split into, one after the other; the gradient is the same."""
    evaluate_every: Annotated[Positive | None, Also("eval_steps")] = None
    """Steps between evaluations. Default: at the end only."""
    exchange_check: bool = True
    """At the end, evaluate once more with the images (or sounds) of samples exchanged: does the model use them?"""
    early_stopping: EarlyStoppingConfig | None = None
    """Default: none."""
    ema_decay: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, Also("ema")] = None
    """Decay of an exponential moving average of the trained weights, used for evaluation and export."""
    activation_checkpointing: Annotated[bool, Also("gradient_checkpointing")] = False
    """Recompute activations in the backward pass instead of keeping them."""
    activation_budget: Annotated[float, Field(gt=0, le=1)] | Size = 1.0
    """A size, `20 GB`: as few layers as possible are recomputed, so that the activations of a microbatch fit. A
    fraction: that much of the activations of compiled layers is kept; of the rest, the cheapest are recomputed."""

    @model_validator(mode="after")
    def _check_batches(self) -> LoopConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either `steps` or `epochs`")
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"`batch_size` = {self.batch_size} is no multiple of `gradient_accumulation_steps` = "
                f"{self.gradient_accumulation_steps}"
            )
        if self.activation_bytes is not None and self.activation_checkpointing:
            raise ValueError(
                f"`activation_checkpointing` recomputes every layer, `activation_budget` = "
                f"{self.activation_budget} as few as possible; give one of them"
            )
        return self

    @property
    def activation_fraction(self) -> float:
        """The fraction of compiled layers' activations that is kept."""
        return 1.0 if isinstance(self.activation_budget, str) else self.activation_budget

    @property
    def activation_bytes(self) -> int | None:
        """The most that the activations of a microbatch may take; None: no size was given."""
        return parse_size(self.activation_budget) if isinstance(self.activation_budget, str) else None


class CheckpointConfig(Section):
    """When the training state is saved, and what is kept."""

    every: Annotated[Positive | None, Also("save_steps")] = None
    """Steps between checkpoints. Default: at the end, at the best evaluation and on SIGTERM."""
    keep: Annotated[Positive, Also("save_total_limit")] = 2
    """How many of the newest are kept; the best one is kept beside them."""
    best_by: Literal["loss", "accuracy"] = "loss"
    """The metric of the best evaluation."""
    background: bool = False
    """Copy the state and write it while training continues: steps wait for the copy only, which takes as much CPU
    memory as the state. A failure ends the run in the next step."""
    form: Literal["sharded", "full", "local"] = "sharded"
    """sharded: each process writes its shards. full: the first process writes everything. local: each process writes
    its whole state, and only the same layout can load it."""


class LoggingConfig(Section):
    """Metrics and progress."""

    every: Annotated[Positive, Also("logging_steps", "log_every_n_steps")] = 10
    """Steps between lines of metrics."""
    to: Annotated[list[Literal["tensorboard", "trackio", "wandb", "mlflow"]], Also("report_to")] = []
    """Beside metrics.jsonl, which is always written."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """auto: a bar in a terminal, else lines."""
    samples: NotNegative = 8
    """Samples of the evaluation data shown in the report with the model's answers."""


class FeaturesConfig(Section):
    """The feature cache: outputs of frozen encoders, kept on disk for later epochs and other runs."""

    cache: bool = False
    """Use the cache. An item that was encoded before is not even decoded again. Encoders must not be trained."""
    folder: Path | None = None
    """Where, for all runs that use it. Default: `feature_cache` beside the run's folder."""
    ahead: bool = True
    """With `loop.gradient_accumulation_steps`, let frozen encoders run once for several microbatches of a step that
    have few items."""
    limit: Size = "50 GB"
    """The most that all files in the folder may take together: `500 MB`, `50 GB`, `1.5 TB`."""

    @property
    def limit_bytes(self) -> int:
        """The limit in bytes."""
        return parse_size(self.limit)
