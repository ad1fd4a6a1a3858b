"""One cell of the matrix: a few steps in several processes, and the same steps in one, compared number by number."""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from cornstarch.data.sample import Sample
from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed
from cornstarch.parallel.distributed import to_full_tensor
from cornstarch.train import load_config
from cornstarch.trainer.recording_trainer import RecordingTrainer, gather_parameters
from cornstarch.verify.twin_trial import TOLERANCE, compute_deviations
from tests.models import local_processors
from tests.parity.columns import COLUMNS, LOADS, Load
from tests.parity.doubled import computed_in_double
from tests.parity.pool import Pool
from tests.parity.rows import TOKENIZER, row_of
from tests.parity.samples import alike, mixed

STEPS = 3
DOUBLED_TOLERANCE = TOLERANCE / 5
"""How far a cell may be off in float64; with cp, sums over blocks of tokens stay in fp32. Others leave about 1e-12."""

# AdamW divides a gradient by its own size. With its usual eps of 1e-8, rounding in a gradient that is zero in truth
# (that of a key's bias: softmax does not see it) would become a step like any other. No parameter is left out.
OPTIMIZER = {"learning_rate": 2e-3, "weight_decay": 0.5, "clip": 0.5, "eps": 1e-6}

Values = dict[str, "np.ndarray | None"]
Measure = Callable[[Values, Values], tuple[float, str]]
"""Says how far two sets of values are apart, and whose value is farthest."""


@dataclass(frozen=True)
class Place:
    """Where cells are computed, and in what."""

    device: str = "cpu"
    precision: str = "fp32"
    attention: str = "auto"
    double: bool = False
    """Whether to compute in float64, whatever the precision is."""


EXACT = Place()
"""Where the matrix is computed: rounding alone is compared, number by number."""


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
    spread: float = 0.0
    """How far the processes are from one another in what several have; 0: equal to the bit."""


# ------------------------------------------------------------------------------------------------ in the processes


def run(
    row: str, load: str, parallel: Mapping[str, Any], tokenizer: str, folder: str, place: Place = EXACT
) -> Outcome | str:
    """Do the steps in this process, one of several or alone; return what came out, or what was refused."""
    samples, loop = _samples(row, LOADS[load]), _loop(LOADS[load])
    with computed_in_double() if place.double else nullcontext():
        try:
            trainer = make_trainer(row, samples, loop, parallel, tokenizer, folder, place=place)
        except ConfigError as error:
            return str(error)
        return outcome_of(trainer)


def outcome_of(trainer: RecordingTrainer) -> Outcome:
    """Do all steps and return what they come to; all processes have to ask together."""
    losses, norms, totals = [], [], []
    for batch in trainer.batches():
        result = trainer.step(batch)
        assert result.grad_norm is not None
        losses.append(distributed.sum_over_ranks([float(result.loss)])[0] / trainer.replica.loss_copies)
        norms.append(float(result.grad_norm))
        # Not what was multiplied: a microbatch of text alone has no backward pass where only projectors are trained, so
        # that depends on which samples are in one microbatch.
        counted = {name: value for name, value in vars(result.totals).items() if name != "flops"}
        totals.append({**counted, "items": dict(result.totals.items)})
    gradients = [{name: None if g is None else array_of(g) for name, g in step.items()} for step in trainer.gradients]
    return Outcome(losses, norms, totals, gradients, parameter_arrays(trainer.model, trainer.task.wrapped))


