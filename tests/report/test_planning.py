"""The page of a plan: it says what was found, escapes it, draws in a browser, and its filters work."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cornstarch.errors import ConfigError
from cornstarch.plan.compared import Own, Scaled, resized
from cornstarch.plan.cost import RunCost
from cornstarch.plan.plan import Plan
from cornstarch.plan.search import search
from cornstarch.report.plan_words import SHARES, cuts_of, lines_of, why_best, why_lost
from cornstarch.report.planning import Page, render, write_page
from tests.plan.runs import cluster, module
from tests.report.browser import look, needs_chromium
from tests.report.test_page import HOSTILE, Walk

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


def page(**changed: object) -> Page:
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
        one = resized(machines, devices)
        best = search(cost, one, runners_up=0).best
        assert best is not None
        scaled.append(Scaled(one, best, 1.0))
    own = Own(found.best.choice.plan, found.runners_up[0].prediction)
    given = Page("vlm", machines, cost, found, own, tuple(scaled), "parallel: {}\n", 2.5)
    return replace(given, **changed)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole() -> Page:
    return page()


def test_it_says_what_was_found(whole: Page) -> None:
    text = render(whole)
    walk = Walk(text)
    assert re.findall(r'<section id="(\w+)"', text) == SECTIONS
    for line in [*lines_of(whole.best.choice), *why_best(whole.found)]:
        assert line in walk.text, line
    for one in whole.found.runners_up:
        assert one.reason in walk.text
    assert walk.elements["tr"] == 2 + 1 + len(whole.found.runners_up) + 1 + 3  # heads, plans, sizes
    assert len(re.findall(r'class="stack"', text)) == len(whole.best.memory)
    assert not re.search(r'(src|href)="(https?:)?//', text)


def test_bars_of_memory_add_up_to_the_peak(whole: Page) -> None:
    text = render(whole)
    most = max(whole.best.limit, whole.best.peak)
    for drawn, place in zip(re.findall(r'class="stack".*?</span>', text), whole.best.memory, strict=True):
        shares = [float(width) for width in re.findall(r"width:([\d.]+)%", drawn)]
        assert sum(shares) == pytest.approx(100 * place.peak / most, abs=0.05)


def test_texts_are_escaped(whole: Page) -> None:
    hostile = replace(whole, name=HOSTILE, plan=HOSTILE, cluster=replace(whole.cluster, name=HOSTILE))
    walk = Walk(render(hostile))
    assert walk.elements["script"] == Walk(render(whole)).elements["script"]
    assert HOSTILE in walk.text


def test_what_is_not_there_is_left_out(whole: Page) -> None:
    text = render(replace(whole, scaled=(), price=None, own=None))
    assert "sizes" not in re.findall(r'<section id="(\w+)"', text) and "A million tokens" not in text
    broken = render(replace(whole, own=Own(Plan(), None, "3 ranks are too few")))
    assert "no prediction of the config&#x27;s own plan: 3 ranks are too few" in broken
    nothing = Scaled(whole.cluster, None, None)
    assert "nothing fits" in render(replace(whole, scaled=(nothing,)))


def test_reasons_compare_with_the_best_that_does_otherwise(whole: Page) -> None:
    found = whole.found
    assert found.best is not None
    said = why_best(found)
    other = next(one for one in found.runners_up if one.prediction.choice.modules[-1][1].tp != 1)
    longer = other.prediction.step / found.best.step - 1
    assert any(f"with tp 2 a step takes {longer:.1%} longer" in text for text in said), said
    stages = replace(found.best, starts={"vision": (0,), "language_model": (0, 3, 5)})
    assert cuts_of(stages) == ["language_model is cut into 3 + 2 + 3 layers"]
    assert set(SHARES) == set(vars(found.best.shares))
    assert all(why_lost(one).startswith("lost: ") for one in found.runners_up if one.reason.startswith("+"))


def test_a_page_that_cannot_be_written_is_told(whole: Page, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it cannot be written"):
        write_page(whole, tmp_path / "none" / "page.html")


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_and_says_nothing_on_the_console(width: int, whole: Page, tmp_path: Path) -> None:
    write_page(replace(whole, name="x" * 300), tmp_path / "page.html")
    (inner, scroll), console = look(tmp_path / "page.html", SIZES, width)
    assert scroll <= inner == width
    assert console == []


@needs_chromium
def test_filters_leave_what_was_chosen(whole: Page, tmp_path: Path) -> None:
    write_page(whole, tmp_path / "page.html")
    found, console = look(tmp_path / "page.html", FILTER, 1280)
    assert console == []
    assert found["all"] == 2 + len(whole.found.runners_up)
    assert 0 < found["left"] == found["same"] < found["all"]
    assert found["said"] == f"{found['left']} of {found['all']}"
    assert all(inner <= outer for inner, outer in found["bars"])
