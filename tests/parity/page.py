"""Runs the whole matrix and writes docs/parity.md."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from cornstarch.verify.twin_trial import FLOOR, TOLERANCE
from tests.parity.cell import (
    DOUBLED_TOLERANCE,
    OPTIMIZER,
    STEPS,
    Deviation,
    Matrix,
    Mismatch,
    compare,
    farthest,
    join_outcomes,
    together,
)
from tests.parity.columns import COLUMNS, LOADS
from tests.parity.experts import build_section, list_cells, run_cell
from tests.parity.frozen import COMBINATIONS, PARTS, SCHEDULES, run_frozen
from tests.parity.masks import MASKS, WAYS, run_mask
from tests.parity.pool import Failed
from tests.parity.random_steps import End, train_by_hand, train_run
from tests.parity.rows import ROWS
from tests.parity.taken_apart import gradients
from tests.versions import versions_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"

Cell = tuple[str, str, str]
"""Row, column, load."""
Found = dict[Cell, Deviation | str]
"""How far a cell is off, or what was answered."""
RANDOM = [(row, kind) for row in ("vision_audio", "lora", "projector") for kind in ("ddp", "fsdp1", "fsdp2")]
"""Rows and kinds of data parallelism that are run for many random steps with the Trainer."""
BY_HAND = [(way, frozen) for frozen in (False, True) for way in ("ddp", "fsdp1", "fsdp2")]
"""Ways to wrap a model with torch alone, and whether all but the projectors is frozen."""
TAKEN_APART = [("qwen3-vl", "ddp"), ("qwen3-vl", "fsdp2"), ("llava", "ddp"), ("llava", "fsdp2")]
"""Whole models, and kinds of data parallelism, that are trained on images in one process and text in the other."""
MANY = 200
MANY_LIMIT = 1e-3
"""How far weights may be off after so many steps, in which rounding grows."""

PARTS_OF_RUN = ("long", *sorted(ROWS, key=lambda row: -len(ROWS[row].modules)), "frozen", "masks", "experts")
"""What can be run apart, the longest first."""

WIDTH = 120

_LONG = 600.0  # seconds
_FAILED = "failed"


def cells() -> Iterator[Cell]:
    """Yield all cells; what is refused is asked once for each row."""
    for row in ROWS:
        for column, spread in COLUMNS.items():
            if not spread.fits(ROWS[row]):
                continue
            for load in spread.loads(row):
                yield row, column, load


def random_steps(matrix: Matrix, row: str, kind: str, steps: int = MANY) -> tuple[float, float]:
    """Return how far losses and weights of 2 processes are from one after random steps with the Trainer."""
    alone = matrix.remembered((row, steps), train_run, row, steps, {}, *matrix.places())
    parallel = {"data": {"kind": kind}}
    return _off(matrix.workers.run(2, train_run, row, steps, parallel, *matrix.places(), seconds=_LONG), alone)


def by_hand(matrix: Matrix, way: str, frozen: bool, steps: int = MANY) -> tuple[float, float]:
    """Return the same for a loop without the Trainer."""
    alone = matrix.remembered((frozen, steps), train_by_hand, "alone", frozen, steps)
    return _off(matrix.workers.run(2, train_by_hand, way, frozen, steps, seconds=_LONG), alone)


def take_apart(matrix: Matrix, family: str, kind: str) -> float:
    """Return how far the gradients of a whole model, taken apart and trained in 2 processes, are from one process."""
    alone = matrix.remembered(family, gradients, family, None)
    return farthest(together(matrix.workers.run(2, gradients, family, kind))[0], alone)[0]


def frozen(matrix: Matrix, trained: tuple[bool, bool, bool], schedule: str) -> Deviation:
    """Return how far a pipeline is from one process with some parts frozen."""
    alone = matrix.remembered(trained, run_frozen, trained, None, *matrix.places())
    found = matrix.workers.run(3, run_frozen, trained, schedule, *matrix.places())
    return compare(join_outcomes(found), alone)


def masked(matrix: Matrix, mask: str, way: str) -> Deviation:
    """Return how far processes that cut tokens are from one, with a mask."""
    spread = COLUMNS[way]
    if spread.is_cut:
        matrix.workers.renew()
    alone = matrix.remembered(mask, run_mask, mask, None, *matrix.places())
    found = matrix.workers.run(spread.ranks(MASKS[mask]), run_mask, mask, way, *matrix.places())
    if isinstance(found[0], str):
        raise Mismatch(found[0])
    return compare(join_outcomes(found), alone)


def _off(found: list[End], alone: End) -> tuple[float, float]:
    losses = max(abs(f - e) / e for f, e in zip(found[0][0], alone[0], strict=True))
    return losses, farthest(together([weights for _, weights in found])[0], alone[1])[0]


# ------------------------------------------------------------------------------------------------ all of it


class Run:
    """A run of everything, told as it goes."""

    def __init__(self, matrix: Matrix | None) -> None:
        self._matrix = matrix
        self.found: Found = {}
        self.many: dict[str, tuple[float, float] | None] = {}
        """By title: the deviations of many steps; None: it failed."""
        self.apart: dict[str, tuple[float] | None] = {}
        """By title: the deviation of a model that is taken apart; None: it failed."""
        self.frozen: dict[str, list[str]] = {}
        """By what is trained: how far each schedule is off."""
        self.masks: dict[str, list[str]] = {}
        """By mask: how far each way to cut tokens is off."""
        self.experts: dict[tuple[str, str], str] = {}
        """By family and layout: how far models with experts over ranks are off."""
        self.failures: list[str] = []
        self._start = time.monotonic()

    @property
    def matrix(self) -> Matrix:
        """What runs cells; not where results of others are added up."""
        assert self._matrix is not None
        return self._matrix

    def results(self) -> tuple[Any, ...]:
        """Return what was found, for another run to add."""
        return self.found, self.many, self.apart, self.frozen, self.masks, self.experts, self.failures

    def add(self, results: tuple[Any, ...]) -> None:
        """Take over what another run has found."""
        found, many, apart, some_frozen, masks, experts, failures = results
        self.found |= found
        self.many |= many
        self.apart |= apart
        self.frozen |= some_frozen
        self.masks |= masks
        self.experts |= experts
        self.failures += failures

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._start

    def part(self, name: str) -> None:
        """Run one part of everything: a row, what is frozen with the models taken apart, or the long runs."""
        if name == "frozen":
            for combination in COMBINATIONS:
                title = " and ".join(part for part, is_trained in zip(PARTS, combination, strict=True) if is_trained)
                self.frozen[title] = [self.some_frozen(title, combination, schedule) for schedule in SCHEDULES]
            for family, kind in TAKEN_APART:
                self.model_apart(family, kind)
        elif name == "masks":
            for mask, row in MASKS.items():
                self.masks[row.title] = [self.some_mask(mask, way) for way in WAYS]
        elif name == "experts":
            for row, layout in list_cells():
                work = partial(run_cell, self.matrix, row, layout)
                self.experts[row, layout] = self._one(f"experts: {row}, {layout}", work)
        elif name == "long":
            for title, work in _long_runs(self.matrix):
                self.long_run(title, work)
        else:
            for cell in cells():
                if cell[0] == name:
                    self.cell(cell)

    def cell(self, cell: Cell) -> None:
        """Run one cell."""
        title = " / ".join(cell)
        try:
            result = self.matrix.cell(*cell)
            problem = _problem(cell, result)
        except (Failed, Mismatch) as error:
            result, problem = _FAILED, str(error)
        self.found[cell] = result
        self._tell(title, f"{result.worst:.0e}" if isinstance(result, Deviation) else result.split("\n  ")[-1], problem)

    def some_frozen(self, title: str, trained: tuple[bool, bool, bool], schedule: str) -> str:
        """Run a pipeline of which only some parts are trained."""
        return self._one(f"trained: {title}, {schedule}", partial(frozen, self.matrix, trained, schedule))

    def some_mask(self, mask: str, way: str) -> str:
        """Run a mask with tokens cut in one way."""
        return self._one(f"{mask}, {way}", partial(masked, self.matrix, mask, way))

    def _one(self, title: str, work: Callable[[], Deviation]) -> str:
        problem = None
        try:
            found = work()
            told = f"{found.worst:.0e}"
            problem = None if found.is_rounding else told
        except (Failed, Mismatch) as error:
            told, problem = f"**{_FAILED}**", str(error)
        self._tell(title, told, problem)
        return told

    def model_apart(self, family: str, kind: str) -> None:
        """Run a whole model that is taken apart."""
        title = f"{family}, {kind}"
        try:
            off = take_apart(self.matrix, family, kind)
            self.apart[title], told, problem = (off,), f"{off:.0e}", None if off < TOLERANCE else f"{off:.0e}"
        except (Failed, Mismatch) as error:
            self.apart[title], told, problem = None, _FAILED, str(error)
        self._tell(f"taken apart: {title}", told, problem)

    def long_run(self, title: str, work: Callable[[], tuple[float, float]]) -> None:
        """Run many steps."""
        problem = None
        try:
            self.many[title] = losses, weights = work()
            told = f"{losses:.0e} {weights:.0e}"
            problem = None if losses < TOLERANCE and weights < MANY_LIMIT else told
        except (Failed, Mismatch) as error:
            self.many[title], told, problem = None, _FAILED, str(error)
        self._tell(title, told, problem)

    def _tell(self, title: str, told: str, problem: str | None) -> None:
        print(f"{self.seconds:5.0f} s  {title:60} {told}", flush=True)
        if problem is not None:
            self.failures.append(f"{title}: {problem}")


def _long_runs(matrix: Matrix) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    for row, kind in RANDOM:
        yield f"Trainer: {ROWS[row].title}, {kind}", partial(random_steps, matrix, row, kind)
    for way, frozen in BY_HAND:
        what = "projectors trained, all else frozen" if frozen else "vision, audio and LLM trained"
        yield f"by hand: {what}, {way}", partial(by_hand, matrix, way, frozen)


def _problem(cell: Cell, result: Deviation | str) -> str | None:
    said = COLUMNS[cell[1]].refusal(cell[0])
    if isinstance(result, Deviation):
        if said is not None:
            return "it works, but the table has it as refused"
        return None if result.is_rounding else str(result)
    return None if said is not None and said in result else result


# ------------------------------------------------------------------------------------------------ the page


RUN_IT = "## Run it\n"
"""The heading of the last section."""


def random_cases_of(text: str) -> str:
    """Return the section of a page about random cases, which `python -m tests.fuzz` writes; empty if there is none."""
    found = re.search(r"<!-- random cases:.*?<!-- end of random cases -->\n", text, re.DOTALL)
    return found.group() if found else ""


def page(run: Run, earlier: str = "") -> str:
    """Return the page.

    Args:
        run: What was found.
        earlier: The page as it was; its section about random cases is kept.
    """
    deviations = [result for result in run.found.values() if isinstance(result, Deviation)]
    worst = {kind: max(getattr(one, kind) for one in deviations) for kind in ("loss", "gradients", "parameters")}
    notes: dict[str, int] = {}
    tables = [
        line
        for name, load in LOADS.items()
        for line in (f"## {load.title}", "", fill(load.about, WIDTH), "", *_table(name, run.found, notes), "")
    ]
    random_cases = random_cases_of(earlier)
    text = _TEXT.format(
        result=_result(run),
        steps=STEPS,
        decay=OPTIMIZER["weight_decay"],
        clip=OPTIMIZER["clip"],
        eps=OPTIMIZER["eps"],
        floor=FLOOR,
        tolerance=TOLERANCE,
        worst=", ".join(f"{value:.0e} for {kind}" for kind, value in worst.items()).replace("loss", "losses"),
        tables="\n".join(tables),
        notes="\n".join(fill(f"{number}. {note}", WIDTH, subsequent_indent="   ") for note, number in notes.items()),
        many=MANY,
        long_runs="\n".join(_row(title, result) for title, result in run.many.items()),
        schedules=" | ".join(SCHEDULES),
        masks=mask_section(run.masks),
        experts=build_section(run.experts),
        frozen="\n".join(f"| {title} | {' | '.join(told)} |" for title, told in run.frozen.items()),
        apart="\n".join(_row(title, result) for title, result in run.apart.items()),
    )
    return text.replace(RUN_IT, f"{random_cases}\n{RUN_IT}") if random_cases else text


def mask_section(masks: Mapping[str, Sequence[str]]) -> str:
    """Return the section about masks."""
    tools = versions_of("torch", "transformers")
    heads = " | ".join(COLUMNS[way].title for way in WAYS)
    about = (
        "Attention must not depend on the placement of tokens. These cells use mixed batches, a vision encoder and a "
        f"language model, both trained, with every kind of mask and every way to shard tokens ({tools}):"
    )
    rows = [f"| {title} | {' | '.join(told)} |" for title, told in masks.items()]
    return "\n".join([fill(about, WIDTH), "", f"| | {heads} |", "|---" * (len(WAYS) + 1) + "|", *rows])


def _table(load: str, found: Found, notes: dict[str, int]) -> list[str]:
    columns = [name for name in COLUMNS if any((row, name, load) in found for row in ROWS)]
    heads = [COLUMNS[name].title for name in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for row, described in ROWS.items():
        shown = [_show(found.get((row, column, load)), column, row, notes) for column in columns]
        lines.append(f"| {described.title} | " + " | ".join(shown) + " |")
    return lines


def _show(result: Deviation | str | None, column: str, row: str, notes: dict[str, int]) -> str:
    if isinstance(result, Deviation):
        number = f"{result.worst:.0e}" if result.is_rounding else f"**{result.worst:.0e}**"
        if result.doubled is not None:
            number += _mark(_DOUBLED, notes)
        return number + (_mark(_ZEROS, notes) if result.zeros else "")
    said = COLUMNS[column].refusal(row)
    if said is not None and result is not None and said in result:
        return f"no{_mark(f'Refused: “{said}”.', notes)}"
    return "" if result is None else f"**{_FAILED}**"


def _mark(note: str, notes: dict[str, int]) -> str:
    return f" ({notes.setdefault(note, len(notes) + 1)})"


def _row(title: str, result: tuple[float, ...] | None) -> str:
    shown = f"**{_FAILED}**" if result is None else " | ".join(f"{number:.0e}" if number else "0" for number in result)
    return f"| {title} | {shown} |"


def _result(run: Run) -> str:
    """Return in a sentence how many cells passed, and when and with what they were run."""
    counts = dict.fromkeys(("passed", "refused", "failed"), 0)
    for cell, result in run.found.items():
        kind = "failed" if _problem(cell, result) else "passed" if isinstance(result, Deviation) else "refused"
        counts[kind] += 1
    tools = versions_of("torch", "transformers", "peft")
    return fill(
        f"**{len(run.found)} cells: {counts['passed']} passed, {counts['refused']} refused as not supported yet, "
        f"{counts['failed']} failed.** Run on {datetime.now(UTC):%Y-%m-%d} with {tools} and Python "
        f"{platform.python_version()}; the processes used gloo on {os.cpu_count()} CPU cores. The whole matrix "
        f"took {max(1, round(run.seconds / 60))} minutes.",
        WIDTH,
    )


_ZEROS = (
    "fsdp1: a trained parameter that the loss does not depend on has a zero gradient, where one process has None (here "
    "CLIP's last norm, which affects only its pooled output). The gradient is dropped before the optimizer step, so "
    "that weight decay does not shrink the parameter."
)

_DOUBLED = (
    f"More than {TOLERANCE:g} in fp32, so the cell was computed once more in float64, in several processes and in one. "
    f"Rounding shrinks there by orders of magnitude, an error would not. At most {DOUBLED_TOLERANCE:g} is left."
)

_TEXT = """\
# Parity

