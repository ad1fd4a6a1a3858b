"""Cases that were wrong once, and some random ones, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.case import load_cases
from tests.fuzz.generate import generate
from tests.fuzz.runner import Runner

CASES = load_cases(Path(__file__).with_name("cases.json"))
SEED, COUNT = 3, 20  # more: `python -m tests.fuzz`


@pytest.mark.parametrize("name", CASES)
def test_case_that_was_wrong(runner: Runner, name: str) -> None:
    verdict = runner.run(CASES[name])
    assert verdict.kind == CASES[name].get("expected", "equal"), verdict


@pytest.mark.parametrize("index", range(COUNT))
def test_random_case(runner: Runner, index: int) -> None:
    case = generate(SEED, index)
    verdict = runner.run(case)
    assert not verdict.is_failure, f"{verdict}\npython -m tests.fuzz --seed {SEED} --only {index} --details"
