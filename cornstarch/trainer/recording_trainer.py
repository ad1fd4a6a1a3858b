"""Trainers that record every number of a run: `RecordingTrainer` for tests, and `TrialTrainer` for trials of a plan.

As a program, it is one process of a trial: the run of a twin, on batches in which plans have gone wrong before. Most
data have an image in every sample, most runs some that have none. A trial has both: microbatches without any image or
sound at the beginning and at the end of a step.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from cornstarch.checkpoint.named_state import named_modules, named_parameters
from cornstarch.config import RunConfig, SourceConfig
from cornstarch.config.config_file import load_config
from cornstarch.config.user_code import import_extensions
from cornstarch.data.loader import StepBatch, open_data
from cornstarch.data.sample import Content, Media, Sample, SampleError
from cornstarch.engine.sharded_loading import ShardedLoading
from cornstarch.errors import ConfigError
from cornstarch.launch import current_world, start_process_group
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.twin import add_noise
from cornstarch.parallel import distributed
from cornstarch.parallel.tensor import gather_full_tensors
from cornstarch.tasks.task import Task
from cornstarch.trainer.trainer import Trainer
from cornstarch.verify.twin_trial import NUMBERS, RECORD, STEPS

_SAMPLED = 4096  # numbers of an output that are kept
_SECONDS = 300.0  # that a process of a trial waits for the others


class RecordingTrainer(Trainer):
    """A trainer that keeps the gradients of every step, as they are before they are clipped."""

    counts_flops = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.watching = True
        self.gradients: list[dict[str, Tensor | None]] = []

    def verify_plan(self, model: nn.Module) -> None:
        """Nothing: this is how a plan is verified."""

    def build_task(self, loading: ShardedLoading) -> Task:
        task = super().build_task(loading)
        if self._given_task is None:  # behind the zeros and ones of a fresh model a mistake could hide
            self.add_noise(task)
        return task

    def add_noise(self, task: Task) -> None:
        add_noise(task.model)

    def update_weights(self, batch: StepBatch, loss: Tensor) -> Tensor | None:
        if self.watching:
            self.gradients.append(self._gather_gradients())
        return super().update_weights(batch, loss)

    def _gather_gradients(self) -> dict[str, Tensor | None]:
        with _use_full_parameters(self.task.wrapped, with_gradients=True):
            found = {name: parameter.grad for name, parameter in named_parameters(self.model).items()}
            if (zero1 := self.run_model.parallel.zero1) is not None:
                found |= zero1.gather_gradients()
            there = {name: gradient for name, gradient in found.items() if gradient is not None}
            # A gradient that only some ranks have could not be gathered: they would wait for ever.
            by_holders: dict[str, set[str]] = {}
            for holding, having in distributed.all_gather_json([json.dumps(sorted(found)), json.dumps(sorted(there))]):
                by_holders.setdefault(holding, set()).add(having)
            assert all(len(one) == 1 for one in by_holders.values()), by_holders
            whole = gather_full_tensors(self.model, there)
            return {name: whole[name].clone() if name in whole else None for name in found}


def gather_parameters(model: nn.Module, wrapped: nn.Module | None) -> dict[str, Tensor]:
    """Return all parameters, whole; all ranks must call it."""
    with _use_full_parameters(wrapped):
        own = {name: parameter.detach() for name, parameter in named_parameters(model).items()}
        return {name: tensor.clone() for name, tensor in gather_full_tensors(model, own).items()}


def _use_full_parameters(wrapped: nn.Module | None, with_gradients: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which parameters have their shapes; FSDP 1 hides them."""
    if not isinstance(wrapped, FullyShardedDataParallel):
        return nullcontext()
    return FullyShardedDataParallel.summon_full_params(wrapped, writeback=False, with_grads=with_gradients)