<!-- Written by `make parity`. To change it, change tests/parity/page.py. -->

Training in several processes must give the same result as training in one. This page shows that it does. Each cell
trains a model (row) for {steps} steps with one kind of parallelism (column), and once more in one process on the same
samples, both with the same `Trainer`, and compares the two.

{result}

The comparison covers

- the loss of every step, the gradient norm, and the counts of samples, tokens, images and audio clips;
- **every** gradient of every step before clipping, and whether it is None: parameters that are frozen, or whose
  modality no process had an item of, have no gradient;
- **every** parameter after {steps} steps of AdamW with a weight decay of {decay} and clipping at {clip};
- that replicated values are bit-identical in all processes.

The number in a cell is the largest deviation of all compared values: |a − b| / (|b| + {floor:g} × the largest |b|),
where the largest is taken over all gradients of the step, or over all parameters. For a loss, it is |a − b| / |b|. More
than **{tolerance:g}** is a failure, unless a second comparison in float64 shows that rounding alone explains it (see
the notes). Everything else is computed in fp32 on the CPU, without dropout. The largest deviations of all cells are
{worst}.

AdamW divides a gradient by its own magnitude. With the usual eps of 1e-8, the rounding error of a gradient that is zero
in theory (such as that of a key bias in attention) would become a full step, so eps is {eps:g} here. No parameter is
excluded.

