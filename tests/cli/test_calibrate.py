"""`cornstarch plan --calibrate`: real processes, tiny amounts, and files that a run uses."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from cornstarch.config.config_file import load_config
from cornstarch.plan.cluster import ERRORS, REACHED, Cluster, write_cluster
from cornstarch.planner import read_costs
from cornstarch.planner.expected_step import expect_step
from tests.cli.small_runs import Command
from tests.cli.test_estimate import RUN


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a config whose data and tokenizer are nowhere: only shapes matter."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "run.yaml").write_text(RUN + "device: cpu\n")
    return tmp_path / "run.yaml"


def test_a_machine_is_calibrated_for_a_run(run: Path, tmp_path: Path, command: Command) -> None:
    folder, plan = tmp_path / "measured", tmp_path / "plan.yaml"
    code, out, err = command("plan", run, "--calibrate", folder, "--quick", "--nproc", 2, "--output", plan)
    assert code == 0, err
    assert "layer costs measured" in out and str(folder / "cluster.yaml") in out.replace("\n", "")
    assert re.search(r"best │ +[\d.]+ m?s ± \d+ %", out.replace("\u00a0", " "))
    assert sorted(one.name for one in folder.iterdir()) == ["cluster.yaml", "costs.yaml"]

    cluster, costs = Cluster.parse(str(folder / "cluster.yaml")), read_costs(folder / "costs.yaml")
    assert cluster.measured and cluster.per_node == 2
    assert [name for name, _ in cluster.device.reached] == list(REACHED)
    assert all(0 < fraction <= 1 for _, fraction in cluster.device.reached)
    assert {name for name, _ in cluster.errors} == set(ERRORS) and all(error >= 0 for _, error in cluster.errors)
    assert costs.is_measured
    write_cluster(tmp_path / "again.yaml", cluster)
    assert Cluster.parse(str(tmp_path / "again.yaml")) == cluster

    written = plan.read_text()
    assert re.search(r"# Predicted: [\d.]+ m?s ± \d+ % a step", written)
    assert yaml.safe_load(written)["parallel"]["cluster"] == str(folder / "cluster.yaml")
    expected = expect_step(load_config(run, (), plan=plan), 2, 2)  # what `train` compares steps with
    assert expected is not None and expected.error is not None and expected.tolerance == expected.error > 0.1
    computed = sum(layer.forward + layer.input_gradient + layer.weight_gradient for layer in costs.modules[0].layers)
    assert computed / 4 < expected.seconds < 20 * computed  # of the same order, on a machine that may be busy


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--calibrate", "/proc/none"], "--calibrate /proc/none: the folder cannot be created"),
        (["--calibrate", "run.yaml"], "--calibrate run.yaml: the folder cannot be created"),
        (["--calibrate", "m", "--nproc", 5000], "nproc = 5000"),
        (["--calibrate", "m", "--cluster", "2xcpu"], "leave --cluster and --costs out"),
        (["--quick"], "--quick is an option of --calibrate"),
    ],
)
def test_mistakes_are_messages(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(run.parent)
    code, _, err = command("plan", run, *arguments)
    assert code == 2 and said in err


def test_a_folder_that_is_not_writable_is_refused(
    run: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_access = SimpleNamespace(access=lambda path, mode: False, W_OK=os.W_OK)  # root may write anywhere
    monkeypatch.setattr("cornstarch.planner.calibrate.os", no_access)
    code, _, err = command("plan", run, "--calibrate", tmp_path / "m")
    assert code == 2 and "the folder is not writable" in err
