"""`cornstarch train` in two processes: FSDP 1 from start to use, mistakes, traces and load balancing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cornstarch.data.load_balancing import COSTS
from cornstarch.train import load_config
from tests.cli.small_runs import Command, summary, write_config
from tests.cli.started import start, together, variables
from tests.trainer.tiny import losses, trainer_of

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


def collect_refusal(ended: list[tuple[int, str]]) -> str:
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


def test_the_same_command_resumes(finished: Path, copied: Path) -> None:
    forget_the_end(copied)
    (code, said), (other, quiet) = together(*TRAIN, folder=copied)
    assert (code, other) == (0, 0)
    assert "resumes after step 3" in said and "step" not in quiet
    assert losses(copied / "run") == losses(finished / "run")
    assert summary(copied / "run")["status"] == "finished"


def test_one_process_generates_from_a_sharded_run(copied: Path, command: Command) -> None:
    code, said, error = command("generate", "run", "what is it", "--max-tokens", "4")
    assert code == 0 and said.strip(), error
    code, said, error = command(*TRAIN, "loop.steps=7", "--allow-changes")
    assert code == 0 and "resumes after step 6" in said and "processes" not in said, error
    assert list(losses(copied / "run")) == [*range(1, 8)]


def test_a_run_resumes_as_another_kind(copied: Path, tmp_path: Path) -> None:
    more = [*TRAIN, "loop.steps=7"]
    as_zero2 = [*more, "parallel.data.kind=zero2"]
    said = collect_refusal(together(*as_zero2, folder=copied))
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
def test_a_damaged_shard_is_refused_on_all_ranks(copied: Path, damage: Callable[[Path], None], told: str) -> None:
    for file in (copied / "run/checkpoints").glob("step_00000006*/rank-0001-*"):
        damage(file)
    (code, said), (other, _) = together(*TRAIN, folder=copied)
    assert (code, other) == (0, 0)
    assert "A damaged checkpoint is passed over" in said and told in said and "resumes after step 3" in said
    for file in (copied / "run/checkpoints").glob("step_*/rank-0001-*"):
        damage(file)
    said = collect_refusal(together(*TRAIN, folder=copied))
    assert "None of the checkpoints" in said and told in said and "Restore one from a copy" in said


def test_a_checkpoint_of_another_model_is_refused(copied: Path) -> None:
    larger = ["model.language_model.config.intermediate_size=24", "--allow-changes"]
    said = collect_refusal(together(*TRAIN, *larger, folder=copied))
    assert "language_model" in said and "mlp" in said and "16" in said and "24" in said


# ------------------------------------------------------------------------------------------------ processes


def test_ranks_with_different_configs_are_refused(copied: Path) -> None:
    before = sorted((copied / "run").rglob("*"))
    said = collect_refusal(together(*TRAIN, folder=copied, second=("optimizer.learning_rate=0.5",)))
    assert "optimizer.learning_rate: 0.01 on rank 0; 0.5 on rank 1" in said
    assert "same config file and the same command" in said
    assert sorted((copied / "run").rglob("*")) == before


def test_ranks_with_different_versions_are_refused(copied: Path) -> None:
    installed = copied / "other/transformers-5.0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.0.1\n")
    environment = {"PYTHONPATH": str(installed.parent)}
    said = collect_refusal(together(*TRAIN, folder=copied, second_environment=environment))
    assert "version of transformers:" in said and "5.0.1 on rank 1" in said
    assert "Install the same versions on every machine." in said


def test_a_port_in_use_is_refused(copied: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        said = collect_refusal([start(*TRAIN, folder=copied, environment=variables(0, 2, port)).ended()])
    assert f"Port {port} of {socket.gethostname()} is in use" in said and "--master-port" in said


def test_unsupported_options_are_refused(copied: Path) -> None:
    new = [*TRAIN[:2], "output=new"]
    said = collect_refusal(together(*new, "parallel.data.kind=fsdp1", "parallel.data.offload=true", folder=copied))
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
def test_a_world_size_that_does_not_fit_is_refused(
    copied: Path, command: Command, arguments: list[str], said: str
) -> None:
    before = sorted(copied.rglob("*"))
    code, _, error = command(*TRAIN[:3], *arguments, "--restart")
    assert code == 2 and said in error
    assert sorted(copied.rglob("*")) == before  # the earlier run is not set aside for a run that cannot begin


# ------------------------------------------------------------------------------------------------ pipeline traces

STAGES = (
    "model.language_model.config.num_hidden_layers=2",
    "parallel.modules.vision.stages=1",
    "parallel.modules.language_model.stages=2",
    "parallel.ranks=first_stage",
    "parallel.schedule=gpipe",
    "loop.gradient_accumulation_steps=4",
)


def test_two_processes_write_one_trace(tmp_path: Path) -> None:
    write_config(tmp_path)
    ended = together("train", "run.yaml", *STAGES, "--trace", folder=tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    trace = json.loads((tmp_path / "run/trace.json").read_text())
    done = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] != "transfer wait"]
    for step in (3, 4, 5, 6):
        for place in range(2):
            own = [event for event in done if event["args"]["step"] == step and event["pid"] == place]
            names = [f"{kind}{m}" for kind in "FB" for m in range(4)]
            assert sorted(event["name"] for event in own) == sorted(names)
            assert [event["name"] for event in sorted(own, key=lambda event: event["ts"])][:4] == names[:4]
    assert trace["otherData"] == {"schedule": "gpipe"}
    assert 'id="pipeline"' in (tmp_path / "run/report.html").read_text()


def test_a_trace_needs_pipeline_stages(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, _, error = command("train", "run.yaml", "--trace", "--restart")
    assert code == 2 and "--trace: a trace shows the stages of a pipeline, and this run has none" in error
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------ balanced samples

BALANCED = ("train", "run.yaml", "output=run", "checkpoint.every=3")


def weights(folder: Path) -> dict[str, bytes]:
    """Return the tensors of the last checkpoint."""
    (last,) = (folder / "checkpoints").glob("step_00000006*")
    return {file.name: file.read_bytes() for file in last.rglob("*.safetensors")}


def test_a_balanced_run_resumes_bit_equal(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        data={"balance": "cost", "packing": True, "max_length": 64, "workers": 1},
        loop={"batch_size": 8, "accumulation": 2},
    )
    (code, said), (other, quiet) = together(*BALANCED, folder=tmp_path)
    assert (code, other) == (0, 0), said + quiet
    assert "Samples are balanced by cost: the slowest replica has" in said and "dealt out" not in quiet
    with np.load(tmp_path / "run" / COSTS, allow_pickle=False) as file:
        assert file["costs"].shape == (2, 25) and (file["costs"] > 0)[1].all()

    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    for checkpoint in (tmp_path / "run/checkpoints").glob("step_00000006*"):
        shutil.rmtree(checkpoint)
    (code, said), (other, quiet) = together(*BALANCED, folder=tmp_path)
    assert (code, other) == (0, 0), said + quiet
    assert "resumes after step 3" in said
    before = (tmp_path / "whole" / COSTS).read_bytes()
    assert (tmp_path / "run" / COSTS).read_bytes() == before
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole") and weights(tmp_path / "run")


# ---------------------------------------------------------------------------------------------- encoder load balancing

STILL = ("model.encoders.vision.config.attention_dropout=0.0", "model.language_model.config.attention_dropout=0.0")


def test_encoder_load_balancing_keeps_the_losses(tmp_path: Path) -> None:
    sections = {"evaluation": [{"path": str(tmp_path / "test.json")}], "shuffle": False, "max_length": 64}
    config = load_config(
        write_config(tmp_path, *STILL, data=sections, loop={"steps": 2, "accumulation": 2, "evaluate_every": 2})
    )
    rows = json.loads((tmp_path / "train.json").read_text())
    images = [row["image"] for row in rows[:5]]
    rows[0] = {"image": images, "conversations": [{"from": "human", "value": "<image>" * 5 + " what is it"},
                                                  {"from": "gpt", "value": "a cat"}]}  # fmt: skip
    (tmp_path / "train.json").write_text(json.dumps(rows))

    (code, said), (other, quiet) = together(
        "train", "run.yaml", "output=lent", "data.balance_encoders=true", folder=tmp_path
    )
    assert (code, other) == (0, 0), said + quiet
    assert "Replicas share their images evenly" in said and "Replicas" not in quiet
    trainer_of(config).fit()
    assert losses(tmp_path / "lent") == pytest.approx(losses(tmp_path / "run"), rel=1e-4)
    assert len(losses(tmp_path / "lent")) == 2
