"""Explanations on a terminal, as a page, and by the command."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from cornstarch.cli.layout import TOPIC_NAMES
from cornstarch.cli.main import main
from cornstarch.explain import TOPICS, explain
from cornstarch.explain.page import render
from cornstarch.explain.terminal import fold_timeline, show
from tests.report.browser import needs_chromium, open_page
from tests.report.test_page import PageParser


def print_story(topic: str, only: int | None = None, width: int = 100, **options: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(explain(topic, **options), console, only)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize("topic", TOPICS)
def test_terminal_shows_every_step(topic: str) -> None:
    story, text = explain(topic), print_story(topic)
    assert story.title in text
    for number, step in enumerate(story.steps, 1):
        assert f"{number}/{len(story.steps)} {step.title}" in text
    flat = " ".join(text.split())
    for step in story.steps:
        assert step.description in flat
    assert all(len(line) <= 100 for line in text.splitlines())


def test_terminal_shows_the_numbers() -> None:
    text = print_story("allreduce")
    assert re.search(r"rank 2 +111 222 +· +· +700 800 +sends chunk 1", text)
    assert "48 B" in text
    assert re.search(r"stage 3 +\. +\. +\. +F0 B0---", print_story("1f1b"))


def test_single_step_is_printed_alone() -> None:
    text = print_story("allreduce", only=3)
    assert "3/7" in text and "2/7" not in text and "4/7" not in text


def test_wide_timelines_are_folded() -> None:
    step = explain("1f1b", ranks=4, microbatches=16).steps[-1]
    blocks = fold_timeline(step.text, 70).split("\n\n")
    assert len(blocks) > 1
    for block in blocks:
        assert [line[:7] for line in block.splitlines()] == [f"stage {stage}" for stage in range(4)]
        assert all(len(line) <= 70 for line in block.splitlines())
    again = ["".join(f"{block.splitlines()[stage][9:]:60}" for block in blocks) for stage in range(4)]
    for line, whole in zip(again, step.text.splitlines(), strict=True):
        assert re.findall(r"\w\d+", line) == re.findall(r"\w\d+", whole[9:])
    assert fold_timeline(step.text, 1000) == step.text


@pytest.mark.parametrize("topic", TOPICS)
def test_page_is_well_formed_and_complete(topic: str) -> None:
    story = explain(topic)
    page = render(story)
    parsed = PageParser(page)
    assert parsed.elements["svg"] == len(story.steps) + 1  # and the logo
    for step in story.steps:
        assert step.description in parsed.text
    for formula in story.formulas:
        assert formula.symbols in parsed.text and formula.result in parsed.text
    boxes = sum(len(row.boxes) for step in story.steps for row in step.rows)
    assert page.count('class="cell"') == boxes
    loaded = [v for name in ("src", "href") for v in parsed.values(name) if not v.startswith(("#", "data:"))]
    assert loaded == [] and "@import" not in page and "url(" not in page
    assert len(page) < 1_000_000


def test_command_prints_writes_and_rejects(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["explain", *arguments])
        return (int(ended.value.code or 0), *capsys.readouterr())

    code, out, _ = run("ring", "--ranks", "2")
    assert code == 0 and "Ring attention" in out
    code, out, _ = run("gpipe", "--html", str(tmp_path / "page.html"))
    assert code == 0 and out.strip() == str(tmp_path / "page.html") and PageParser((tmp_path / "page.html").read_text())
    code, _, wrong = run("gpip")
    assert code == 2 and "Did you mean gpipe?" in wrong
    code, _, wrong = run("gpipe", "--step", "99")
    assert code == 2 and "has the steps 1 to 15" in wrong
    code, _, wrong = run("gpipe", "--html", str(tmp_path / "no" / "page.html"))
    assert code == 2 and "cannot be written" in wrong


def test_help_names_every_topic() -> None:
    assert TOPIC_NAMES.split(", ") == [*TOPICS]


# What a reader does: click, use the keyboard, ask for all.
USE = """
const steps = [...document.querySelectorAll(".step")];
const seen = () => steps.map((one, at) => one.offsetParent ? at + 1 : 0).filter(Boolean);
const key = (name) => dispatchEvent(new KeyboardEvent("keydown", { key: name }));
const found = { inner: innerWidth, first: seen(), scroll: [] };
const fits = () => found.scroll.push(document.documentElement.scrollWidth);
fits();
document.getElementById("next").click(); found.clicked = seen(); fits();
key("ArrowRight"); found.right = seen(); fits();
key("ArrowLeft"); key("ArrowLeft"); key("ArrowLeft"); found.left = seen();
key("End"); found.end = seen(); fits();
document.getElementById("back").click(); found.back = seen();
document.getElementById("every").click(); found.all = seen().length; fits();
return found;
"""


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("topic", ["allreduce", "fsdp", "tp", "interleaved"])
def test_buttons_and_keys_step_through_a_page(topic: str, width: int, tmp_path: Path) -> None:
    story = explain(topic)
    (tmp_path / "page.html").write_text(render(story), encoding="utf-8")
    found, console = open_page(tmp_path / "page.html", USE, width)
    last = len(story.steps)
    assert console == [] and found["inner"] == width and max(found["scroll"]) <= width
    assert (found["first"], found["clicked"], found["right"], found["left"]) == ([1], [2], [3], [1])
    assert (found["end"], found["back"], found["all"]) == ([last], [last - 1], last)


def test_documentation_shows_the_printed_step() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "explain.md").read_text(encoding="utf-8")
    shown = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 1
    text = "\n".join(line.rstrip() for line in print_story("allreduce", only=2).splitlines())
    assert shown[0] in text + "\n"
    for topic in TOPICS:
        assert f"`{topic}`" in page
