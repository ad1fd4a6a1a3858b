"""The pipeline benchmarks run in their quickest form, and say what they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script: str, output: Path, *arguments: str) -> dict[str, Any]:
    """Run a script and return what it wrote."""
    command = [sys.executable, str(FOLDER / script), *arguments, "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())


@pytest.mark.timeout(300)
def test_pipeline_runtime(tmp_path: Path) -> None:
    options = "--repetitions 1 --rounds 1 --steps 1 --cases small --no-deepspeed --places 2 --microbatches 4"
    found = run(
        "pipeline_runtime.py", tmp_path / "found.json", *options.split(), "--sleep", "0.01", "--steps-asleep", "1"
    )
    (case,) = found["cases"]
    assert case["milliseconds"].keys() == {"Cornstarch", "torch", "torch, again", "Cornstarch, train_batch"}
    assert case["ratios"]["Cornstarch"]["to"] == "torch"
    assert found["overhead"]["milliseconds"]["messages alone"] > 0
    assert [(one["policy"], one["formula"]) for one in found["bubbles"]] == [("gpipe", 0.2), ("1f1b", 0.2)]
    assert all(one["bubble"] >= 0.2 - 1e-6 for one in found["bubbles"])  # nothing is faster than its sleeps


@pytest.mark.timeout(300)
def test_modality(tmp_path: Path) -> None:
    options = "--workloads published --models VALM-M --seconds 0.3 --steps 1"
    found = run("modality.py", tmp_path / "found.json", *options.split())
    ((model,),) = [workload["models"] for workload in found["workloads"]]
    plans = model["plans"]
    assert all(plan["devices"] <= 24 and plan["deviation"] > -1e-3 for plan in plans.values())
    assert plans["apart"]["simulated"] == pytest.approx(0.3)
    assert plans["searched"]["simulated"] <= min(plan["simulated"] for plan in plans.values())
    assert plans["apart"]["plan"] == "vision 1 + audio 1 → 5"
    assert set(model["ratios"]) == {"apart", "searched"}
