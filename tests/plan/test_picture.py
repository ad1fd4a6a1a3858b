"""Pictures: every rank is in them once, large worlds stay short, and nothing in a name can break the SVG."""

from __future__ import annotations

import re
import time
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from cornstarch.plan import DataPlan, Layout, ModulePlan, Plan
from cornstarch.plan.picture import MOST_NODES, MOST_ROWS, RankRow, as_svg, as_text, count_shown_replicas, rows
from tests.plan import brute_force
from tests.plan.test_layout import EXAMPLE

SVG = "{http://www.w3.org/2000/svg}"


def test_text_of_the_example() -> None:
    plan = Plan(EXAMPLE.modules, EXAMPLE.data, schedule="zero_bubble")
    text = as_text(Layout.of(plan, 54))
    assert text.startswith(
        "54 ranks on 7 nodes of 8: 2 replicas of 27\n"
        "\n"
        "module          ranks  pp  dp  cp  tp  data parallelism\n"
        "vision              4   1   2   1   2  fsdp2 over 2\n"
        "audio               2   1   2   1   1  fsdp2 over 2\n"
        "language_model     48   3   2   2   4  fsdp2 over 4\n"
        "\n"
        "node  ranks  module          stage  dp   cp  tp\n"
        "0     0–3    language_model  0      0    0   0–3\n"
        "      4–7    language_model  0      0    1   0–3\n"
        "1     8–11   language_model  1      0    0   0–3\n"
    )
    assert (
        "6     48–49  vision          0      0    0   0–1\n"
        "      50–51  vision          0      1    0   0–1\n"
        "      52–53  audio           0      0–1  0   0\n"
        "\n"
        "This layout can be planned, but not run yet:\n"
    ) in text


def test_text_of_data_parallelism_alone() -> None:
    plan = Plan({"vision": ModulePlan(), "language_model": ModulePlan()}, DataPlan("hsdp", 2))
    assert as_text(Layout.of(plan, 12, 8)) == (
        "12 ranks on 2 nodes of 8: 12 replicas of 1\n"
        "\n"
        "module          ranks  pp  dp  cp  tp  data parallelism\n"
        "vision             12   1  12   1   1  hsdp, 2 × 6\n"
        "language_model     12   1  12   1   1  hsdp, 2 × 6\n"
        "\n"
        "node  ranks  module                   stage  dp    cp  tp\n"
        "0     0–7    vision + language_model  0      0–7   0   0\n"
        "1     8–11   vision + language_model  0      8–11  0   0"
    )


def covered(row: RankRow) -> int:
    """Return how many places the ranges of a row span."""
    product = 1
    for low, high in (row.stage, row.dp, row.cp, row.tp):
        product *= high - low + 1
    return product


@settings(max_examples=60)
@given(brute_force.layouts())
def test_every_rank_is_in_one_row(layout: Layout) -> None:
    found = rows(layout, layout.dp)
    ranks = [rank for row in found for rank in range(row.ranks[0], row.ranks[1] + 1)]
    assert ranks == list(range(layout.world))
    for row in found:
        assert covered(row) == row.ranks[1] - row.ranks[0] + 1
        for rank, end in zip(row.ranks, (0, 1), strict=True):
            place = layout.place(rank)
            assert place.modules == row.modules
            assert (place.stage, place.dp, place.cp, place.tp) == tuple(
                axis[end] for axis in (row.stage, row.dp, row.cp, row.tp)
            )


LARGE = [
    (EXAMPLE, 54_000, "… × 2,000 replicas, of which the first is shown.\n8 replicas stand together (216 ranks)"),
    (Plan({"model": ModulePlan(tp=8)}), 80_000, "… × 10,000 replicas, of which the first is shown.\nEach stands 8"),
    (Plan(), 100_000, "… × 100,000 replicas, of which the first 8 are shown."),
    (Plan({"model": ModulePlan(tp=8, cp=4, stages=64)}), 2048, "model   0      0   0–3  0–7"),
    (Plan({"model": ModulePlan(tp=8, stages=1000)}), 8000, "0–999  0–7999  model   0–999  0   0   0–7"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "world", "said"), LARGE)
def test_large_layouts_stay_short(plan: Plan, world: int, said: str) -> None:
    start = time.process_time()
    layout = Layout.of(plan, world)
    text, picture = as_text(layout), as_svg(layout)
    assert said in text
    assert len(text.splitlines()) < MOST_ROWS + 30
    assert picture.count('class="node"') <= MOST_NODES and len(picture) < 500_000
    assert time.process_time() - start < 60  # nothing grows with the square of the ranks


def test_the_svg_has_a_cell_for_every_rank() -> None:
    layout = Layout.of(EXAMPLE, 54)
    root = ElementTree.fromstring(as_svg(layout))
    cells = [group for group in root.iter(f"{SVG}g") if group.get("class") == "cell"]
    assert [cell.findtext(f"{SVG}text") for cell in cells] == [str(rank) for rank in range(54)]
    titles = [" ".join((cell.findtext(f"{SVG}title") or "").split()) for cell in cells]
    assert titles[40] == "rank 40: language_model, stage 2, dp 1, cp 0, tp 0"
    assert len({cell.find(f"{SVG}rect").get("fill") for cell in cells}) == 3  # type: ignore[union-attr]
    nodes = [node for node in root.iter(f"{SVG}rect") if node.get("class") == "node"]
    assert len(nodes) == layout.nodes
    # Everything is inside the picture.
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for shape in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(shape.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height


@settings(max_examples=30)
@given(brute_force.layouts())
def test_the_svg_is_valid_and_self_contained(layout: Layout) -> None:
    picture = as_svg(layout)
    ElementTree.fromstring(picture)
    assert not re.search(r"(?:href|src|url\()", picture)


def test_encoders_in_the_first_stage_are_drawn_there() -> None:
    modules = {"vision": ModulePlan(), "audio": ModulePlan(), "language_model": ModulePlan(stages=3)}
    layout = Layout.of(Plan(modules, ranks="first_stage"), 3)
    lines = as_text(layout).splitlines()
    assert "0     0      vision + audio + language_model  0      0   0   0" in lines
    assert "      1      language_model                   1      0   0   0" in lines
    assert "language_model: 3 stages × dp 1 × cp 1 × tp 1, with vision + audio in the first" in as_svg(layout)
    many = Layout.of(Plan({**modules, "language_model": ModulePlan(stages=1000)}, ranks="first_stage"), 1000)
    assert [row.stage for row in rows(many, 1)] == [(0, 0), (1, 999)]


def test_warnings_are_in_text_and_svg() -> None:
    layout = Layout.of(Plan({"model": ModulePlan(tp=16)}), 32)
    assert "warning: model: all tensor-parallel groups (tp 16) lie" in as_text(layout)
    assert "model: all tensor-parallel groups (tp 16) lie" in as_svg(layout)


def test_module_names_of_any_alphabet_are_drawn() -> None:
    plan = Plan({"bild_é": ModulePlan(tp=2), "language_model": ModulePlan()})
    layout = Layout.of(plan, 6)
    assert "bild_é" in as_text(layout)
    ElementTree.fromstring(as_svg(layout))


def test_the_first_replicas_are_shown() -> None:
    assert count_shown_replicas(Layout.of(EXAMPLE, 54)) == 2
    assert count_shown_replicas(Layout.of(EXAMPLE, 270)) == 1
    assert count_shown_replicas(Layout.of(Plan({"model": ModulePlan(tp=2)}), 2000, 8)) == 4
    assert count_shown_replicas(Layout.of(Plan(), 512, 8)) == 512  # one row for each node
