"""The files of the feature cache: whole or not there, below their limit, whoever writes, dies or damages them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from cornstarch.data.feature_store import CacheFolder, FeatureStore
from cornstarch.data.media import content_digest
from cornstarch.data.sample import Media
from cornstarch.errors import ConfigError
from tests.data.small_data import png
from tests.models.local_processors import image

KEY = "0123456789abcdef" * 4
ROOM = 1 << 30


def digest(number: int) -> str:
    return f"{number * 2654435761 % 2**32:08x}" * 8


def features(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3 + number % 4, 16, generator=torch.Generator().manual_seed(number)).to(dtype)


def store(folder: Path, limit: int = ROOM, key: str = KEY, opened: float | None = None) -> FeatureStore:
    return FeatureStore(CacheFolder(folder, limit, opened), key)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def set_age(kept: FeatureStore, number: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(kept.path(digest(number)), (then, then))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_features_are_loaded_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    kept = store(tmp_path)
    assert kept.load(digest(0)) is None
    assert kept.save(digest(0), features(0, dtype))
    found = kept.load(digest(0))
    assert found is not None and found.dtype == dtype and torch.equal(found, features(0, dtype))
    assert torch.equal(load_file(kept.path(digest(0)))["features"], found)  # plain safetensors
    assert not kept.save(digest(0), features(1))  # the first one stays
    assert kept.space.used == on_disk(tmp_path)


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    store(tmp_path).save(digest(0), features(0))
    assert store(tmp_path, key=KEY[::-1]).load(digest(0)) is None
    same_folder = store(tmp_path, key=KEY[:-1] + "x")  # should two keys share a folder, files still know theirs
    assert same_folder.folder == store(tmp_path).folder and same_folder.load(digest(0)) is None


@pytest.mark.parametrize("place", range(8))
def test_damaged_file_is_ignored_and_rewritten(tmp_path: Path, place: int) -> None:
    kept = store(tmp_path)
    kept.save(digest(0), features(0))
    content = bytearray(kept.path(digest(0)).read_bytes())
    content[(len(content) - 1) * place // 7] ^= 0x10
    kept.path(digest(0)).write_bytes(content)
    assert kept.load(digest(0)) is None
    assert kept.save(digest(0), features(0)) and kept.load(digest(0)) is not None


@pytest.mark.parametrize("length", [0, 4, 50, -1])
def test_truncated_file_is_ignored(tmp_path: Path, length: int) -> None:
    kept = store(tmp_path)
    kept.save(digest(0), features(0))
    content = kept.path(digest(0)).read_bytes()
    kept.path(digest(0)).write_bytes(content[:length])
    assert kept.load(digest(0)) is None


# ---------------------------------------------------------------------------------------------------- the limit


def test_least_recently_used_files_are_evicted(tmp_path: Path) -> None:
    old = store(tmp_path)
    for number in range(10):
        old.save(digest(number), features(0))
        set_age(old, number, 1000 - number)
    size = on_disk(tmp_path) // 10
    limit = 10 * size
    new = store(tmp_path, limit)
    assert new.load(digest(0)) is not None  # used again: the oldest no more
    for number in range(10, 14):
        assert new.save(digest(number), features(0))
        assert on_disk(tmp_path) <= limit and new.space.used == on_disk(tmp_path)
    there = [number for number in range(14) if new.path(digest(number)).exists()]
    assert 0 in there and {10, 11, 12, 13} <= set(there) and not {1, 2, 3} & set(there) and 9 in there


def test_files_used_in_this_run_are_not_evicted(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(digest(0), features(0))
    kept = store(tmp_path, limit=5 * on_disk(tmp_path) + 10, opened=time.time() - 100)
    stored = [number for number in range(1, 9) if kept.save(digest(number), features(0))]
    assert stored == [1, 2, 3, 4]
    assert on_disk(tmp_path) <= kept.space.limit
    assert all(kept.load(digest(number)) is not None for number in stored)


def test_opening_recounts_used_bytes(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(digest(0), features(0))
    (tmp_path / ".used").write_text("nonsense")
    assert kept.space.used == on_disk(tmp_path)
    (tmp_path / ".used").write_text("1000000")  # a process has died before it wrote
    assert store(tmp_path).space.used == on_disk(tmp_path)


def test_abandoned_temporary_files_are_removed(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(digest(0), features(0))
    folder = kept.path(digest(0)).parent
    (folder / ".old.tmp").write_bytes(b"x")
    (folder / ".new.tmp").write_bytes(b"x")
    os.utime(folder / ".old.tmp", (0, 0))
    store(tmp_path)
    assert not (folder / ".old.tmp").exists() and (folder / ".new.tmp").exists()


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"(?s)features\.folder = .*cannot be written"):
        CacheFolder(tmp_path / "file", ROOM)


# ---------------------------------------------------------------------------------------------------- processes


def write_and_read(folder: Path, limit: int, seed: int) -> int:
    """Write and read some items in an order of its own; return how many were not as they should be."""
    kept = store(folder, limit)
    wrong = 0
    for number in np.random.default_rng(seed).permutation(60).tolist():
        kept.save(digest(number), features(number))
        found = kept.load(digest(number))
        wrong += found is not None and not torch.equal(found, features(number))
    return wrong


@pytest.mark.parametrize("limit", [ROOM, 20_000])
def test_concurrent_processes_read_correct_features_below_the_limit(tmp_path: Path, limit: int) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        wrong = pool.starmap(write_and_read, [(tmp_path, limit, seed) for seed in range(3)])
    assert wrong == [0, 0, 0]
    assert on_disk(tmp_path) <= limit
    assert CacheFolder(tmp_path, limit).used == on_disk(tmp_path) == sum(
        store(tmp_path).path(digest(number)).stat().st_size
        for number in range(60)
        if store(tmp_path).load(digest(number)) is not None
    )  # fmt: skip
    assert not list(tmp_path.rglob("*.tmp"))


def write_for_ever(folder: Path, ready: object) -> None:
    kept = store(folder)
    kept.save(digest(0), features(0))
    ready.set()  # type: ignore[attr-defined]
    number = 1
    while True:
        kept.save(digest(number), torch.ones(400, 400))
        number += 1


def test_a_killed_writer_leaves_whole_files_only(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        folder, ready = tmp_path / str(attempt), context.Event()
        process = context.Process(target=write_for_ever, args=(folder, ready))
        process.start()
        assert ready.wait(250)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kept = store(folder)  # nobody holds the lock
        files = list(folder.rglob("*.safetensors"))
        assert files and all(kept.load(path.stem) is not None for path in files)


# ---------------------------------------------------------------------------------------------------- digests


def test_content_digest_depends_on_content_alone(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(seed=0))
    (tmp_path / "b.png").write_bytes(png(seed=0))
    (tmp_path / "c.png").write_bytes(png(seed=1))
    by_name = {name: content_digest(Media("image", str(tmp_path / f"{name}.png"))) for name in "abc"}
    assert by_name["a"] == by_name["b"] == content_digest(Media("image", png(seed=0))) != by_name["c"]

    wave = np.arange(8, dtype=np.float32)
    others = [
        Media("audio", wave),
        Media("audio", wave[:-1]),
        Media("audio", wave.astype(np.float64)),
        Media("audio", wave.reshape(4, 2)),
        Media("audio", {"array": wave, "sampling_rate": 8000}),
        Media("audio", {"array": wave, "sampling_rate": 16000}),
        Media("image", image(seed=0)),
        Media("image", image(seed=1)),
        Media("image", Image.fromarray(np.asarray(image(seed=0))[::-1].copy())),
    ]
    assert len({content_digest(media) for media in others}) == len(others)
    assert content_digest(Media("image", image(seed=0))) == content_digest(Media("image", image(seed=0)))
