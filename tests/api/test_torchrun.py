"""The Booster in processes that torchrun has started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.api.test_parity import TOLERANCE
from tests.api.work import Case, alone

ROOT = Path(__file__).resolve().parents[2]


def test_torchrun_starts_a_boosted_script(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "tests" / "api" / "torchrun_script.py"), str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": warm.interpreter(),  # what torchrun starts its processes with
    }
    done = subprocess.run([*torchrun, *script], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = alone(Case())
    found = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    for one in found:
        assert one["losses"] == pytest.approx(expected.losses, rel=TOLERANCE)
    sizes = {name: float(abs(value).sum()) for name, value in expected.parameters.items() if value is not None}
    vision, language_model = (one["parameters"] for one in found)
    assert not vision.keys() & language_model.keys()
    assert {**vision, **language_model} == pytest.approx(sizes, rel=TOLERANCE)
