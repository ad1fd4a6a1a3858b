"""`python -m tests.fuzz`: cases in several processes, each against one process.

python -m tests.fuzz --cases tests/fuzz/cases.json                  # cases of a file
python -m tests.fuzz --cases tests/fuzz/cases.json --only eval1     # some of them, by name
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of `find_unused_parameters` in each process
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")


def main() -> int:
    """Return 1 if a case failed."""
    reader = argparse.ArgumentParser(prog="python -m tests.fuzz")
    reader.add_argument("--cases", type=Path, help="a file of cases")
    reader.add_argument("--only", nargs="+", help="names of cases")
    reader.add_argument("--details", action="store_true", help="show tracebacks and all differences")
    asked = reader.parse_args()

    from tests.fuzz.case import load_cases
    from tests.fuzz.runner import Runner
    from tests.parity.pool import pool

    cases = load_cases(asked.cases)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        runner = Runner(pool(), Path(folder))
        for name, case in cases.items():
            if asked.only and name not in asked.only:
                continue
            verdict = runner.run(case)
            failures += verdict.is_failure
            reason = " ".join(verdict.reason.split())
            print(f"{verdict.seconds:5.1f} s  {name:36} {verdict.kind:8} {verdict.deviation:.0e}  {reason}", flush=True)
            if asked.details and verdict.is_failure:
                print("\n".join(verdict.details))
            if verdict.is_failure:
                print(f"         again: python -m tests.fuzz --cases {asked.cases} --only {name} --details")
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
