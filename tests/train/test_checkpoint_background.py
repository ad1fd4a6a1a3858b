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

from cornstarch.errors import ConfigError
from cornstarch.train.checkpoint import CheckpointStore, files
from tests import forked


class Gate:
    """Holds back the writing of files until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._write = files.write_file
        monkeypatch.setattr(files, "write_file", self._wait_and_write)

    def _wait_and_write(self, *arguments: Any) -> dict[str, Any]:
        assert self._open.wait(250)
        return self._write(*arguments)

    def open(self) -> None:
        self._open.set()


def value_in(store: CheckpointStore, step: int) -> float:
    with store.verify(step).tensors() as tensors:
        [value] = tensors["w"].unique().tolist()
        return float(value)


def test_training_goes_on_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = CheckpointStore(tmp_path, keep=3)
    weights = torch.full((100, 3), 1.0)
    path = store.save(1, {"w": weights, "t": weights.t()}, {"a": 1}, wait=False)
    weights.fill_(2.0)
    assert not path.exists() and [p.name for p in tmp_path.glob("step_*")] != []
    store.check()
    gate.open()
    store.wait()
    assert path == tmp_path / "step_00000001" and value_in(store, 1) == 1.0
    assert store.save(2, {"w": weights}, {}, wait=False).name == "step_00000002"
    weights.fill_(3.0)
    store.save(3, {"w": weights}, {})  # waits for step 2
    assert [value_in(store, step) for step in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert [one.sequence for one in store.list()] == [1, 2, 3]


@pytest.mark.parametrize("what", ["save", "latest", "best", "verify"])
def test_whoever_looks_waits(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {"w": torch.ones(2)}, {}, metric=1.0, wait=False)
    threading.Timer(0.1, gate.open).start()
    if what == "save":
        store.save(2, {"w": torch.ones(2)}, {})
        assert [one.step for one in store.list()] == [1, 2]
    else:
        found = store.verify(1) if what == "verify" else getattr(store, what)()
        assert found.step == 1


@pytest.mark.parametrize("asked", ["check", "wait", "save"])
def test_a_failure_is_raised_once_by_whoever_asks_next(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {"w": torch.ones(2)}, {})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_file", full)
        store.save(2, {"w": torch.ones(2)}, {}, wait=False)
        while store._background.is_running:
            time.sleep(0.001)
    ask = {"check": store.check, "wait": store.wait, "save": lambda: store.save(3, {}, {})}[asked]
    with pytest.raises(ConfigError, match="step 2 could not be saved.*No space left.*untouched"):
        ask()
    store.check()
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]
    store.save(2, {"w": torch.ones(2)}, {})
    assert [one.step for one in store.list()] == [1, 2]


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", keep=1)
    with pytest.raises(ConfigError, match="w cannot be saved"):
        store.save(1, {"w": torch.ones(2, device="meta")}, {}, wait=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="could not be saved"):
        CheckpointStore(tmp_path / "file", keep=1).save(1, {}, {}, wait=False)
    assert not (tmp_path / "run").exists()


def test_copies_go_into_the_same_memory(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    weights = torch.ones(1000)
    seen = []
    for step in range(3):
        store.save(step, {"w": weights, f"{step}": torch.ones(1)}, {}, wait=False)
        store.wait()
        buffers = {key[0]: buffer.data_ptr() for key, buffer in store._stager._buffers.items()}
        assert set(buffers) == {"w", f"{step}"}  # what is not saved any more takes no memory
        seen.append(buffers["w"])
    assert len(set(seen)) == 1 and weights.data_ptr() not in seen


def test_a_failure_that_nobody_asks_about_is_printed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    monkeypatch.setattr(files, "write_file", lambda *_: 1 / 0)
    store.save(2, {"w": torch.ones(2)}, {}, wait=False)
    while store._background.is_running:
        time.sleep(0.001)
    store._background._last_words()
    assert "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        store.check()


def _save_and_end(folder: Path) -> None:
    CheckpointStore(folder, keep=1).save(1, {"w": torch.ones(1_000_000)}, {}, wait=False)


def test_a_process_that_ends_waits(tmp_path: Path) -> None:
    process = forked.process(_save_and_end, tmp_path)
    process.start()
    process.join(250)
    assert process.exitcode == 0
    assert value_in(CheckpointStore(tmp_path, keep=1), 1) == 1.0


@pytest.mark.gpu
def test_from_a_gpu(tmp_path: Path) -> None:
    """Copied to pinned memory before the call returns, whatever the next kernels do."""
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2):
        weights = torch.full((4096, 4096), float(step), device="cuda")
        product = weights @ weights  # still being computed
        store.save(step, {"w": weights, "p": product}, {}, wait=False)
        weights.fill_(-1.0)
        product.fill_(-1.0)
        assert all(buffer.is_pinned() for buffer in store._stager._buffers.values())
        store.wait()
        assert value_in(store, step) == step
        with store.verify(step).tensors() as tensors:
            assert tensors["p"].unique().tolist() == [4096.0 * step * step]
