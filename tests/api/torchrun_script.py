"""What a user starts with torchrun: a few boosted steps; the losses of each process go to a file of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.api.work import Case, run


def main(folder: str) -> None:
    """Join the others, train, and write down what came out."""
    dist.init_process_group("gloo")
    try:
        outcome = run(Case(2))
        sizes = {name: float(abs(value).sum()) for name, value in outcome.parameters.items() if value is not None}
        told = json.dumps({"losses": outcome.losses, "parameters": sizes})
        (Path(folder) / f"{dist.get_rank()}.json").write_text(told, encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
