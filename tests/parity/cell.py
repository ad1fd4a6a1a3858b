"""One cell of the matrix: a few steps in several processes, and the same steps in one, compared number by number."""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.parallel import processes
from cornstarch.parallel.data import full_value
from cornstarch.train import load_config
from cornstarch.train.data.sample import Sample
from cornstarch.train.witness import Witness, deviations, whole_parameters
from tests.models import local_processors
from tests.parity.columns import COLUMNS, LOADS, Load
from tests.parity.pool import Pool
from tests.parity.rows import ROWS, TOKENIZER
from tests.parity.samples import alike, mixed

STEPS = 3

# AdamW divides a gradient by its own size. With its usual eps of 1e-8, rounding in a gradient that is zero in truth
# (that of a key's bias: softmax does not see it) would become a step like any other. No parameter is left out.
OPTIMIZER = {"learning_rate": 2e-3, "weight_decay": 0.5, "clip": 0.5, "eps": 1e-6}

Values = dict[str, "np.ndarray | None"]


@dataclass(frozen=True)
class Outcome:
    """What some steps came to."""

    losses: list[float]
    """Of each step, over all processes."""
    norms: list[float]
    """Of all gradients of a step together, before clipping."""
    totals: list[dict[str, Any]]
    """What each step has counted: tokens, samples, items."""
    gradients: list[Values]
    """Of each step, before clipping; None where there is none."""
    parameters: Values
    """After the last step."""


# ------------------------------------------------------------------------------------------------ in the processes


def run(row: str, load: str, parallel: Mapping[str, Any], tokenizer: str, folder: str) -> Outcome | str:
    """Do the steps in this process, one of several or alone; return what came out, or what was refused."""
    try:
        trainer = made(row, _samples(row, LOADS[load]), _loop(LOADS[load]), parallel, tokenizer, folder)
    except ConfigError as error:
        return str(error)
    return outcome_of(trainer)


def outcome_of(trainer: Witness) -> Outcome:
    """Do all steps and return what they come to; all processes have to ask together."""
    losses, norms, totals = [], [], []
    for batch in trainer.batches():
        result = trainer.step(batch)
        assert result.grad_norm is not None
        losses.append(processes.sum_over_ranks([float(result.loss)])[0] / trainer.replica.alike)
        norms.append(float(result.grad_norm))
        # Not what was multiplied: a portion of text alone has no backward pass where only projectors are trained, so
        # that depends on which samples are in one portion.
        counted = {name: value for name, value in vars(result.totals).items() if name != "flops"}
        totals.append({**counted, "items": dict(result.totals.items)})
    gradients = [{name: None if g is None else g.numpy() for name, g in step.items()} for step in trainer.gradients]
    return Outcome(losses, norms, totals, gradients, parameter_arrays(trainer.model, trainer.task.wrapped))


def made(
    row: str,
    samples: list[Sample],
    loop: Mapping[str, Any],
    parallel: Mapping[str, Any],
    tokenizer: str,
    folder: str,
    kind: type[Witness] = Witness,
    **options: Any,
) -> Witness:
    """Return a trainer of a row that is ready for its first step."""
    described = {
        "output": folder,
        "device": "cpu",
        "threads": 1,
        "precision": "fp32",
        "model": _replaced(ROWS[row].model, TOKENIZER, tokenizer),
        "data": {
            "train": [{"path": "samples", "format": "given"}], "shuffle": False, "skip_limit": 1.0, **ROWS[row].data,
        },
        "optimizer": OPTIMIZER,
        "schedule": {"name": "constant", "warmup": 0},
        "loop": dict(loop),
        "logging": {"progress": "none", "samples": 0},
        "parallel": dict(parallel),
    }  # fmt: skip
    console = Console(file=io.StringIO())
    witness = kind(load_config(None, base=described), train_data=samples, console=console, **options)
    witness.setup()
    return witness


def _replaced(value: Any, word: str, by: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _replaced(one, word, by) for key, one in value.items()}
    return by if value == word else value


def _loop(load: Load) -> dict[str, Any]:
    return {"steps": STEPS, "batch_size": load.batch_size, "accumulation": load.accumulation}


def _samples(row: str, load: Load) -> list[Sample]:
    make = ROWS[row].make
    return mixed(make) if load.mixed else alike(make, STEPS * load.batch_size)


def parameter_arrays(model: nn.Module, wrapped: nn.Module | None) -> Values:
    """Return all parameters, whole; all processes have to ask together."""
    return {name: tensor.numpy() for name, tensor in whole_parameters(model, wrapped).items()}


def whole_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor whole; all processes have to ask together."""
    return full_value(tensor.detach()).clone().numpy()


# ------------------------------------------------------------------------------------------------ the comparison


@dataclass(frozen=True)
class Deviation:
    """How far several processes are from one: 0 is equal to the bit, more than `TOLERANCE` is a failure."""

    loss: float
    """Of losses, and of the gradients' norms."""
    gradients: float
    parameters: float
    where: str
    """The gradient and the parameter that are farthest off."""
    zeros: bool = False
    """Whether zeros were taken for a gradient that one process has not."""

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.loss, self.gradients, self.parameters)


