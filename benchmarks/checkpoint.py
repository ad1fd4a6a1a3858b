"""Measure the cost of checkpoints: how long a save blocks training, the overhead of checksums, and the loading time.

Each process has a shard of tensors with the given number of megabytes, as with FSDP. Each round runs, in random order:

    waiting     synchronous save: write, sync, hash, read back and compare, rename
    beside      background save: blocks until the tensors are copied, then until everything is on disk
    unchecked   save without hashing and reading back, to measure the cost of checksums
    verify      find the newest complete checkpoint: all processes together read and hash all of it
    load        fill the tensors in place from verified files (which are in the page cache)

Reported: the median over rounds of the slowest process, and GB/s.

    python benchmarks/checkpoint.py         # prints a table; with --output FILE.json also writes it
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from cornstarch.checkpoint import CheckpointStore, Sharded, shards, storage
from cornstarch.checkpoint.shards import Tensorlike

TENSOR_MEGABYTES = 16


class NoHash:
    """A stand-in for SHA-256 that does nothing."""

    def update(self, piece: Any) -> None:
        """Ignore the bytes."""

    def hexdigest(self) -> str:
        """Return a string in the format of a hash."""
        return "0" * 64


@contextmanager
def unchecked() -> Iterator[None]:
    """Skip hashing and reading back inside the block."""
    check = shards.check_written
    storage.hashlib = SimpleNamespace(sha256=NoHash, file_digest=hashlib.file_digest)  # type: ignore[assignment]
    shards.check_written = lambda *_: None
    try:
        yield
    finally:
        storage.hashlib, shards.check_written = hashlib, check


def state(megabytes: int, rank: int, size: int, device: str) -> dict[str, Tensorlike]:
    """Return the shard of this process."""
    rows = TENSOR_MEGABYTES * 1_000_000 // 4 // 1000
    begin, end = (rows * 1000 * number // size for number in (rank, rank + 1))
    shape = torch.Size([rows, 1000])
    return {
        f"w{number}": Sharded(shape, torch.randn(end - begin, device=device), begin)
        for number in range(max(1, megabytes // TENSOR_MEGABYTES))
    }


def measure(rank: int, size: int, folder: Path, options: argparse.Namespace, results: Any) -> None:
    """Run as one of the processes."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), size), rank=rank, world_size=size)
    tensors = state(options.megabytes, rank, size, options.device)
    store = CheckpointStore(folder / "checkpoints", keep=1)
    order = random.Random(0)
    seconds: dict[str, list[float]] = {}
    step = 0
    for round_ in range(options.rounds + 1):  # the first one warms up
        measured: dict[str, float] = {}
        for kind in order.sample(["waiting", "beside", "unchecked"], 3):
            step += 1
            _meet(size)
            begin = time.perf_counter()
            if kind == "unchecked":
                with unchecked():
                    store.save(step, tensors, {})
            else:
                store.save(step, tensors, {}, wait=kind == "waiting")
            measured[kind] = time.perf_counter() - begin
            store.wait()
            measured[f"{kind}, until it is there"] = time.perf_counter() - begin
        store.save(step + 1, tensors, {})
        step += 1
        _meet(size)
        begin = time.perf_counter()
        found = store.latest()
        measured["verify"] = time.perf_counter() - begin
        assert found is not None
        begin = time.perf_counter()
        with found.tensors() as reader:
            for name, tensor in tensors.items():
                reader.copy_into(name, tensor)
        measured["load"] = time.perf_counter() - begin
        if round_:
            for kind, value in measured.items():
                seconds.setdefault(kind, []).append(value)
    results.put((rank, seconds))
    if size > 1:
        _meet(size)
        dist.destroy_process_group()


def _meet(size: int) -> None:
    if size > 1:
        dist.barrier()


def run(size: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of the slowest process by kind."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with TemporaryDirectory(dir=options.folder) as folder:
        arguments = [(rank, size, Path(folder), options, results) for rank in range(size)]
        workers = [context.Process(target=measure, args=argument) for argument in arguments]
        for worker in workers:
            worker.start()
        found = [results.get(timeout=600)[1] for _ in workers]
        for worker in workers:
            worker.join()
    rounds = {kind: [max(values) for values in zip(*(one[kind] for one in found), strict=True)] for kind in found[0]}
    return {kind: statistics.median(values) for kind, values in rounds.items()}


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="size of the tensors, over all processes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cpu", help="device of the tensors: cpu or cuda")
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure; default: the temporary folder")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    gigabytes = max(1, options.megabytes // TENSOR_MEGABYTES) * TENSOR_MEGABYTES / 1000
    everything: dict[str, Any] = {
        "date": str(date.today()),
        "torch": str(torch.__version__),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "device": options.device,
        "gigabytes": gigabytes,
        "rounds": options.rounds,
        "seconds": {},
    }
    print(f"{gigabytes:.2f} GB of tensors on {options.device}, median of {options.rounds} rounds\n")
    columns = "processes", "save", "in the background", "until it is there", "without checksums", "verify", "load"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    lines: list[str] = []
    for size in options.processes:
        found = run(size, options)
        everything["seconds"][size] = found
        cells = [found[kind] for kind in ("waiting", "beside", "beside, until it is there", "unchecked")]
        cells += [found["verify"], found["load"]]
        print(f"| {size} | " + " | ".join(f"{value:.3f} s, {gigabytes / value:.2f} GB/s" for value in cells) + " |")
        lines.append(
            f"{size} process(es): a save in the background blocks {found['beside'] / found['waiting']:.1%} of the time "
            f"of a synchronous one; checksums and reading back cost {found['waiting'] / found['unchecked']:.2f}x."
        )
    print("\n" + "\n".join(lines))
    if options.output is not None:
        options.output.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
