"""How it is trained: optimizer, schedule, loop, checkpoints, logging, features."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cornstarch.train.config.values import AboveZero, NotNegative, Positive, Rate, Section, Share, Size, size_in_bytes

_OPTIMIZERS = ("adamw", "sgd")
_OPTIMIZER_CLASSES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip


class OptimizerConfig(Section):
    """How weights are changed."""

    name: str = "adamw"
    """`adamw`, `sgd`, or a class of torch.optim: `torch.optim.Adafactor`."""
    learning_rate: AboveZero = 1e-4
    """The highest of the schedule, for parts that do not say their own."""
    weight_decay: Rate = 0.0
    """For parts that do not say their own; biases and norms are never decayed."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """For `adamw`."""
    eps: AboveZero = 1e-8
    """For `adamw`."""
    momentum: Share = 0.9
    """For `sgd`."""
    clip: AboveZero | None = 1.0
    """The largest norm of all gradients together; null: no clipping."""
    arguments: dict[str, Any] = {}
    """Further arguments of the optimizer's class."""
    scale_rate: Literal["none", "linear", "sqrt"] = "none"
    """Multiply learning rates by the number of processes, or its square root, if each process gets a whole batch."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, value: str) -> str:
        """Refuse a name that torch.optim does not have; classes of other packages are looked up by the run."""
        module, _, name = value.rpartition(".")
        if value.lower() in _OPTIMIZERS or module not in ("", "torch.optim") or name in _OPTIMIZER_CLASSES:
            return value
        if hasattr(import_module("torch.optim"), name):  # a newer torch has more
            return value
        near = get_close_matches(name, [*_OPTIMIZERS, *_OPTIMIZER_CLASSES], n=1)
        meant = f" Did you mean `{near[0]}`?" if near else ""
        raise ValueError(
            f"torch.optim has no `{name[:80]}`.{meant} Expected adamw, sgd, a class of torch.optim such as "
            "torch.optim.Adafactor, or a class of another package with its module, package.module.Class"
        )


class ScheduleConfig(Section):
    """How the learning rate changes."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """How it falls after the warm-up."""
    warmup: Rate = 0.03
    """Below 1: a share of all steps; else a number of steps."""
    final: Share = 0.0
    """The last learning rate, as a share of the highest."""


class EarlyStoppingConfig(Section):
    """Stop when evaluation does not get better."""

    patience: Positive = 3
    """So many evaluations without improvement."""
    least: Rate = 0.0
    """What counts as improvement."""


class LoopConfig(Section):
    """How long, and in which portions."""

    steps: Positive | None = None
    """Steps of the optimizer."""
    epochs: AboveZero | None = None
    """Passes over the data. Default, if `steps` is not given either: 1."""
    batch_size: Positive = 8
    """Samples per step, packed or not."""
    accumulation: Positive = 1
    """Portions a batch is cut into, one after the other; the gradient is the same."""
    evaluate_every: Positive | None = None
    """Steps. Default: at the end only."""
    exchange_check: bool = True
    """At the end, evaluate once more with the images (or sounds) of samples exchanged: does the model look?"""
    early_stopping: EarlyStoppingConfig | None = None
    """Default: none."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the trained weights, used for evaluation and export."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    activation_budget: Annotated[float, Field(gt=0, le=1)] | Size = 1.0
    """A size, `20 GB`: as few layers as possible are computed again, so that what a portion keeps for its backward pass
    fits. A share: that much of the activations of compiled layers is kept; of the rest, the cheapest first."""

    @model_validator(mode="after")
    def _portions(self) -> LoopConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either `steps` or `epochs`")
        if self.batch_size % self.accumulation:
            raise ValueError(f"`batch_size` = {self.batch_size} is no multiple of `accumulation` = {self.accumulation}")
        if self.activation_bytes is not None and self.activation_checkpointing:
            raise ValueError(
                f"`activation_checkpointing` computes every layer again, `activation_budget` = "
                f"{self.activation_budget} as few as possible; give one of them"
            )
        return self

    @property
    def activation_share(self) -> float:
        """The share of compiled layers' activations that is kept."""
        return 1.0 if isinstance(self.activation_budget, str) else self.activation_budget

    @property
    def activation_bytes(self) -> int | None:
        """The most that a portion may keep for its backward pass; None: no size was given."""
        return size_in_bytes(self.activation_budget) if isinstance(self.activation_budget, str) else None


class CheckpointConfig(Section):
    """What is kept."""

    every: Positive | None = None
    """Steps. Default: at the end, at the best evaluation and on SIGTERM."""
    keep: Positive = 2
    """The newest so many; the best one is kept beside them."""
    best_by: Literal["loss", "accuracy"] = "loss"
    """What the best evaluation is told by."""
    background: bool = False
    """Copy the state and write it while training goes on: steps wait for the copy only, which takes as much memory of
    the CPU as the state has. A failure ends the run in the next step."""
    form: Literal["sharded", "full", "local"] = "sharded"
    """sharded: each process writes what it holds. full: the first process writes everything. local: each process writes
    all that it has, and only the same layout can load it."""


class LoggingConfig(Section):
    """What is told while it runs."""

    every: Positive = 10
    """Steps between lines of metrics."""
    to: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = []
    """Beside metrics.jsonl, which is always written."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """auto: a bar in a terminal, else lines."""
    samples: NotNegative = 8
    """Samples of the evaluation data shown in the report with the model's answers."""


class FeaturesConfig(Section):
    """What frozen encoders make of images and sounds, kept on the disk for later epochs and other runs."""

    cache: bool = False
    """Keep it. An item that was encoded before is not even decoded again. Encoders must not be trained themselves."""
    folder: Path | None = None
    """Where, for all runs that share it. Default: `feature_cache` beside the run's folder."""
    ahead: bool = True
    """With `loop.accumulation`, let frozen encoders run once for several portions of a step that have few items."""
    limit: Size = "50 GB"
    """The most that all files in the folder may take together: `500 MB`, `50 GB`, `1.5 TB`."""

    @property
    def limit_bytes(self) -> int:
        """The limit in bytes."""
        return size_in_bytes(self.limit)
