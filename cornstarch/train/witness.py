"""Steps of which every number is kept, in one process or several, and how far two such records are apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from cornstarch.models.twin import disturb
from cornstarch.parallel import processes
from cornstarch.parallel.tensor import full_tensors
from cornstarch.train.data.loader import StepBatch
from cornstarch.train.holdings import named_modules, named_parameters
from cornstarch.train.setup.assembling import RunSetup
from cornstarch.train.tasks.task import Task
from cornstarch.train.trainer import Trainer

TOLERANCE = 1e-4
"""How far a number may be off: this times (its own size + FLOOR × the largest number beside it)."""
FLOOR = 1e-2
_NUMBERS, _RECORD = "numbers-{}.safetensors", "record.json"
_SAMPLED = 4096  # numbers of an output that are kept


class Witness(Trainer):
    """A trainer that keeps the gradients of every step, as they are before they are clipped.

    Its weights have noise: behind the zeros and ones of a fresh model a mistake could hide.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.watching = True
        self.gradients: list[dict[str, Tensor | None]] = []

    def _verify_plan(self) -> None:
        """Nothing: this is how a plan is verified."""

    def _take(self, made: RunSetup) -> None:
        super()._take(made)
        self._counter.count_no_flops()  # a run of some steps has no use for them

    def _built_task(self) -> Task:
        task = super()._built_task()
        self._disturb(task)
        return task

    def _disturb(self, task: Task) -> None:
        disturb(task.model)

    def _changed_weights(self, batch: StepBatch, loss: Tensor) -> Tensor | None:
        if self.watching:
            self.gradients.append(self._whole_gradients())
        return super()._changed_weights(batch, loss)

    def _whole_gradients(self) -> dict[str, Tensor | None]:
        with _whole(self.task.wrapped, with_gradients=True):
            found = {name: parameter.grad for name, parameter in named_parameters(self.model).items()}
            there = {name: gradient for name, gradient in found.items() if gradient is not None}
            # A gradient that only some have could not be gathered: those would wait for ever.
            by_holders: dict[str, set[str]] = {}
            for holding, having in processes.gather_data([json.dumps(sorted(found)), json.dumps(sorted(there))]):
                by_holders.setdefault(holding, set()).add(having)
            assert all(len(one) == 1 for one in by_holders.values()), by_holders
            whole = full_tensors(self.model, there)
            return {name: whole[name].clone() if name in whole else None for name in found}


def whole_parameters(model: nn.Module, wrapped: nn.Module | None) -> dict[str, Tensor]:
    """Return all parameters, whole; all processes have to ask together."""
    with _whole(wrapped):
        own = {name: parameter.detach() for name, parameter in named_parameters(model).items()}
        return {name: tensor.clone() for name, tensor in full_tensors(model, own).items()}


@contextmanager
def _whole(wrapped: nn.Module | None, with_gradients: bool = False) -> Iterator[None]:
    """Run a block in which parameters have their shapes; FSDP 1 hides them."""
    if not isinstance(wrapped, FullyShardedDataParallel):
        yield
        return
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False, with_grads=with_gradients):
        yield


# ---------------------------------------------------------------------------------------------------- records


def record(witness: Witness, folder: Path) -> None:
    """Do all steps of a run and write what they came to; all processes have to call it."""
    witness.setup()
    losses, norms = [], []
    outputs = _Outputs(witness.model)
    for batch in witness.batches():
        result = witness.step(batch)
        outputs.end()
        losses.append(processes.sum_over_ranks([float(result.loss)])[0] / witness.replica.alike)
        norms.append(None if result.grad_norm is None else float(result.grad_norm))
    whole = whole_parameters(witness.model, witness.task.wrapped)
    numbers = {f"parameter {name}": value for name, value in whole.items()}
    for step, gradients in enumerate(witness.gradients):
        numbers |= {f"gradient {step} {name}": value for name, value in gradients.items() if value is not None}
    numbers |= {f"output {name}": value for name, value in outputs.samples.items()}
    if processes.rank() == 0 or witness.pipeline is not None:  # of a pipeline each process has other numbers
        folder.mkdir(parents=True, exist_ok=True)
        there = {name: value.contiguous() for name, value in numbers.items()}
        save_file(there, folder / _NUMBERS.format(processes.rank()))
    if processes.rank() == 0:
        parts = {part.name: list(part.parameters) for part in witness.all_parts}
        said = {"losses": losses, "norms": norms, "parts": parts, "outputs": outputs.shapes}
        (folder / _RECORD).write_text(json.dumps(said), encoding="utf-8")


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


