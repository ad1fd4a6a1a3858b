"""The steps of a run beside what its plan predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cornstarch.planner.expected_step import ExpectedStep
from cornstarch.train import Trainer
from cornstarch.trainer.prediction_check import PredictionCheck
from tests.trainer.tiny import quiet, tiny_config

SLOW = """
name: old-machine
per_node: 1
device: {name: abacus, memory: 80 GB, bandwidth: 1 MB/s, flops: {fp32: 1 MFLOP/s, bf16: 1 MFLOP/s}}
inside: {bandwidth: 1 GB/s, latency: 1 us}
measured: true
"""


def compute_expected() -> ExpectedStep:
    return ExpectedStep(2.0, 1000.0, "2xH100")


def test_the_first_steps_do_not_count() -> None:
    check = PredictionCheck(compute_expected())
    assert check.add(10, 10, 60.0, 1000.0) == 2.0  # compiles
    check.add(20, 10, 2.0, 1000.0)
    assert check.ratio is None and check.read_new() is None
    check.add(30, 10, 2.1, 1000.0)
    assert check.ratio == pytest.approx(1.025) and check.read_new() is None


def test_a_difference_is_told_once() -> None:
    check = PredictionCheck(compute_expected(), first=100)
    for step in (110, 120, 130, 140):
        check.add(step, 10, 3.0, 1000.0)
    told = check.read_new()
    assert told is not None and "A step takes 3 s, 50% longer than the 2 s that were predicted for 2xH100" in told
    assert check.read_new() is None and check.describe()["ratio"] == 1.5


def test_the_error_bar_decides_where_there_is_one() -> None:
    for error, is_told in ((0.2, True), (0.6, False)):
        check = PredictionCheck(replace(compute_expected(), error=error))
        for step in (10, 20, 30, 40):
            check.add(step, 10, 3.0, 1000.0)
        told = check.read_new()
        assert (told is not None) == is_told
        assert told is None or "than the 2 s ± 20 % that were predicted" in told.replace("\u00a0", " ")


def test_shorter_samples_are_no_difference() -> None:
    check = PredictionCheck(compute_expected())
    for step in (10, 20, 30):
        assert check.add(step, 10, 1.0, 500.0) == 1.0
    assert check.ratio == 1.0


def test_a_run_is_compared_with_the_prediction_for_its_cluster(tmp_path: Path) -> None:
    (tmp_path / "slow.yaml").write_text(SLOW)
    config = tiny_config(tmp_path, f"parallel.cluster={tmp_path / 'slow.yaml'}", "loop.steps=32", "logging.every=10")
    Trainer(config, console=quiet()).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert all(line["predicted_step_time"] > 10 * line["step_time"] for line in steps)
    told = [line for line in lines if line.get("event") == "prediction"]
    assert [line["step"] for line in told] == [30]
    assert "shorter than the" in told[0]["text"] and "predicted for 1xabacus" in told[0]["text"]
    assert "shorter than predicted for 1xabacus" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_without_a_cluster_has_no_prediction(tmp_path: Path) -> None:
    Trainer(tiny_config(tmp_path, "loop.steps=2"), console=quiet()).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not any("predicted_step_time" in line for line in lines)
