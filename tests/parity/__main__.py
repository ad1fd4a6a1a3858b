"""`python -m tests.parity`: run the whole matrix and write docs/parity.md.

python -m tests.parity --jobs 5        # so many rows at a time; each takes up to four processes
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def main() -> int:
    """Return 1 if a cell failed."""
    from tests.parity.page import PAGE, page

    reader = argparse.ArgumentParser(prog="python -m tests.parity")
    reader.add_argument("--jobs", type=int, default=1)
    reader.add_argument("--part", help=argparse.SUPPRESS)
    reader.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.part is not None:
        asked.into.write_bytes(pickle.dumps(_results(asked.part)))
        return 0
    run = _together(asked.jobs)
    PAGE.write_text(page(run), encoding="utf-8")
    for failure in run.failures:
        print(f"\nFAILED {failure}")
    print(f"\n{len(run.failures)} failures; written to {PAGE}")
    return 1 if run.failures else 0


def _results(part: str) -> tuple[Any, ...]:
    """Run one part in processes of its own."""
    from tests.parity.cell import Matrix
    from tests.parity.page import Run
    from tests.parity.pool import pool

    with tempfile.TemporaryDirectory() as folder:
        run = Run(Matrix(pool(), Path(folder)))
        run.part(part)
    return run.results()


def _together(jobs: int) -> Any:
    """Run all parts, so many at a time."""
    from tests.parity.page import PARTS_OF_RUN, Run

    run = Run(None)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads:

        def work(part: str) -> None:
            into = Path(folder) / f"{part}.pickle"
            subprocess.run([sys.executable, "-m", "tests.parity", "--part", part, "--into", str(into)], check=True)

        list(threads.map(work, PARTS_OF_RUN))
        for part in PARTS_OF_RUN:
            run.add(pickle.loads((Path(folder) / f"{part}.pickle").read_bytes()))  # our own, a moment old
    return run


if __name__ == "__main__":
    sys.exit(main())
