"""The page says what is in the run folder, escapes all of it, and asks the network for nothing."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cornstarch.report import write_report
from cornstarch.report.run_record import read_run
from cornstarch.report.run_report import render_run
from tests.effort import counted
from tests.report import fake_run

VOID = {"br", "hr", "img", "input", "link", "meta"}
SECTIONS = ["overview", "curves", "shuffled-media", "samples", "model", "data", "events", "config", "versions"]
HOSTILE = "<script>alert(1)</script>\"><img src=x onerror=alert(2)>'&amp;"


class PageParser(HTMLParser):
    """Reads a page, refuses tags that do not close in order, and notes elements, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.pieces: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()} closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.pieces).replace("\xa0", " ").split())

    def values(self, name: str) -> list[str]:
        return [value or "" for _, attribute, value in self.attributes if attribute == name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run.write_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def page_of(folder: Path) -> PageParser:
    return PageParser(render_run(read_run(folder)))


def section(page: str, name: str) -> str:
    """Return the text of one section."""
    found = re.search(rf'<section id="{name}".*?</section>', page, re.DOTALL)
    assert found is not None
    return PageParser(found[0]).text


# ------------------------------------------------------------------------------------------------ the whole


def test_every_section_has_a_heading_and_a_link(page: str) -> None:
    parsed = PageParser(page)
    ids = parsed.values("id")
    assert len(ids) == len(set(ids))
    assert set(SECTIONS) <= set(ids)
    assert {f"#{name}" for name in SECTIONS} <= set(parsed.values("href"))
    assert parsed.elements["h1"] == parsed.elements["main"] == parsed.elements["title"] == 1
    assert parsed.elements["h2"] == len(SECTIONS)
    assert set(parsed.values("aria-labelledby")) <= set(ids)


def test_page_loads_nothing_from_outside(page: str) -> None:
    parsed = PageParser(page)
    for name in ("src", "href", "srcset", "action", "data", "poster"):
        assert all(value.startswith(("#", "data:")) for value in parsed.values(name))
    assert "://" not in page
    assert "@import" not in page and "url(" not in page
    policy = next(value for value in parsed.values("content") if "default-src" in value)
    for rule in ("default-src 'none'", "img-src data:", "style-src 'unsafe-inline'", "script-src 'unsafe-inline'"):
        assert rule in policy
    assert "media-src data:" in policy


def test_images_sounds_and_drawings_have_descriptions(page: str) -> None:
    described = {"img": "alt", "svg": None, "audio": "aria-label"}
    for match in re.finditer(r"<(img|audio|svg)\b[^>]*>", page):
        name = described[match[1]]
        if name is None:
            assert "aria-label=" in match[0] or "aria-hidden=" in match[0]
        else:
            assert re.search(rf'{name}="[^"]+"', match[0]), match[0]
    assert '<html lang="en">' in page


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb, as WCAG defines it."""
    shares = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_enough_contrast(theme: str, page: str) -> None:
    (rules,) = re.findall(rf':root\[data-theme="{theme}"\] {{ (.*?) }}', page)
    colours = dict(re.findall(r"--([\w-]+):(#\w{6});", rules))
    texts = [(text, back, 4.5) for text in ("ink", "soft") for back in ("back", "card", "sunk")]
    texts += [(name, back, 4.5) for name in ("good", "warn", "bad", "busy") for back in ("card", f"{name}-back")]
    texts += [("accent", "card", 4.5), *[(f"series-{number}", "card", 3.0) for number in range(1, 7)]]
    for text, back, least in texts:
        dark, light = sorted((luminance(colours[text]), luminance(colours[back])))
        assert (light + 0.05) / (dark + 0.05) >= least, (text, back)


def test_overview_has_the_numbers_of_the_run(page: str) -> None:
    last, evaluation = fake_run.train_line(600, 600), fake_run.evaluation_line(600, 600)
    overview = section(page, "overview")
    assert f"Held-out loss {evaluation['loss']:.4g}" in overview
    assert f"training {last['loss']:.4g}" in overview
    for name, measures in evaluation["sources"].items():
        assert f"{name} {100 * measures['accuracy']:.1f} % of {measures['count']}" in overview
    assert "1.87 M" in overview and "1.47 M trained (78.5 %)" in overview
    assert "1 min 42 s" in overview and "600 steps" in overview
    assert "cpu" in overview and "precision fp32" in overview
    rates = sorted(fake_run.train_line(step, 600)["tokens_per_second"] for step in range(2, 601, 2))
    assert f"Tokens per second {(rates[149] + rates[150]) / 2:,.0f}" in overview
    head = PageParser(page).text
    assert "demo ✓ finished" in head and "2026-01-01 00:00 UTC" in head and "loop.steps=600" in head
    assert "step 600 of 600" in head


def test_sections_have_the_content_of_the_run(page: str) -> None:
    model = section(page, "model")
    for words in ("vision encoder CLIPVisionModel 128 k 6.9 %", "31.9 MFLOPs", "0.001", "1.5 MiB", "all parts 1.87 M"):
        assert words in model
    data = section(page, "data")
    assert "data/digits/train.json: llava, 1,437 samples, weight 2" in data
    assert "2 broken" in data and "1 too long" in data
    events = section(page, "events")
    assert "resumed 300 from checkpoints/step_00000300" in events and "SIGTERM: saved and stopped" in events
    assert "model_type: clip_vision_model" in section(page, "config")
    assert "transformers 5.22.2" in section(page, "versions")
    evaluations = section(page, "curves")
    assert "11 evaluations, as a table" in evaluations
    assert f"{fake_run.evaluation_line(60, 600)['loss']:.4g}" in evaluations


def test_shuffled_media_are_compared_with_the_true_ones(page: str) -> None:
    check = section(page, "shuffled-media")
    assert "Images shuffled digits accuracy true images 97.1 % shuffled 10.3 % −86.8 points" in check
    assert "Sounds shuffled spoken digits accuracy true sounds 93.9 % shuffled 9.7 %" in check
    assert check.count("the answers depend on them") == 2


def test_samples_show_question_truth_and_answer(page: str) -> None:
    samples = section(page, "samples")
    assert "7 of these 8 answers are right" in samples
    assert "test.json:9 ✗ wrong Which digit is spoken? truth nine answer one" in samples
    parsed = PageParser(page)
    assert parsed.elements["audio"] == 2
    assert sum(value.startswith("data:image/png") for value in parsed.values("src")) == 6
    assert parsed.values("class").count("tiny") == 6


# ------------------------------------------------------------------------------------------------ hostile texts


def make_hostile(value: Any) -> Any:
    """Return a JSON value with every text replaced, and every name that the reader does not look for."""
    known = {"digits", "spoken digits", "torch", "python", "broken"}
    if isinstance(value, dict):
        return {HOSTILE + key if key in known else key: make_hostile(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [make_hostile(entry) for entry in value]
    return HOSTILE if isinstance(value, str) else value


def test_texts_of_the_run_are_escaped(tmp_path: Path, page: str) -> None:
    folder = fake_run.write_run(tmp_path / "demo")
    summary = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(make_hostile(summary)))
    (folder / "config.yaml").write_text(HOSTILE)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    changed = [make_hostile(line) | {"kind": line["kind"]} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    parsed = page_of(folder)
    assert parsed.elements["script"] == PageParser(page).elements["script"]
    assert parsed.elements["img"] == 0  # the images of the samples are not found any more
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on")]
    assert parsed.text.count("<script>alert(1)</script>") > 40


def test_lone_surrogates_and_nul_are_replaced(tmp_path: Path) -> None:
    folder = fake_run.write_run(tmp_path / "demo")
    fake_run.change_summary(folder, name="a\ud800b\0c\x1b", command="\udfff")
    assert "<h1>a?b\ufffdc" in write_report(folder).read_text(encoding="utf-8")


def test_long_texts_are_shortened(tmp_path: Path) -> None:
    folder = fake_run.write_run(tmp_path / "demo")
    long = "word " * 10_000
    answer = {"id": long, "source": long, "question": [{"text": long}, {"image": long}], "truth": long, "answer": long}
    fake_run.change_summary(folder, answers=[answer] * 70, name=long, command=long, data={"train": [long] * 210})
    page = render_run(read_run(folder))
    assert len(page) < 3_000_000
    assert "more characters)" in page and "The first 60 of 70 are shown." in page and "and 10 more" in page


# ------------------------------------------------------------------------------------------------ missing, damaged


def test_missing_files_are_named_in_their_sections(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    page = write_report(folder).read_text(encoding="utf-8")
    parsed = PageParser(page)
    assert set(SECTIONS) <= set(parsed.values("id"))
    assert (folder / "loss.png").stat().st_size > 1000
    for said in ("There is no config.yaml", "There is no run.json", "metrics.jsonl is empty", "bare ? unknown"):
        assert said in parsed.text
    for name in set(SECTIONS) - {"overview"}:
        assert 'class="missing"' in page[page.index(f'<section id="{name}"') :].split("</section>")[0]


TORN = '{"kind": "train", "step": 7, "lo'
LINES = {
    "one line": (['{"kind":"train","step":5,"loss":1.25,"learning_rate":0.1}'], "Training loss 1.25"),
    "torn": (['{"kind":"train","step":5,"loss":1.25}', TORN], "1 of 2 lines could not be read; the last one is torn"),
    "all torn": ([TORN], "metrics.jsonl has no finite loss"),
    "nan": (['{"kind":"train","step":5,"loss":NaN}'], "Training loss NaN"),
    "one nan": (
        ['{"kind":"train","step":5,"loss":1.5}', '{"kind":"train","step":6,"loss":Infinity}'],
        "training: 1 value is NaN or infinite, first at step 6.",
    ),
    "enormous": (
        ['{"kind":"train","step":1,"loss":1e308}', '{"kind":"train","step":2,"loss":-1e308}'],
        "Training loss -1e308",
    ),
    "tiny": (['{"kind":"train","step":1,"loss":1e-320}', '{"kind":"train","step":2,"loss":0}'], "Training loss 0"),
    "equal": ([f'{{"kind":"train","step":{step},"loss":2}}' for step in range(9)], "Training loss 2"),
    "negative": ([f'{{"kind":"train","step":{step},"loss":-{step}}}' for step in range(9)], "Training loss -8"),
    "wrong types": (['{"kind":"train","step":"x","loss":[]}', "[]", "7", '"x"', "null"], "5 of 5 lines could not be"),
    "no values": (['{"kind":"train","step":5,"loss":null,"items_per_second":3}'], "Training loss –"),
    "huge numbers": ([f'{{"kind":"train","step":{10**400},"loss":1}}'], "1 of 1 lines could not be read"),
    "nan step": (['{"kind":"train","step":NaN,"loss":1}'], "1 of 1 lines could not be read"),
    "nan evaluation": (
        ['{"kind":"evaluation","step":3,"loss":NaN,"accuracy":NaN,"sources":{"a":{"accuracy":NaN},"b":1}}'],
        "Held-out loss NaN",
    ),
    "unknown kind": (['{"kind":"weather","step":3}'], "There is no evaluation in metrics.jsonl."),
    "event": (['{"kind":"event","step":3,"event":null,"time":1e300}'], "event 3 – –"),
    "deep": (["[" * 100_000], "1 of 1 lines could not be read"),
    "binary": (["\x00\x01\ufffd"], "1 of 1 lines could not be read"),
}


@pytest.mark.parametrize("name", LINES)
def test_odd_metrics_give_a_page_that_names_them(name: str, tmp_path: Path) -> None:
    lines, said = LINES[name]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    write_report(tmp_path)
    parsed = PageParser((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert said in parsed.text
    assert not [value for _, name, value in parsed.attributes if name in ("d", "style") and "nan" in (value or "")]


JUNK: list[Any] = [
    None, True, -1, math.inf, math.nan, "", "x", [], [[]], [3, None, {"question": 5}],
    {}, {"x": {"y": None}}, {"x": "z"},
]  # fmt: skip


def test_wrong_types_in_the_summary_give_a_page(tmp_path: Path) -> None:
    copy = fake_run.write_run(tmp_path / "demo", total=20, log_every=5, evaluate_every=10)
    summary = json.loads((copy / "run.json").read_text())
    answers = [answer | {"question": [{"text": "?"}]} for answer in summary["answers"]]
    for key in summary:
        for junk in JUNK:
            (copy / "run.json").write_text(json.dumps(summary | {"answers": answers} | {key: junk}))
            assert render_run(read_run(copy)).endswith("</html>\n")
    for key in ("parts", "answers", "shuffled"):
        for name in summary[key][0]:
            for junk in JUNK[::2]:
                (copy / "run.json").write_text(json.dumps(summary | {key: [summary[key][0] | {name: junk}]}))
                assert render_run(read_run(copy)).endswith("</html>\n")


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "\x00", '{"name": "a"'])
def test_damaged_summary_gives_a_warning(content: str, tmp_path: Path) -> None:
    folder = fake_run.write_run(tmp_path / "demo", total=20)
    (folder / "run.json").write_text(content)
    assert "run.json" in page_of(folder).text.split("Training time")[0]


def test_running_run_without_evaluation_shows_its_progress(tmp_path: Path) -> None:
    folder = fake_run.write_run(tmp_path / "demo")
    fake_run.change_summary(
        folder, status="running", ended=None, step=40, evaluation=None, shuffled=[], answers=[], best=None, skipped={}
    )
    lines = [json.dumps(fake_run.train_line(step, 600)) + "\n" for step in range(10, 50, 10)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    text = page_of(folder).text
    assert "▸ running" in text and "step 40 of 600" in text and "ended" not in text.split("Overview")[0]
    assert "The run has no evaluation with shuffled items" in text
    assert "There are no samples" in text and "3 of all kinds" in text
    assert f"Training loss {fake_run.train_line(40, 600)['loss']:.4g} no evaluation" in text


def test_report_of_a_hundred_thousand_lines_is_small_and_quick(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    total = 100_000
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, total + 1):
            file.write(json.dumps(fake_run.train_line(step, total)) + "\n")
            if step % 100 == 0:
                file.write(json.dumps(fake_run.evaluation_line(step, total)) + "\n")
    written, turns = counted(lambda: write_report(folder))
    page = written.read_text(encoding="utf-8")
    assert turns < 4000 * total  # measured: some 400 turns of a loop for each line
    assert len(page) < 1_000_000
    for path in re.findall(r' d="([^"]*)"', page):
        assert path.count("L") <= 1000
    last = fake_run.train_line(total, total)["loss"]
    assert f"step 100,000 training {last:.4g} training, smoothed" in PageParser(page).text
