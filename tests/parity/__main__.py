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
    from tests.parity.page import PAGE, run_all
    from tests.parity.pool import pool

    with tempfile.TemporaryDirectory() as folder:
        text, failures = run_all(Path(folder), pool())
    PAGE.write_text(text, encoding="utf-8")
    for failure in failures:
        print(f"\nFAILED {failure}", file=sys.stderr)
    print(f"\n{len(failures)} failures; {PAGE}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
