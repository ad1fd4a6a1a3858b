"""What docs/schedules.md shows and claims is what the code does."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from cornstarch.plan.simulate import as_text, simulate
from cornstarch.schedule import POLICIES, StageGraph, make_schedule

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)


def test_every_picture_of_the_page_is_drawn_by_the_code() -> None:
    chain = StageGraph.chain(3)
    shown = [
        (chain, "1f1b"),
        (chain, "gpipe"),
        (StageGraph.chain(2, virtual_stages=2), "interleaved"),
        (chain, "zero_bubble"),
        (StageGraph.branches({"vision": 2, "audio": 1}, language_model=2), "1f1b"),
        (StageGraph.branches({"vision": 1}, 2, trains={"vision": False}), "1f1b"),
    ]
    pictures = [as_text(simulate(make_schedule(graph, 4, policy))) for graph, policy in shown]
    assert [*pictures, str(make_schedule(StageGraph.chain(2), 2).with_transfers())] == BLOCKS
    assert all(f"## {policy}\n" in PAGE for policy in POLICIES)


@pytest.mark.parametrize(("stages", "many", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 12, 3)])
def test_the_table_of_waits(stages: int, many: int, virtual: int) -> None:
    one = Fraction(1)
    chain = StageGraph.chain(stages, costs=(one, one, one))  # type: ignore[arg-type]
    parts = StageGraph.chain(stages, virtual_stages=virtual, costs=(one, one, one))  # type: ignore[arg-type]
    expected = {
        "naive": Fraction(stages - 1, stages),
        "gpipe": Fraction(stages - 1, many + stages - 1),
        "1f1b": Fraction(stages - 1, many + stages - 1),
        "interleaved": Fraction(stages - 1, virtual * many + stages - 1),
        "zero_bubble": Fraction(stages - 1, 3 * many + stages - 1),
    }
    for policy, bubble in expected.items():
        graph = parts if policy == "interleaved" else chain
        assert simulate(make_schedule(graph, many, policy)).bubble == bubble, policy
