"""`cornstarch train`: whole runs, runs that are ended from outside, and everything that may be wrong with one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cornstarch.checkpoint.weights import open_checkpoint
from cornstarch.cli.main import main
from cornstarch.train import load_config
from tests.cli.small_runs import AUDIO, Command, break_rows, record, summary, write_config
from tests.cli.started import Started, start
from tests.trainer.tiny import losses, tiny_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with data and `run.yaml`, a run of 6 steps into `run`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_config(tmp_path, "logging.progress=lines")
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, which nothing has interrupted, and its config."""
    folder = tmp_path_factory.mktemp("finished")
    write_config(folder, "logging.progress=lines")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(folder / "run.yaml")])
    assert not ended.value.code
    return folder


def steps(path: Path) -> list[int]:
    """Return the steps of the checkpoints of a run."""
    return sorted(int(one.name[5:13]) for one in (path / "checkpoints").glob("step_*"))


# ------------------------------------------------------------------------------------------------ a whole run


def test_from_a_config_to_a_report(tmp_path: Path) -> None:
    """In a process of its own, as a user starts it: from YAML to a report, with values of the command line."""
    tiny_config(tmp_path)
    evaluation = {"data": {"evaluation": [{"path": "test.json", "name": "held out"}]}}
    config = write_config(tmp_path, "logging.progress=auto", "output=old", **evaluation)
    arguments = ["train", "run.yaml", "loop.steps=5", "output=new", "name=mine"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "cornstarch", *arguments],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=200,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    for text in (
        "vision projector",
        "25 samples",
        "step 5/5  loss ",
        "shuffled between samples",
        "report: new/report",
    ):
        assert text in ended.stdout
    run = tmp_path / "new"
    assert not (tmp_path / "old").exists()
    assert {path.name for path in run.iterdir()} == {
        ".lock", "checkpoints", "config.yaml", "loss.png", "metrics.jsonl", "report.html", "run.json", "samples",
    }  # fmt: skip
    assert load_config(run / "config.yaml") == load_config(config, arguments[2:])
    assert list(losses(run)) == [1, 2, 3, 4, 5]
    told = summary(run)
    assert (told["status"], told["step"], told["total_steps"], told["name"]) == ("finished", 5, 5, "mine")
    assert told["command"] == "cornstarch train run.yaml loop.steps=5 output=new name=mine"
    assert told["evaluation"]["sources"]["held out"]["count"] == 9
    assert [line["modality"] for line in record(run, "shuffled")] == ["vision"]
    page = (run / "report.html").read_text()
    assert "mine" in page and "vision projector" in page


def test_the_stored_config_reproduces_the_run(folder: Path, command: Command) -> None:
    assert command("train", "run.yaml", "loop.steps=3")[0] == 0
    assert command("train", "run/config.yaml", "output=again")[0] == 0
    assert losses(folder / "again") == losses(folder / "run")


# ------------------------------------------------------------------------------------------------ ended from outside


@pytest.fixture
def gated(tmp_path: Path) -> Path:
    """A folder with a run of 6 steps that waits before its third as long as there is a file `gate`."""
    tiny_config(tmp_path)
    arguments = {"path": str(tmp_path / "train.json"), "gate": str(tmp_path / "gate"), "free": 10}  # two to look at
    source = {"path": "tests.cli.gated_rows:rows", "arguments": arguments, "media": str(tmp_path)}
    write_config(tmp_path, "logging.progress=lines", data={"train": [source]})
    return tmp_path


def start_and_wait(folder: Path) -> Started:
    """Train until the run waits after its second step."""
    (folder / "gate").touch()
    run = start("train", "run.yaml", folder=folder)
    run.until(lambda: (folder / "gate").stat().st_size > 0)
    assert list(losses(folder / "run")) == [1, 2]
    return run


