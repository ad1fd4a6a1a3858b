"""The page of a plan: it says what was found, escapes it, draws in a browser, and its filters work."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cornstarch.plan.cluster import resize_cluster
from cornstarch.plan.cost import RunCost
from cornstarch.plan.plan import Plan
from cornstarch.plan.search import OwnPlan, ScalingPoint, search
from cornstarch.report.plan_page import PlanReport, render_plan
from cornstarch.report.plan_text import (
    TIME_PARTS,
    describe_choice,
    describe_layer_split,
    explain_choice,
    extract_reason,
)
from tests.plan.runs import cluster, module
from tests.report.browser import needs_chromium, open_page
from tests.report.test_page import HOSTILE, PageParser

SECTIONS = ["overview", "why", "timeline", "memory", "time", "candidates", "sizes", "file"]
SIZES = "return [innerWidth, document.documentElement.scrollWidth];"
FILTER = """
const rows = () => [...document.querySelectorAll("#candidates tbody tr")].filter((row) => row.offsetParent).length;
const select = document.querySelector("select[data-filter=data]"), all = rows();
select.value = document.querySelector("tr.best").dataset.data;
select.dispatchEvent(new Event("change"));
const same = [...document.querySelectorAll("#candidates tbody tr")].filter((row) => row.dataset.data === select.value);
const bars = [...document.querySelectorAll(".stack")].map((one) => [one.scrollWidth, one.clientWidth]);
return { all, left: rows(), same: same.length, said: document.querySelector(".filters output").textContent, bars };
"""


def page(**changed: object) -> PlanReport:
    """Return the page of an encoder and a language model on eight devices, of which several plans fit."""
    sizes = {"parameters": 10**6, "parameter_bytes": 2 * 10**6, "output_bytes": 10**6, "activation_bytes": 10**7}
    encoder = module("vision", 4, trained=False, seconds=1e-3, tp_sizes=(1, 2), **sizes)
    model = module("language_model", 8, seconds=4e-3, tp_sizes=(1, 2), sums=2, **sizes)
    cost = RunCost((encoder, model), batch=16, tokens=2048, flops=1e9)
    machines = cluster(2, 4, memory=200 * 10**6, inside=1e10, between=1e9)
    found = search(cost, machines, runners_up=20)
    assert found.best is not None
    scaled = []
    for devices in (4, 8, 16):
        one = resize_cluster(machines, devices)
        best = search(cost, one, runners_up=0).best
        assert best is not None
        scaled.append(ScalingPoint(one, best, 1.0))
    own = OwnPlan(found.best.candidate.plan, found.runners_up[0].prediction)
    given = PlanReport("vlm", machines, cost, found, own, tuple(scaled), "parallel: {}\n", 2.5)
    return replace(given, **changed)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole() -> PlanReport:
    return page()


def test_page_has_the_plans_and_the_reasons(whole: PlanReport) -> None:
    text = render_plan(whole)
    parsed = PageParser(text)
    assert re.findall(r'<section id="(\w+)"', text) == SECTIONS
    for line in [*describe_choice(whole.best.candidate), *explain_choice(whole.found)]:
        assert line in parsed.text, line
    for one in whole.found.runners_up:
        assert one.reason in parsed.text
    assert parsed.elements["tr"] == 2 + 1 + len(whole.found.runners_up) + 1 + 3  # heads, plans, sizes
    assert len(re.findall(r'class="stack"', text)) == len(whole.best.memory)
    assert not re.search(r'(src|href)="(https?:)?//', text)


def test_memory_bars_add_up_to_the_peak(whole: PlanReport) -> None:
    text = render_plan(whole)
    most = max(whole.best.limit, whole.best.peak)
    for drawn, place in zip(re.findall(r'class="stack".*?</span>', text), whole.best.memory, strict=True):
        shares = [float(width) for width in re.findall(r"width:([\d.]+)%", drawn)]
        assert sum(shares) == pytest.approx(100 * place.peak / most, abs=0.05)


def test_texts_are_escaped(whole: PlanReport) -> None:
    hostile = replace(whole, name=HOSTILE, plan=HOSTILE, cluster=replace(whole.cluster, name=HOSTILE))
    parsed = PageParser(render_plan(hostile))
    assert parsed.elements["script"] == PageParser(render_plan(whole)).elements["script"]
    assert HOSTILE in parsed.text


def test_optional_sections_are_left_out(whole: PlanReport) -> None:
    text = render_plan(replace(whole, scaled=(), price=None, own=None))
    assert "sizes" not in re.findall(r'<section id="(\w+)"', text) and "A million tokens" not in text
    broken = render_plan(replace(whole, own=OwnPlan(Plan(), None, "3 ranks are too few")))
    assert "no prediction of the config&#39;s own plan: 3 ranks are too few" in broken
    nothing = ScalingPoint(whole.cluster, None, None)
    assert "nothing fits" in render_plan(replace(whole, scaled=(nothing,)))


def test_reasons_compare_with_the_best_plan_that_differs(whole: PlanReport) -> None:
    found = whole.found
    assert found.best is not None
    said = explain_choice(found)
    other = next(one for one in found.runners_up if one.prediction.candidate.modules[-1][1].tp != 1)
    longer = other.prediction.step / found.best.step - 1
    assert any(f"with tp 2 a step takes {longer:.1%} longer" in text for text in said), said
    stages = replace(found.best, starts={"vision": (0,), "language_model": (0, 3, 5)})
    assert describe_layer_split(stages) == ["language_model is split into 3 + 2 + 3 layers"]
    assert set(TIME_PARTS) == set(vars(found.best.breakdown))
    assert all(extract_reason(one).startswith("lost: ") for one in found.runners_up if one.reason.startswith("+"))


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_plan_page_fits_the_screen_without_console_messages(width: int, whole: PlanReport, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render_plan(replace(whole, name="x" * 300)), encoding="utf-8")
    (inner, scroll), console = open_page(tmp_path / "page.html", SIZES, width)
    assert scroll <= inner == width
    assert console == []


@needs_chromium
def test_filters_show_only_the_chosen_plans(whole: PlanReport, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render_plan(whole), encoding="utf-8")
    found, console = open_page(tmp_path / "page.html", FILTER, 1280)
    assert console == []
    assert found["all"] == 2 + len(whole.found.runners_up)
    assert 0 < found["left"] == found["same"] < found["all"]
    assert found["said"] == f"{found['left']} of {found['all']}"
    assert all(inner <= outer for inner, outer in found["bars"])
