"""Two programs write docs/parity.md, and each keeps what the other has written."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fuzz.generate import generate
from tests.fuzz.page import write_page
from tests.fuzz.runner import Verdict
from tests.parity.cell import Deviation
from tests.parity.page import PAGE, Run, page, random_cases_of


def test_section_is_replaced_and_kept(tmp_path: Path) -> None:
    results, text = tmp_path / "results.jsonl", tmp_path / "parity.md"
    text.write_text(PAGE.read_text(encoding="utf-8").replace(random_cases_of(PAGE.read_text(encoding="utf-8")), ""))
    verdicts = [Verdict("equal"), Verdict("refused", "parallel: this plan cannot be run yet.\n  why not. More."),
                Verdict("wrong", "off")]  # fmt: skip
    for count in (2, 3):
        rows = [{"case": generate(1, n), "verdict": verdicts[n].as_data()} for n in range(count)]
        rows.append({"case": generate(1, 0), "verdict": verdicts[0].as_data()})
        rows[0] = {"case": generate(1, 0), "verdict": verdicts[2].as_data()}  # failed, and was mended
        results.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        write_page(results, text)
    written = text.read_text(encoding="utf-8")
    assert written.count("## Random cases") == 1
    assert "1 of them failed at first" in " ".join(written.split())
    expected = "**3 cases: 1 equal, 1 refused with a reason before any step, 1 failed** (1 wrong,"
    assert expected in " ".join(written.split())
    assert "| why not. | 1 |" in written and "--seed 1 --count 3" in written
    assert random_cases_of(page_of_one_cell(written)) == random_cases_of(written) != ""


def page_of_one_cell(earlier: str) -> str:
    """Return the page of a matrix with one cell."""
    run = Run(None)
    run.found["llm", "ddp", "plain"] = Deviation(0.0, 0.0, 0.0, "nowhere")
    return page(run, earlier)
