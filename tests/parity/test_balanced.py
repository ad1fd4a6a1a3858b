"""Samples dealt out by cost: several processes end where one process ends that takes them as they come."""

from __future__ import annotations

from typing import Any

import pytest

from cornstarch.data.loader import StepBatch
from cornstarch.metrics.metrics import StepResult
from cornstarch.verify.twin_trial import TOLERANCE
from tests.parity.cell import Matrix, Outcome, compare, join_outcomes, make_trainer, outcome_of
from tests.parity.columns import COLUMNS
from tests.parity.rows import row_of
from tests.parity.samples import mixed


def run(row: str, column: str | None, packing: bool, tokenizer: str, folder: str) -> tuple[Outcome, list[list[int]]]:
    """Do three steps of mixed samples; return what came out, and the tokens of this process's microbatches."""
    parallel = {} if column is None else COLUMNS[column].parallel(row_of(row))
    data: dict[str, Any] = {"packing": packing, "balance": "off" if column is None else "cost"}
    if packing:
        data |= {"max_length": 64, "tokens_per_step": 8 * 64}
    loop = {"steps": 3, "batch_size": 16, "accumulation": 2}
    trainer = make_trainer(row, mixed(row_of(row).make), loop, parallel, tokenizer, folder, data=data)
    tokens: list[list[int]] = []
    step = trainer.step

    def noted(batch: StepBatch) -> StepResult:
        tokens.append([microbatch.tokens for microbatch in batch.microbatches])
        return step(batch)

    trainer.step = noted  # type: ignore[method-assign]
    return outcome_of(trainer), tokens


@pytest.mark.parametrize(
    ("column", "packing"),
    [("ddp", False), ("ddp", True), ("fsdp2", True), ("zero1", False), ("dp_tp", False), ("pp_dp", True)],
)
def test_balanced_samples(matrix: Matrix, column: str, packing: bool) -> None:
    row = "vision_audio"
    spread = COLUMNS[column]
    if spread.is_cut:  # torch remembers meshes that are equal to those of an earlier job, whose groups have ended
        matrix.workers.renew()
    found = matrix.workers.run(spread.ranks(row_of(row)), run, row, column, packing, *matrix.places())
    alone, _ = matrix.remembered((row, packing), run, row, None, packing, *matrix.places())
    off = compare(join_outcomes([outcome for outcome, _ in found]), alone, spread.unused_are_zero)
    assert off.worst < TOLERANCE, off
    # And they are dealt out otherwise than as they come, where the first process has texts and the last has images.
    if packing and column == "ddp":
        (first, second), (third, fourth) = found[0][1][0], found[1][1][0]
        assert max(first, second, third, fourth) < 1.2 * min(first, second, third, fourth)
