"""Results of many cases, in a file of JSON lines; of two lines about a case the later one counts."""

from __future__ import annotations

import json
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
    found: dict[str, Result] = {}
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        verdict = Verdict(**{**data["verdict"], "details": tuple(data["verdict"]["details"])})
        found[data["case"]["name"]] = Result(data["case"], verdict)
    return found
