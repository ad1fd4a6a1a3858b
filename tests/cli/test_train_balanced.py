"""`cornstarch train` with samples dealt out by cost: what is told, and going on to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from cornstarch.train.data.balancing import COSTS
from tests.cli.small_runs import write_config
from tests.cli.started import together
from tests.train.tiny import losses

TRAIN = ("train", "run.yaml", "output=run", "checkpoint.every=3")


def weights(folder: Path) -> dict[str, bytes]:
    """Return the tensors of the last checkpoint."""
    (last,) = (folder / "checkpoints").glob("step_00000006*")
    return {file.name: file.read_bytes() for file in last.rglob("*.safetensors")}


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        data={"balance": "cost", "packing": True, "max_length": 64, "workers": 1},
        loop={"batch_size": 8, "accumulation": 2},
    )
    (code, said), (other, quiet) = together(*TRAIN, folder=tmp_path)
    assert (code, other) == (0, 0), said + quiet
    assert "Samples are dealt out by cost: the slowest replica has" in said and "dealt out" not in quiet
    with np.load(tmp_path / "run" / COSTS, allow_pickle=False) as file:
        assert file["costs"].shape == (2, 25) and (file["costs"] > 0)[1].all()

    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    for checkpoint in (tmp_path / "run/checkpoints").glob("step_00000006*"):
        shutil.rmtree(checkpoint)
    (code, said), (other, quiet) = together(*TRAIN, folder=tmp_path)
    assert (code, other) == (0, 0), said + quiet
    assert "goes on after step 3" in said
    before = (tmp_path / "whole" / COSTS).read_bytes()
    assert (tmp_path / "run" / COSTS).read_bytes() == before
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole") and weights(tmp_path / "run")
