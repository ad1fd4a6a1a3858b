"""`python -m tests.fuzz`: cases in several processes, each against one process.

python -m tests.fuzz --seed 7 --count 1000 --jobs 2 --into runs.jsonl  # random cases; goes on where it was interrupted
python -m tests.fuzz --seed 7 --only 12 --details                      # one of them, with tracebacks
python -m tests.fuzz --case '{"llm": …}'                               # a case as it is printed
python -m tests.fuzz --cases tests/fuzz/cases.json --only eval1        # cases of a file, by name
python -m tests.fuzz --again runs.jsonl                                # those that failed once more; results replaced
python -m tests.fuzz --page runs.jsonl                                 # the table, into docs/parity.md
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of `find_unused_parameters` in each process
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

QUIET = 40.0
"""Seconds that a rank waits for another one: a hang should not take long, and compiling is no hang."""


def main() -> int:
    """Return 1 if a case failed."""
    asked = _read_arguments()
    if asked.page is not None:
        from tests.fuzz.page import write_page

        print(write_page(asked.page))
        return 0
    if asked.jobs > 1:
        return _run_side_by_side(asked)
    return _run(asked)


def _read_arguments() -> argparse.Namespace:
    reader = argparse.ArgumentParser(prog="python -m tests.fuzz")
    reader.add_argument("--seed", type=int, default=0, help="of random cases")
    reader.add_argument("--count", type=int, default=40, help="random cases")
    reader.add_argument("--first", type=int, default=0, help="number of the first random case")
    reader.add_argument("--only", nargs="+", help="names of cases of a file, or numbers of random cases")
    reader.add_argument("--cases", type=Path, help="a file of cases, instead of random ones")
    reader.add_argument("--case", help="one case, as JSON")
    reader.add_argument("--jobs", type=int, default=1, help="cases at a time; each takes up to six processes")
    reader.add_argument("--into", type=Path, help="a file of JSON lines; cases that it has are not run again")
    reader.add_argument("--again", type=Path, help="such a file: run its failures again, and replace their results")
    reader.add_argument("--page", type=Path, help="such a file: write its table into docs/parity.md")
    reader.add_argument("--seconds", type=float, default=150.0, help="that one run of a case may take")
    reader.add_argument("--details", action="store_true", help="show tracebacks and all differences")
    reader.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    return reader.parse_args()


def _run_side_by_side(asked: argparse.Namespace) -> int:
    """Share the cases out to processes with pools of their own; all append to the same file."""
    if asked.into is None and asked.again is None:
        raise SystemExit("--jobs needs --into FILE or --again FILE")
    given = [word for word in sys.argv[1:] if not word.startswith("--jobs=")]
    if "--jobs" in given:
        at = given.index("--jobs")
        del given[at : at + 2]
    commands = [[sys.executable, "-m", "tests.fuzz", *given, "--share", f"{n}/{asked.jobs}"] for n in range(asked.jobs)]
    running = [subprocess.Popen(command) for command in commands]
    return max(one.wait() for one in running)


def _run(asked: argparse.Namespace) -> int:
    from tests.fuzz.runner import Runner
    from tests.parity.pool import Pool

    counts: Counter[str] = Counter()
    into = asked.again or asked.into
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        workers = Pool(quiet=QUIET)
        runner = Runner(workers, Path(folder), asked.seconds)
        for case in _cases(asked):
            verdict = runner.run(case)
            counts[verdict.kind] += 1
            reason = " ".join(verdict.reason.split())[:300]
            print(
                f"{verdict.seconds:5.1f} s  {case['name']:36} {verdict.kind:8} {verdict.deviation:.0e}  {reason}",
                flush=True,
            )
            if verdict.is_failure:
                print("\n".join(verdict.details) if asked.details else f"         again: {_command(asked, case)}")
            if into is not None:
                with into.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"case": case, "verdict": verdict.as_data()}) + "\n")
        workers.close()
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if any(counts[kind] for kind in ("wrong", "crashed", "hung")) else 0


def _command(asked: argparse.Namespace, case: Mapping[str, Any]) -> str:
    """Return the command that runs a case again, whatever becomes of the generator."""
    if asked.cases is not None:
        return f"python -m tests.fuzz --cases {asked.cases} --only {case['name']} --details"
    return f"python -m tests.fuzz --details --case {shlex.quote(json.dumps(case, separators=(',', ':')))}"


def _cases(asked: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    from tests.fuzz.results import read_results

    part, parts = map(int, asked.share.split("/"))
    done = read_results(asked.into) if asked.into is not None else {}
    for number, case in enumerate(_all_cases(asked)):
        if number % parts == part and case["name"] not in done:
            yield case


def _all_cases(asked: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    from tests.fuzz.case import load_cases
    from tests.fuzz.generate import generate
    from tests.fuzz.results import read_results

    if asked.case is not None:
        yield {"name": "given", **json.loads(asked.case)}
    elif asked.again is not None:
        yield from (one.case for one in read_results(asked.again).values() if one.verdict.is_failure)
    elif asked.cases is not None:
        cases = load_cases(asked.cases)
        yield from (cases[name] for name in asked.only or cases)
    else:
        numbers = map(int, asked.only) if asked.only else range(asked.first, asked.first + asked.count)
        yield from (generate(asked.seed, number) for number in numbers)


if __name__ == "__main__":
    sys.exit(main())
