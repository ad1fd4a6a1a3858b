"""Loads the model of a run for inference, and exports it to a folder that its library loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from cornstarch.attention.mask_verification import use_eval_mode
from cornstarch.checkpoint.random_state import random_state, restore_random_state, seed_all
from cornstarch.checkpoint.state import restore_weights
from cornstarch.checkpoint.weights import CheckpointChoice, open_checkpoint
from cornstarch.config import RunConfig
from cornstarch.config.run_folder import open_run
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.formats import open_sources
from cornstarch.data.sample import SampleError
from cornstarch.engine.model_parts import cast_parts, split_into_parts
from cornstarch.errors import ConfigError
from cornstarch.parallel.device import DTYPES, DevicePlacement, choose_placement
from cornstarch.tasks import Task, build_task

_COMPARED = 4  # samples
_TRIED = 100
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Relative to the largest logit: merging adapters into weights rounds differently."""


@dataclass(frozen=True)
class LoadedRun:
    """A run's model, ready for inference."""

    config: RunConfig
    task: Task
    placement: DevicePlacement
    step: int


def load_run(folder: Path, which: CheckpointChoice | int = "best", device: str = "auto") -> LoadedRun:
    """Load the model of a run from a checkpoint, with averaged weights if the run has them."""
    config = open_run(folder).read_config()
    assert config is not None  # open_run
    if config.model.given is not None:
        raise ConfigError(
            f"{folder}: its model ({config.model.given}) was built in Python and cannot be rebuilt from here. Load a "
            "checkpoint with cornstarch.checkpoint.state.restore_weights, or describe the model with `model.factory`."
        )
    checkpoint = open_checkpoint(folder, which)
    data = checkpoint.data()
    placement = DevicePlacement(choose_placement(device, "fp32").device, data["precision"])
    before = random_state()
    try:
        seed_all(config.seed)  # frozen parts without stored weights get the same random weights as in the run
        task = build_task(config)
    finally:
        restore_random_state(before)
    cast_parts(split_into_parts(task.model, config.model, config.optimizer), DTYPES[placement.precision])
    with checkpoint.tensors() as tensors:
        restore_weights(tensors, data, task.model, averaged=config.loop.ema_decay is not None)
    task.model.to(placement.device).eval()
    return LoadedRun(config, task, placement, checkpoint.step)


def export_run(run: LoadedRun, folder: Path, *, compare: bool = True) -> float | None:
    """Write the model to a new folder, load it again, and return the largest difference of the logits.

    The difference is relative to the largest logit. Raise ConfigError if it is more than rounding.
    """
    batch = _comparison_batch(run) if compare else None
    try:
        run.task.save(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder} cannot be written: {reason}. It was removed; the run is unchanged.") from error
    if batch is None:
        return None
    inputs = run.placement.move_batch(batch.inputs)
    loaded = run.task.load(folder).to(run.placement.device).eval()
    with use_eval_mode(run.task.model), torch.no_grad(), run.placement.forward_context():
        mine, theirs = (run.task.logits(model, inputs).float() for model in (run.task.model, loaded))
    difference = float((mine - theirs).abs().max() / mine.abs().max().clamp_min(1e-12))
    if not difference <= _TOLERANCE[run.placement.dtype]:
        raise ConfigError(
            f"The model in {folder} is not the run's: its logits differ by {difference:.1e} of the largest, expected "
            f"at most {_TOLERANCE[run.placement.dtype]:.0e}. Please report this; the run itself is unchanged."
        )
    return difference


def _comparison_batch(run: LoadedRun) -> CollatedBatch:
    data = run.config.data
    try:
        sources = open_sources(data.evaluation or data.train)
    except ConfigError as error:
        raise ConfigError(f"{error}\nWithout data the export cannot be compared with the run: --unchecked.") from error
    prepared = []
    for index in range(min(len(sources), _TRIED)):
        try:
            prepared.append(run.task.collator.prepare(sources[index]))
        except SampleError:
            continue
        if len(prepared) == _COMPARED:
            break
    if not prepared:
        raise ConfigError("None of the first samples can be used to compare the export with the run: --unchecked.")
    return run.task.collator.join(prepared)