{tables}
## Notes

{notes}

## Masks

{masks}

## Experts over ranks

{experts}

## Frozen parts in a pipeline

A vision encoder on its own rank, the language model in two stages, packed rows, 4 microbatches. A stage without any
trained module in it or before it has no backward pass. A frozen stage after a trained one computes input gradients
only. Each row names the trained parts; all others are frozen.

| trained | {schedules} |
|---|---|---|---|
{frozen}

## Decomposed models

`MultimodalModel.from_multimodal` decomposes a Hugging Face model. Here, two processes train such a model together: the
first has images, the second only text, and neither hangs. The number is the largest deviation of any gradient from one
process that has both batches. A deviation of 0 is possible, because halving is exact. Qwen3-VL also passes features of
deeper layers to the language model; LLaVA does not use the last layer of its vision tower.

| | gradients |
|---|---|
{apart}

## {many} random steps

Two processes train on random samples: text only, up to three images, audio and, with the Trainer, many broken samples,
so that a process often has no image or no sample at all. Nothing hangs, and the final result equals that of one
process. The numbers are the largest deviation of a loss, and of a weight at the end. "By hand" is a loop without the
Trainer: `model.keep_encoders_running(processor.stand_ins())`, torch's own wrapping, and SGD.

| | losses | weights |
|---|---|---|
{long_runs}

## Run it

```sh
make parity
```

writes this page. `make test` runs a subset of the cells: every row with every kind of batch, and every column. Columns
that do not combine others also run with every kind of batch. To add a column, add an entry to
`tests/parity/columns.py`; to add a row, add one to `tests/parity/rows.py`.

Some of the cells (`tests/parity/on_device.py`) also run on a GPU, in fp32 and bf16, with all processes on the same GPU:
`python -m tests.parity --device cuda --jobs 2` writes `benchmarks/results/gpu_parity.md`, with the tolerances.
"""
