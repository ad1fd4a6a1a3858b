"""The walk of one batch in docs/architecture.md names the files that a training step really runs through."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

import cornstarch
from cornstarch.demo import demo_config
from cornstarch.trainer.trainer import Trainer

PACKAGE = Path(cornstarch.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
MOST = 25
# Only with several processes, or before the first step.
NOT_IN_A_STEP = {"cli/train.py"}


def page_of_the_walk() -> tuple[set[str], set[str]]:
    """Return the files of the page's table, and those that are asked on the way, by their paths in the package."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## The walk of one batch") : text.index("## The walk of one plan")]
    table = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    others = section[section.index("Other files are asked") : section.index("`tests/test_walk.py`")]
    return set(map(find, named(table))), set(map(find, named(others)))


def named(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py)`", text)


def find(name: str) -> str:
    """Return the path in the package of the one file with this name, or with this end of its path."""
    [path] = [path for path in PACKAGE.rglob(Path(name).name) if path.as_posix().endswith(f"/{name}")]
    return path.relative_to(PACKAGE).as_posix()


@contextmanager
def record_files(files: set[str]) -> Iterator[None]:
    """Add every file of the package in which a function is called."""
    names = {path.as_posix(): path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename in names:
            files.add(names[frame.f_code.co_filename])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def test_a_step_runs_through_the_files_that_the_page_names(tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}", "loop.steps=9", "loop.evaluate_every=null", "data.workers=0", "threads=1"]
    trainer = Trainer(demo_config(overrides, None), console=Console(quiet=True))
    batches = trainer.batches()
    for _ in range(3):  # the first steps also measure memory and fill caches
        trainer.step(next(batches))
    files: set[str] = set()
    with record_files(files):
        for batch in batches:
            trainer.step(batch)
    walk, others = page_of_the_walk()
    assert len(walk) <= MOST
    assert files - walk - others == set(), "the page does not name these"
    assert walk - files == NOT_IN_A_STEP, "the walk names files that do not run"
