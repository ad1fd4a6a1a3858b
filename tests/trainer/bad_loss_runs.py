"""Runs in which the loss of a batch is bad, and the same runs without that batch."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from cornstarch.config import RunConfig
from cornstarch.config.config_file import load_config
from cornstarch.config.run_folder import METRICS
from cornstarch.data.loader import StepBatch
from cornstarch.data.sample import Sample
from cornstarch.engine.bad_steps import FILE
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import StepResult, read_metrics
from cornstarch.parallel import distributed
from cornstarch.trainer.recording_trainer import RecordingTrainer
from tests.parity.cell import OPTIMIZER, parameter_arrays
from tests.parity.rows import TOKENIZER, row_of
from tests.parity.samples import numbers

SIZE = 4  # samples of a step


class Spoiled(RecordingTrainer):
    """A trainer whose loss, or gradient, is NaN for some samples, where they are computed."""

    spoiled: Collection[str] = ()
    gradient_only = False

    def setup(self) -> None:
        super().setup()
        self.watching = False
        if not hasattr(self, "honest"):
            self.honest, self.is_spoiled = self.task.loss, False
            self.task.loss = self.spoil  # type: ignore[method-assign]

    def spoil(self, inputs: Mapping[str, Any]) -> Tensor:
        loss = self.honest(inputs)
        if not self.is_spoiled:
            return loss
        return loss + (loss * 0).sqrt() if self.gradient_only else loss * float("nan")

    def step(self, batch: StepBatch) -> StepResult:
        ids = [name for one in batch.microbatches for name in one.sample_ids]
        self.is_spoiled = not set(self.spoiled).isdisjoint(ids)
        return super().step(batch)


def samples_of(row: str, steps: int, without: Collection[int] = ()) -> list[Sample]:
    """Return the samples of some steps of `SIZE` samples, except for those of some."""
    make = row_of(row).make if row != "mlp" else numbers
    return [make(n, ".", 1 + n % 3) for n in range(steps * SIZE) if n // SIZE not in without]


def describe_run(
    row: str, folder: str, tokenizer: str, loop: Mapping[str, Any], options: Mapping[str, Any]
) -> RunConfig:
    model = json.loads(json.dumps(row_of(row).model).replace(TOKENIZER, tokenizer))
    data = {"train": [{"path": "samples", "format": "given"}], "shuffle": False, "skip_limit": 1.0, "workers": 0}
    return load_config(None, base={
        "output": folder, "device": "cpu", "threads": 1, "compile": "off", "model": model, "data": data,
        "optimizer": OPTIMIZER, "logging": {"progress": "none", "samples": 0, "every": 1}, **options, "loop": loop,
    })  # fmt: skip


def train(
    row: str, folder: str, tokenizer: str, options: dict[str, Any], spoiled: Collection[str] = (),
    without: Collection[int] = (), steps: int = 8, updates: int = 6, kill_at: int | None = None,
    gradient_only: bool = False,
) -> dict[str, Any] | str:  # fmt: skip
    """Train through `updates` steps; return losses by step and digests of the result, or why the run ended."""
    kind = type("Run", (Spoiled,), {"spoiled": spoiled, "gradient_only": gradient_only})
    loop = {"steps": updates, "batch_size": SIZE, "accumulation": 2, **options.get("loop", {})}
    losses: dict[int, float] = {}
    try:
        config = describe_run(row, folder, tokenizer, loop, options)
        trainer = kind(config, train_data=samples_of(row, steps, without), console=Console(file=io.StringIO()))
        trainer.setup()
        every = trainer.config.checkpoint.every
        for batch in trainer.batches():
            result = trainer.step(batch)
            if not result.is_left_out:
                own = distributed.sum_over_ranks([float(result.loss)])[0] / trainer.replica.loss_copies
                losses[result.step] = own
                if every and result.step % every == 0:
                    trainer.save()
                if result.step == kill_at:
                    break
        return describe(trainer, losses, Path(folder))
    except ConfigError as error:
        return str(error)
    finally:
        if "trainer" in locals():
            trainer.close()


def describe(trainer: RecordingTrainer, losses: dict[int, float], folder: Path) -> dict[str, Any]:
    arrays = parameter_arrays(trainer.model, trainer.task.wrapped)
    weights = {name: hashlib.sha256(one.tobytes()).hexdigest() for name, one in arrays.items()}
    averages = trainer.averages.averages if trainer.averages is not None else {}
    buffers = {name: one.tolist() for name, one in trainer.model.named_buffers() if one.numel() < 64}
    told = json.loads((folder / FILE).read_text())["batches"] if (folder / FILE).exists() else []
    events = [one for one in read_metrics(folder / METRICS) if one.get("event") in ("left_out", "rewound")]
    return {
        "losses": losses, "weights": weights, "buffers": buffers, "position": dict(vars(trainer.position)),
        "averages": {name: float(one.double().sum()) for name, one in averages.items()}, "told": told,
        "events": events, "draws": torch.rand(1).item(),
    }  # fmt: skip
