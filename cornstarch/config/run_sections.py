"""The sections of a config about what a run keeps, reports and survives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cornstarch.config import fields
from cornstarch.config.fields import Also, PositiveFloat, Section, Size, parse_size
from cornstarch.plan.data_options import REGISTERED
from cornstarch.plan.validation import NotNegative, Positive, or_registered

TrackerName = Literal["tensorboard", "trackio", "wandb", "mlflow"]


class CheckpointConfig(Section):
    """When the training state is saved, and what is kept."""

    every: Annotated[Positive | None, Also("save_steps")] = None
    """Steps between checkpoints. Default: at the end, at the best evaluation and on SIGTERM."""
    keep: Annotated[Positive, Also("save_total_limit")] = 2
    """How many of the newest are kept; the best one is kept beside them."""
    best_by: Literal["loss", "accuracy"] = "loss"
    """The metric of the best evaluation."""
    folder: str | None = None
    """A folder for checkpoints outside of the run's: a path, or the URL of an object store (`s3://bucket/run`,
    `gs://…`) or of a registered storage. No two runs may have the same one. Default: `checkpoints` in the run's
    folder."""
    background: bool = False
    """Copy the state and write it while training continues: steps wait for the copy only, which takes as much CPU
    memory as the state. A failure ends the run in the next step."""
    peer: Positive | None = None
    """Steps between copies of the state in shared memory, which outlive the processes of the run: a run goes on from
    there after a failure without reading a checkpoint. On several nodes, each shard is kept on two. Default: none."""
    form: Literal["sharded", "full", "local"] = "sharded"
    """sharded: each process writes its shards. full: the first process writes everything. local: each process writes
    its whole state, and only the same layout can load it."""


class LaunchConfig(Section):
    """What happens when a process of the run fails, hangs or leaves."""

    restarts: Annotated[NotNegative, Also("max_restarts")] = 0
    """How often the run starts again by itself, from its newest checkpoint, after a process has failed."""
    hang_timeout: Annotated[Literal["auto", "off"] | PositiveFloat, fields.false_as_off] = "auto"
    """Seconds after which a rank that does not go on is named, and the run ends. auto: 5 times the median step, at
    least 5 s; the first steps and compilation may take longer."""


class LoggingConfig(Section):
    """Metrics and progress."""

    every: Annotated[Positive, Also("logging_steps", "log_every_n_steps")] = 10
    """Steps between lines of metrics."""
    to: Annotated[list[Annotated[TrackerName, or_registered(REGISTERED["tracker"])]], Also("report_to")] = []
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
        return parse_size(self.limit)
