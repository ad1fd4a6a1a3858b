"""kill -9 while checkpoints are saved: at every operation on files, and at random moments.

    python -m tests.checkpoint.kills --moments 500
    python -m tests.checkpoint.kills --moments 50 --s3      (a server that speaks S3, in this process)
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import torch

from cornstarch.checkpoint import CheckpointStore, object_storage
from tests.checkpoint import numbered
from tests.checkpoint.halted import halt_in_a_save, is_half_written
from tests.checkpoint.s3_server import s3_server
from tests.forked import run_in_child

OPERATIONS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def kill_at_operation(number: int, place: Path) -> None:
    """Have this process killed at the n-th time that it changes something under `place`, just before it does."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in OPERATIONS or (event == "open" and str(arguments[0]).startswith(str(place))):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def kill_at_random_moments(folder: Path, moments: int, seed: int = 0, size: int = 100_000) -> tuple[int, int]:
    """Kill a process that saves as fast as it can; return the last step, and the kills in the midst of a save.

    What it has said to be saved is there, and no checkpoint is mixed. Most processes have saved before, and every third
    one is killed while it saves, however busy the machine is.
    """
    chance = random.Random(seed)
    said_step, during = 0, 0
    for number in range(moments):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            store, step = CheckpointStore(folder, keep=2), said_step
            while True:
                step += 1
                numbered.save_numbered(store, step, size)
                os.write(write, f"{step}\n".encode())
        os.close(write)
        said = os.read(read, 100) if number % 2 or number % 3 == 0 else b""
        time.sleep(chance.uniform(0.0, 0.05))
        if number % 3 == 0:
            halt_in_a_save([child], folder)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(read, "rb") as rest:
            said_step = max([said_step, *map(int, (said + rest.read()).split())])
        during += is_half_written(folder)
        found = numbered.step_told_by(folder, 1) or 0
        assert found in (said_step, said_step + 1), (found, said_step)
        said_step = found
    return said_step, during


def kill_at_every_operation(folder: Path) -> int:
    """Kill a save at each of its operations on files; return how many there are."""
    seen: list[int] = []
    for number in range(1, 1000):
        place = folder / str(number)
        store = CheckpointStore(place, keep=1)
        numbered.save_numbered(store, 1)

        def save_until_killed(number: int = number, store: CheckpointStore = store) -> None:
            kill_at_operation(number, store.folder)
            numbered.save_numbered(store, 2)

        status = run_in_child(save_until_killed)
        seen.append(numbered.step_told_by(place, 1) or 0)
        numbered.save_numbered(store, 3)
        assert sorted(path.name for path in place.iterdir() if path.name != ".lock") == ["step_00000003"]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert seen == sorted(seen) and set(seen) == {1, 2}
    return number - 1


def kill_in_object_store(moments: int, seed: int = 0) -> tuple[int, int]:
    """The same against a store that speaks S3, with uploads in parts; no unfinished upload may stay, either."""
    chance, url = random.Random(seed), "s3://kills/run"
    said_step, during = 0, 0
    object_storage.PART_BYTES = 5 * 2**20
    with s3_server("kills"):
        for number in range(moments):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                store, step = CheckpointStore(url, keep=1), said_step
                while True:
                    step += 1
                    numbered.save_numbered(store, step, 500_000)
                    os.write(write, f"{step}\n".encode())
            os.close(write)
            said = os.read(read, 100) if number % 2 else b""
            time.sleep(chance.uniform(0.0, 1.0))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with open(read, "rb") as rest:
                said_step = max([said_step, *map(int, (said + rest.read()).split())])
            store = CheckpointStore(url, keep=1)
            with suppress(FileNotFoundError):
                during += any(".tmp." in name for name in store.storage.list_names(store.folder))
            found = numbered.step_told_by(Path(url), 1) or 0
            assert found in (said_step, said_step + 1), (found, said_step)
            said_step = found
        numbered.save_numbered(store, said_step + 1)
        assert store.storage.list_names(store.folder) == [f"step_{said_step + 1:08d}"]
        client = fsspec.filesystem("s3")
        assert not client.call_s3("list_multipart_uploads", Bucket="kills").get("Uploads")
    return said_step, during


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--s3", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.s3:
        step, during = kill_in_object_store(given.moments, given.seed)
        print(f"S3: killed at {given.moments} random moments, {during} of them in the midst of a save:")
        print(f"of {step} saved steps none was lost or mixed, and no unfinished upload has stayed")
        return
    with tempfile.TemporaryDirectory() as parent:
        operations = kill_at_every_operation(Path(parent) / "operations")
        print(f"killed at each of {operations} operations on files: the old checkpoint or the new one, never a mix")
        step, during = kill_at_random_moments(Path(parent) / "moments", given.moments, given.seed)
    print(f"killed at {given.moments} random moments, {during} of them in the midst of a save:")
    print(f"of {step} saved steps none was lost or mixed")


if __name__ == "__main__":
    main()
