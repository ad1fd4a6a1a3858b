"""`python -m tests.parity`: run the whole matrix on the CPU and write docs/parity.md; or a part of it on a GPU.

python -m tests.parity --jobs 5                # so many rows at a time; each takes up to four processes
python -m tests.parity --device cuda --jobs 2  # the GPU's part; writes benchmarks/results/gpu_parity.md
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of `find_unused_parameters` in each process


def main() -> int:
    """Return 1 if a cell failed."""
    reader = argparse.ArgumentParser(prog="python -m tests.parity")
    reader.add_argument("--jobs", type=int, default=1, help="rows at a time")
    reader.add_argument("--device", choices=["cpu", "cuda"], help="run the GPU's part of the matrix there")
    reader.add_argument("--rows", nargs="+", help="with --device: only these rows")
    reader.add_argument("--page", type=Path, help="with --device: the file to write")
    reader.add_argument("--part", help=argparse.SUPPRESS)
    reader.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.device == "cuda" and not _has_gpu():
        reader.error("--device cuda: torch finds no GPU here")
    if asked.part is not None:
        asked.into.write_bytes(pickle.dumps(_results(asked.part, asked.device)))
        return 0
    told, path = _matrix(asked.jobs) if asked.device is None else _on_device(asked)
    for failure in told:
        print(f"\nFAILED {failure}")
    print(f"\n{len(told)} failures; written to {path}")
    return 1 if told else 0


def _has_gpu() -> bool:
    import torch  # after what is said in the environment

    return torch.cuda.is_available()


def _results(part: str, device: str | None) -> Any:
    """Run one part in processes of its own."""
    if device is not None:
        from tests.parity import on_device

        return on_device.run_part(part, device)
    from tests.parity.cell import Matrix
    from tests.parity.page import Run
    from tests.parity.pool import pool

    with tempfile.TemporaryDirectory() as folder:
        run = Run(Matrix(pool(), Path(folder)))
        run.part(part)
    return run.results()


def _matrix(jobs: int) -> tuple[Sequence[str], Path]:
    """Run the whole matrix and write its page; return what failed, and the page."""
    from tests.parity.page import PAGE, PARTS_OF_RUN, Run, page

    run = Run(None)
    for part, results in _together(PARTS_OF_RUN, jobs):
        assert results is not None, f"{part} broke off"
        run.add(results)
    earlier = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    PAGE.write_text(page(run, earlier), encoding="utf-8")
    return run.failures, PAGE


def _on_device(asked: argparse.Namespace) -> tuple[Sequence[str], Path]:
    """Run the part of the matrix that is run on a GPU, and write its page; return what failed, and the page."""
    from tests.parity import on_device

    start, found = time.monotonic(), on_device.Results()
    parts = [part for part in on_device.PARTS if not asked.rows or part.split(" ")[0] in asked.rows]
    path = asked.page or on_device.PAGE
    command = f"python -m tests.parity --device {asked.device} --jobs {asked.jobs}"
    for part, results in _together(parts, asked.jobs, "--device", asked.device):
        found |= on_device.broken_off(part) if results is None else results
        # After each: what has been found must not be lost with a machine.
        path.write_text(on_device.page(found, asked.device, command, time.monotonic() - start), encoding="utf-8")
    return on_device.failures(found), path


def _together(parts: Sequence[str], jobs: int, *options: str) -> Iterator[tuple[str, Any]]:
    """Run all parts, so many at a time; yield each with its results, None if it broke off."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads:

        def work(part: str) -> Any:
            into = Path(folder) / f"{part}.pickle"
            own = ["--part", part, "--into", str(into), *options]
            ended = subprocess.run([sys.executable, "-m", "tests.parity", *own])
            return None if ended.returncode else pickle.loads(into.read_bytes())  # our own, a moment old

        yield from zip(parts, threads.map(work, parts), strict=True)


if __name__ == "__main__":
    sys.exit(main())
