"""CheckpointStore: what comes back, what is kept, what is found damaged, and crashes."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import random
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from cornstarch.checkpoint import Checkpoint, CheckpointStore, LocalStorage, read_checkpoint, register_storage
from cornstarch.checkpoint import shards as files
from cornstarch.checkpoint import storage as storage_module
from cornstarch.errors import ConfigError
from cornstarch.files import file_digests, own_digest
from tests.checkpoint.damage import KINDS, damage_often
from tests.checkpoint.full_disk import fill_disks
from tests.checkpoint.kills import kill_at_every_operation, kill_at_random_moments
from tests.forked import run_in_child


def tensors_of(step: int, size: int = 1000) -> dict[str, Tensor]:
    """Tensors whose every element tells the step."""
    return {"a/weight": torch.full((size, 3), float(step)), "b": torch.full((7,), step), "c": torch.tensor(step)}


def save(store: CheckpointStore, step: int, metric: float | None = None, size: int = 1000) -> Path:
    return store.save(step, tensors_of(step, size), {"step": step}, metric=metric)


def step_in(found: Checkpoint | None) -> int:
    """Return the step that data and every element of every tensor tell."""
    assert found is not None
    with found.tensors() as tensors:
        steps = {float(value) for tensor in tensors.values() for value in tensor.unique()}
        assert set(tensors) == {"a/weight", "b", "c"}
    assert steps == {float(found.step)} == {float(found.data()["step"])}
    return found.step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# ---------------------------------------------------------------------------------------------------- what comes back

ALL_TYPES = [dtype for dtype in files.DTYPES if dtype is not torch.bool]


def one_of_each() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in ALL_TYPES:
        raw = torch.randint(0, 120, (24, 8), dtype=torch.uint8, generator=generator)
        found[f"{dtype}"] = raw.view(dtype)
    return {
        **found,
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "strided": torch.arange(20)[::3],
        'a name / with ünusual " characters': torch.tensor([-0.0, float("nan"), float("inf")]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


@pytest.mark.parametrize("file_bytes", [2**30, 300], ids=["one file", "many files"])
def test_saved_tensors_are_bit_equal(file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", file_bytes)
    expected = one_of_each()
    folder = CheckpointStore(tmp_path, keep=1).save(3, expected, {})
    written = sorted(folder.glob("*.safetensors"))
    assert (len(written) > 5) == (file_bytes == 300)
    reference = {name: tensor for file in written for name, tensor in safetensors.torch.load_file(file).items()}
    found = CheckpointStore(tmp_path, keep=1).latest()
    assert found is not None
    with found.tensors() as tensors:
        assert set(tensors) == set(expected) == set(reference)
        for name, tensor in expected.items():
            for read in (tensors[name], reference[name]):
                assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
                assert (
                    read.reshape(-1).view(torch.uint8).equal(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
                ), name


def test_saved_data_is_equal(tmp_path: Path) -> None:
    data = {
        "text": "ä\n",
        "number": 0.1 + 0.2,
        "none": None,
        "nested": {"list": [1, True, {"x": 1e-300}]},
        "inf": 1e999,
    }
    CheckpointStore(tmp_path / "not" / "there" / "yet", keep=1).save(0, {}, data, metric=2)
    found = CheckpointStore(tmp_path / "not/there/yet", keep=1).latest()
    assert found is not None
    assert found.data() == data
    assert (found.step, found.metric, found.sequence) == (0, 2.0, 1)
    assert found.size == sum(path.stat().st_size for path in found.folder.iterdir()) - (
        (found.folder / "checkpoint.json").stat().st_size
    )
    assert found.versions["torch"] == torch.__version__


def test_only_json_and_safetensors_are_written(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path, keep=1), 5)
    assert names(folder) == ["checkpoint.json", "data.json", "tensors-00001.safetensors"]
    assert folder.name == "step_00000005"


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        store = CheckpointStore(folder, keep=1)
        assert (store.latest(), store.best(), store.list(), store.problems) == (None, None, [], [])
    assert names(tmp_path) == []


BAD_CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("negative step", {"step": -1}, "step = -1"),
    ("step with a fraction", {"step": 1.0}, "step = 1.0"),
    ("tensor in data", {"data": {"a": {"b": torch.ones(1)}}}, "data.a.b is a Tensor"),
    ("number as key", {"data": {"a": [{1: 2}]}}, "data.a.0 has the key 1, a int"),
    ("meta", {"tensors": {"w": torch.ones(2, device="meta")}}, "w cannot be saved.*on meta"),
    ("sparse", {"tensors": {"w": torch.eye(2).to_sparse()}}, "w cannot be saved.*sparse"),
    ("type", {"tensors": {"w": torch.ones(2, dtype=torch.complex128)}}, "no torch.complex128"),
    ("reserved name", {"tensors": {"__metadata__": torch.ones(2)}}, "under the name '__metadata__'"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BAD_CALLS], ids=[case[0] for case in BAD_CALLS])
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointStore(tmp_path, keep=1).save(**{"step": 1, "tensors": {}, "data": {}, **change})
    assert list(tmp_path.iterdir()) == []


def test_keep_must_be_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep = 0; at least 1"):
        CheckpointStore(tmp_path, keep=0)


# ---------------------------------------------------------------------------------------------------- what is kept

NAN = float("nan")
KEPT = [
    # keep, better, [(step, metric), …], steps left in the order of saving, latest, best
    ("newest", 2, "lower", [(1, None), (2, None), (3, None)], [2, 3], 3, None),
    ("one", 1, "lower", [(1, None), (2, None)], [2], 2, None),
    ("more than there are", 9, "lower", [(1, None), (2, None), (3, None), (4, None)], [1, 2, 3, 4], 4, None),
    ("best beside", 2, "lower", [(1, 0.5), (2, 0.1), (3, 0.3), (4, 0.4), (5, 0.2)], [2, 4, 5], 5, 2),
    ("best is higher", 1, "higher", [(1, 0.9), (2, 0.1), (3, 0.3)], [1, 3], 3, 1),
    ("best is newest", 2, "lower", [(1, 3.0), (2, 2.0), (3, 1.0)], [2, 3], 3, 3),
    ("of equal ones the first", 1, "lower", [(1, 1.0), (2, 1.0), (3, 1.0)], [1, 3], 3, 1),
    ("NaN is never best", 1, "lower", [(1, NAN), (2, 5.0), (3, NAN)], [2, 3], 3, 2),
    ("back to an earlier step", 2, "lower", [(10, None), (20, None), (12, None), (13, None)], [12, 13], 13, None),
    ("the same step again", 2, "lower", [(1, None), (2, None), (2, 0.5)], [1, 2], 2, 2),
    ("the same step without its metric", 1, "lower", [(1, 0.7), (2, 0.5), (2, None)], [2, 2], 2, 2),
]


@pytest.mark.parametrize(
    ("keep", "better", "saves", "left", "latest", "best"), [case[1:] for case in KEPT], ids=[case[0] for case in KEPT]
)
def test_the_newest_and_the_best_are_kept(
    keep: int,
    better: Any,
    saves: list[tuple[int, float]],
    left: list[int],
    latest: int,
    best: int | None,
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, keep, better)
    for step, metric in saves:
        save(store, step, metric)
    again = CheckpointStore(tmp_path, keep, better)
    assert [one.step for one in again.list()] == left
    assert len(names(tmp_path)) == len(left)
    assert step_in(again.latest()) == latest
    found = again.best()
    assert (None if found is None else step_in(found)) == best
    assert again.problems == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / "step_00000001_mine").mkdir()
    (tmp_path / "notes.tmp.txt").write_text("mine")
    for step in (1, 2):
        save(store, step)
    assert names(tmp_path) == ["notes.tmp.txt", "step_00000001_mine", "step_00000002"]


def test_two_processes_do_not_save_in_one_folder(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    with open(tmp_path / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="Another process is saving"):
            save(store, 2)
    save(store, 3)
    assert step_in(store.latest()) == 3


# ---------------------------------------------------------------------------------------------------- damage


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """100 flips in each file of a checkpoint: each is found, and the older checkpoint is used."""
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    folder = save(store, 2)
    chance = random.Random(0)
    flips = 0
    for name in names(folder):
        content = (folder / name).read_bytes()
        for _ in range(100):
            flip(folder / name, chance)
            flips += 1
            assert step_in(store.latest()) == 1
            assert len(store.problems) == 1 and "step_00000002" in store.problems[0]
            with pytest.raises(ConfigError, match="step_00000002"):
                store.verify(2)
            (folder / name).write_bytes(content)
    assert flips == 300
    assert step_in(store.latest()) == 2 and store.problems == []
    assert step_in(store.verify(2)) == 2


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the description and give it a right checksum, as someone who means harm would."""
    content = json.loads((folder / "checkpoint.json").read_text())
    change(content)
    content["sha256"] = own_digest(content)
    (folder / "checkpoint.json").write_bytes(files.encode_manifest(content))


