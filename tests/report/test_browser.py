"""The page in a real browser: nothing is said on the console, nothing is wider than the screen, the script works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cornstarch.report import write_report
from tests.report import fake_run
from tests.report.browser import needs_chromium, open_page

pytestmark = needs_chromium

SIZES = "return [innerWidth, document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor];"
LONG = "x" * 3000

# What a reader does: point at a curve, choose the log scale, the other colours and the wrong samples.
USE = """
const chart = document.querySelector("figure.chart"), plots = chart.querySelector(".plots");
const legend = () => [...chart.querySelectorAll(".legend b")].map((one) => one.textContent);
const shown = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.offsetParent).length;
const before = legend(), box = chart.querySelector(".area").getBoundingClientRect();
plots.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2 }));
const pointed = legend();
plots.dispatchEvent(new PointerEvent("pointerleave"));
const after = legend();
plots.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
const home = legend();
const linear = [shown(".tall .linear"), shown(".tall .log")];
chart.querySelector(".log-choice").click();
const log = [shown(".tall .linear"), shown(".tall .log")];
const back = () => getComputedStyle(document.body).backgroundColor;
const light = back(); document.getElementById("theme").click(); const dark = back();
const all = shown(".sample"); document.querySelector("[value=wrong]").click();
return { before, pointed, after, home, linear, log, light, dark, all, wrong: shown(".sample") };
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write_report(fake_run.write_run(tmp_path / "demo"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_page_fits_the_screen_without_console_messages(width: int, dark: bool, page: Path) -> None:
    (inner, scroll, back), console = open_page(page, SIZES, width, dark)
    assert inner == width
    assert scroll <= inner
    assert console == []
    assert back == ("rgb(15, 20, 24)" if dark else "rgb(245, 247, 248)")


def test_long_words_fit_the_screen(tmp_path: Path) -> None:
    folder = fake_run.write_run(tmp_path / "demo")
    answer = dict.fromkeys(("id", "source", "truth", "answer"), LONG) | {"question": [{"text": LONG}], "right": False}
    fake_run.change_summary(
        folder, name=LONG, status=LONG, task=LONG, command=LONG, device=LONG, precision=LONG, answers=[answer],
        versions={LONG: LONG}, data={"train": [LONG]}, skipped={LONG: 1},
    )  # fmt: skip
    lines: list[dict[str, Any]] = [
        {"kind": "evaluation", "loss": 1, "sources": {LONG: {"accuracy": 0.5, "count": 3}}},
        {"kind": "event", "event": LONG, "text": LONG},
        {"kind": "shuffled", "modality": LONG, "accuracy": 0.2, "loss": 3},
    ]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line | {"step": 601}) + "\n" for line in lines))
    (folder / "config.yaml").write_text(LONG)
    (inner, scroll, _), console = open_page(write_report(folder), SIZES, 400)
    assert scroll <= inner == 400
    assert console == []


def test_script_shows_values_scales_themes_and_filters(page: Path) -> None:
    found, console = open_page(page, USE, 1280)
    assert console == []
    middle, first = fake_run.train_line(300, 600)["loss"], fake_run.train_line(2, 600)["loss"]
    assert found["pointed"][:2] == ["300", f"{middle:.4g}"]
    assert found["pointed"][3] == f"{fake_run.evaluation_line(300, 600)['loss']:.4g}"
    assert found["home"][:2] == ["2", f"{first:.4g}"]
    assert found["before"] == found["after"] != found["pointed"]
    assert (found["linear"], found["log"]) == ([1, 0], [0, 1])
    assert (found["light"], found["dark"]) == ("rgb(245, 247, 248)", "rgb(15, 20, 24)")
    assert (found["all"], found["wrong"]) == (8, 1)


def test_empty_run_gives_no_console_messages(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (inner, scroll, _), console = open_page(write_report(tmp_path), SIZES, 400)
    assert scroll <= inner
    assert console == []
