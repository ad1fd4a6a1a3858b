"""ZeRO-1 beside every other axis at once, on more processes than the matrix has."""

from __future__ import annotations

import pytest

from tests.parity.cell import Deviation, Matrix
from tests.parity.columns import COLUMNS, Column

EIGHT = Column(
    "zero1 2 × pp 2 × tp 2", 2, {"kind": "zero1"}, module={"tp": 2}, last={"stages": 2}, ranks_of="first_stage"
)


@pytest.mark.parametrize("load", ["accumulation", "mixed"])
def test_zero1_with_stages_and_tp_equals_one_process(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    monkeypatch.setitem(COLUMNS, "zero1_pp_tp", EIGHT)  # embeddings are tied over the stages, gradients are clipped
    deviation = matrix.cell("tied", "zero1_pp_tp", load)
    assert isinstance(deviation, Deviation) and deviation.is_rounding, deviation
