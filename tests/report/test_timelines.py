"""The pipeline on the page: two charts on one scale, every action with its text, in every width and colour."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cornstarch.report import write_report
from cornstarch.report.run_record import read_run
from cornstarch.report.run_report import render_run
from cornstarch.schedule.graph import StageGraph
from tests.report import fake_run, fake_timeline
from tests.report.browser import needs_chromium, open_page

GRAPH = StageGraph.branches({"vision": 1, "audio": 1}, 2)

# Sizes of the page, and of every bar and its row, by chart.
LOOK = """
const boxes = [...document.querySelectorAll("section > .gantt svg")].map((svg) => {
  const own = svg.getBoundingClientRect();
  const place = (bar) => {
    const box = bar.getBoundingClientRect();
    return [bar.getAttribute("class"), box.left, box.right, box.top, box.bottom, getComputedStyle(bar).fill];
  };
  const rows = [...svg.querySelectorAll("g")].map((row) => [...row.querySelectorAll("rect")].map(place));
  return [own.left, own.width, rows];
});
const names = [...document.querySelectorAll("section > .gantt .places > span")].map((one) => {
  const box = one.getBoundingClientRect();
  return [one.textContent.replace("\u00a0", " "), box.right, box.top, box.bottom];
});
return { inner: innerWidth, scroll: document.documentElement.scrollWidth, boxes, names };
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = fake_run.write_run(tmp_path / "demo", total=60, log_every=5, evaluate_every=20)
    return fake_timeline.write(made, graph=GRAPH)


def section(page: str) -> str:
    found = re.search(r'<section id="pipeline".*?</section>', page, re.DOTALL)
    assert found is not None
    return found[0].replace("\xa0", " ")


def test_pipeline_section_has_step_times_and_bubbles(folder: Path) -> None:
    text = section(render_run(read_run(folder)))
    step = json.loads((folder / "timeline.json").read_text())["steps"][-1]
    real, predicted = step["real"], step["predicted"]
    assert f"{1e3 * real['seconds']:.3g} ms" in text and f"{1e3 * predicted['seconds']:.3g} ms" in text
    assert f"the real one is {100 * (real['seconds'] / predicted['seconds'] - 1):.1f} % longer" in text
    assert f"{100 * real['bubble']:.1f} %" in text and f"predicted {100 * predicted['bubble']:.1f} %" in text
    for share in (*real["bubbles"], *predicted["bubbles"]):
        assert f">{100 * share:.1f} %<" in text
    assert "4 places with the schedule zero_bubble and 6 microbatches" in text
    assert "Step 3<" in text  # the earlier one, folded


def test_every_action_has_a_tooltip(folder: Path) -> None:
    text = section(render_run(read_run(folder)))
    steps = json.loads((folder / "timeline.json").read_text())["steps"]
    events = [
        event for step in steps for side in ("real", "predicted") for own in step[side]["events"] for event in own
    ]
    waits = [event for event in events if event[6] > 0]
    bubbles = 2 * len(steps) * 4
    assert text.count("<title>") == len(events) + len(waits) + bubbles
    for kind in ("forward", "input gradient", "weight gradient", "transfer wait"):
        assert re.search(rf"<title>{kind}, microbatch \d, language_model 0: [\d.]+ ms from [\d.]+ ms<", text), kind
        assert f"</i>{kind}</li>" in text
    assert "</i>bubble</li>" in text and "</i>backward</li>" not in text  # only what there is


def test_many_actions_are_drawn_as_one_shape_per_kind(folder: Path) -> None:
    fake_timeline.write(folder, policy="1f1b", graph=StageGraph.chain(16), microbatches=128, steps=(3,))
    text = section(render_run(read_run(folder)))
    assert text.count("<path") == 2 * 16 * 2 + 16  # forward and backward twice, transfers once
    assert len(text) < 600_000


def test_run_without_pipeline_has_no_pipeline_section(folder: Path) -> None:
    (folder / "timeline.json").unlink()
    page = render_run(read_run(folder))
    assert 'id="pipeline"' not in page and "#pipeline" not in page.partition("<nav")[2]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"places": [{}], "steps": [{}]}', '{"places": [], "steps": []}', '{"steps": 3}', "9" * 5000],
)
def test_damaged_timeline_is_left_out_with_a_warning(folder: Path, content: str) -> None:
    (folder / "timeline.json").write_text(content)
    run = read_run(folder)
    assert run.timelines is None and any("timeline.json could not be read" in note for note in run.warnings)
    assert 'id="pipeline"' not in render_run(run)


def test_unknown_kind_of_event_is_rejected(folder: Path) -> None:
    data = fake_timeline.data()
    data["steps"][0]["real"]["events"][0][0][0] = "X"
    (folder / "timeline.json").write_text(json.dumps(data))
    assert read_run(folder).timelines is None


def test_names_are_escaped(folder: Path) -> None:
    data = fake_timeline.data()
    data["places"][0]["name"] = data["stages"][0] = "<script>alert(1)</script>"
    data["schedule"] = "<b>"
    (folder / "timeline.json").write_text(json.dumps(data))
    text = section(render_run(read_run(folder)))
    assert "<script" not in text and "<b>" not in text and "&lt;script&gt;" in text


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_gantt_bars_are_drawn_in_their_rows(width: int, dark: bool, folder: Path) -> None:
    found, console = open_page(write_report(folder), LOOK, width, dark)
    assert console == [] and found["scroll"] <= found["inner"] == width
    predicted, real = found["boxes"]
    assert predicted[:2] == real[:2] and real[1] > 0.5 * width  # the same scale, with room to read
    colours: dict[str, str] = {}
    seconds = json.loads((folder / "timeline.json").read_text())["steps"][-1]
    for (left, wide, rows), name in ((predicted, "predicted"), (real, "real")):
        share = seconds[name]["seconds"] / seconds["real"]["seconds"]
        assert len(rows) == 4
        for (kind, *free), *bars in rows:
            assert kind == "n" and free[:2] == pytest.approx([left, left + wide * share], abs=0.6)
            colours[kind] = free[4]
            for kind, begin, end, top, bottom, colour in bars:
                assert left - 0.6 <= begin < end <= left + wide + 0.6 and (top, bottom) == tuple(free[2:4])
                colours[kind] = colour
            for one, following in zip(bars, bars[1:], strict=False):
                assert one[2] <= following[1] + 1.0  # pixels
    assert colours.keys() == {"f", "i", "w", "t", "n"} and len(set(colours.values())) == 5
    first = found["names"][:4]
    assert [name for name, *_ in first] == ["vision 0", "audio 0", "language_model 0", "language_model 1"]
    for (_, right, top, bottom), (free, *_) in zip(first, predicted[2], strict=True):
        assert right <= free[1] + 0.6 and top <= free[3] < free[4] <= bottom  # each name beside its row