def make_trainer(
    row: str,
    samples: list[Sample],
    loop: Mapping[str, Any],
    parallel: Mapping[str, Any],
    tokenizer: str,
    folder: str,
    kind: type[RecordingTrainer] = RecordingTrainer,
    place: Place = EXACT,
    data: Mapping[str, Any] | None = None,
    **options: Any,
) -> RecordingTrainer:
    """Return a trainer of a row that is ready for its first step; `data` is said beside what the row says of it."""
    described = {
        "output": folder,
        "device": place.device,
        "threads": 1,
        "precision": place.precision,
        "attention": place.attention,
        "compile": "off",
        "model": _replace(row_of(row).model, TOKENIZER, tokenizer),
        "data": {
            "train": [{"path": "samples", "format": "given"}], "shuffle": False, "skip_limit": 1.0, **row_of(row).data,
            **(data or {}),
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


def _replace(value: Any, word: str, by: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace(one, word, by) for key, one in value.items()}
    return by if value == word else value


def _loop(load: Load) -> dict[str, Any]:
    return {"steps": STEPS, "batch_size": load.batch_size, "accumulation": load.accumulation}


def _samples(row: str, load: Load) -> list[Sample]:
    make = row_of(row).make
    return mixed(make) if load.mixed else alike(make, STEPS * load.batch_size)


def parameter_arrays(model: nn.Module, wrapped: nn.Module | None) -> Values:
    """Return all parameters, whole; all processes have to ask together."""
    return {name: array_of(tensor) for name, tensor in gather_parameters(model, wrapped).items()}


def whole_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor whole; all processes have to ask together."""
    return array_of(to_full_tensor(tensor.detach()).clone())


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a tensor as NumPy has it, which knows no bfloat16."""
    return tensor.cpu().float().numpy()


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
    processes: float = 0.0
    """How far the processes are from one another."""
    doubled: float | None = None
    """How far off the cell is in float64, if it had a second look."""

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.loss, self.gradients, self.parameters)

    @property
    def is_rounding(self) -> bool:
        """Whether nothing but the rounding of fp32 is left of the difference."""
        return self.worst < TOLERANCE or (self.doubled is not None and self.doubled < DOUBLED_TOLERANCE)


class Mismatch(AssertionError):
    """Several processes did something else than one; rounding does not explain it."""


class Matrix:
    """Runs cells, each in as many processes as its column has, and remembers what one process does."""

    def __init__(self, workers: Pool, folder: Path, place: Place = EXACT) -> None:
        self.workers, self.place = workers, place
        self._folder, self._runs = folder, 0
        self._tokenizer = str(folder / "tokenizer")
        local_processors.tokenizer().save_pretrained(self._tokenizer)
        self._remembered: dict[Any, Any] = {}

    def cell(self, row: str, column: str, load: str) -> Deviation | str:
        """Run one cell; return how far it is from one process, or what was refused."""
        found = self._cell(row, column, load, self.place)
        if self.place == EXACT and isinstance(found, Deviation) and found.worst >= TOLERANCE:
            # In one process alone, too, rounding may take a number this far from the true one.
            second = self._cell(row, column, load, replace(EXACT, double=True))
            assert isinstance(second, Deviation), second
            return replace(found, doubled=second.worst)
        return found

    def _cell(self, row: str, column: str, load: str, place: Place) -> Deviation | str:
        spread = COLUMNS[column]
        # torch remembers meshes that are equal to those of an earlier job, whose groups have ended.
        if spread.is_cut or "ep" in spread.last:
            self.workers.renew()
        described, work = row_of(row), partial(run, place=place)
        ranks, parallel = spread.ranks(described), spread.parallel(described)
        outcomes = self.workers.run(ranks, work, row, load, parallel, *self.places())
        if isinstance(outcomes[0], str):
            if any(outcome != outcomes[0] for outcome in outcomes):
                raise Mismatch(f"processes do not agree: {outcomes}")
            return outcomes[0]
        return self.deviation(outcomes, self.alone(row, load, place), spread.unused_are_zero)

    def deviation(self, found: list[Outcome], alone: Outcome, unused_are_zero: bool) -> Deviation:
        """Return how far processes are from one, by what the precision allows for."""
        if self.place == EXACT:
            return compare(join_outcomes(found), alone, unused_are_zero)
        measure = farthest if self.place.precision == "fp32" else relative_norm
        return compare(join_outcomes(found, measure), alone, unused_are_zero, measure)

    def alone(self, row: str, load: str, place: Place | None = None) -> Outcome:
        """Return what one process does; default: where the matrix is computed."""
        place = place or self.place
        outcome = self.remembered((row, load, place), run, row, load, {}, *self.places(), place)
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


def join_outcomes(outcomes: list[Outcome], measure: Measure | None = None) -> Outcome:
    """Return what all processes have together, and by a measure how far they agree; without one, to the bit."""
    first, spread = outcomes[0], 0.0
    for outcome in outcomes[1:]:
        ours, theirs = ((one.losses, one.norms, one.totals) for one in (outcome, first))
        if ours != theirs and (measure is None or ours[2] != theirs[2]):
            raise Mismatch(f"processes do not agree: {first.losses, first.norms} and {outcome.losses, outcome.norms}")
        spread = max(spread, _apart(outcome, first))
    gradients = [together([one.gradients[step] for one in outcomes], measure) for step in range(len(first.gradients))]
    parameters = together([one.parameters for one in outcomes], measure)
    spread = max(spread, *(one[1] for one in gradients), parameters[1])
    whole = [values for values, _ in gradients]
    return Outcome(first.losses, first.norms, first.totals, whole, parameters[0], spread)


def together(parts: list[Values], measure: Measure | None = None) -> tuple[Values, float]:
    """Return the values of all processes, and how far those that several have are apart: not at all, if unmeasured."""
    whole: Values = {}
    spread = 0.0
    for part in parts:
        for name, value in part.items():
            if name in whole and _bytes(whole[name]) != _bytes(value):
                if measure is None:
                    raise Mismatch(f"{name} differs between processes")
                spread = max(spread, measure({name: value}, {name: whole[name]})[0])
            whole[name] = value
    return whole, spread


def _bytes(value: np.ndarray | None) -> bytes | None:
    return None if value is None else value.tobytes()


def _apart(found: Outcome, expected: Outcome) -> float:
    """Return how far losses and the norms of gradients are apart."""
    numbers = zip(found.losses + found.norms, expected.losses + expected.norms, strict=True)
    return max(abs(f - e) / (abs(e) or 1.0) for f, e in numbers)


def compare(
    found: Outcome, expected: Outcome, unused_are_zero: bool = False, measure: Measure | None = None
) -> Deviation:
    """Return how far two outcomes are apart; what rounding does not explain raises."""
    measure = measure or farthest
    if found.totals != expected.totals:
        raise Mismatch(f"the steps counted {found.totals}, those of one process {expected.totals}")
    loss, own = _apart(found, expected), found.gradients
    if unused_are_zero:
        own = [_without_zeros(f, e) for f, e in zip(own, expected.gradients, strict=True)]
    gradients = max(measure(f, e) for f, e in zip(own, expected.gradients, strict=True))
    parameters = measure(found.parameters, expected.parameters)
    where = f"gradient of {gradients[1]}, parameter {parameters[1]}"
    zeros = _nones(own) != _nones(found.gradients)
    return Deviation(loss, gradients[0], parameters[0], where, zeros, found.spread)


def _nones(steps: list[Values]) -> int:
    return sum(value is None for values in steps for value in values.values())


def _without_zeros(found: Values, expected: Values) -> Values:
    """Return gradients without those that are zeros, where one process has none."""
    return {
        name: None if expected.get(name) is None and value is not None and not value.any() else value
        for name, value in found.items()
    }


def farthest(found: Values, expected: Values) -> tuple[float, str]:
    """Return the largest deviation of any number, and whose it is."""
    ours, theirs = _tensors(found, expected)
    return max(((off, name) for name, off in compute_deviations(ours, theirs).items()), default=(0.0, "nothing"))


def relative_norm(found: Values, expected: Values) -> tuple[float, str]:
    """Return the norm of all differences, as a share of that of all values, and whose difference is largest."""
    ours, theirs = _tensors(found, expected)
    if not theirs:
        return 0.0, "nothing"
    apart = {name: float((ours[name] - value).double().norm()) for name, value in theirs.items()}
    whole = sum(float(value.double().norm()) ** 2 for value in theirs.values()) ** 0.5
    return sum(one**2 for one in apart.values()) ** 0.5 / (whole or 1.0), max(apart, key=lambda name: apart[name])


def _tensors(found: Values, expected: Values) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the values that are there on both sides; one that is only on one raises."""
    if found.keys() != expected.keys():
        raise Mismatch(f"only on one side: {sorted(found.keys() ^ expected.keys())}")
    odd = {n: "none" if found[n] is None else "one" for n in found if (found[n] is None) != (expected[n] is None)}
    if odd:
        raise Mismatch(f"here is a gradient where one process has none, or none where it has one: {odd}")
    ours, theirs = ({n: torch.from_numpy(v) for n, v in one.items() if v is not None} for one in (found, expected))
    return ours, theirs
