"""Runs the whole matrix and writes docs/parity.md."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tests.parity.cell import FLOOR, OPTIMIZER, STEPS, TOLERANCE, Deviation, Matrix, Mismatch, farthest, together
from tests.parity.columns import COLUMNS, LOADS
from tests.parity.pool import Failed
from tests.parity.random_steps import trained, trained_by_hand
from tests.parity.rows import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"

Cell = tuple[str, str, str]
"""Row, column, load."""
RANDOM = [(row, kind) for row in ("vision_audio", "lora", "projector") for kind in ("ddp", "fsdp1", "fsdp2")]
"""Rows and kinds of data parallelism that are run for many random steps with the Trainer."""
BY_HAND = [(way, frozen) for frozen in (False, True) for way in ("ddp", "fsdp1", "fsdp2")]
"""Ways to wrap a model with torch alone, and whether all but the projectors is frozen."""
MANY = 200


def cells() -> Iterator[Cell]:
    """Yield all cells; what is refused is asked once for each row."""
    for row in ROWS:
        for column, spread in COLUMNS.items():
            for load in list(LOADS)[:1] if spread.refusal(row) else LOADS:
                yield row, column, load


def random_steps(matrix: Matrix, row: str, kind: str, steps: int = MANY) -> tuple[float, float]:
    """Return how far losses and weights of 2 processes are from one after random steps with the Trainer."""
    (alone,) = matrix.workers.run(1, trained, row, steps, {}, *matrix.places(), seconds=600)
    found = matrix.workers.run(2, trained, row, steps, {"data": {"kind": kind}}, *matrix.places(), seconds=600)
    return _ends(found, alone)


def by_hand(matrix: Matrix, way: str, frozen: bool, steps: int = MANY) -> tuple[float, float]:
    """Return the same for a loop without the Trainer."""
    (alone,) = matrix.workers.run(1, trained_by_hand, "alone", frozen, steps, seconds=600)
    return _ends(matrix.workers.run(2, trained_by_hand, way, frozen, steps, seconds=600), alone)


def _ends(found, alone) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    losses = max(abs(f - e) / e for f, e in zip(found[0][0], alone[0], strict=True))
    return losses, farthest(together([weights for _, weights in found]), alone[1])[0]


# ------------------------------------------------------------------------------------------------ all of it


def run_all(folder: Path, workers) -> tuple[str, list[str]]:  # type: ignore[no-untyped-def]
    """Run everything; return the page, and what failed."""
    matrix, start = Matrix(workers, folder), time.monotonic()
    found: dict[Cell, Deviation | str] = {}
    failures: list[str] = []
    for cell in cells():
        try:
            found[cell] = matrix.cell(*cell)
        except (Failed, Mismatch) as error:
            failures.append(f"{' / '.join(cell)}: {error}")
            found[cell] = "failed"
        failures += _judged(cell, found[cell])
        print(f"{time.monotonic() - start:5.0f} s  {' / '.join(cell):40} {_told(found[cell])}", flush=True)
    many: dict[str, tuple[float, float] | None] = {}
    for title, work in _long_runs(matrix):
        try:
            many[title] = work()
        except (Failed, Mismatch) as error:
            failures.append(f"{title}: {error}")
            many[title] = None
        print(f"{time.monotonic() - start:5.0f} s  {title}: {many[title]}", flush=True)
    return page(found, many), failures


def _long_runs(matrix: Matrix):  # type: ignore[no-untyped-def]
    for row, kind in RANDOM:
        yield f"Trainer, {ROWS[row].title}, {kind}", lambda row=row, kind=kind: random_steps(matrix, row, kind)
    for way, frozen in BY_HAND:
        what = "projectors trained, all else frozen" if frozen else "vision, audio and LLM trained"
        yield f"by hand, {what}, {way}", lambda way=way, frozen=frozen: by_hand(matrix, way, frozen)


def _judged(cell: Cell, result: Deviation | str) -> list[str]:
    said = COLUMNS[cell[1]].refusal(cell[0])
    if isinstance(result, Deviation):
        if said is not None:
            return [f"{' / '.join(cell)}: it works; the table says that it is refused"]
        return [f"{' / '.join(cell)}: {result}"] if not result.worst < TOLERANCE else []
    return [] if result == "failed" or (said is not None and said in result) else [f"{' / '.join(cell)}: {result}"]


def _told(result: Deviation | str) -> str:
    return result.splitlines()[-1].strip() if isinstance(result, str) else f"{result.worst:.0e}"


# ------------------------------------------------------------------------------------------------ the page


def page(found: dict[Cell, Deviation | str], many: dict[str, tuple[float, float] | None]) -> str:
    """Return the page."""
    deviations = [result for result in found.values() if isinstance(result, Deviation)]
    worst = {kind: max(getattr(one, kind) for one in deviations) for kind in ("loss", "gradients", "parameters")}
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    lines = [
        "# Parity",
        "",
        "<!-- Written by `make parity`; change tests/parity instead. -->",
        "",
        "Training on several processes must come to the same as training on one. This page shows that it does: each cell is",
        f"a model (row) trained for {STEPS} steps under one kind of parallelism (column), and again in one process on the",
        "same samples, through the same `Trainer`. Compared are",
        "",
        "- the loss of every step, the norm of its gradients, and what it has counted (samples, tokens, images, sounds);",
        "- **every** gradient of every step before clipping, and whether there is one at all: what is frozen, or what no",
        "  process had an item for, has none;",
        f"- **every** parameter after {STEPS} steps of AdamW with weight decay {OPTIMIZER['weight_decay']} and clipping at",
        f"  {OPTIMIZER['clip']};",
        "- that all processes have the same to the bit, where they should.",
        "",
        "The number in a cell is the largest deviation of anything compared: |a − b| / (|b| + "
        f"{FLOOR:g} × the largest |b|), where",
        "the largest is taken over all gradients of a step, or all parameters (of a loss: |a − b| / |b|). More than",
        f"**{TOLERANCE:g}** is a failure. All is computed in fp32 on the CPU, without dropout. The largest of all cells are",
        f"{worst['loss']:.0e} for losses, {worst['gradients']:.0e} for gradients and {worst['parameters']:.0e} for parameters.",
        "",
        f"AdamW's eps is {OPTIMIZER['eps']:g}. It divides a gradient by its own size; with the usual 1e-8, rounding in",
        "a gradient that is zero in truth (that of a key's bias in attention) would become a step like any other. No",
        "parameter is left out.",
        "",
    ]
    notes: dict[str, int] = {}
    for name, load in LOADS.items():
        lines += [f"## {load.title}", "", load.about, "", *_table(name, found, notes), ""]
    lines += [f"{number}. {note}" for note, number in notes.items()]
    lines += ["", *_many(many), "", "## Run it", "", "```sh", "make parity", "```", ""]
    lines += [
        f"This page was written with {versions}, Python {platform.python_version()}, gloo. `make test` runs some of the",
        "cells: every row and every column with every kind of batches. To add a column, add an entry to",
        "`tests/parity/columns.py`; to add a row, one to `tests/parity/rows.py`.",
        "",
    ]
    return "\n".join(lines)


_ZEROS = (
    "A trained parameter that the loss does not depend on has a gradient of zeros under fsdp1, and none in one process "
    "(here: CLIP's last norm, which only its pooled output goes through). With weight decay such a parameter shrinks, "
    "unless it is a bias or belongs to a norm."
)


def _table(load: str, found: dict[Cell, Deviation | str], notes: dict[str, int]) -> list[str]:
    columns = [name for name in COLUMNS if any((row, name, load) in found for row in ROWS)]
    heads = [f"{COLUMNS[name].title}{_mark(_ZEROS, notes) if COLUMNS[name].unused_are_zero else ''}" for name in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for row, described in ROWS.items():
        shown = [_shown(found.get((row, column, load)), column, row, notes) for column in columns]
        lines.append(f"| {described.title} | " + " | ".join(shown) + " |")
    return lines


def _shown(result: Deviation | str | None, column: str, row: str, notes: dict[str, int]) -> str:
    if isinstance(result, Deviation):
        return f"{result.worst:.0e}" if result.worst < TOLERANCE else f"**{result.worst:.0e}**"
    said = COLUMNS[column].refusal(row)
    if said is not None and result is not None:
        return f"no{_mark(f'Refused: “{said}”.', notes)}"
    return "" if result is None else "**failed**"


def _mark(note: str, notes: dict[str, int]) -> str:
    return f" ({notes.setdefault(note, len(notes) + 1)})"


def _many(many: dict[str, tuple[float, float] | None]) -> list[str]:
    lines = [
        f"## {MANY} random steps",
        "",
        "Two processes, samples drawn at random: text alone, up to three images, sounds, and (with the Trainer) many broken",
        "ones, so that a process often has no image, or not a single sample. Nothing hangs, and at the end everything is",
        "where one process is: the largest deviation of a loss, and of a weight. By hand: a loop without the Trainer,",
        "`model.keep_encoders_running(processor.stand_ins())` and torch's own wrapping, with SGD.",
        "",
        "| | losses | weights |",
        "|---|---|---|",
    ]
    for title, result in many.items():
        lines.append(f"| {title} | " + ("**failed** | |" if result is None else f"{result[0]:.0e} | {result[1]:.0e} |"))
    return lines
