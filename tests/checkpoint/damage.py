"""Damage to stored checkpoints: flips, truncations, swaps and zeroed pages, each of which must be found.

    python -m tests.checkpoint.damage --count 10000
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from cornstarch.checkpoint import CheckpointStore
from cornstarch.checkpoint.reader import convert_checkpoint
from cornstarch.checkpoint.store import Checkpoint

PAGE = 512
Files = dict[Path, bytes]


def write_checkpoints(folder: Path) -> CheckpointStore:
    """Write an older and a newer checkpoint, each in several files, as four ranks would."""
    source = CheckpointStore(folder / "source", keep=1)
    store = CheckpointStore(folder / "run", keep=2)
    store.folder.mkdir()
    for step in (1, 2):
        torch.manual_seed(step)
        source.save(step, {"w": torch.randn(64, 30), "m": torch.randn(64, 30), "n": torch.arange(9)}, {"step": step})
        found = source.latest()
        assert isinstance(found, Checkpoint)
        convert_checkpoint(found, folder / f"out-{step}", "sharded", 4).folder.rename(
            store.folder / found.folder.name
        )  # fmt: skip
    return store


def flip(files: Files, chance: random.Random) -> Files:
    path = chance.choice(list(files))
    content = bytearray(files[path])
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return {path: bytes(content)}


def truncate(files: Files, chance: random.Random) -> Files:
    path = chance.choice(list(files))
    return {path: files[path][: chance.randrange(len(files[path]))]}


def extend(files: Files, chance: random.Random) -> Files:
    path = chance.choice(list(files))
    return {path: files[path] + chance.randbytes(chance.randrange(1, PAGE))}


def zero_page(files: Files, chance: random.Random) -> Files:
    path = chance.choice(list(files))
    content = files[path]
    start = chance.randrange(0, len(content), PAGE)
    return {path: content[:start] + bytes(len(content[start : start + PAGE])) + content[start + PAGE :]}


def swap_pages(files: Files, chance: random.Random) -> Files:
    """Swap two pages of a file, or of two files."""
    contents = {path: bytearray(files[path]) for path in files}
    (a, i), (b, j) = ((path, chance.randrange(0, len(files[path]), PAGE)) for path in chance.choices(list(files), k=2))
    size = min(PAGE, len(contents[a]) - i, len(contents[b]) - j)
    one, two = bytes(contents[a][i : i + size]), bytes(contents[b][j : j + size])
    contents[a][i : i + size] = two
    contents[b][j : j + size] = one
    return {a: bytes(contents[a]), b: bytes(contents[b])}


def swap_files(files: Files, chance: random.Random) -> Files:
    a, b = chance.sample(list(files), 2)
    return {a: files[b], b: files[a]}


def put_older_file(files: Files, chance: random.Random) -> Files:
    """Put the file of the same name of the older checkpoint in place."""
    path = chance.choice(list(files))
    return {path: (path.parent.parent / "step_00000001" / path.name).read_bytes()}


KINDS: tuple[Callable[[Files, random.Random], Files], ...] = (
    flip, truncate, extend, zero_page, swap_pages, swap_files, put_older_file,
)  # fmt: skip


def damage_often(folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """Damage the newer checkpoint `count` times; return how often by kind. Each time the older one must be found."""
    chance = random.Random(seed)
    store = write_checkpoints(folder)
    newest = store.latest()
    assert newest is not None and newest.step == 2
    files = {path: path.read_bytes() for path in sorted(newest.folder.iterdir())}
    done: Counter[str] = Counter()
    while done.total() < count:
        kind = KINDS[done.total() % len(KINDS)]
        changed = {path: content for path, content in kind(files, chance).items() if content != files[path]}
        if not changed:
            continue  # a page of zeros, or a file that both checkpoints have
        for path, content in changed.items():
            path.write_bytes(content)
        found = store.latest()
        named = any("step_00000002" in problem for problem in store.problems)
        assert found is not None and found.step == 1 and named, (kind.__name__, list(changed), store.problems)
        done[kind.__name__] += 1
        for path in changed:
            path.write_bytes(files[path])
    newest = store.latest()
    assert newest is not None and newest.step == 2
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        done = damage_often(Path(folder), given.count, given.seed)
    for kind, number in done.items():
        print(f"{kind:16}{number:7}")
    print(f"{done.total()} of {done.total()} damaged checkpoints were found, and the older one was used")


if __name__ == "__main__":
    main()
