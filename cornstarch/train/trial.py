"""One process of a trial of a plan: the run of a twin, on batches in which plans have gone wrong before.

Most data have an image in every sample, most runs some that have none. A trial has both: microbatches without any
image or sound at the beginning and at the end of a step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from torch import nn

from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.twin import disturb
from cornstarch.train.config import ModelConfig, RunConfig, SourceConfig
from cornstarch.train.data.sample import Content, Media, Sample, SampleError
from cornstarch.train.setup.data import RunData, open_data
from cornstarch.train.tasks.task import Task
from cornstarch.train.witness import Witness

STEPS = 3
"""Steps of a trial: on samples as they come, with the last and with the first microbatch without images and sounds."""


class TrialWitness(Witness):
    """A witness that computes in fp32, scaled as the run scales its losses, and leaves stored weights as they are."""

    exact = True

    def _disturb(self, task: Task) -> None:
        for module in _made_anew(task.model, self.config.model):
            disturb(module)


def _made_anew(model: nn.Module, described: ModelConfig) -> list[nn.Module]:
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


def build_witness(config: RunConfig, **options: Any) -> TrialWitness:
    """Return what does the steps of a trial, described as a run."""
    samples = choose_samples(config)
    if not any(sample.media for sample in samples):
        return TrialWitness(config, **options)
    given = SourceConfig(path="trial", format="given")
    data = config.data.model_copy(update={"train": [given], "shuffle": False})
    return TrialWitness(config.model_copy(update={"data": data}), train_data=samples, **options)


def choose_samples(config: RunConfig) -> list[Sample]:
    """Return the samples of all steps; where the data has images and sounds, some microbatches are without."""
    step = config.loop.batch_size
    portion = step // config.loop.accumulation
    samples = list(islice(cycle(_first_samples(open_data(config), STEPS * step)), STEPS * step))
    for number in (*range(2 * step - portion, 2 * step), *range(2 * step, 2 * step + portion)):
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


__all__ = ["STEPS", "TrialWitness", "build_witness", "choose_samples"]
