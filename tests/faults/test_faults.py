"""The faults of docs/errors.md: each has a test, and those that no other file tests are tested here."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cornstarch.checkpoint.reader import read_checkpoint
from cornstarch.config.run_folder import CHECKPOINTS
from cornstarch.data.loader import StepBatch
from cornstarch.errors import ConfigError
from cornstarch.files import own_digest
from cornstarch.metrics.metrics import Position, StepResult
from cornstarch.trainer.recording_trainer import RecordingTrainer
from cornstarch.trainer.trainer import Trainer
from tests.parity.cell import make_trainer
from tests.parity.pool import pool
from tests.parity.samples import numbers
from tests.trainer.tiny import tiny_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"


def read_rows() -> dict[int, tuple[str, list[str]]]:
    """Return, by number, a row of the page and the tests that it names."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## Faults of a run") :]
    rows = re.findall(r"^\| (\d+) (\|.*\|)$", section, re.MULTILINE)
    return {int(number): (row, re.findall(r"`(tests/[\w/]+\.py::\w+)`", row)) for number, row in rows}


def test_every_fault_has_a_row_and_its_tests_exist() -> None:
    rows = read_rows()
    assert list(rows) == list(range(1, 29))
    for number, (row, tests) in rows.items():
        assert tests and row.count(" | ") == 3, number
        for one in tests:
            path, _, name = one.partition("::")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, one


# ------------------------------------------------------------------------------------------------ 5


class Hungry(RecordingTrainer):
    """Rank 1 runs out of memory in its third step."""

    def step(self, batch: StepBatch) -> StepResult:
        self.watching = False
        if self.rank == 1 and self.position.step == 2:
            self.task.loss = lambda inputs: torch.empty(2**50)  # type: ignore[method-assign,assignment]
        return super().step(batch)


def run_out_of_memory(folder: str) -> str:
    samples = [numbers(number, ".", 1) for number in range(24)]
    try:
        make_trainer("mlp", samples, {"epochs": 1, "batch_size": 4}, {}, "", folder, kind=Hungry).fit()
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_one_rank_without_memory(tmp_path: Path) -> None:
    one, other = pool().run(2, run_out_of_memory, str(tmp_path / "run"), apart=10.0)
    assert one == other
    assert one.startswith("Memory ran out in the forward pass") and "weights of the model" in one and "Try: " in one
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"


# ------------------------------------------------------------------------------------------------ 16 to 18


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    Trainer(tiny_config(folder, "loop.steps=2", "checkpoint.every=1"), console=Console(quiet=True)).fit()
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copied"))


def start(folder: Path) -> str:
    """Start the run of a folder again; return what it says."""
    said = io.StringIO()
    config = tiny_config(folder, "loop.steps=3", "checkpoint.every=1", output=str(folder / "run"))
    try:
        Trainer(config, console=Console(file=said, width=300), allow_changes=True).fit()
    except ConfigError as error:
        return str(error)
    return said.getvalue()


def test_a_run_says_that_it_begins_at_the_first_step(copied: Path) -> None:
    shutil.rmtree(copied / "run" / CHECKPOINTS)
    assert "The earlier start left no checkpoint: this one begins at the first step." in start(copied)


def newest(folder: Path) -> Path:
    return sorted((folder / "run" / CHECKPOINTS).glob("step_*"))[-1]


def sign(checkpoint: Path, **changed: Any) -> None:
    """Change a manifest, and give it the checksum that it must have."""
    path = checkpoint / "checkpoint.json"
    content = json.loads(path.read_text()) | changed
    content["sha256"] = own_digest(content)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def test_a_checkpoint_leads_to_no_other_folder(copied: Path, tmp_path: Path) -> None:
    files = json.loads((newest(copied) / "checkpoint.json").read_text())["files"]
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(next(newest(copied).glob("*.safetensors")).read_bytes())
    for name in ("../../../../outside.safetensors", str(outside), "a/../../x", "..\\x"):
        entry = next(iter(files.values()))
        sign(newest(copied), files={**files, name: entry})
        with pytest.raises(ConfigError, match="which does not lie in the model's folder: refused"):
            read_checkpoint(newest(copied))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("[]", "data.json is damaged"),
        ("{}", "found nothing, expected \"state\""),
        ('{"state": {"format": 2}}', "cannot be restored: it does not have what a run writes (KeyError"),
    ],
)
def test_data_signed_again_are_refused_in_one_message(data: str, said: str, copied: Path) -> None:
    for checkpoint in (copied / "run" / CHECKPOINTS).glob("step_*"):
        (checkpoint / "data.json").write_text(data)
        files = json.loads((checkpoint / "checkpoint.json").read_text())["files"]
        files["data.json"] = {"size": len(data), "sha256": hashlib.sha256(data.encode()).hexdigest()}
        sign(checkpoint, files=files)
    assert said in start(copied)


@pytest.mark.parametrize("value", [{"step": "3"}, {"step": None}, {"losses": 1}, {"tokens": [1]}, {"best": "x"}])
def test_a_position_of_another_kind_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"position.{next(iter(value))} is "):
        Position.read(value)
    assert Position.read({"step": 3, "seconds": 1, "best": 2, "losses": [1.0, 2], "unknown": 1}).losses == (1.0, 2.0)
