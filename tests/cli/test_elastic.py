"""`cornstarch train --nproc 2:4`: a run that shrinks, grows and is killed has the losses of one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornstarch.checkpoint.weights import open_checkpoint
from tests import warm
from tests.cli.small_runs import Command, summary, write_config
from tests.cli.started import start
from tests.cli.test_restarts import restarts
from tests.trainer.tiny import losses, tiny_config

STILL = ("model.encoders.vision.config.attention_dropout=0.0", "model.language_model.config.attention_dropout=0.0")
TRAIN = ("train", "run.yaml")
EPOCHS, SAMPLES, BATCH = 10, 24, 12


def write_run(folder: Path, pause: float) -> None:
    """Write a run of 20 steps, on 24 samples in 10 epochs."""
    tiny_config(folder)
    arguments = {"path": str(folder / "train.json"), "folder": str(folder), "pause": pause}
    source = {"path": "tests.cli.dying_rows:rows", "arguments": arguments, "media": str(folder), "limit": SAMPLES}
    loop = {"steps": None, "epochs": EPOCHS, "batch_size": BATCH}
    options = (*STILL, "checkpoint.every=3", "data.workers=0", "logging.progress=none")
    write_config(folder, *options, data={"train": [source]}, loop=loop)


def test_four_two_three_four_processes_with_kills(tmp_path: Path) -> None:
    write_run(tmp_path, pause=0.0)
    code, said = start(*TRAIN, "output=fixed", folder=tmp_path, python=warm.interpreter()).ended()
    assert code == 0, said
    write_run(tmp_path, pause=0.04)
    orders = {"die_3_0": "2", "scale_0_1": "3 2", "scale_0_2": "7 3", "die_1_3": "10", "scale_0_4": "11 4"}
    for name, text in orders.items():
        (tmp_path / name).write_text(text)
    command = (*TRAIN, "--nproc", "2:4", "--restarts", "5")
    code, said = start(*command, folder=tmp_path, python=warm.interpreter()).ended()
    assert code == 0, said
    kinds = [(line["kind"], line["ranks"]) for line in restarts(tmp_path / "run")]
    assert kinds == [
        ("failure", 4), ("restart", 4), ("resized", 2), ("resized", 3), ("failure", 3), ("restart", 3), ("resized", 4),
    ]  # fmt: skip
    assert "goes on with 2 instead of 4 processes" in said
    elastic, fixed = losses(tmp_path / "run"), losses(tmp_path / "fixed")
    assert elastic == pytest.approx(fixed, rel=1e-5) and len(fixed) == EPOCHS * SAMPLES // BATCH
    position = open_checkpoint(tmp_path / "run", "last").data()["position"]
    assert (position["samples"], position["step"]) == (EPOCHS * SAMPLES, len(fixed))  # none left out, none twice
    assert summary(tmp_path / "run")["status"] == "finished"
    assert "4 processes" in (tmp_path / "run/report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc", "4:2"], "--nproc 4:2: expected a number of at least 1, or the least and the most, such as 2:4."),
        (["--nproc", "7:8"], "8 processes: loop.batch_size = 12 does not divide into 8 replicas and microbatches."),
        (["--nnodes", "2"], "--nnodes 2 needs --node-rank"),
        (["--nnodes", "1:2", "--node-rank", "2", "--master", "a:1"], "2 machines have the numbers 0 to 1"),
        (["--master", "a:1"], "add --nnodes N"),
        (["--nnodes", "2", "--node-rank", "0", "--master", "no"], "--master no: expected"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    write_run(tmp_path, pause=0.0)
    monkeypatch.chdir(tmp_path)
    code, _, error = command(*TRAIN, *arguments)
    assert code == 2 and said in error, error
    assert not (tmp_path / "run").exists()
