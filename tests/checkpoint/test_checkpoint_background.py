"""Saving beside the training, in one process: what is saved, what is waited for, and that no failure is lost."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cornstarch.checkpoint import CheckpointStore, LocalStorage
from cornstarch.checkpoint.storage import Chunks
from cornstarch.errors import ConfigError
from tests import forked


class GatedStorage(LocalStorage):
    """Writes no file before the gate is opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def write(self, path: Path, chunks: Chunks) -> dict[str, Any]:
        assert self.gate.wait(250)
        return super().write(path, chunks)


class FailingStorage(LocalStorage):
    """Raises an error instead of writing a file."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def write(self, path: Path, chunks: Chunks) -> dict[str, Any]:
        raise self.error


def wait_until_it_has_ended(store: CheckpointStore) -> None:
    while store.is_saving:
        time.sleep(0.001)


def value_in(store: CheckpointStore, step: int) -> float:
    with store.verify(step).tensors() as tensors:
        [value] = tensors["w"].unique().tolist()
        return float(value)


def test_tensors_changed_after_the_call_are_saved_as_they_were(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.storage = storage = GatedStorage()
    weights = torch.full((100, 3), 1.0)
    path = store.save(1, {"w": weights, "t": weights.t()}, {"a": 1}, wait=False)
    weights.fill_(2.0)
    assert not path.exists() and [p.name for p in tmp_path.glob("step_*")] != []
    store.check()
    storage.gate.set()
    store.wait()
    assert path == tmp_path / "step_00000001" and value_in(store, 1) == 1.0
    assert store.save(2, {"w": weights}, {}, wait=False).name == "step_00000002"
    weights.fill_(3.0)
    store.save(3, {"w": weights}, {})  # waits for step 2
    assert [value_in(store, step) for step in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert [one.sequence for one in store.list()] == [1, 2, 3]


@pytest.mark.parametrize("what", ["save", "latest", "best", "verify"])
def test_other_calls_wait_for_the_background_save(what: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.storage = storage = GatedStorage()
    store.save(1, {"w": torch.ones(2)}, {}, metric=1.0, wait=False)
    threading.Timer(0.1, storage.gate.set).start()
    if what == "save":
        store.save(2, {"w": torch.ones(2)}, {})
        assert [one.step for one in store.list()] == [1, 2]
    else:
        found = store.verify(1) if what == "verify" else getattr(store, what)()
        assert found.step == 1


@pytest.mark.parametrize("asked", ["check", "wait", "save"])
def test_a_failure_is_raised_once_by_the_next_call(asked: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {"w": torch.ones(2)}, {})
    store.storage = FailingStorage(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    store.save(2, {"w": torch.ones(2)}, {}, wait=False)
    wait_until_it_has_ended(store)
    store.storage = LocalStorage()
    ask = {"check": store.check, "wait": store.wait, "save": lambda: store.save(3, {}, {})}[asked]
    with pytest.raises(ConfigError, match="step 2 could not be saved.*No space left.*untouched"):
        ask()
    store.check()
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]
    store.save(2, {"w": torch.ones(2)}, {})
    assert [one.step for one in store.list()] == [1, 2]


def test_unsupported_tensors_are_refused_before_the_call_returns(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", keep=1)
    with pytest.raises(ConfigError, match="w cannot be saved"):
        store.save(1, {"w": torch.ones(2, device="meta")}, {}, wait=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="could not be saved"):
        CheckpointStore(tmp_path / "file", keep=1).save(1, {}, {}, wait=False)
    assert not (tmp_path / "run").exists()


def test_staging_reuses_its_buffers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    weights = torch.ones(1000)
    seen = []
    for step in range(3):
        store.save(step, {"w": weights, f"{step}": torch.ones(1)}, {}, wait=False)
        store.wait()
        buffers = {key[0]: buffer.data_ptr() for key, buffer in store.stager.buffers.items()}
        assert set(buffers) == {"w", f"{step}"}  # what is not saved any more takes no memory
        seen.append(buffers["w"])
    assert len(set(seen)) == 1 and weights.data_ptr() not in seen


def test_a_failure_that_nothing_raised_is_printed_at_exit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.storage = FailingStorage(ZeroDivisionError())
    store.save(2, {"w": torch.ones(2)}, {}, wait=False)
    wait_until_it_has_ended(store)
    store.print_failure()
    assert "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        store.check()


def _save_and_end(folder: Path) -> None:
    CheckpointStore(folder, keep=1).save(1, {"w": torch.ones(1_000_000)}, {}, wait=False)


def test_a_process_waits_for_the_save_before_it_exits(tmp_path: Path) -> None:
    process = forked.process(_save_and_end, tmp_path)
    process.start()
    process.join(250)
    assert process.exitcode == 0
    assert value_in(CheckpointStore(tmp_path, keep=1), 1) == 1.0


@pytest.mark.gpu
def test_gpu_tensors_are_copied_to_pinned_memory_before_the_call_returns(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2):
        weights = torch.full((4096, 4096), float(step), device="cuda")
        product = weights @ weights  # still being computed
        store.save(step, {"w": weights, "p": product}, {}, wait=False)
        weights.fill_(-1.0)
        product.fill_(-1.0)
        assert all(buffer.is_pinned() for buffer in store.stager.buffers.values())
        store.wait()
        assert value_in(store, step) == step
        with store.verify(step).tensors() as tensors:
            assert tensors["p"].unique().tolist() == [4096.0 * step * step]
