"""`python -m tests.parity`: run the whole matrix and write docs/parity.md."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def main() -> int:
    """Return 1 if a cell failed."""
    from tests.parity.cell import Matrix
    from tests.parity.page import PAGE, Run, page
    from tests.parity.pool import pool

    with tempfile.TemporaryDirectory() as folder:
        run = Run(Matrix(pool(), Path(folder)))
        run.everything()
    PAGE.write_text(page(run), encoding="utf-8")
    for failure in run.failures:
        print(f"\nFAILED {failure}")
    print(f"\n{len(run.failures)} failures; written to {PAGE}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
