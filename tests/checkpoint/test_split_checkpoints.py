"""Checkpoints of models that are cut inside their layers and along their tokens, loaded in other layouts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cornstarch.checkpoint import CheckpointStore, state_hash
from tests.models import local_processors
from tests.parity.cell import make_trainer
from tests.parity.pool import pool
from tests.parity.rows import ROWS
from tests.parity.samples import alike

STEPS, BATCH = 4, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp 2": (2, {"modules": {"model": {"tp": 2}}}),
    "cp 2": (2, {"modules": {"model": {"cp": 2}}}),
    "zero3 2": (2, {"data": {"kind": "zero3"}}),
    "pp 2": (2, {"modules": {"model": {"stages": 2}}}),
    "pp 2 x dp 2": (4, {"modules": {"model": {"stages": 2}}}),
    "vision, pp 2": (3, {"modules": {"vision": {}, "language_model": {"stages": 2}}}),
    "vision inside, pp 2 x zero2": (
        4,
        {
            "data": {"kind": "zero2"},
            "modules": {"vision": {}, "language_model": {"stages": 2}},
            "ranks": "first_stage",
        },
    ),
    "pp 2, tp 2, vocabulary": (
        4,
        {
            "modules": {"vision": {"tp": 2}, "language_model": {"stages": 2, "tp": 2, "tp_vocabulary": True}},
            "ranks": "first_stage",
        },
    ),
    "zero3 2, tp 2": (4, {"data": {"kind": "zero3"}, "modules": {"model": {"tp": 2}}}),
    "ep 2": (2, {"modules": {"model": {"ep": 2}}}),
    "ep 2, zero3 4": (4, {"data": {"kind": "zero3"}, "modules": {"model": {"ep": 2}}}),
    "ep 2, zero1 4": (4, {"data": {"kind": "zero1"}, "modules": {"model": {"ep": 2}}}),
    "ep 4": (4, {"modules": {"model": {"ep": 4}}}),
    "ep 2, tp 2": (4, {"data": {"kind": "fsdp2"}, "modules": {"model": {"ep": 2, "tp": 2}}}),
    "pp 2, ep 2": (4, {"modules": {"model": {"stages": 2, "ep": 2}}}),
}
PAIRS = [
    ("fused", "tp 2", "one process"),
    ("fused", "one process", "zero3 2, tp 2"),
    ("fused", "zero3 2, tp 2", "tp 2"),
    ("fused", "zero3 2, tp 2", "cp 2"),
    ("vision_audio", "cp 2", "tp 2"),
    ("vision_audio", "tp 2", "zero3 2"),
    ("lora", "zero3 2, tp 2", "one process"),
    ("fused", "pp 2", "tp 2"),
    ("fused", "one process", "pp 2 x dp 2"),
    ("tied", "vision, pp 2", "one process"),
    ("tied", "zero3 2", "vision, pp 2"),
    ("tied", "vision, pp 2", "vision inside, pp 2 x zero2"),
    ("tied", "pp 2, tp 2, vocabulary", "one process"),
    ("lora", "vision inside, pp 2 x zero2", "vision, pp 2"),
    ("moe", "ep 2", "one process"),
    ("moe", "one process", "ep 4"),
    ("moe", "ep 2", "ep 4"),
    ("moe", "ep 4", "ep 2, zero3 4"),
    ("moe", "ep 2, zero3 4", "ep 2, zero1 4"),
    ("moe", "ep 2, zero1 4", "pp 2, ep 2"),
    ("moe", "ep 2, tp 2", "ep 4"),
    ("moe", "ep 2", "ep 2, tp 2"),
]


def save_run(row: str, parallel: Mapping[str, Any], steps: int, tokenizer: str, folder: str) -> list[float]:
    """Train to a step, from the checkpoint that is there, save, and return this process's losses."""
    samples = alike(ROWS[row].make, STEPS * BATCH)
    loop = {"steps": STEPS, "batch_size": BATCH, "ema": 0.5}
    trainer = make_trainer(row, samples, loop, parallel, tokenizer, folder, allow_changes=True)
    trainer.watching = False
    losses = []
    if trainer.position.step < steps:
        for batch in trainer.batches():
            losses.append(float(trainer.step(batch).loss))
            if trainer.position.step == steps:
                break
    trainer.save()
    return losses


def hash_of(folder: Path) -> str:
    newest = CheckpointStore(folder / "checkpoints", keep=9).latest()
    assert newest is not None
    with newest.tensors() as tensors:
        return state_hash(tensors)


def run(row: str, layout: str, steps: int, folder: Path) -> list[list[float]]:
    """Train to a step in a layout, from the checkpoint that is there; return the losses of each process."""
    pool().renew()  # torch remembers meshes of an earlier job
    ranks, parallel = LAYOUTS[layout]
    return pool().run(ranks, save_run, row, parallel, steps, str(folder.parent / "tokenizer"), str(folder))


Begun = Callable[[str, str, int], tuple[Path, list[list[float]]]]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """Return a function that trains to a step from the start, once for each layout; it returns the folder and losses.

    The folder is everybody's: whoever goes on from it needs a copy.
    """
    home = tmp_path_factory.mktemp("begun")
    local_processors.tokenizer().save_pretrained(home / "tokenizer")

    @cache
    def begin(row: str, layout: str, steps: int) -> tuple[Path, list[list[float]]]:
        folder = home / f"{row}, {layout}, {steps}"
        return folder, run(row, layout, steps, folder)

    return begin


@pytest.mark.parametrize(("row", "saving", "loading"), PAIRS)
def test_any_layout_loads_any_other(row: str, saving: str, loading: str, begun: Begun, tmp_path: Path) -> None:
    first, _ = begun(row, saving, 2)
    second = tmp_path / "second"
    shutil.copytree(first, second)
    shutil.copytree(first.parent / "tokenizer", tmp_path / "tokenizer")
    run(row, loading, 2, second)  # loads, and saves what it has loaded
    assert hash_of(second) == hash_of(first)
    found = run(row, loading, STEPS, second)
    _, (expected,) = begun(row, "one process", STEPS)
    cut = sum(loss[-1] for loss in found) / (2 if "tp" in loading else 1)
    assert cut == pytest.approx(expected[-1], rel=1e-4)
