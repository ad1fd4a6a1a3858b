"""Published runs on many GPUs: their layouts can be run, and predictions stay near what was published."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.pipeline import measured


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Return the benchmark."""
    return measured.script("published_clusters")


def test_rows_are_whole(script: ModuleType) -> None:
    rows = script.ROWS
    assert len({row.name for row in rows}) == len(rows)
    assert sum(row.looked_at for row in rows) == 31 and sum(not row.looked_at for row in rows) == 134
    for row in rows:
        assert row.replicas * row.tp * row.cp * row.stages == row.devices, row.name
        assert row.batch % (row.replicas * row.microbatch) == 0, row.name
        assert row.source and row.layout and row.published > 0, row.name


# One of each source that was looked at; fewer layers would be other runs.
@pytest.mark.parametrize("name", ["MPT-7B, 8 × A100-80", "MPT-1B, 512 × H100", "Llama 8B, FSDP 8 × TP 8"])
def test_predictions_stay_near_published_figures(script: ModuleType, name: str) -> None:
    (row,) = [row for row in script.ROWS if row.name == name]
    found = script.predict_row(row)
    assert abs(found.error) < 0.3 and found.prediction.fits
    cells = script.format_row(found).split(" | ")
    assert f"{found.error:+.0%}" in cells and f"{row.published:,g} {row.unit}" in cells
