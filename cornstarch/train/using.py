"""A run's model after training: loaded to be asked, or exported to a folder of its library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from cornstarch.attention.verify import evaluating
from cornstarch.errors import ConfigError
from cornstarch.train.build import DTYPES
from cornstarch.train.config import RunConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.formats import open_sources
from cornstarch.train.data.sample import SampleError
from cornstarch.train.parts import keep_in_precision, parts_of
from cornstarch.train.precision import Placement, choose_placement
from cornstarch.train.runs import open_run
from cornstarch.train.state import random_state, restore_random_state, restore_weights, seed_all
from cornstarch.train.tasks import Task, build_task
from cornstarch.train.weights import Which, checkpoint_of

_COMPARED = 4  # samples
_LOOKED_AT = 100
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Relative to the largest logit: adapters that are merged into weights round in another place."""


@dataclass(frozen=True)
class LoadedRun:
    """A run's model, ready to be used."""

    config: RunConfig
    task: Task
    placement: Placement
    step: int


def load_run(folder: Path, which: Which | int = "best", device: str = "auto") -> LoadedRun:
    """Load the model of a run as a checkpoint has it, with averaged weights if the run made them."""
    config = open_run(folder).stored_config()
    assert config is not None  # open_run
    if config.model.given is not None:
        raise ConfigError(
            f"{folder}: its model ({config.model.given}) was made in Python, so only Python can make it again. Load a "
            "checkpoint with cornstarch.train.state.restore_weights, or describe the model with `model.factory`."
        )
    checkpoint = checkpoint_of(folder, which)
    data = checkpoint.data()
    placement = Placement(choose_placement(device, "fp32").device, data["precision"])
    before = random_state()
    try:
        seed_all(config.seed)  # frozen parts without stored weights are made as the run made them
        task = build_task(config)
    finally:
        restore_random_state(before)
    keep_in_precision(parts_of(task.model, config.model, config.optimizer), DTYPES[placement.precision])
    with checkpoint.tensors() as tensors:
        restore_weights(tensors, data, task.model, averaged=config.loop.ema is not None)
    task.model.to(placement.device).eval()
    return LoadedRun(config, task, placement, checkpoint.step)


def export_run(run: LoadedRun, folder: Path, *, compare: bool = True) -> float | None:
    """Write the model to a new folder, load it again, and return the largest difference of their logits.

    It is relative to the largest logit; more than rounding is an error.
    """
    batch = _some_batch(run) if compare else None
    try:
        run.task.save(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{folder} cannot be written: {reason}. Nothing is left there; the run is untouched."
        ) from error
    if batch is None:
        return None
    inputs = run.placement.moved(batch.inputs)
    loaded = run.task.load(folder).to(run.placement.device).eval()
    with evaluating(run.task.model), torch.no_grad(), run.placement.computing():
        mine, theirs = (run.task.logits(model, inputs).float() for model in (run.task.model, loaded))
    difference = float((mine - theirs).abs().max() / mine.abs().max().clamp_min(1e-12))
    if not difference <= _TOLERANCE[run.placement.dtype]:
        raise ConfigError(
            f"The model in {folder} is not the run's: its logits differ by {difference:.1e} of the largest, expected "
            f"at most {_TOLERANCE[run.placement.dtype]:.0e}. Please report this; the run itself is untouched."
        )
    return difference


def _some_batch(run: LoadedRun) -> CollatedBatch:
    data = run.config.data
    try:
        sources = open_sources(data.evaluation or data.train)
    except ConfigError as error:
        raise ConfigError(f"{error}\nWithout data the export cannot be compared with the run: --unchecked.") from error
    prepared = []
    for index in range(min(len(sources), _LOOKED_AT)):
        try:
            prepared.append(run.task.collator.prepare(sources[index]))
        except SampleError:
            continue
        if len(prepared) == _COMPARED:
            break
    if not prepared:
        raise ConfigError("None of the first samples can be used to compare the export with the run: --unchecked.")
    return run.task.collator.join(prepared)
