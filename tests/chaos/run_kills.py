"""`python -m tests.chaos kills`: cases drawn at random, their results in a file, and one line about all of them."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.kills import DOUBLE_WRITERS, LAUNCHER, ORPHANS, Case, Disturbed, Outcome, Verdict, draw_case
from tests.chaos.processes import append_result

KILLS = 5
"""In one run."""


def add_command(commands: Any) -> None:
    """Add the command and its options."""
    reader = commands.add_parser("kills", help="kill -9 of ranks and launchers")
    reader.add_argument("--count", type=int, default=20, help="kills; five of them in one run")
    reader.add_argument("--seed", type=int, default=0, help="of the cases")
    reader.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    reader.add_argument("--restarts", type=int, default=0, help="let runs restart themselves, so often at most")
    reader.add_argument("--cold", action="store_true", help="start interpreters instead of forking a warm one")
    reader.add_argument("--jobs", type=int, default=1, help="runs at a time")
    reader.add_argument("--into", type=Path, help="a file of JSON lines; cases that it has are not run again")
    reader.add_argument("--details", action="store_true", help="keep the folder of a run that fails")
    reader.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    reader.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Run the cases; return 1 if one failed."""
    if asked.jobs > 1:
        run_side_by_side(asked.jobs, asked.into)
    else:
        _run_share(asked)
    if asked.share != "0/1" or asked.into is None and asked.only is None:
        return 0
    verdicts = read_verdicts(asked.into) if asked.into is not None else []
    if verdicts:
        print(describe(verdicts))
    return int(any(one.is_failure for one in verdicts))


def run_side_by_side(jobs: int, into: Path | None) -> None:
    """Share the cases out to processes; all append to the same file."""
    if into is None:
        raise SystemExit("--jobs needs --into FILE")
    commands = [
        [sys.executable, "-m", "tests.chaos", *sys.argv[1:], "--jobs", "1", "--share", f"{number}/{jobs}"]
        for number in range(jobs)
    ]
    for process in [subprocess.Popen(command) for command in commands]:
        process.wait()


def _run_share(asked: argparse.Namespace) -> None:
    part, parts = map(int, asked.share.split("/"))
    numbers = iter(asked.only or itertools.count(part, parts))
    wanted = math.ceil(asked.count / parts)
    results = read_all([asked.into]) if asked.into is not None else []
    done = {case["name"]: verdict for case, verdict in results if case["restarts"] == asked.restarts}
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
        base = Path(place).resolve()
        while wanted > 0 and (number := next(numbers, None)) is not None:
            case = draw_case(asked.seed, number, KILLS, asked.restarts, asked.cold)
            if case.name not in done:
                done[case.name] = _run_case(case, base, asked)
            wanted -= len(done[case.name].kills)


def _run_case(case: Case, base: Path, asked: argparse.Namespace) -> Verdict:
    folder = base / case.name
    verdict = Disturbed(case, base, folder).run()
    print(describe_one(case, verdict), flush=True)
    if verdict.is_failure:
        print(f"    {' '.join(verdict.problems)[:900]}\n    again: {command_of(case, asked.seed)}", flush=True)
    append_result(asked.into, {"command": "kills", "case": asdict(case), "verdict": asdict(verdict)})
    if verdict.is_failure and asked.details:
        kept = Path(tempfile.mkdtemp(prefix=f"chaos-{case.name}-"))
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        print(f"    kept: {kept}")
    shutil.rmtree(folder, ignore_errors=True)
    return verdict


def command_of(case: Case, seed: int) -> str:
    """Return the command that runs a case again."""
    number = case.name.rpartition("-")[2]
    more = (f" --restarts {case.restarts}" if case.restarts else "") + (" --cold" if case.cold else "")
    return f"python -m tests.chaos kills --seed {seed} --only {number}{more} --details"


# ------------------------------------------------------------------------------------------------ results


def read_all(paths: Sequence[Path]) -> list[tuple[Mapping[str, Any], Verdict]]:
    """Return the cases of files, and what came of them; of two results for a case the later one counts."""
    found = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            data = json.loads(text)
            if "case" in data:
                said = data["verdict"]
                outcomes = [Outcome(**{**one, "victims": tuple(one["victims"])}) for one in said.pop("kills")]
                case = data["case"]
                found[(case["name"], case.get("restarts"))] = case, Verdict(**said, kills=outcomes)
    return list(found.values())


def read_results(path: Path) -> list[tuple[str, Verdict]]:
    """Return the names of the cases of a file, and what came of them."""
    return [(str(case["name"]), verdict) for case, verdict in read_all([path])]


def read_verdicts(path: Path) -> list[Verdict]:
    """Return the verdicts of a file."""
    return [verdict for _, verdict in read_results(path)]


def describe_one(case: Case, verdict: Verdict) -> str:
    """Return a line about a case."""
    word = "FAILED" if verdict.is_failure else "equal"
    said = ", ".join(f"{one.phase} {'+'.join(map(str, one.victims))}" for one in verdict.kills)
    lost = max((one.lost for one in verdict.kills), default=0)
    return f"{verdict.seconds:6.1f} s  {case.name:8} {case.layout:9} {word}  {said}; at most {lost} steps lost"


def _count(verdicts: Sequence[Verdict], problem: str) -> int:
    return sum(any(problem in text for text in one.problems) for one in verdicts)


def describe(verdicts: Sequence[Verdict]) -> str:
    """Return one line about all cases."""
    kills = [one for verdict in verdicts for one in verdict.kills]
    failed = sum(one.is_failure for one in verdicts)
    named = [one.named for one in kills if one.named is not None]
    ends = sorted(one.ended for one in kills if LAUNCHER not in one.victims) or [0.0]
    backs = sorted(one.back for one in kills if one.back is not None) or [0.0]
    words = [
        f"{len(kills)} kills in {len(verdicts)} runs",
        f"{failed} runs failed",
        f"{_count(verdicts, ORPHANS)} with orphans",
        f"{_count(verdicts, DOUBLE_WRITERS)} with two writers",
        f"{sum(one.compared for one in verdicts)} values bit-equal",
        f"at most {max((one.lost for one in kills), default=0)} steps lost",
        f"{sum(named)} of {len(named)} victims named",
        f"ranks gone after {statistics.median(ends):.2f} s (at most {ends[-1]:.2f})",
        f"training again after {statistics.median(backs):.1f} s (at most {backs[-1]:.1f})",
        f"{sum(one.by_itself for one in kills)} restarted by the run itself",
        f"{sum(len(one.left) for one in verdicts)} temporary files left",
    ]
    return "; ".join(words)