@dataclass(frozen=True)
class PartDifference:
    """How far the gradients and the parameters of one part are off."""

    part: str
    gradients: float
    parameters: float
    begins: str | None
    """The wrong gradient that is computed first: the last one of the part in the order of the model."""
    missing: tuple[str, ...]
    """Gradients that only one of the two records has."""


@dataclass(frozen=True)
class Difference:
    """How far a record is from that of one process; 0 is equal to the bit."""

    loss: float
    parts: list[PartDifference]
    output: str | None = None
    """The first module whose output, of the same shape in both, is another one."""

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains it."""
        wrong = [one for one in self.parts if one.missing or max(one.gradients, one.parameters) > TOLERANCE]
        return self.loss <= TOLERANCE and not wrong

    @property
    def begins(self) -> str | None:
        """The module where it begins: that of the first wrong output, or else of the first wrong gradient."""
        if self.output is not None:
            return self.output
        wrong = [one.begins for one in self.parts if one.begins is not None]
        return wrong[-1].rpartition(".")[0] if wrong else None


def difference(found: Path, expected: Path) -> Difference:
    """Compare two records."""
    ours, theirs = (json.loads((folder / _RECORD).read_text(encoding="utf-8")) for folder in (found, expected))
    a, b = _numbers(found), _numbers(expected)
    pairs = zip(ours["losses"] + ours["norms"], theirs["losses"] + theirs["norms"], strict=True)
    loss = max(abs(x - y) / (abs(y) or 1.0) for x, y in pairs if x is not None)
    parts = [_part_difference(name, parameters, a, b) for name, parameters in theirs["parts"].items()]
    return Difference(loss, parts, _first_output(ours, theirs, a, b))


def _numbers(folder: Path) -> dict[str, Tensor]:
    """Return what all processes have written."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("numbers*.safetensors")):
        found |= load_file(file)
    assert found, f"{folder} has no numbers to compare"
    return found


def _first_output(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> str | None:
    """Return the first module that put out something else; what is cut has another shape, and says nothing."""
    shapes: dict[str, list[int]] = ours.get("outputs", {})
    for name, shape in theirs.get("outputs", {}).items():
        key = f"output {name}"
        if shapes.get(name) == shape and deviations(found, {key: expected[key]}).get(key, 0.0) > 10 * TOLERANCE:
            return name
    return None


def _part_difference(
    part: str, names: list[str], found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> PartDifference:
    own = set(names)
    keys = [key for key in sorted({*found, *expected}) if key.split(" ")[-1] in own]
    both = {key for key in keys if key in found and key in expected}
    missing = tuple(key for key in keys if key not in both)
    off = {
        kind: deviations(found, {key: expected[key] for key in both if key.startswith(kind)})
        for kind in ("gradient", "parameter")
    }
    order = {name: number for number, name in enumerate(names)}
    wrong = sorted((order[key.split(" ")[-1]], key) for key, far in off["gradient"].items() if far > TOLERANCE)
    begins = wrong[-1][1].split(" ")[-1] if wrong else None
    largest = {kind: max(values.values(), default=0.0) for kind, values in off.items()}
    return PartDifference(part, largest["gradient"], largest["parameter"], begins, missing)


def deviations(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far each number is off: the largest |a − b| / (|b| + FLOOR × the largest |b| of all)."""
    there = {name: value for name, value in expected.items() if value.numel()}
    floor = FLOOR * max((float(value.abs().max()) for value in there.values()), default=0.0)
    return {
        name: float(((found[name] - value).abs() / (value.abs() + floor).clamp(min=1e-30)).max())
        for name, value in there.items()
    }


__all__ = ["Difference", "PartDifference", "Witness", "deviations", "difference", "record", "whole_parameters"]
