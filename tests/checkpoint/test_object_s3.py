"""Checkpoints in a store that speaks S3, over HTTP: parts, conditions, kills, whole runs, and the command line."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cornstarch.checkpoint import CheckpointStore, object_lock, object_storage, state_hash
from cornstarch.checkpoint.reader import convert_checkpoint
from cornstarch.checkpoint.weights import open_checkpoint
from cornstarch.cli.main import main
from cornstarch.errors import ConfigError
from cornstarch.trainer.checkpointer import load_run
from tests import forked
from tests.checkpoint import numbered
from tests.checkpoint.s3_server import s3_server
from tests.parity.pool import pool
from tests.trainer.tiny import losses, tiny_config, trainer_of

BUCKET = "models"
Variables = dict[str, str]


@pytest.fixture(scope="module")
def server() -> Iterator[Variables]:
    with s3_server(BUCKET) as variables:
        yield variables


def list_keys(store: CheckpointStore) -> list[str]:
    return [name.partition("/run/")[2] for name in store.storage.client.find(f"{BUCKET}/{store.folder.parts[2]}")]  # type: ignore[attr-defined]


def list_uploads(store: CheckpointStore) -> list[Any]:
    found: dict[str, Any] = store.storage.client.call_s3("list_multipart_uploads", Bucket=BUCKET)  # type: ignore[attr-defined]
    return list(found.get("Uploads", ()))


def test_large_files_travel_in_parts_and_are_vouched_for(server: Variables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "PART_BYTES", 5 * 2**20)  # the smallest that S3 takes
    store = CheckpointStore(f"s3://{BUCKET}/parts/run", keep=1)
    tensors = {"w": torch.randn(3_000_000), "n": torch.ones(3)}
    confirmed = []
    monkeypatch.setattr(store.storage, "digest", lambda path: confirmed.append(path))
    store.save(1, tensors, {"a": 1})
    assert confirmed == []  # the ETags were enough
    monkeypatch.undo()
    monkeypatch.setattr(object_storage, "PART_BYTES", 5 * 2**20)
    found = store.latest()
    assert found is not None and found.data() == {"a": 1}
    with found.tensors() as stored:
        assert state_hash(stored) == state_hash(tensors)
    assert list_keys(store) == ["step_00000001/checkpoint.json", "step_00000001/data.json", *(
        f"step_00000001/tensors-{n:05d}.safetensors" for n in (1,)
    )]  # fmt: skip
    converted = convert_checkpoint(found, f"s3://{BUCKET}/parts/out", "sharded", 2)
    with converted.tensors() as stored:
        assert state_hash(stored) == state_hash(tensors)
    with pytest.raises(FileExistsError, match="Another process writes there"):
        store.storage.write(found.folder / "data.json", [b"{}"])


def test_a_bucket_that_is_not_there_is_named(server: Variables) -> None:
    with pytest.raises(ConfigError, match=r"s3://nowhere/run/.lock: .*\(HTTP 404\)\. Check the name of the bucket"):
        CheckpointStore("s3://nowhere/run", keep=1).save(1, {}, {})


def save_until_killed(url: str, variables: Variables) -> None:
    os.environ.update(variables)
    object_storage.PART_BYTES = 5 * 2**20
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    store = CheckpointStore(url, keep=1)
    latest = store.latest()
    step = 0 if latest is None else latest.step
    while True:
        step += 1
        store.save(step, {"w": torch.full((1_400_000,), float(step))}, {"step": step})


@pytest.mark.slow
def test_kills_leave_whole_checkpoints_and_no_unfinished_uploads(
    server: Variables, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, chance = f"s3://{BUCKET}/kills/run", random.Random(0)
    store = CheckpointStore(url, keep=1)
    seen = [0]
    for _ in range(2):
        process = forked.process(save_until_killed, url, server)
        process.start()
        end = time.monotonic() + 200
        while not any("/.begun" in key for key in list_keys(store)):  # it is saving
            assert process.is_alive() and time.monotonic() < end
        time.sleep(chance.uniform(0.0, 0.3))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = store.latest()
        assert store.problems == []
        if found is not None:
            with found.tensors() as tensors:
                assert tensors["w"].unique().tolist() == [found.step] and found.data() == {"step": found.step}
        seen.append(0 if found is None else found.step)
    assert seen == sorted(seen)
    # An upload that began, and whose process is gone.
    store.storage.make_folder(store.folder / "step_00000900.tmp.ab")
    key = f"{BUCKET}/kills/run/step_00000900/tensors-00001.safetensors"
    client = store.storage.client  # type: ignore[attr-defined]
    client.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key.partition("/")[2])
    assert list_uploads(store)
    store.save(900, {"w": torch.ones(2)}, {})
    assert list_uploads(store) == []
    assert {key.partition("/")[0] for key in list_keys(store)} == {"step_00000900"}


def save_in_two_processes(url: str, variables: Variables) -> int | None:
    with mock.patch.dict(os.environ, variables):  # the process goes on with other tests
        return save_twice(url)


def save_twice(url: str) -> int | None:
    store = CheckpointStore(url, keep=2)
    for step in (1, 2):
        numbered.save_numbered(store, step, wait=step == 1)
    store.wait()
    found = store.latest()
    assert found is not None
    return found.step


def test_ranks_save_together(server: Variables) -> None:
    url = f"s3://{BUCKET}/ranks/run"
    assert pool().run(2, save_in_two_processes, url, server) == [2, 2]
    with CheckpointStore(url, keep=2).verify(2).tensors() as tensors:
        assert {float(n) for name in tensors for n in tensors[name].unique()} == {2.0}


def test_a_run_keeps_its_checkpoints_in_the_store(
    server: Variables, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/mine/run"
    section = {"checkpoint": {"folder": url, "every": 2, "background": True}}
    whole = tmp_path / "whole"
    trainer_of(tiny_config(whole)).fit()
    trainer = trainer_of(tiny_config(tmp_path, **section))
    save = trainer.save

    def save_and_fail(metric: float | None = None) -> Path:
        path = save(metric)
        if trainer.position.step == 4:
            trainer.checkpoints.wait()
            raise ConfigError("stop here")
        return path

    monkeypatch.setattr(trainer, "save", save_and_fail)
    with pytest.raises(ConfigError, match="stop here"):
        trainer.fit()
    other = trainer_of(tiny_config(tmp_path, **section, output=str(tmp_path / "other")))
    with other.checkpoints.claim(), pytest.raises(ConfigError, match="Another process is saving"):
        trainer_of(tiny_config(tmp_path, **section)).fit()
    assert trainer_of(tiny_config(tmp_path, **section)).fit().step == 6
    assert losses(tmp_path / "run") == losses(whole / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert open_checkpoint(tmp_path / "run", "last").step == 6 and load_run(tmp_path / "run", "last").step == 6
    capsys.readouterr()
    for place in (str(tmp_path / "run"), url, f"{url}/step_00000006"):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", "verify", place])
        assert ended.value.code == 0
        assert "step_00000006: intact, 2 files" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["checkpoint", "list", url])
    assert "2 complete" in capsys.readouterr().out


def test_a_lock_is_renewed_while_a_save_lasts(server: Variables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_lock, "RENEWAL", 0.01)
    store = CheckpointStore(f"s3://{BUCKET}/renewed/run", keep=1)
    with store.storage.lock(store.folder):
        end = time.monotonic() + 60
        while b'"renewals": 0' in (content := store.storage.read(store.folder / ".lock")):
            assert time.monotonic() < end
        assert b'"renewals"' in content
    assert list_keys(store) == []
