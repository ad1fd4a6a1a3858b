"""Saves on disks that are too small by some amount: the old checkpoint stays, and the message names place and bytes.

    python -m tests.checkpoint.full_disk --sizes 100      (root: it mounts small file systems)
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cornstarch.checkpoint import CheckpointStore
from cornstarch.errors import ConfigError

_NUMBERS = 40_000
_LARGE = 2**23


@contextmanager
def mount_small(folder: Path, size: int) -> Iterator[None]:
    """Mount a file system of some bytes at a folder; OSError or CalledProcessError if that is not allowed."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _resize(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True, capture_output=True)


def _save(store: CheckpointStore, step: int) -> None:
    tensors = {f"w{n}": torch.full((_NUMBERS // 4,), float(step)) for n in range(4)}
    store.save(step, tensors, {"step": step, "text": "x" * 20_000})


def _step_in(store: CheckpointStore) -> int:
    found = store.latest()
    assert found is not None and store.problems == []
    with found.tensors() as tensors:
        assert {float(n) for name in tensors for n in tensors[name].unique()} == {float(found.step)}
    assert found.data()["step"] == found.step
    return found.step


def fill_disks(folder: Path, sizes: int, seed: int = 0) -> Counter[str]:
    """Save on disks of random sizes; return how often that was refused, and how often it fitted."""
    chance = random.Random(seed)
    done: Counter[str] = Counter()
    with mount_small(folder, _LARGE):
        store = CheckpointStore(folder / "run", keep=1)
        _save(store, 1)
        used = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
        for number in range(sizes):
            before = _step_in(store)
            _resize(folder, used + chance.randrange(4096, int(1.2 * used)))
            step = 2 * number + 2
            try:
                _save(store, step)
            except ConfigError as error:
                text = str(error)
                assert str(store.folder) in text and "No space left on device" in text, text
                assert re.search(r"It has [\d.]+ GB of tensors; [\d.]+ GB are free there", text), text
                assert len(text.splitlines()) == 1
                assert _step_in(store) == before
                done["refused"] += 1
            else:
                assert _step_in(store) == step
                done["fitted"] += 1
            _resize(folder, _LARGE)
            _save(store, step + 1)  # with space again, nothing stands in the way
            assert _step_in(store) == step + 1
            assert len(list(store.folder.glob("step_*"))) == 1
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as parent:
        done = fill_disks(Path(parent) / "disk", given.sizes, given.seed)
    print(f"{given.sizes} sizes: {done['refused']} saves were refused with the place and the bytes, and the old ")
    print(f"checkpoint was loaded each time; {done['fitted']} saves fitted")


if __name__ == "__main__":
    main()