def send(run: Started, number: signal.Signals, gate: Path) -> None:
    """Send a signal, and wait until the run has taken notice of it."""
    run.send(number)
    before = gate.stat().st_size
    run.until(lambda: gate.stat().st_size > before + 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_stopped_run_is_saved_and_resumes_bit_equal(
    gated: Path, finished: Path, number: signal.Signals, code: int
) -> None:
    run = start_and_wait(gated)
    send(run, number, gated / "gate")
    (gated / "gate").unlink()
    ended, said = run.ended()
    assert ended == code and "Traceback" not in said
    told = re.search(r"stopped and saved at step (\d); the same command resumes", said)
    assert told is not None and steps(gated / "run") == [int(told[1])]
    assert int(told[1]) in (2, 3)  # what waited is the third step's data
    assert summary(gated / "run")["status"] == "stopped"
    assert (gated / "run/report.html").exists()
    again, said = start("train", "run.yaml", folder=gated).ended()
    assert again == 0 and f"resumes after step {told[1]}" in said
    events = [line["event"] for line in record(gated / "run", "event")]
    assert events == ["saved", "stopped", "resumed", "saved", "finished"]
    assert losses(gated / "run") == losses(finished / "run")  # to the last bit
    assert list(losses(gated / "run")) == [1, 2, 3, 4, 5, 6]


def test_a_second_interruption_ends_at_once(gated: Path) -> None:
    run = start_and_wait(gated)
    send(run, signal.SIGINT, gated / "gate")
    run.send(signal.SIGINT)  # and the gate stays closed
    ended, said = run.ended()
    assert ended == 130 and "Traceback" not in said
    assert steps(gated / "run") == [] and summary(gated / "run")["status"] == "failed"


# ------------------------------------------------------------------------------------------------ the same run again


@pytest.fixture
def copied(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work beside a copy of a finished run, `run`."""
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.copy(finished / "run.yaml", tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_changed_config_ends_with_the_difference(copied: Path, command: Command) -> None:
    before = {path: path.read_bytes() for path in (copied / "run").rglob("*") if path.is_file()}
    code, _, error = command("train", "run.yaml", "output=run", "loop.steps=8", "seed=1", "logging.every=2")
    assert code == 2
    assert "run has a run at step 6 with another config" in error
    assert "loop.steps: 6 → 8" in error and "seed: 0 → 1" in error and "logging" not in error
    assert "--allow-changes" in error and "--restart" in error
    assert {path: path.read_bytes() for path in (copied / "run").rglob("*") if path.is_file()} == before


def test_allowed_changes_resume_the_run(copied: Path, command: Command) -> None:
    code, said, _ = command("train", "run.yaml", "output=run", "loop.steps=8", "--allow-changes")
    assert code == 0
    assert "Changed since the checkpoint: loop.steps: 6 → 8" in said and "resumes after step 6" in said
    assert list(losses(copied / "run")) == list(range(1, 9))
    assert load_config(copied / "run/config.yaml").loop.steps == 8


def test_a_restart_moves_the_earlier_run_aside(copied: Path, command: Command) -> None:
    for number in (1, 2):
        code, said, _ = command("train", "run.yaml", "output=run", f"loop.steps={number}", "--restart")
        assert code == 0 and f"run.old-{number}" in said
    assert [list(losses(copied / name)) for name in ("run", "run.old-1", "run.old-2")] == [[1, 2], [*range(1, 7)], [1]]
    assert steps(copied / "run.old-1") == [6]


def test_a_restart_leaves_other_folders_alone(folder: Path, command: Command) -> None:
    (folder / "mine").mkdir()
    (folder / "mine/letter.txt").write_text("dear")
    assert command("train", "run.yaml", "output=mine", "loop.steps=1", "--restart")[0] == 0
    assert (folder / "mine/letter.txt").read_text() == "dear" and (folder / "mine/run.json").exists()
    code, _, error = command("train", "run.yaml", "output=.", "loop.steps=1", "--restart")
    assert code == 0, error  # no run there yet
    code, _, error = command("train", "run.yaml", "output=.", "loop.steps=1", "--restart")
    assert code == 2 and "the folder that you are in" in error


def test_damaged_checkpoints_are_refused(copied: Path, command: Command) -> None:
    file = next((copied / "run/checkpoints").glob("step_*/tensors*"))
    file.write_bytes(file.read_bytes()[:-1])
    code, _, error = command("train", "run.yaml", "output=run")
    assert code == 2 and "None of the checkpoints" in error and "bytes, but" in error


# ------------------------------------------------------------------------------------------------ mistakes


MISTAKES = [
    (["train", "none.yaml"], "There is no"),
    (["train", "run.yaml", "loop.stepz=3"], "Did you mean `steps`?"),
    (["train", "run.yaml", "data.train=trian.json"], "Did you mean train.json?"),
    (["train", "run.yaml", "data.train=void.json"], "The file is empty."),
    (["train", "run.yaml", "model.language_model.tokenizer=./none"], "There is no such folder"),
    (["train", "run.yaml", "loop.batch_size=0"], "loop.batch_size = 0"),
    (["train", "run.yaml", "loop.batch_size=6", "loop.gradient_accumulation_steps=4"], "no multiple"),
    (["train", "run.yaml", "output=train.json"], "train.json is a file"),
    (["train", "loop.stepz=3"], "Did you mean `steps`?"),  # of the demo
]


def test_mistakes_are_reported_before_torch_is_imported(folder: Path) -> None:
    (folder / "void.json").touch()
    code = (
        "import contextlib, io, json, sys\nfrom cornstarch.cli.main import main\nsaid = []\n"
        f"for arguments in {[arguments for arguments, _ in MISTAKES]!r}:\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as error:\n"
        "        try: main(arguments)\n"
        "        except SystemExit as end: said.append([end.code, error.getvalue()])\n"
        "print(json.dumps([said, 'torch' in sys.modules]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment)
    said, torch_imported = json.loads(ended.stdout)
    assert len(said) == len(MISTAKES) and not torch_imported
    for (arguments, message), (ended_with, error) in zip(MISTAKES, said, strict=True):
        assert ended_with == 2 and message in error and "Traceback" not in error, (arguments, error)


@pytest.mark.parametrize(
    ("files", "overrides", "message"),
    [
        ({"none.json": "[]"}, ["data.train=none.json"], "none.json"),
        ({"odd.json": '[{"a": 1}]'}, ["data.train=odd.json"], "fits a format"),
        ({"bad.json": '[{"a": 1}'}, ["data.train=bad.json"], "bad.json"),
        ({}, ["data.max_length=8", "data.too_long=error"], r"train.json:\d+: has \d+ tokens, max_length is 8"),
        ({}, ["data.max_length=4"], "Not one of 25 samples can be used"),
        ({}, ["model.language_model.config.model_type=lama"], "lama"),
        ({}, ["output=/proc/none/run"], "cannot be written|no permission"),
        ({}, ["device=cuda:99"], "device = cuda:99"),
        ({}, ["data.evaluation=[{path: test.json, name: a}, {path: test.json, name: a}]"], "named 'a'"),
        ({}, ["logging.to=[wandb]"], "wandb"),
    ],
)
def test_runs_that_cannot_train_are_refused(
    folder: Path, command: Command, files: dict[str, str], overrides: list[str], message: str
) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    code, _, error = command("train", "run.yaml", *overrides)
    assert code == 2 and re.search(message, error), error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(folder: Path, command: Command) -> None:
    (folder / "closed").mkdir(mode=0o500)
    code, _, error = command("train", "run.yaml", "output=closed/run")
    assert code == 2 and "no permission" in error


# ------------------------------------------------------------------------------------------------ broken media


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on 36 rows, 3 of which have broken images and sounds."""
    folder = tmp_path_factory.mktemp("broken")
    tiny_config(folder)
    break_rows(folder, "train.json")
    sees_and_hears: dict[str, Any] = {"model": {"encoders": {"audio": AUDIO}}}
    write_config(folder, "loop.steps=null", "loop.epochs=1", "data.skip_limit=0.2", **sees_and_hears)
    return folder


def test_broken_media_are_skipped_counted_and_listed(broken: Path, tmp_path: Path, command: Command) -> None:
    code, said, _ = command("train", broken / "run.yaml", f"output={tmp_path / 'run'}", "logging.progress=lines")
    assert code == 0
    told = re.findall(r"skipped: train.json:(\d+): .*?(cut.jpg|silent.wav|missing.png) (.*)", said)
    assert sorted((number, name) for number, name, _ in told) == [
        ("34", "cut.jpg"), ("35", "silent.wav"), ("36", "missing.png"),
    ]  # fmt: skip
    assert summary(tmp_path / "run")["skipped"] == {"broken": 3, "too_long": 0}
    assert record(tmp_path / "run", "train")[-1]["skipped"] == 3
    assert summary(tmp_path / "run")["step"] == 9  # all 36 rows in batches of 4


def test_too_many_broken_samples_stop_the_run(broken: Path, tmp_path: Path, command: Command) -> None:
    code, _, error = command("train", broken / "run.yaml", f"output={tmp_path / 'run'}", "data.skip_limit=0.02")
    assert code == 2
    assert re.search(r"(1|2|3) of \d+ samples are broken, more than `data.skip_limit` = 0.02 allows", error)
    assert re.search(r"train.json:3[456]: .*(cut.jpg|silent.wav|missing.png)", error)
    assert summary(tmp_path / "run")["status"] == "failed"


# ------------------------------------------------------------------------------------------------ a full disk


def test_a_full_disk_keeps_the_earlier_checkpoint(folder: Path) -> None:
    """What a limit on the size of files makes of writing is what a full disk does: an error in the middle."""
    assert start("train", "run.yaml", "checkpoint.every=3", "loop.steps=3", folder=folder).ended()[0] == 0
    arguments = ["train", "run.yaml", "checkpoint.every=1", "loop.steps=6", "--allow-changes"]
    code, said = start(*arguments, folder=folder, largest_file=20_000).ended()
    assert code == 2 and "Traceback" not in said
    assert "The checkpoint of step 4 could not be saved" in said and "What was saved before is untouched" in said
    checkpoint = open_checkpoint(folder / "run", "last")
    checkpoint.verify()
    assert checkpoint.step == 3 and steps(folder / "run") == [3]
    assert not list((folder / "run/checkpoints").glob("*.tmp.*"))
    code, said = start(*arguments, folder=folder).ended()
    assert code == 0 and "resumes after step 3" in said
    assert list(losses(folder / "run")) == [1, 2, 3, 4, 5, 6]
