"""`python -m tests.chaos`: real processes, real signals.

python -m tests.chaos kills --count 200 --restarts 50 --jobs 2 --into chaos.jsonl  # goes on where it was interrupted
python -m tests.chaos kills --seed 0 --only 12 --restarts 50 --details             # one of these runs
python -m tests.chaos stops --count 50 --into chaos.jsonl                          # SIGSTOP: who is named, how soon?
python -m tests.chaos cuts --count 20 --into chaos.jsonl                           # links that go down; needs root
python -m tests.chaos busy --minutes 60 --into chaos.jsonl                         # false alarms
python -m tests.chaos goodput --minutes 30 --every 60 --into chaos.jsonl           # speed with faults
python -m tests.chaos elastic --into chaos.jsonl                                   # 4, 2, 3, 4 ranks
python -m tests.chaos soak --hours 2 --every 30 --into chaos.jsonl                 # memory and open files
python -m tests.chaos page chaos.jsonl                                             # benchmarks/results/chaos.md
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
    from tests.chaos import elastic, endurance, hangs, page, run_kills

    run_kills.add_command(commands)
    endurance.add_commands(commands)
    elastic.add_command(commands)
    hangs.add_commands(commands)
    page.add_command(commands)
    asked = reader.parse_args()
    return asked.run(asked)


if __name__ == "__main__":
    sys.exit(main())
