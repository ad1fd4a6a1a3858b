"""Results of many cases, in a file of JSON lines; of two lines about a case the later one counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.case import Case
from tests.fuzz.runner import Verdict


@dataclass(frozen=True)
class Result:
    """A case, and what it came to."""

    case: Case
    verdict: Verdict


def read_results(path: Path) -> dict[str, Result]:
    """Return the results of a file by the names of the cases; none if there is no such file."""
    return {str(one.case["name"]): one for one in _read_lines(path)}


def count_mended(path: Path) -> int:
    """Return how many cases of a file failed at first, and no longer when they were run again."""
    failed = {one.case["name"] for one in _read_lines(path) if one.verdict.is_failure}
    return sum(not one.verdict.is_failure for name, one in read_results(path).items() if name in failed)


def _read_lines(path: Path) -> Iterator[Result]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        data = json.loads(line)
        verdict = Verdict(**{**data["verdict"], "details": tuple(data["verdict"]["details"])})
        yield Result(data["case"], verdict)
