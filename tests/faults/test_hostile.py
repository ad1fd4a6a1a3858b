"""A sample of `python -m tests.faults.hostile`, and that its watch would see harm."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from cornstarch.errors import ConfigError
from tests import forked
from tests.faults import hostile, watch

COUNTS = {
    "configs": 40, "runs": 6, "checkpoints": 25, "models": 8, "exports": 4, "images": 40, "sounds": 40, "tars": 25,
}  # fmt: skip


def run_sample(folder: str) -> None:
    found = hostile.run_cases(Path(folder), COUNTS, seed=7)
    told = {kind: [tally.cases, dict(tally.outcomes), tally.problems] for kind, tally in found.items()}
    (Path(folder) / "tallies").write_text(json.dumps(told))


@pytest.mark.timeout(300)
def test_nothing_that_others_have_made_does_harm(tmp_path: Path) -> None:
    process = forked.process(run_sample, str(tmp_path))  # its audit hook and limits end with it
    process.start()
    process.join(280)
    assert process.exitcode == 0
    found = json.loads((tmp_path / "tallies").read_text())
    assert [problem for *_, problems in found.values() for problem in problems] == []
    assert {kind: cases for kind, (cases, *_) in found.items()} == COUNTS
    # Some are read, and some refused: cases that all end at the first check would find nothing.
    for kind, (cases, outcomes, _) in found.items():
        if cases >= 25:
            assert outcomes.get("read", 0) > 0 and outcomes.get("refused", 0) > 0, (kind, outcomes)


# ------------------------------------------------------------------------------------------------ the watch


def judge_harm(folder: str) -> None:
    """Do harm in several ways, and write what is said of each."""
    own = Path(folder) / "case" / "own"
    own.mkdir(parents=True)
    seen, said = watch.Watch(), {}
    watch.SECONDS = 0.2

    def hang() -> str:
        while True:
            time.sleep(0.01)

    def fail(error: Exception) -> Any:
        def raise_it() -> str:
            raise error

        return raise_it

    cases = {
        "read": lambda: "read",
        "refused": fail(ConfigError("what was found")),
        "refused without a word": fail(ConfigError("")),
        "tracebacks": fail(KeyError("x")),
        "hangs": hang,
        "executes": lambda: str(os.system("true")),
        "unpickles": lambda: str(pickle.loads(pickle.dumps(Path("x")))),
        "writes elsewhere": lambda: str(Path(folder, "elsewhere").write_text("x")),
        "removes elsewhere": lambda: str(os.remove(Path(folder, "elsewhere"))),
        "writes in its folder": lambda: str((own / "x").write_text("x")) and "read",
        "leaves its mark": lambda: str((own / "executed").write_text("")) and "read",
    }
    for name, case in cases.items():
        tally = watch.Tally()
        watch.judge(tally, seen, own, name, case)
        said[name] = [next(iter(tally.outcomes)), len(tally.problems)]
    (Path(folder) / "said").write_text(json.dumps(said))


def test_the_watch_sees_harm(tmp_path: Path) -> None:
    process = forked.process(judge_harm, str(tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "said").read_text()) == {
        "read": ["read", 0],
        "refused": ["refused", 0],
        "refused without a word": ["refused without a word", 1],
        "tracebacks": ["tracebacks", 1],
        "hangs": ["hangs", 1],
        "executes": ["harm", 1],
        "unpickles": ["harm", 1],
        "writes elsewhere": ["harm", 1],
        "removes elsewhere": ["harm", 1],
        "writes in its folder": ["read", 0],
        "leaves its mark": ["harm", 1],
    }


def test_scripts_are_found_in_a_page() -> None:
    find = hostile._read_scripts
    assert find("<p>a</p><script>{}</script>") == set()
    assert find("<script>alert(1)</script>") == {"alert(1)"}
    assert find('<img src=x onerror="alert(1)">') == {"onerror=alert(1)"}
    assert find('<a href=" JavaScript:alert(1)">') == {"href= JavaScript:alert(1)"}
    assert find("&lt;script&gt;alert(1)&lt;/script&gt;") == set()
