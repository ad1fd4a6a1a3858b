"""Some cells of the matrix: every row with every load, every column. `make parity` runs all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cornstarch.verify.twin_trial import TOLERANCE
from tests.parity.cell import DOUBLED_TOLERANCE, Deviation, Matrix, Mismatch, Outcome, compare, join_outcomes
from tests.parity.columns import COLUMNS, LOADS
from tests.parity.page import cells
from tests.parity.rows import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
# What has a way through the graph that depends on the batch, and so could bring processes out of step.
DELICATE = [(row, column, "mixed") for row in ("projector", "lora") for column in ("fsdp1", "fsdp2", "hsdp")]
# What flows back through a head that is cut and frozen.
DELICATE += [("projector", "tp_vocabulary", "plain")]
# What meets every load, as the kinds of data parallelism do. What is put together of these has one, in turns.
SIMPLE = ("ring", "pp", "pp_zero_bubble", "pp_interleaved", "pp_dp", "own")


def some() -> list[tuple[str, str, str]]:
    """Return cells in which every row meets every load, and every column one; the simple columns every load, too."""
    working = [name for name, column in COLUMNS.items() if column.refused is None]
    chosen = [*DELICATE]
    for place, name in enumerate(working):
        column = COLUMNS[name]
        rows = [row for row in ROWS if column.fits(ROWS[row]) and not column.refusal(row)]
        some = [(rows[(place + 3 * turn) % len(rows)], load) for turn, load in enumerate(LOADS)]
        meeting = [(row, name, load) for row, load in some if load in column.loads(row)]
        is_simple = name in SIMPLE or not column.parallel(ROWS[rows[0]])["modules"]
        first = 0 if column.is_cut else place % len(meeting)
        chosen += meeting if is_simple else meeting[first : first + 1]
    met = {(row, load) for row, _, load in chosen}
    chosen += [(row, "fsdp2", load) for row in ROWS for load in LOADS if (row, load) not in met]
    return list(dict.fromkeys(chosen))


@pytest.mark.parametrize(("row", "column", "load"), some())
def test_several_processes_do_what_one_does(matrix: Matrix, row: str, column: str, load: str) -> None:
    deviation = matrix.cell(row, column, load)
    assert isinstance(deviation, Deviation), deviation
    assert deviation.is_rounding, deviation


@pytest.mark.parametrize(
    ("row", "column"), [("vision_audio", name) for name, column in COLUMNS.items() if column.refusal("vision_audio")]
)
def test_what_cannot_be_done_is_refused(matrix: Matrix, row: str, column: str) -> None:
    answer = matrix.cell(row, column, "plain")
    said = COLUMNS[column].refusal(row)
    assert said is not None and isinstance(answer, str) and said in answer


def test_every_row_and_column_is_among_them() -> None:
    chosen = some()
    assert {row for row, _, _ in chosen} == set(ROWS)
    assert {column for _, column, _ in chosen} == {name for name, column in COLUMNS.items() if column.refused is None}
    assert set(chosen) <= set(cells())


@pytest.mark.skipif(not PAGE.exists(), reason="`make parity` has not written the page yet")
def test_the_page_has_every_row_and_column() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for title in [*(row.title for row in ROWS.values()), *(c.title for c in COLUMNS.values())]:
        assert f"| {title} |" in text, title
    for column in COLUMNS.values():
        assert column.refused is None or column.refused in text


# ------------------------------------------------------------------------------------------------ the comparison


def outcome(**changes: object) -> Outcome:
    weights = {"a": np.array([1.0, 2.0], dtype=np.float32), "b": np.array([1e-3], dtype=np.float32)}
    values = {
        "losses": [2.0], "norms": [1.0], "totals": [{"tokens": 3}],
        "gradients": [{"a": np.array([0.5, 0.0], dtype=np.float32), "b": None}], "parameters": weights,
    }  # fmt: skip
    return Outcome(**{**values, **changes})  # type: ignore[arg-type]


def test_equal_is_zero_and_a_little_is_little() -> None:
    assert compare(outcome(), outcome()).worst == 0
    near = outcome(losses=[2.0 + 1e-6], parameters={"a": np.array([1.0, 2.0 + 2e-6]), "b": np.array([1e-3])})
    found = compare(near, outcome())
    assert found.loss == pytest.approx(5e-7) and found.parameters == pytest.approx(1e-6, rel=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("losses", [2.001]),
        ("norms", [1.001]),
        ("gradients", [{"a": np.array([0.5, 1e-5]), "b": None}]),
        ("gradients", [{"a": np.array([0.4999, 0.0]), "b": None}]),
        ("parameters", {"a": np.array([1.0, 2.001]), "b": np.array([1e-3])}),
        ("parameters", {"a": np.array([1.0, 2.0]), "b": np.array([1.1e-3])}),
    ],
)
def test_what_is_off_is_seen(name: str, value: object) -> None:
    assert compare(outcome(**{name: value}), outcome()).worst > TOLERANCE


def test_a_gradient_that_is_there_on_one_side_only_is_no_rounding() -> None:
    with pytest.raises(Mismatch, match="where one process has none"):
        compare(outcome(gradients=[{"a": np.array([0.5, 0.0]), "b": np.zeros(1)}]), outcome())
    with pytest.raises(Mismatch, match="none where it has one"):
        compare(outcome(gradients=[{"a": None, "b": None}]), outcome())
    with pytest.raises(Mismatch, match="only on one side"):
        compare(outcome(parameters={}), outcome())
    with pytest.raises(Mismatch, match="counted"):
        compare(outcome(totals=[{"tokens": 4}]), outcome())


def test_zeros_stand_for_none_only_where_a_column_says_so() -> None:
    a = outcome().gradients[0]["a"]
    zeros, something = outcome(gradients=[{"a": a, "b": np.zeros(1)}]), outcome(gradients=[{"a": a, "b": np.ones(1)}])
    assert compare(zeros, outcome(), unused_are_zero=True).zeros
    assert not compare(outcome(), outcome(), unused_are_zero=True).zeros
    with pytest.raises(Mismatch):
        compare(something, outcome(), unused_are_zero=True)


def test_processes_must_agree_to_the_bit() -> None:
    assert join_outcomes([outcome(), outcome()]).losses == [2.0]
    with pytest.raises(Mismatch, match="a differs"):
        join_outcomes([outcome(), outcome(gradients=[{"a": np.array([0.5, 1e-12], dtype=np.float32), "b": None}])])
    with pytest.raises(Mismatch, match="do not agree"):
        join_outcomes([outcome(), outcome(losses=[2.0 + 1e-12])])


def test_a_second_look_in_float64_tells_rounding_from_an_error() -> None:
    rounded, off = compare(outcome(losses=[2.001]), outcome()), 2 * TOLERANCE
    assert not rounded.is_rounding
    assert replace(rounded, doubled=DOUBLED_TOLERANCE / 10).is_rounding
    assert not replace(rounded, doubled=off).is_rounding


def test_cells_that_round_much_are_equal_in_float64(matrix: Matrix) -> None:
    deviation = matrix.cell("lora", "tp", "plain")  # in fp32 it is off by about as much as one process is from float64
    assert isinstance(deviation, Deviation) and deviation.is_rounding, deviation
