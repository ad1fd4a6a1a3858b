"""Steps of which every number is kept, in one process or several, and how far two such records are apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from cornstarch.checkpoint.named_shards import named_modules, named_parameters
from cornstarch.data.loader import StepBatch
from cornstarch.engine.sharded_loading import ShardedLoading
from cornstarch.models.twin import add_noise
from cornstarch.parallel import distributed
from cornstarch.parallel.tensor import gather_full_tensors
from cornstarch.tasks.task import Task
from cornstarch.trainer.trainer import Trainer
from cornstarch.verify.compare import NUMBERS, RECORD

_SAMPLED = 4096  # numbers of an output that are kept


class RecordingTrainer(Trainer):
    """A trainer that keeps the gradients of every step, as they are before they are clipped.

    Its weights have noise: behind the zeros and ones of a fresh model a mistake could hide.
    """

    counts_flops = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.watching = True
        self.gradients: list[dict[str, Tensor | None]] = []

    def verify_plan(self, model: nn.Module) -> None:
        """Nothing: this is how a plan is verified."""

    def build_task(self, loading: ShardedLoading) -> Task:
        """Return the task, with noise in its weights."""
        task = super().build_task(loading)
        if self._given_task is None:
            self.add_noise(task)
        return task

    def add_noise(self, task: Task) -> None:
        """Disturb all weights."""
        add_noise(task.model)

    def update_weights(self, batch: StepBatch, loss: Tensor) -> Tensor | None:
        """Record the gradients, then do as any trainer does."""
        if self.watching:
            self.gradients.append(self._whole_gradients())
        return super().update_weights(batch, loss)

    def _whole_gradients(self) -> dict[str, Tensor | None]:
        with _whole(self.task.wrapped, with_gradients=True):
            found = {name: parameter.grad for name, parameter in named_parameters(self.model).items()}
            there = {name: gradient for name, gradient in found.items() if gradient is not None}
            # A gradient that only some have could not be gathered: those would wait for ever.
            by_holders: dict[str, set[str]] = {}
            for holding, having in distributed.all_gather_json([json.dumps(sorted(found)), json.dumps(sorted(there))]):
                by_holders.setdefault(holding, set()).add(having)
            assert all(len(one) == 1 for one in by_holders.values()), by_holders
            whole = gather_full_tensors(self.model, there)
            return {name: whole[name].clone() if name in whole else None for name in found}


def gather_parameters(model: nn.Module, wrapped: nn.Module | None) -> dict[str, Tensor]:
    """Return all parameters, whole; all processes have to ask together."""
    with _whole(wrapped):
        own = {name: parameter.detach() for name, parameter in named_parameters(model).items()}
        return {name: tensor.clone() for name, tensor in gather_full_tensors(model, own).items()}


@contextmanager
def _whole(wrapped: nn.Module | None, with_gradients: bool = False) -> Iterator[None]:
    """Run a block in which parameters have their shapes; FSDP 1 hides them."""
    if not isinstance(wrapped, FullyShardedDataParallel):
        yield
        return
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False, with_grads=with_gradients):
        yield


# ---------------------------------------------------------------------------------------------------- records


def record(trainer: RecordingTrainer, folder: Path) -> None:
    """Do all steps of a run and write what they came to; all processes have to call it."""
    trainer.setup()
    losses, norms = [], []
    outputs = _Outputs(trainer.model)
    for batch in trainer.batches():
        result = trainer.step(batch)
        outputs.end()
        losses.append(distributed.sum_over_ranks([float(result.loss)])[0] / trainer.replica.loss_copies)
        norms.append(None if result.grad_norm is None else float(result.grad_norm))
    whole = gather_parameters(trainer.model, trainer.task.wrapped)
    numbers = {f"parameter {name}": value for name, value in whole.items()}
    for step, gradients in enumerate(trainer.gradients):
        numbers |= {f"gradient {step} {name}": value for name, value in gradients.items() if value is not None}
    numbers |= {f"output {name}": value for name, value in outputs.samples.items()}
    if distributed.rank() == 0 or trainer.pipeline is not None:  # of a pipeline each process has other numbers
        folder.mkdir(parents=True, exist_ok=True)
        there = {name: value.contiguous() for name, value in numbers.items()}
        save_file(there, folder / NUMBERS.format(distributed.rank()))
    if distributed.rank() == 0:
        parts = {part.name: list(part.parameters) for part in trainer.run_model.all_parts}
        said = {"losses": losses, "norms": norms, "parts": parts, "outputs": outputs.shapes}
        (folder / RECORD).write_text(json.dumps(said), encoding="utf-8")


class _Outputs:
    """What each module put out first, in the order in which they ended: a sample of its numbers."""

    def __init__(self, model: nn.Module) -> None:
        self.samples: dict[str, Tensor] = {}
        self.shapes: dict[str, list[int]] = {}
        self._handles = [
            module.register_forward_hook(partial(self._keep, name))
            for name, module in named_modules(model).items()
            if name
        ]

    def _keep(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if name in self.samples or not isinstance(first, Tensor) or not first.is_floating_point():
            return
        numbers = first.detach().flatten()
        self.samples[name] = numbers[:: max(1, len(numbers) // _SAMPLED)].float().clone()
        self.shapes[name] = list(first.shape)

    def end(self) -> None:
        """Stop looking."""
        for handle in self._handles:
            handle.remove()
