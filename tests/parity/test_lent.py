"""Replicas that lend images and sounds to one another end where one process ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

from cornstarch.verify.twin_trial import TOLERANCE
from tests.parity.cell import EXACT, Deviation, Matrix, Outcome, Place, make_trainer, outcome_of
from tests.parity.columns import COLUMNS
from tests.parity.on_device import PRECISIONS, problem
from tests.parity.pool import Pool
from tests.parity.rows import row_of
from tests.parity.samples import mixed


def run(row: str, column: str | None, tokenizer: str, folder: str, place: Place = EXACT) -> tuple[Outcome, list[int]]:
    """Do three steps of mixed samples; return what came out, and how many images each call of the encoder had."""
    parallel = {} if column is None else COLUMNS[column].parallel(row_of(row))
    loop = {"steps": 3, "batch_size": 16, "accumulation": 2}
    data = {"balance_encoders": column is not None}
    trainer = make_trainer(row, mixed(row_of(row).make), loop, parallel, tokenizer, folder, place=place, data=data)
    seen: list[int] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(len(kwargs["pixel_values"]))

    model: Any = trainer.model
    model.vision_encoder.module.register_forward_pre_hook(note, with_kwargs=True)
    return outcome_of(trainer), seen


def lent(matrix: Matrix, row: str, column: str) -> Deviation:
    """Return how far replicas that lend are from one process that has all images."""
    spread = COLUMNS[column]
    if spread.is_cut:  # torch remembers meshes that are equal to those of an earlier job, whose groups have ended
        matrix.workers.renew()
    work = partial(run, place=matrix.place)
    found = matrix.workers.run(spread.ranks(row_of(row)), work, row, column, *matrix.places())
    alone, _ = matrix.remembered((row, "lent"), run, row, None, *matrix.places(), matrix.place)
    # In the first microbatch the first replica has none of 4 images, in the second all 2 of them.
    assert all(seen[:2] == [2, 1] for _, seen in found), [seen for _, seen in found]
    return matrix.deviation([outcome for outcome, _ in found], alone, spread.unused_are_zero)


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
    off = lent(matrix, row, column)
    assert off.worst < TOLERANCE, off


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("row", "column"), [("vision_audio", "ddp"), ("vision_audio", "fsdp2"), ("frozen_vision", "ddp")]
)
def test_lent_items_on_a_gpu(
    on_gpu: Pool, tmp_path_factory: pytest.TempPathFactory, row: str, column: str, precision: str
) -> None:
    matrix = Matrix(on_gpu, tmp_path_factory.mktemp("matrix"), Place("cuda:0", precision))
    assert problem(lent(matrix, row, column), precision) is None
