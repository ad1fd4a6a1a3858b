"""The migration guide does in two processes what it does in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs_hub import lay_out
from tests.parallel.guide import lay_links, run_guide
from tests.parity.pool import Pool


def test_the_guide_gives_the_same_numbers_in_one_process_and_in_two(workers: Pool, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    lay_out(hub)
    said = {}
    for ranks in (1, 2):
        lay_links(hub, tmp_path / str(ranks))
        said[ranks] = workers.run(ranks, run_guide, str(tmp_path / str(ranks)))
    (alone,), (first, second) = said[1], said[2]
    assert first == second
    assert first.losses[0][1] < first.losses[0][0]
    for found, expected in zip(first.losses, alone.losses, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert first.norms == pytest.approx(alone.norms, rel=1e-4)
    for kind, norms in alone.trained.items():
        assert first.trained[kind] == pytest.approx(norms, rel=1e-4)