def record(trainer: RecordingTrainer, folder: Path) -> None:
    """Do all steps of a run and write their losses, norms, gradients and outputs; all ranks must call it."""
    trainer.setup()
    losses, norms = [], []
    samples: dict[str, Tensor] = {}  # of each module's first output, in the order in which the modules ended
    shapes: dict[str, list[int]] = {}

    def keep_sample(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if name not in samples and isinstance(first, Tensor) and first.is_floating_point():
            numbers = first.detach().flatten()
            samples[name] = numbers[:: max(1, len(numbers) // _SAMPLED)].float().clone()
            shapes[name] = list(first.shape)

    modules = {name: module for name, module in named_modules(trainer.model).items() if name}
    hooks = [one.register_forward_hook(partial(keep_sample, name)) for name, one in modules.items()]
    for batch in trainer.batches():
        result = trainer.step(batch)
        for hook in hooks:
            hook.remove()
        losses.append(distributed.sum_over_ranks([float(result.loss)])[0] / trainer.replica.loss_copies)
        norms.append(None if result.grad_norm is None else float(result.grad_norm))
    whole = gather_parameters(trainer.model, trainer.task.wrapped)
    numbers = {f"parameter {name}": value for name, value in whole.items()}
    for step, gradients in enumerate(trainer.gradients):
        numbers |= {f"gradient {step} {name}": value for name, value in gradients.items() if value is not None}
    numbers |= {f"output {name}": value for name, value in samples.items()}
    if distributed.rank() == 0 or trainer.pipeline is not None:  # of a pipeline each process has other numbers
        folder.mkdir(parents=True, exist_ok=True)
        there = {name: value.contiguous() for name, value in numbers.items()}
        save_file(there, folder / NUMBERS.format(distributed.rank()))
    if distributed.rank() == 0:
        parts = {part.name: list(part.parameters) for part in trainer.run_model.all_parts}
        summary = {"losses": losses, "norms": norms, "parts": parts, "outputs": shapes}
        (folder / RECORD).write_text(json.dumps(summary), encoding="utf-8")


class TrialTrainer(RecordingTrainer):
    """Computes in fp32, scaled as the run scales its losses; only modules that are not stored in a folder get noise."""

    exact = True

    def add_noise(self, task: Task) -> None:
        model, described = task.model, self.config.model
        if not isinstance(model, MultimodalModel) or described.language_model is None:
            is_stored = described.whole is not None and described.whole.path is not None
            fresh: list[nn.Module | None] = [] if is_stored else [model]
        else:
            fresh = [] if described.language_model.path is not None else [model.language_model]
            for name, encoder in model.encoders.items():
                fresh += [encoder.module if described.encoders[name].path is None else None, encoder.projector]
        for module in fresh:
            if module is not None:
                add_noise(module)


def build_trial(config: RunConfig, **options: Any) -> TrialTrainer:
    """Return the trainer of a trial, described as a run."""
    samples = choose_samples(config)
    if not any(sample.media for sample in samples):
        return TrialTrainer(config, **options)
    given = SourceConfig(path="trial", format="given")
    data = config.data.model_copy(update={"train": [given], "shuffle": False})
    return TrialTrainer(config.model_copy(update={"data": data}), train_data=samples, **options)


def choose_samples(config: RunConfig) -> list[Sample]:
    """Return the samples of all steps; where the data has images and sounds, some microbatches are without."""
    step, data = config.loop.batch_size, open_data(config)
    found: list[Sample] = []
    for number in data.order.order(0):
        with suppress(SampleError):
            found.append(data.train[int(number)])
        if len(found) == STEPS * step:
            break
    samples = list(islice(cycle(found), STEPS * step))
    microbatch = step // config.loop.microbatches
    for number in range(2 * step - microbatch, min(2 * step + microbatch, len(samples))):
        sample = samples[number]
        messages = tuple(replace(message, content=_drop_media(message.content)) for message in sample.messages)
        samples[number] = replace(sample, messages=messages, document=_drop_media(sample.document))
    return samples


def _drop_media(content: Content) -> Content:
    return tuple("." if isinstance(part, Media) else part for part in content)


def main(arguments: list[str]) -> None:
    """Be one process of a trial: the arguments are a config and the folder to write to."""
    import_extensions()  # before the config, which may name what they register
    config, folder = load_config(Path(arguments[0])), Path(arguments[1])
    world = current_world()
    with nullcontext() if world.size == 1 else start_process_group(world, "cpu", _SECONDS):
        record(build_trial(config, console=Console(file=io.StringIO())), folder)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"ConfigError: {error}")