def lead_out(content: dict[str, Any]) -> None:
    content["files"]["../../outside.safetensors"] = content["files"].pop("tensors-00001.safetensors")


def tensors_twice(folder: Path) -> None:
    name = "tensors-00002.safetensors"
    shutil.copy(folder / "tensors-00001.safetensors", folder / name)
    entry = {"size": (folder / name).stat().st_size, "sha256": file_digests(folder, [name])[name]}
    rewrite(folder, lambda content: content["files"].update({name: entry}))


def first_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("tensors gone", lambda f: (f / "tensors-00001.safetensors").unlink(), "missing"),
    ("data gone", lambda f: (f / "data.json").unlink(), "missing"),
    ("description gone", lambda f: (f / "checkpoint.json").unlink(), "missing"),
    ("everything gone", lambda f: (shutil.rmtree(f), f.mkdir()), "missing"),
    ("truncated", lambda f: first_half(f / "tensors-00001.safetensors"), "bytes, but .* were saved"),
    ("description truncated", lambda f: first_half(f / "checkpoint.json"), "not JSON"),
    ("description nested", lambda f: (f / "checkpoint.json").write_text("[" * 100_000), "damaged"),
    ("description is a list", lambda f: (f / "checkpoint.json").write_text("[]"), "no format number"),
    ("a blank more", lambda f: (f / "checkpoint.json").open("a").write(" "), "damaged or was edited"),
    ("newer format", lambda f: rewrite(f, lambda c: c.update(format=2)), "newer Cornstarch"),
    ("leads out", lambda f: rewrite(f, lead_out), "refused"),
    ("absolute", lambda f: rewrite(f, lambda c: c["files"].update({"/etc/hosts": c["files"]["data.json"]})), "refused"),
    ("other type", lambda f: rewrite(f, lambda c: c.update(metric="best")), "metric is 'best'"),
    ("another step", lambda f: rewrite(f, lambda c: c.update(step=7)), "holds step 7: it was renamed"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_a_damaged_checkpoint_is_reported_and_the_older_one_used(
    damage: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1, metric=1.0)
    folder = save(store, 2, metric=0.5)
    damage(folder)
    assert step_in(store.latest()) == 1
    assert step_in(store.best()) == 1
    [problem] = store.problems
    assert "step_00000002" in problem
    with pytest.raises(ConfigError, match=message):
        store.verify(2)
    # The run goes on from step 1, comes by step 2 again, and resumes from there.
    assert save(store, 2).name == "step_00000002.1"
    assert step_in(store.latest()) == 2
    assert step_in(store.verify(2)) == 2


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    tensors_twice(save(store, 1))
    found = store.latest()
    assert found is not None
    with pytest.raises(ConfigError, match="'a/weight' twice"), found.tensors():
        pass


def test_only_damaged_checkpoints_are_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        flip(save(store, step) / "data.json", random.Random(step))
    with pytest.raises(ConfigError, match="None of the checkpoints(.|\n)*step_00000002(.|\n)*step_00000001"):
        store.latest()
    assert store.best() is None


def test_a_missing_step_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 4)
    with pytest.raises(ConfigError, match="no step 5; it has 4"):
        store.verify(5)


