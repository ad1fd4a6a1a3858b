"""Checkpoints of many processes: any layout loads any other to the bit, optimizer and averages included."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cornstarch.checkpoint import CheckpointStore, LocalStorage, read_checkpoint
from cornstarch.checkpoint.reader import convert_checkpoint
from cornstarch.errors import ConfigError
from tests.checkpoint import layouts, numbered
from tests.parity.pool import pool


def run(ranks: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a job in so many processes; one is this process itself."""
    return [job(*arguments)] if ranks == 1 else pool().run(ranks, job, *arguments)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The hashes that one process gets: after three steps, and after the fourth."""
    return layouts.save_run(tmp_path_factory.mktemp("one"), "one")


# ---------------------------------------------------------------------------------------------------- any to any

PAIRS = [
    ("fsdp2", 2, "one", 1),
    ("one", 1, "fsdp2", 4),
    ("fsdp2", 4, "ddp", 2),
    ("ddp", 2, "one", 1),
    ("fsdp2", 3, "fsdp2", 2),
    ("fsdp2", 2, "fsdp2", 2),
    ("zero1", 3, "fsdp2", 2),
    ("hsdp", 4, "zero1", 2),
    ("fsdp1", 3, "fsdp2", 2),
    ("fsdp2", 4, "fsdp1", 3),
    ("fsdp1 hybrid", 4, "hsdp", 4),
    ("one", 1, "fsdp1 hybrid", 4),
    ("zero1 of torch", 2, "fsdp1", 2),
    ("fsdp1", 2, "zero1 of torch", 3),
    ("tp", 4, "fsdp2", 3),
    ("hsdp", 4, "tp", 4),
    ("ddp", 2, "zero1", 3),
    ("zero1", 2, "ddp", 2),
    ("zero1 tp", 4, "one", 1),
    ("fsdp2", 3, "zero1 tp", 4),
    ("zero1", 3, "zero1 tp", 4),
]


@pytest.mark.parametrize(("saving", "n", "loading", "m"), PAIRS, ids=[f"{a} {n} to {b} {m}" for a, n, b, m in PAIRS])
def test_any_layout_loads_any_other(
    saving: str, n: int, loading: str, m: int, expected: dict[str, str], tmp_path: Path
) -> None:
    assert run(n, layouts.save_run, tmp_path, saving) == [expected] * n
    for found in run(m, layouts.loaded, tmp_path, loading):
        assert {key: found[key] for key in expected} == expected
        assert set(found["rates"]) <= {0.1, 0.02}


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "fsdp1"])
def test_a_process_group_of_one_saves_and_loads(layout: str, expected: dict[str, str], tmp_path: Path) -> None:
    assert pool().run(1, layouts.save_run, tmp_path, layout) == [expected]
    [found] = pool().run(1, layouts.loaded, tmp_path, layout)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "fsdp1"])
def test_training_resumes_bit_equal(layout: str, tmp_path: Path) -> None:
    assert run(2, layouts.train, tmp_path, layout, True) == run(2, layouts.train, tmp_path, layout, False)


@pytest.mark.parametrize(("layout", "averaged"), [("fsdp2", True), ("fsdp1", False), ("ddp", True)])
def test_weights_are_restored_without_an_optimizer(layout: str, averaged: bool, tmp_path: Path) -> None:
    run(3, layouts.save_run, tmp_path, "fsdp2")
    assert run(2, layouts.weights_loaded, tmp_path, layout, averaged) == [True, True]


def test_random_states_are_restored_or_derived(tmp_path: Path) -> None:
    """As many processes go on with theirs; others get numbers that are their own, and the same each time."""
    run(2, layouts.save_run, tmp_path, "ddp")

    def drawn(ranks: int, layout: str) -> list[list[float]]:
        for name in ("again", "next"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        return [found["drawn"] for found in run(ranks, layouts.loaded, tmp_path, layout)]

    assert drawn(2, "ddp") == drawn(2, "fsdp2")
    three = drawn(3, "ddp")
    assert three == drawn(3, "fsdp2") and len({tuple(numbers) for numbers in three}) == 3
    assert drawn(1, "one") == drawn(1, "one") and drawn(1, "one")[0] not in three


def test_the_manifest_describes_the_layout(tmp_path: Path) -> None:
    run(4, layouts.save_run, tmp_path, "hsdp")
    [found] = CheckpointStore(tmp_path, keep=1).list()
    assert found.layout == {"processes": 4, "form": "sharded", "meshes": ["replicate 2 x shard 2"]}
    assert found.metric == 0.5 and set(found.versions) == {"cornstarch", "torch", "python"}
    # Of two replicas the first writes, and rank 0 what is plain: the others have their random numbers only.
    sizes = {name: entry["size"] for name, entry in found.files.items() if name.startswith("rank-")}
    assert list(sizes) == [f"rank-{rank:04d}-tensors-00001.safetensors" for rank in range(4)]
    assert min(list(sizes.values())[:2]) > 1.2 * max(list(sizes.values())[2:])
    data = found.data()
    assert list(data["state"]["rngs"]) == ["0", "1", "2", "3"] and data["state"]["rng"] is None
    assert data["per_rank"] == {str(rank): {"rank": rank} for rank in range(4)}
    assert data["state"]["parameters"]["embedding.weight"]["is"] == "float32 [7, 5]"
    for name in (*found.files, "checkpoint.json"):
        assert name.endswith((".json", ".safetensors"))


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp2", 3), ("hsdp", 4), ("tp", 4)])
def test_shards_are_those_of_torch(layout: str, ranks: int) -> None:
    assert run(ranks, layouts.boxes_of_torch, layout) == [True] * ranks


# ---------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize(("saving", "n"), [("fsdp2", 4), ("zero1", 3), ("fsdp1", 2)])
def test_the_full_form_has_whole_tensors(saving: str, n: int, expected: dict[str, str], tmp_path: Path) -> None:
    assert run(n, layouts.save_run, tmp_path, saving, "full") == [expected] * n
    [found] = CheckpointStore(tmp_path, keep=1).list()
    assert sorted(found.files) == ["data.json", "tensors-00001.safetensors"]
    assert found.layout["form"] == "full" and found.layout["processes"] == n
    assert {key: run(1, layouts.loaded, tmp_path, "one")[0][key] for key in expected} == expected


@pytest.mark.parametrize("layout", ["fsdp2", "zero1", "fsdp1"])
def test_the_local_form_loads_in_the_same_layout_only(layout: str, expected: dict[str, str], tmp_path: Path) -> None:
    """It is loaded as it was saved, refused in any other way, and converted."""
    assert run(3, layouts.save_run, tmp_path / "local", layout, "local") == [expected] * 3
    shutil.rmtree(tmp_path / "local/after")
    for found in run(3, layouts.loaded, tmp_path / "local", layout):
        assert {key: found[key] for key in expected} == expected
    for message in run(2, layouts.refusal, layouts.loaded, tmp_path / "local", "fsdp2"):
        assert "saved in the local form by 3 processes, and here are 2" in message
    other = "fsdp1" if layout == "fsdp2" else "fsdp2"
    for message in run(3, layouts.refusal, layouts.loaded, tmp_path / "local", other):
        assert "local form, which can be loaded only as it was saved" in message or "incomplete" in message
    [local] = CheckpointStore(tmp_path / "local", keep=1).list()
    for form, processes in (("full", None), ("sharded", 2)):
        convert_checkpoint(local, tmp_path / form, form, processes)  # type: ignore[arg-type]
        assert layouts.hash_of(tmp_path / form) == expected["saved"]
    for found in run(2, layouts.loaded, tmp_path / "sharded", "fsdp2"):
        assert {key: found[key] for key in expected} == expected


def test_conversion_to_any_form_keeps_the_tensors(expected: dict[str, str], tmp_path: Path) -> None:
    run(3, layouts.save_run, tmp_path / "a", "fsdp1")
    [first] = CheckpointStore(tmp_path / "a", keep=1).list()
    full = convert_checkpoint(first, tmp_path / "full")
    assert sorted(full.files) == ["data.json", "tensors-00001.safetensors"] and full.form == "full"
    assert (full.step, full.metric, full.versions, full.data()) == (3, 0.5, first.versions, first.data())
    cut = convert_checkpoint(full, tmp_path / "cut", "sharded", 4)
    assert [name for name in cut.files if name.startswith("rank-0003")] and cut.layout["processes"] == 4
    for folder in ("full", "cut"):
        assert layouts.hash_of(tmp_path / folder) == expected["saved"]
        read_checkpoint(next((tmp_path / folder).iterdir())).verify()
    with pytest.raises(ConfigError, match="exists already"):
        convert_checkpoint(full, tmp_path / "cut")
    with pytest.raises(ConfigError, match="form = 'local'"):
        convert_checkpoint(full, tmp_path / "other", "local")  # type: ignore[arg-type]
    layouts_file = next(first.folder.glob("rank-0001*"))
    layouts_file.unlink()
    with pytest.raises(ConfigError, match="rank-0001.*missing"):
        convert_checkpoint(first, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "cut", "full"]


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("fsdp2", 2), ("fsdp1", 3), ("tp", 4)])
def test_another_model_is_refused(layout: str, ranks: int, tmp_path: Path) -> None:
    run(2, layouts.save_run, tmp_path, "fsdp2")
    for message in run(ranks, layouts.refusal, layouts.with_other_frozen_values, tmp_path, layout):
        assert "1 difference(s)" in message and "frozen.weight is frozen and was not saved, and has other" in message


def test_the_model_inside_an_fsdp1_unit_is_refused(tmp_path: Path) -> None:
    for message in run(2, layouts.refusal, layouts.save_what_is_inside, tmp_path):
        assert "cut by an FSDP1 unit that is around this model" in message


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("data", "data.a.b is 0 on rank 0, 1 on rank 1. What differs belongs under data['per_rank']"),
        ("step", "step is 0 on rank 0, 1 on rank 1"),
        ("form", 'form is "full" on rank 0, "sharded" on rank 1'),
        ("shape", "same is F32 [4] on rank 1, but F32 [3] on a lower one"),
        ("kind", "Rank 1: data.a.b is a object, which JSON cannot hold"),
        ("parts", "cut [500, 3] cannot be saved: the parts that the 2 processes have do not make a whole"),
    ],
)
def test_ranks_that_disagree_are_refused(what: str, told: str, tmp_path: Path) -> None:
    messages = run(2, numbered.disagree, tmp_path, what)
    assert told in messages[0] and messages[0] == messages[1]


# ---------------------------------------------------------------------------------------------------- damage


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("missing shard", lambda f: next(f.glob("rank-0001*")).unlink(), "missing"),
    ("flipped byte", lambda f: flip(next(f.glob("rank-0001*")), random.Random(0)), "SHA-256"),
    ("flipped byte of rank 0", lambda f: flip(next(f.glob("rank-0000*")), random.Random(0)), "SHA-256"),
    ("data", lambda f: flip(f / "data.json", random.Random(0)), "SHA-256"),
    ("description", lambda f: flip(f / "checkpoint.json", random.Random(0)), "checkpoint.json"),
]


@pytest.mark.parametrize(("damage", "told"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_all_ranks_use_the_older_checkpoint(damage: Callable[[Path], Any], told: str, tmp_path: Path) -> None:
    run(2, numbered.save_steps, tmp_path, [1, 2])
    damage(tmp_path / "step_00000002")
    found = run(3, numbered.find_steps, tmp_path)
    assert [step for step, _ in found] == [1, 1, 1] and found[0] == found[1] == found[2]
    [problem] = found[0][1]
    assert told in problem and "step_00000002" in problem


def test_damage_on_one_rank_makes_all_use_the_older_checkpoint(tmp_path: Path) -> None:
    run(2, numbered.save_steps, tmp_path, [1, 2])
    found = run(3, numbered.find_steps, tmp_path, 2)
    assert [step for step, _ in found] == [1, 1, 1]
    assert found[0] == found[1] and "Rank 2" in found[0][1][0]


def test_a_thousand_flipped_bits_are_found(tmp_path: Path) -> None:
    run(
        2,
        numbered.save_steps,
        tmp_path,
        [1],
    )
    folder = tmp_path / "step_00000001"
    read_checkpoint(folder).verify()
    contents = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    assert len(contents) == 4
    chance = random.Random(0)
    for _ in range(1000):
        path = chance.choice(list(contents))
        flip(path, chance)
        with pytest.raises(ConfigError, match="step_00000001"):
            read_checkpoint(folder).verify()
        path.write_bytes(contents[path])
    read_checkpoint(folder).verify()


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    """A description that does not list a shard, with a right checksum, as someone who means harm would write it."""
    from cornstarch.checkpoint.shards import encode_manifest
    from cornstarch.files import own_digest

    run(2, numbered.save_steps, tmp_path, [1])
    path = tmp_path / "step_00000001/checkpoint.json"
    content = json.loads(path.read_text())
    del content["files"]["rank-0001-tensors-00001.safetensors"]
    content["sha256"] = own_digest(content)
    path.write_bytes(encode_manifest(content))
    found = CheckpointStore(tmp_path, keep=1).latest()
    assert found is not None
    with pytest.raises(ConfigError, match="does not hold all of the tensor 'cut'"), found.tensors():
        pass


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(("form", "full"), [("sharded", 1), ("sharded", 0), ("local", 1), ("full", 0)])
@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "beside"])
def test_a_full_disk_on_one_rank_is_raised_on_all(form: str, full: int, wait: bool, tmp_path: Path) -> None:
    for message in run(2, numbered.save_on_a_full_disk, tmp_path, full, form, wait):
        assert message.startswith(f"Rank {full}: The checkpoint of step 2 could not be saved")
        assert "File too large" in message and "untouched" in message
    assert numbered.step_told_by(tmp_path) == 3


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_background_saves_overlap_with_training(form: str, tmp_path: Path) -> None:
    assert run(2, numbered.save_in_background, tmp_path, form) == [(True, True, 6)] * 2
    with CheckpointStore(tmp_path, keep=1).verify(5).all_tensors() as tensors:
        assert {float(n) for name in tensors for n in tensors[name].unique()} == {5.0}


def test_a_background_failure_is_raised_on_all_ranks(tmp_path: Path) -> None:
    for message in run(2, numbered.fail_in_background, tmp_path, 1):
        assert message.startswith("Rank 1: The checkpoint of step 2 could not be saved") and "No space left" in message


def test_a_folder_that_only_rank_0_sees_is_refused(tmp_path: Path) -> None:
    messages = run(2, layouts.refusal, _save_elsewhere, tmp_path)
    assert all("Rank 1" in message and "a file system that all machines share" in message for message in messages)
    assert not list(tmp_path.glob("*/step_*"))


class UnsharedStorage(LocalStorage):
    """A file system that does not show the folders of other machines."""

    def exists(self, path: Path) -> bool:
        return ".tmp." not in path.name and super().exists(path)


def _save_elsewhere(folder: Path) -> None:
    from cornstarch.checkpoint import save

    store = CheckpointStore(folder / "run", keep=1)
    if dist.get_rank() == 1:
        store.storage = UnsharedStorage()
    patience, save.FOLDER_TIMEOUT = save.FOLDER_TIMEOUT, 0.1
    try:
        numbered.save_numbered(store, 1)
    finally:
        save.FOLDER_TIMEOUT = patience