class Mismatch(AssertionError):
    """Several processes did something else than one; rounding does not explain it."""


class Matrix:
    """Runs cells, each in as many processes as its column has, and remembers what one process does."""

    def __init__(self, workers: Pool, folder: Path) -> None:
        self.workers = workers
        self._folder, self._runs = folder, 0
        self._tokenizer = str(folder / "tokenizer")
        local_processors.tokenizer().save_pretrained(self._tokenizer)
        self._remembered: dict[Any, Any] = {}

    def cell(self, row: str, column: str, load: str) -> Deviation | str:
        """Run one cell; return how far it is from one process, or what was refused."""
        spread = COLUMNS[column]
        if spread.is_cut:  # torch remembers meshes that are equal to those of an earlier job, whose groups have ended
            self.workers.close()
        outcomes = self.workers.run(spread.ranks(ROWS[row]), run, row, load, spread.parallel(ROWS[row]), *self.places())
        if isinstance(outcomes[0], str):
            if any(outcome != outcomes[0] for outcome in outcomes):
                raise Mismatch(f"processes do not agree: {outcomes}")
            return outcomes[0]
        return compared(joined(outcomes), self.alone(row, load), spread.unused_are_zero)

    def alone(self, row: str, load: str) -> Outcome:
        """Return what one process does."""
        outcome = self.remembered((row, load), run, row, load, {}, *self.places())
        assert isinstance(outcome, Outcome), outcome
        return outcome

    def remembered(self, name: Hashable, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return what one process alone comes to; it is asked once for each name."""
        if (work, name) not in self._remembered:
            (self._remembered[work, name],) = self.workers.run(1, work, *arguments)
        return self._remembered[work, name]

    def places(self) -> tuple[str, str]:
        """Return the folder of the tokenizer, and one for a run."""
        self._runs += 1
        return self._tokenizer, str(self._folder / f"run {self._runs}")


def joined(outcomes: list[Outcome]) -> Outcome:
    """Return what all processes have together; what several have must be the same to the bit."""
    first = outcomes[0]
    for outcome in outcomes[1:]:
        if (outcome.losses, outcome.norms, outcome.totals) != (first.losses, first.norms, first.totals):
            raise Mismatch(f"processes do not agree: {first.losses, first.norms} and {outcome.losses, outcome.norms}")
    gradients = [together([outcome.gradients[step] for outcome in outcomes]) for step in range(len(first.gradients))]
    parameters = together([outcome.parameters for outcome in outcomes])
    return Outcome(first.losses, first.norms, first.totals, gradients, parameters)


def together(parts: list[Values]) -> Values:
    """Return the values of all processes; those that several have must be the same to the bit."""
    whole: Values = {}
    for part in parts:
        for name, value in part.items():
            if name in whole and _bytes(whole[name]) != _bytes(value):
                raise Mismatch(f"{name} differs between processes")
            whole[name] = value
    return whole


def _bytes(value: np.ndarray | None) -> bytes | None:
    return None if value is None else value.tobytes()


def compared(found: Outcome, expected: Outcome, unused_are_zero: bool = False) -> Deviation:
    """Return how far two outcomes are apart; what rounding does not explain raises."""
    if found.totals != expected.totals:
        raise Mismatch(f"the steps counted {found.totals}, those of one process {expected.totals}")
    numbers = zip(found.losses + found.norms, expected.losses + expected.norms, strict=True)
    loss = max(abs(f - e) / (abs(e) or 1.0) for f, e in numbers)
    own = found.gradients
    if unused_are_zero:
        own = [_without_zeros(f, e) for f, e in zip(own, expected.gradients, strict=True)]
    gradients = max(farthest(f, e) for f, e in zip(own, expected.gradients, strict=True))
    parameters = farthest(found.parameters, expected.parameters)
    where = f"gradient of {gradients[1]}, parameter {parameters[1]}"
    return Deviation(loss, gradients[0], parameters[0], where, zeros=_nones(own) != _nones(found.gradients))


def _nones(steps: list[Values]) -> int:
    return sum(value is None for values in steps for value in values.values())


def _without_zeros(found: Values, expected: Values) -> Values:
    """Return gradients without those that are zeros, where one process has none."""
    return {
        name: None if expected.get(name) is None and value is not None and not value.any() else value
        for name, value in found.items()
    }


def farthest(found: Values, expected: Values) -> tuple[float, str]:
    """Return the largest deviation, and whose it is."""
    if found.keys() != expected.keys():
        raise Mismatch(f"only on one side: {sorted(found.keys() ^ expected.keys())}")
    odd = {n: "none" if found[n] is None else "one" for n in found if (found[n] is None) != (expected[n] is None)}
    if odd:
        raise Mismatch(f"here is a gradient where one process has none, or none where it has one: {odd}")
    ours, theirs = ({n: torch.from_numpy(v) for n, v in one.items() if v is not None} for one in (found, expected))
    return max(((off, name) for name, off in deviations(ours, theirs).items()), default=(0.0, "nothing"))