# ---------------------------------------------------------------------------------------------------- what goes wrong


class FullDisk(io.BufferedWriter):
    """A file on a disk that takes so many bytes more."""

    left = 0

    def write(self, piece: Any) -> int:
        FullDisk.left -= len(piece)
        if FullDisk.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(piece)


@pytest.mark.parametrize("file_bytes", [2**30, 10], ids=["one file", "three files"])
@pytest.mark.parametrize("left", [0, 10, 5_000, 12_200, 12_500])
def test_a_full_disk_leaves_the_old_checkpoint(
    left: int, file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", file_bytes)
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def opened(path: Path, mode: str) -> Any:
        return FullDisk(io.FileIO(path, mode.replace("b", ""))) if "x" in mode else open(path, mode)

    FullDisk.left = left
    monkeypatch.setattr(storage_module, "open", opened, raising=False)
    with pytest.raises(ConfigError, match="step 2 .*No space left.*untouched"):
        save(store, 2)
    monkeypatch.undo()
    assert FullDisk.left < 0
    assert names(tmp_path) == ["step_00000001"]
    assert step_in(store.latest()) == 1
    save(store, 2)
    assert step_in(store.latest()) == 2


def test_a_file_that_may_not_grow_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The same with the operating system's own limit."""
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match="File too large.*untouched"):
            save(store, 2, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["step_00000001"]
    assert step_in(store.latest()) == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupted_save_leaves_no_files(
    interruption: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def interrupt(*_: Any) -> None:
        raise interruption

    monkeypatch.setattr(files, "check_written", interrupt)
    with pytest.raises(interruption):
        save(store, 2)
    assert names(tmp_path) == ["step_00000001"]


class FlippingStorage(LocalStorage):
    """Stores other bytes than it was given."""

    def write(self, path: Path, chunks: Any) -> dict[str, Any]:
        entry = super().write(path, chunks)
        if path.suffix == ".safetensors":
            flip(path, random.Random(0))
        return entry


def test_a_disk_that_stores_other_bytes_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    store.storage = FlippingStorage()
    with pytest.raises(ConfigError, match="other bytes are read than were written.*SHA-256"):
        save(store, 2)
    assert names(tmp_path) == ["step_00000001"]


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="step_00000001.*not yours"):
        save(store, 2)
    monkeypatch.undo()
    assert step_in(store.latest()) == 2
    save(store, 3)
    assert names(tmp_path) == ["step_00000003"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="could not be saved"):
            save(CheckpointStore(folder, keep=1), 1)


@pytest.mark.parametrize(("mode", "loads"), [(0o000, False), (0o555, True)], ids=["unreadable", "read-only"])
def test_missing_permissions_are_reported(mode: int, loads: bool) -> None:
    # Not tmp_path, into which nobody but its owner can look.
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        store = CheckpointStore(Path(parent) / "run", keep=1)
        save(store, 1)

        def without_rights() -> None:
            if os.geteuid() == 0:  # for whom there is no forbidden folder
                os.setuid(65534)
            with pytest.raises(ConfigError, match="Permission denied"):
                save(store, 2)
            if loads:
                assert step_in(store.latest()) == 1
            else:
                with pytest.raises(ConfigError, match="Permission denied"):
                    store.latest()

        os.chmod(store.folder, mode)
        status = run_in_child(without_rights)
        os.chmod(store.folder, 0o755)
        assert status == 0


# ---------------------------------------------------------------------------------------------------- storage backends


def test_a_registered_storage_is_chosen_by_scheme(tmp_path: Path) -> None:
    """Every file of a store goes through its storage: the local folder of the same name stays untouched."""

    class Bucket(LocalStorage):
        def _inside(self, path: Path) -> Path:
            return path if path.is_relative_to(tmp_path) else tmp_path / path.relative_to("/")

        def __getattribute__(self, name: str) -> Any:
            operation = super().__getattribute__(name)
            if name.startswith("_"):
                return operation
            return lambda *given: operation(*(self._inside(one) if isinstance(one, Path) else one for one in given))

    register_storage("bucket", Bucket)
    store = CheckpointStore("bucket://models/run", keep=1)
    for step in (1, 2):
        save(store, step)
    assert step_in(store.latest()) == 2
    assert names(tmp_path / "models" / "run") == ["step_00000002"] and not Path("/models").exists()
    assert step_in(read_checkpoint("bucket://models/run/step_00000002")) == 2
    assert step_in(CheckpointStore(Path("bucket://models/run"), keep=1).latest()) == 2
    assert step_in(CheckpointStore(f"file://{tmp_path}/models/run", keep=1).latest()) == 2
    with pytest.raises(ConfigError, match="no storage is registered for other://; there is bucket, file"):
        CheckpointStore("other://models/run", keep=1)


# ---------------------------------------------------------------------------------------------------- crashes

def test_a_kill_at_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    assert kill_at_every_operation(tmp_path) > 10


def test_kills_at_random_moments_lose_no_checkpoint(tmp_path: Path) -> None:
    """The same at 500 moments: `python -m tests.checkpoint.kills`."""
    step, during = kill_at_random_moments(tmp_path / "run", 30)
    assert step >= 20 and during >= 10


def test_any_damage_is_found(tmp_path: Path) -> None:
    """The same 10,000 times: `python -m tests.checkpoint.damage`."""
    done = damage_often(tmp_path, 140)
    assert set(done.values()) == {20} and len(done) == len(KINDS)


def test_a_disk_that_is_too_small_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The same with 100 sizes: `python -m tests.checkpoint.full_disk`."""
    try:
        done = fill_disks(tmp_path / "disk", 8)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("only root can mount a small file system")
    assert done["refused"] >= 4 and done.total() == 8
