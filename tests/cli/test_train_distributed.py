"""`cornstarch train` in two processes: FSDP 1 from the start to its use, and everything that may be wrong."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.small_runs import Command, summary, write_config
from tests.cli.started import start, together, variables
from tests.train.tiny import losses

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ("train", "run.yaml", "output=run", "parallel.data.kind=fsdp1", "checkpoint.every=3")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 6 steps under FSDP 1, started as a user does, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    write_config(folder, "logging.progress=lines")
    ran = subprocess.run(
        [sys.executable, "-m", "cornstarch", *TRAIN, "--nproc", "2"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stderr
    assert "6 steps of 4 samples on cpu in fp32 in 2 processes (fsdp1)" in ran.stdout
    assert ran.stdout.count("step 6/6") == 1
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work beside a copy of that run."""
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.copy(finished / "run.yaml", tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(ended: list[tuple[int, str]]) -> str:
    """Return what all processes say, who end with 2 and without a traceback."""
    assert [code for code, _ in ended] == [2] * len(ended), ended
    assert all("Traceback" not in text for _, text in ended), ended
    told = {text[text.index("ConfigError: ") :] for _, text in ended}
    assert len(told) == 1, told
    return told.pop()


def forget_the_end(folder: Path) -> None:
    """Leave the run as it is when it is killed after step 3."""
    for checkpoint in (folder / "run/checkpoints").glob("step_00000006*"):
        shutil.rmtree(checkpoint)


# ------------------------------------------------------------------------------------------------ FSDP 1


def test_the_same_command_goes_on(finished: Path, copied: Path) -> None:
    forget_the_end(copied)
    (code, said), (other, quiet) = together(*TRAIN, folder=copied)
    assert (code, other) == (0, 0)
    assert "goes on after step 3" in said and "step" not in quiet
    assert losses(copied / "run") == losses(finished / "run")
    assert summary(copied / "run")["status"] == "finished"


def test_one_process_uses_it(copied: Path, command: Command) -> None:
    code, said, error = command("generate", "run", "what is it", "--max-tokens", "4")
    assert code == 0 and said.strip(), error
    code, said, error = command(*TRAIN, "loop.steps=7", "--allow-changes")
    assert code == 0 and "goes on after step 6" in said and "processes" not in said, error
    assert list(losses(copied / "run")) == [*range(1, 8)]


def test_it_goes_on_as_another_kind(copied: Path, tmp_path: Path) -> None:
    more = [*TRAIN, "loop.steps=7"]
    as_zero2 = [*more, "parallel.data.kind=zero2"]
    said = refused(together(*as_zero2, folder=copied))
    assert 'parallel.data.kind: "fsdp1" → "zero2"' in said and "--allow-changes" in said
    shutil.copytree(copied / "run", copied / "other")
    assert [code for code, _ in together(*as_zero2, "--allow-changes", folder=copied)] == [0, 0]
    assert [code for code, _ in together(*more, "output=other", "--allow-changes", folder=copied)] == [0, 0]
    zero2, fsdp1 = losses(copied / "run"), losses(copied / "other")
    assert list(zero2) == list(fsdp1) == [*range(1, 8)]
    assert zero2[7] == pytest.approx(fsdp1[7], rel=1e-5)


# ------------------------------------------------------------------------------------------------ checkpoints


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(("damage", "told"), [(flip_a_byte, "is damaged"), (Path.unlink, "No such file")])
def test_a_damaged_shard(copied: Path, damage: Callable[[Path], None], told: str) -> None:
    for file in (copied / "run/checkpoints").glob("step_00000006*/rank-0001-*"):
        damage(file)
    (code, said), (other, _) = together(*TRAIN, folder=copied)
    assert (code, other) == (0, 0)
    assert "A damaged checkpoint is passed over" in said and told in said and "goes on after step 3" in said
    for file in (copied / "run/checkpoints").glob("step_*/rank-0001-*"):
        damage(file)
    said = refused(together(*TRAIN, folder=copied))
    assert "None of the checkpoints" in said and told in said and "Restore one from a copy" in said


def test_a_checkpoint_of_another_model(copied: Path) -> None:
    larger = ["model.language_model.config.intermediate_size=24", "--allow-changes"]
    said = refused(together(*TRAIN, *larger, folder=copied))
    assert "language_model" in said and "mlp" in said and "16" in said and "24" in said


# ------------------------------------------------------------------------------------------------ processes


def test_processes_with_other_configs(copied: Path) -> None:
    before = sorted((copied / "run").rglob("*"))
    said = refused(together(*TRAIN, folder=copied, second=("optimizer.learning_rate=0.5",)))
    assert "optimizer.learning_rate: 0.01 on rank 0; 0.5 on rank 1" in said
    assert "same config file and the same command" in said
    assert sorted((copied / "run").rglob("*")) == before


def test_processes_with_other_versions(copied: Path) -> None:
    installed = copied / "other/transformers-5.0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.0.1\n")
    environment = {"PYTHONPATH": str(installed.parent)}
    said = refused(together(*TRAIN, folder=copied, second_environment=environment))
    assert "version of transformers:" in said and "5.0.1 on rank 1" in said
    assert "Install the same versions on every machine." in said


def test_a_port_in_use(copied: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        said = refused([start(*TRAIN, folder=copied, environment=variables(0, 2, port)).ended()])
    assert f"Port {port} of {socket.gethostname()} is taken" in said and "--master-port" in said


def test_options_that_do_not_work_here(copied: Path) -> None:
    new = [*TRAIN[:2], "output=new"]
    said = refused(together(*new, "parallel.data.kind=fsdp1", "parallel.data.offload=true", folder=copied))
    assert "parallel.data.offload = true" in said and "use fsdp2" in said


HSDP = ["parallel.data.kind=hsdp", "parallel.data.replicate=2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [*HSDP, "--nproc", "3"],
            "3 ranks do not divide evenly: a replica takes 1 and the plan wants 2 copies (hsdp).",
        ),
        (HSDP, "1 rank is too few: a replica takes 1 and the plan wants 2 copies (hsdp)."),
        (
            ["parallel.data.kind=fsdp2", "parallel.data.reshard_after_forward=3", "--nproc", "2"],
            "data.reshard_after_forward = 3: model is sharded over 2 ranks; the number must divide that and be "
            "smaller. Use true or false.",
        ),
        (["parallel.modules.model.stages=2", "parallel.data.kind=fsdp1", "--nproc", "2"], "it cannot shard the stages"),
        (["parallel.modules.model.tp=2"], "1 rank is too few: a replica takes 2"),
        (["parallel.modules.visoin.tp=2"], "`parallel.modules` has visoin; the model has language_model, vision"),
        (["parallel.modules.language_model.tp=2"], "`parallel.modules` says nothing about vision"),
        (["--nproc", "none"], "nproc = none: expected a number of processes, at least 1, or auto."),
    ],
)
def test_a_world_that_does_not_fit(copied: Path, command: Command, arguments: list[str], said: str) -> None:
    before = sorted(copied.rglob("*"))
    code, _, error = command(*TRAIN[:3], *arguments, "--restart")
    assert code == 2 and said in error
    assert sorted(copied.rglob("*")) == before  # the earlier run is not set aside for a run that cannot begin
