"""Some cells of the GPU's part of the matrix on a GPU; and two in bf16 on the CPU, by the same code."""

from __future__ import annotations

import pytest

from tests.parity.cell import Deviation, Matrix, Mismatch, Outcome, Place, compare, join_outcomes, relative_norm
from tests.parity.columns import COLUMNS, LOADS
from tests.parity.on_device import BOUNDS, LOAD, PARTS, PRECISIONS, WAYS, page, place_of, problem
from tests.parity.on_device import ROWS as ROWS_THERE
from tests.parity.pool import Pool
from tests.parity.rows import row_of
from tests.parity.test_matrix import outcome

CELLS = [
    ("llm", "pp"), ("frozen_vision", "tp"), ("projector", "ddp"), ("lora", "fsdp2"), ("packed", "ring"),
    ("packed", "pp_gpipe"), ("long", "gather"), ("long", "ulysses"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("row", "column"), CELLS)
def test_processes_that_share_a_gpu_do_what_one_does(
    on_gpu: Pool, tmp_path_factory: pytest.TempPathFactory, row: str, column: str, precision: str
) -> None:
    matrix = Matrix(on_gpu, tmp_path_factory.mktemp("matrix"), place_of("cuda", precision))
    assert problem(matrix.cell(row, column, LOAD), precision) is None


@pytest.mark.parametrize(("row", "column"), [("frozen_vision", "fsdp2"), ("packed", "ring")])
def test_processes_do_what_one_does_in_bf16(
    workers: Pool, tmp_path_factory: pytest.TempPathFactory, row: str, column: str
) -> None:
    found = Matrix(workers, tmp_path_factory.mktemp("matrix"), Place(precision="bf16")).cell(row, column, LOAD)
    assert problem(found, "bf16") is None
    assert isinstance(found, Deviation) and found.gradients > 1e-4  # it was computed in bf16


def test_the_part_has_what_a_gpu_does_differently() -> None:
    assert {"tp", "ring", "gather", "ulysses", "pp", "pp_gpipe", "fsdp2", "ddp"} == set(WAYS)
    assert len(PARTS) == len(ROWS_THERE) * len(PRECISIONS)
    for row in ROWS_THERE:
        for way in WAYS:
            assert COLUMNS[way].fits(row_of(row)) and COLUMNS[way].refusal(row) is None
            assert row == "long" or LOAD in COLUMNS[way].loads(row)
    assert LOAD in LOADS


# ------------------------------------------------------------------------------------------------ the comparison


def off(share: float, **more: object) -> Outcome:
    """Return an outcome whose first gradient is off by a share of its size."""
    gradient = outcome().gradients[0]["a"]
    assert gradient is not None
    return outcome(gradients=[{"a": gradient * (1 + share), "b": None}], **more)


def test_in_bf16_gradients_are_compared_by_their_norm() -> None:
    found = compare(off(0.01), outcome(), measure=relative_norm)
    assert found.gradients == pytest.approx(0.01, rel=1e-3)
    assert problem(found, "bf16") is None and problem(found, "fp32") is not None
    assert "gradients" in str(problem(compare(off(0.1), outcome(), measure=relative_norm), "bf16"))
    assert "loss" in str(problem(compare(outcome(losses=[2.1]), outcome(), measure=relative_norm), "bf16"))


def test_how_far_processes_are_from_one_another_is_measured() -> None:
    whole = join_outcomes([outcome(), off(0.01)], relative_norm)
    assert whole.spread == pytest.approx(0.01, rel=1e-3)
    assert compare(whole, outcome(), measure=relative_norm).processes == whole.spread
    assert "processes" in str(problem(compare(join_outcomes([outcome(), off(0.2)], relative_norm), outcome()), "bf16"))
    with pytest.raises(Mismatch, match="do not agree"):
        join_outcomes([outcome(), outcome(totals=[{"tokens": 4}])], relative_norm)


def test_the_page_says_what_failed() -> None:
    good = Deviation(1e-6, 2e-6, 3e-6, "nothing")
    bad = Deviation(1e-6, 2 * BOUNDS["fp32"].gradients, 0.0, "nothing")
    found = {("llm", "tp", "fp32"): good, ("llm", "ddp", "fp32"): bad, ("llm", "tp", "bf16"): "it broke"}
    text = page(found, "cpu", "the command", 60.0)
    assert "3 cells: 1 passed, 2 failed" in text and "`the command`" in text
    assert "| 1e-06 2e-06 3e-06; 0 |" in text and f"**1e-06 {bad.gradients:.0e} 0; 0**" in text and "**failed**" in text
