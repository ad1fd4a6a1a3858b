"""`python -m tests.chaos`: real processes, real signals.

python -m tests.chaos kills --count 200 --jobs 2 --into kills.jsonl   # kill -9; goes on where it was interrupted
python -m tests.chaos kills --seed 0 --only 12 --details              # one of these runs
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")


def main() -> int:
    """Return 1 if something failed."""
    reader = argparse.ArgumentParser(prog="python -m tests.chaos")
    commands = reader.add_subparsers(dest="command", required=True)
    from tests.chaos import elastic, endurance, hangs, run_kills

    run_kills.add_command(commands)
    endurance.add_commands(commands)
    elastic.add_command(commands)
    hangs.add_commands(commands)
    asked = reader.parse_args()
    return asked.run(asked)


if __name__ == "__main__":
    sys.exit(main())
