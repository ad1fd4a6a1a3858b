"""Random numbers of a run whose matrices are cut: what is dropped is the same after a stop, and in all of a group."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from rich.console import Console

from cornstarch.parallel import distributed
from cornstarch.train import Trainer
from tests.parity.pool import pool
from tests.trainer.tiny import tiny_config

TP = "parallel.modules.model.tp=2"


def train_run(folder: str, output: str, until: int, *overrides: str) -> tuple[list[float], bool]:
    """Train to a step and save; return the losses of all processes, and whether they draw the same numbers now."""
    config = tiny_config(Path(folder), f"output={output}", *overrides)
    trainer = Trainer(config, console=Console(file=io.StringIO()), allow_changes=True)
    trainer.setup()
    losses: list[float] = []
    if trainer.position.step < until:
        for batch in trainer.batches():
            losses.append(float(trainer.step(batch).loss))
            if trainer.position.step == until:
                break
    trainer.save()
    drawn = distributed.all_gather_json([*torch.rand(2).tolist(), losses])
    return losses, all(one == drawn[0] for one in drawn)


def run(*arguments: object) -> list[tuple[list[float], bool]]:
    pool().renew()  # torch remembers meshes of an earlier job
    return pool().run(2, train_run, *arguments)


def test_a_run_with_dropout_resumes_bit_equal(tmp_path: Path) -> None:
    tiny_config(tmp_path)  # writes the data
    place = str(tmp_path)
    whole = run(place, str(tmp_path / "whole"), 4, TP)
    first, second = (run(place, str(tmp_path / "parts"), until, TP) for until in (2, 4))
    for alone, one, two in zip(whole, first, second, strict=True):
        assert alone[0] == one[0] + two[0]
        assert alone[1] and one[1] and two[1]  # both have the same loss, and draw the same numbers


def test_tensor_parallel_ranks_draw_the_same_numbers_after_any_layout(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    before = run(str(tmp_path), str(tmp_path / "run"), 2)
    assert not any(alike for _, alike in before)  # replicas draw numbers of their own
    after = run(str(tmp_path), str(tmp_path / "run"), 4, TP)
    assert all(alike for _, alike in after)
