"""`cornstarch verify`: a plan on a tiny twin, against one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cornstarch.cli import main as command_line
from cornstarch.config.config_file import dump_config
from tests import warm
from tests.trainer.tiny import tiny_config

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `cornstarch verify` in a folder with a run; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(dump_config(tiny_config(tmp_path)))

    def run_command(*arguments: str) -> tuple[int, str, str]:
        with warm.used(warm.interpreter()), pytest.raises(SystemExit) as ended:
            command_line.main(["verify", "run.yaml", *arguments])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return int(ended.value.code or 0), captured.out, captured.err

    return run_command


def test_a_correct_tensor_parallel_plan_passes(run: Run) -> None:
    code, out, _ = run("parallel.modules.model.tp=2", "--nproc", "2")
    assert code == 0
    assert "A tiny twin of the model, 2 processes against one:" in out
    assert [line.split("  ")[0] for line in out.splitlines() if "e-" in line] == [
        "vision encoder", "vision projector", "language model", "loss",
    ]  # fmt: skip
    assert out.endswith("The plan computes the same as one process.\n")
    assert not Path("run").exists()  # the run's own folder is left alone


def test_a_correct_pipeline_passes(run: Run) -> None:
    code, out, _ = run("parallel.modules.model.stages=2", "--nproc", "2")
    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines() if "e-" in line or " 0" in line][-1] == "loss"
    assert out.endswith("The plan computes the same as one process.\n")


def test_a_trial_process_starts_in_a_fresh_interpreter(tmp_path: Path) -> None:
    """As users have it: with an interpreter that has imported nothing yet."""
    ran = subprocess.run(
        [sys.executable, "-m", "cornstarch.trainer.recording_trainer", "nowhere.yaml", "record"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 1 and ran.stderr.startswith("ConfigError: nowhere.yaml"), ran.stderr


WRONG = [
    (["parallel.modules.model.tpp=2"], "tpp"),
    (["parallel.modules.model.stages=2", "parallel.data.kind=fsdp1"], "it cannot shard the stages of a pipeline"),
    (["parallel.modules.model.tp=2", "--nproc", "3"], "3 ranks do not divide evenly: a replica takes 2"),
    (["data.train=[{path: nowhere.json}]"], "nowhere.json"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_mistakes_are_reported_before_anything_starts(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and said in err and out == ""


def test_one_process_has_nothing_to_compare(run: Run) -> None:
    code, out, _ = run("--nproc", "1")
    assert code == 0 and "there is nothing to compare" in out
