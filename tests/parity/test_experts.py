"""Experts shared out over ranks: losses, every gradient and every weight are those of one process."""

from __future__ import annotations

import pytest

from tests.parity.cell import Matrix
from tests.parity.experts import BESIDE, LAYOUTS, OTHERS, ROUNDING, build_section, list_cells, run_cell
from tests.parity.page import PAGE
from tests.parity.rows import EXPERTS


def check(matrix: Matrix, row: str, layout: str) -> None:
    deviation = run_cell(matrix, row, layout)
    assert deviation.is_rounding and (deviation.doubled or 0.0) < ROUNDING, deviation


@pytest.mark.parametrize("family", EXPERTS)
def test_families_over_four_ranks(matrix: Matrix, family: str) -> None:
    check(matrix, family, "ep2_dp4")


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_layouts(matrix: Matrix, layout: str) -> None:
    check(matrix, OTHERS.get(layout, "mixtral"), layout)


@pytest.mark.parametrize(("row", "layout"), BESIDE.items())
def test_experts_beside_encoders(matrix: Matrix, row: str, layout: str) -> None:
    check(matrix, row, layout)


def test_the_page_has_every_cell() -> None:
    page = PAGE.read_text(encoding="utf-8")
    head, *_, last = build_section(dict.fromkeys(list_cells(), "1e-05")).split("\n\n")[1].split("\n")
    assert head in page
    rows = page[page.index(head) :].split("\n\n")[0].split("\n")
    figures = [cell for row in rows[2:] for cell in row.split("|")[2:-1] if cell.strip()]
    assert len(figures) == len(set(list_cells())) and not any("**" in one for one in figures)
    assert rows[-1].split("|")[1] == last.split("|")[1]
