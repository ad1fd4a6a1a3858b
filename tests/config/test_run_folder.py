"""The folder of a run: one run at a time, its config, and what makes room for another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cornstarch.config.run_folder import RunFolder, read_run_config
from cornstarch.errors import ConfigError
from cornstarch.train import RunConfig, load_config

ROOT = Path(__file__).resolve().parents[2]


def config(*overrides: str) -> RunConfig:
    base = {"model": {"language_model": {"path": "a/b"}}, "data": {"train": "train.json"}}
    return load_config(None, overrides, base=base)


# ------------------------------------------------------------------------------------------------ one at a time


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a/b/run")
    with folder.claim():
        with pytest.raises(ConfigError, match="Another run is writing to .*run"), RunFolder(folder.path).claim():
            pass
        with RunFolder(tmp_path / "other").claim():
            pass
    with folder.claim():  # free again
        pass


def test_a_folder_is_free_again_when_its_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom cornstarch.config.run_folder import RunFolder\n"
        f"with RunFolder(Path({str(tmp_path / 'run')!r})).claim():\n"
        "    print('mine', flush=True)\n    sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "mine\n"
        with pytest.raises(ConfigError, match="Another run"), RunFolder(tmp_path / "run").claim():
            pass
    finally:
        process.kill()
        process.wait()
    with RunFolder(tmp_path / "run").claim():
        pass


@pytest.mark.parametrize("place", ["file/run", "/proc/none/run"])
def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot be written: .*\n.*output=<folder>"),
        RunFolder(tmp_path / place).claim(),
    ):
        pass


# ------------------------------------------------------------------------------------------------ the config


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("seed=3", "seed: 0 → 3"),
        ("loop.steps=9", "loop.steps: null → 9"),
        ("device=cpu", 'device: "auto" → "cpu"'),
        (
            "checkpoint.best_by=accuracy",
            'checkpoint.best_by: "loss" → "accuracy"',
        ),  # what was best is another thing then
        ("data.train=other.json", "other.json"),
        ("name=other", None),
        ("output=elsewhere", None),
        ("logging.every=3", None),
        ("logging.to=[tensorboard]", None),
        ("checkpoint.every=3", None),
        ("checkpoint.keep=3", None),
        ("threads=3", None),
        ("data.workers=3", None),
        ("data.prefetch=3", None),
        ("loop.exchange_check=false", None),
    ],
)
def test_what_changes_the_result_is_told(tmp_path: Path, override: str, difference: str | None) -> None:
    folder = RunFolder(tmp_path)
    assert folder.check_config(config(override)) == []  # nothing stored yet
    folder.store_config(config())
    found = folder.check_config(config(override))
    assert (found == []) if difference is None else (len(found) == 1 and difference in found[0])
    assert read_run_config(folder.path) == config()


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write_summary({"step": 1, "text": "ä"})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="run.json cannot be written: No space left on device"):
        folder.write_summary({"step": 2})
    assert json.loads((tmp_path / "run.json").read_text()) == {"step": 1, "text": "ä"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


# ------------------------------------------------------------------------------------------------ set aside


def test_a_run_is_set_aside_under_the_next_free_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/mine"))
    assert folder.set_aside() is None
    for number in (1, 2, 3):
        with folder.claim():
            folder.store_config(config(f"seed={number}"))
        if number == 2:
            (tmp_path / "runs/mine.old-2").mkdir()  # taken by something else
        aside = folder.set_aside()
        assert aside is not None and not folder.path.exists()
        stored = read_run_config(aside)
        assert stored is not None and stored.seed == number
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "mine.old-1", "mine.old-2", "mine.old-3", "mine.old-4",
    ]  # fmt: skip


def test_what_is_no_run_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.png").touch()
    assert RunFolder(tmp_path / "photos").set_aside() is None
    assert (tmp_path / "photos/a.png").exists()


def test_a_run_that_is_running_is_not_set_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.claim():
        folder.store_config(config())
        with pytest.raises(ConfigError, match="Another run is writing"):
            RunFolder(folder.path).set_aside()
    assert folder.path.exists()


@pytest.mark.parametrize("place", [".", "..", "../../run"])
def test_the_folder_that_one_is_in_is_not_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    here = tmp_path / "run/deeper"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    RunFolder(Path(place)).store_config(config())
    with pytest.raises(ConfigError, match="the folder that you are in"):
        RunFolder(Path(place)).set_aside()
    assert here.exists()


@pytest.mark.parametrize(
    ("made", "message"),
    [(None, "There is no folder"), ("folder", "is no run: it has no config.yaml"), ("file", "no folder")],
)
def test_a_folder_that_is_no_run_is_told(tmp_path: Path, made: str | None, message: str) -> None:
    if made == "folder":
        (tmp_path / "run").mkdir()
    elif made == "file":
        (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match=message):
        read_run_config(tmp_path / "run")
