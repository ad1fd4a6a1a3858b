"""kill -9 of one process while two save: what was said to be saved is there, nothing is mixed, and nobody hangs."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from cornstarch.checkpoint import CheckpointStore
from cornstarch.errors import ConfigError
from tests import forked
from tests.checkpoint import numbered
from tests.checkpoint.halted import halt_in_a_save

_PATIENCE = 120.0


def _save_without_end(rank: int, folder: Path, meeting: Path, told: Path, first: int, wait: bool) -> None:
    """Be one of two processes that save one step after the other; rank 0 writes down each that is saved."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    store = dist.FileStore(str(meeting), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=_PATIENCE))
    checkpoints = CheckpointStore(folder, keep=2)
    step = first
    try:
        while True:
            numbered.save_numbered(checkpoints, step, 30_000, wait=wait)
            if not wait:
                for _ in range(3):
                    dist.all_reduce(torch.ones(10))
                    checkpoints.check()
                checkpoints.wait()
            if rank == 0:
                with open(told, "a") as file:
                    file.write(f"{step}\n")
            step += 1
    except ConfigError as error:  # the other one is gone
        os._exit(7 if "has ended or cannot be reached" in str(error) else 1)
    except RuntimeError:
        os._exit(7 if not wait else 1)  # noticed by training first


def _kill(folder: Path, round_: int, chance: random.Random, wait: bool) -> tuple[int, bool]:
    """Start two, kill one of them, and return the last step that was told and whether the other one ended by itself.

    In every second round they are in the midst of a save, however fast or slowly they go.
    """
    told = folder.with_name(f"{folder.name}.told")
    told.touch()
    before = max(map(int, told.read_text().split()), default=0)
    found = CheckpointStore(folder, keep=2).latest()
    first = max(before, 0 if found is None else found.step) + 1
    meeting = folder.with_name(f"{folder.name}.meeting-{round_}")
    two: list[ForkServerProcess] = [
        forked.process(_save_without_end, rank, folder, meeting, told, first, wait) for rank in (0, 1)
    ]
    for process in two:
        process.start()
    end = time.monotonic() + _PATIENCE
    while max(map(int, told.read_text().split()), default=0) < first:  # they are at work
        assert time.monotonic() < end and all(process.is_alive() for process in two), [p.exitcode for p in two]
        time.sleep(0.002)
    time.sleep(chance.uniform(0.0, 0.08))
    victim = chance.randrange(2)
    pids = [process.pid for process in two if process.pid is not None]
    if round_ % 2:
        halt_in_a_save(pids, folder)
    os.kill(pids[victim], signal.SIGKILL)
    os.kill(pids[1 - victim], signal.SIGCONT)
    for process in two:
        process.join(_PATIENCE)
    codes = [process.exitcode for process in two]
    for process in two:
        process.kill()
    assert codes[victim] == -signal.SIGKILL
    return max(map(int, told.read_text().split())), codes[1 - victim] == 7


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "wait"), [(12, True), (6, False)], ids=["waiting", "beside"])
def test_kills_at_random_moments_lose_no_checkpoint(kills: int, wait: bool, tmp_path: Path) -> None:
    chance = random.Random(0)
    folder = tmp_path / "run"
    for round_ in range(kills):
        told, ended = _kill(folder, round_, chance, wait)
        assert ended, "the other process must notice"
        assert numbered.step_told_by(folder) in (told, told + 1)
