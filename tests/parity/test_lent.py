"""Replicas that lend images and sounds to one another end where one process ends."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from cornstarch.train.witness import TOLERANCE
from tests.parity.cell import Matrix, Outcome, compared, joined, made, outcome_of
from tests.parity.columns import COLUMNS
from tests.parity.rows import row_of
from tests.parity.samples import mixed


def run(row: str, column: str | None, tokenizer: str, folder: str) -> tuple[Outcome, list[int]]:
    """Do three steps of mixed samples; return what came out, and how many images each call of the encoder had."""
    parallel = {} if column is None else COLUMNS[column].parallel(row_of(row))
    loop = {"steps": 3, "batch_size": 16, "accumulation": 2}
    data = {"split_images": column is not None}
    trainer = made(row, mixed(row_of(row).make), loop, parallel, tokenizer, folder, data=data)
    seen: list[int] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(len(kwargs["pixel_values"]))

    model: Any = trainer.model
    model.vision_encoder.module.register_forward_pre_hook(note, with_kwargs=True)
    return outcome_of(trainer), seen


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("vision_audio", "ddp"),
        ("vision_audio", "zero1"),
        ("vision_audio", "fsdp2"),
        ("vision_audio", "dp_tp"),
        ("frozen_vision", "ddp"),
    ],
)
def test_lent_items(matrix: Matrix, row: str, column: str) -> None:
    spread = COLUMNS[column]
    if spread.is_cut:  # torch remembers meshes that are equal to those of an earlier job, whose groups have ended
        matrix.workers.close()
    found = matrix.workers.run(spread.ranks(row_of(row)), run, row, column, *matrix.places())
    alone, _ = matrix.remembered((row, "lent"), run, row, None, *matrix.places())
    off = compared(joined([outcome for outcome, _ in found]), alone, spread.unused_are_zero)
    assert off.worst < TOLERANCE, off
    # In the first portion the first replica has none of 4 images, in the second all 2 of them.
    assert all(seen[:2] == [2, 1] for _, seen in found), [seen for _, seen in found]
