"""One process of a trial of a plan: the run of a twin, on batches in which plans have gone wrong before.

Most data have an image in every sample, most runs some that have none. A trial has both: microbatches without any
image or sound at the beginning and at the end of a step.
"""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from cornstarch.config import ModelConfig, RunConfig, SourceConfig
from cornstarch.config.config_file import load_config
from cornstarch.data.run_data import RunData, open_data
from cornstarch.data.sample import Content, Media, Sample, SampleError
from cornstarch.errors import ConfigError
from cornstarch.launch import current_world, start_process_group
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.twin import add_noise
from cornstarch.tasks.task import Task
from cornstarch.trainer.recording_trainer import RecordingTrainer, record
from cornstarch.verify.twin_trial import STEPS

_SECONDS = 300.0  # that a process of a trial waits for the others


class TrialTrainer(RecordingTrainer):
    """A witness that computes in fp32, scaled as the run scales its losses, and leaves stored weights as they are."""

    exact = True

    def add_noise(self, task: Task) -> None:
        for module in _find_random_modules(task.model, self.config.model):
            add_noise(module)


def _find_random_modules(model: nn.Module, described: ModelConfig) -> list[nn.Module]:
    """Return the modules of a model that are not stored in a folder; those that are have noise there already."""
    if not isinstance(model, MultimodalModel) or described.language_model is None:
        is_stored = described.whole is not None and described.whole.path is not None
        return [] if is_stored else [model]
    found: list[nn.Module] = [] if described.language_model.path is not None else [model.language_model]
    for name, encoder in model.encoders.items():
        if described.encoders[name].path is None:
            found.append(encoder.module)
        if encoder.projector is not None:
            found.append(encoder.projector)
    return found


def build_trial(config: RunConfig, **options: Any) -> TrialTrainer:
    """Return what does the steps of a trial, described as a run."""
    samples = choose_samples(config)
    if not any(sample.media for sample in samples):
        return TrialTrainer(config, **options)
    given = SourceConfig(path="trial", format="given")
    data = config.data.model_copy(update={"train": [given], "shuffle": False})
    return TrialTrainer(config.model_copy(update={"data": data}), train_data=samples, **options)


def choose_samples(config: RunConfig) -> list[Sample]:
    """Return the samples of all steps; where the data has images and sounds, some microbatches are without."""
    step = config.loop.batch_size
    microbatch = step // config.loop.gradient_accumulation_steps
    samples = list(islice(cycle(_first_samples(open_data(config), STEPS * step)), STEPS * step))
    for number in (*range(2 * step - microbatch, 2 * step), *range(2 * step, 2 * step + microbatch)):
        if number < len(samples):
            samples[number] = _without_items(samples[number])
    return samples


def _first_samples(data: RunData, count: int) -> list[Sample]:
    found: list[Sample] = []
    for number in data.order.order(0):
        try:
            found.append(data.train[int(number)])
        except SampleError:
            continue
        if len(found) == count:
            break
    return found


def _without_items(sample: Sample) -> Sample:
    messages = tuple(replace(message, content=_words(message.content)) for message in sample.messages)
    return replace(sample, messages=messages, document=_words(sample.document))


def _words(content: Content) -> Content:
    return tuple("." if isinstance(part, Media) else part for part in content)


def main(arguments: list[str]) -> None:
    """Be one process of a trial."""
    config, folder = load_config(Path(arguments[0])), Path(arguments[1])
    world = current_world()
    console = Console(file=io.StringIO())
    if world.size == 1:
        record(build_trial(config, console=console), folder)
        return
    with start_process_group(world, "cpu", _SECONDS):
        record(build_trial(config, console=console), folder)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"ConfigError: {error}")
