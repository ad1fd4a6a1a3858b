"""`cornstarch profile`: what it writes, and every mistake as a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornstarch.planner import read_costs
from tests.cli.small_runs import Command
from tests.cli.test_estimate import RUN


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a config whose data and tokenizer are nowhere: only shapes matter."""
    (tmp_path / "run.yaml").write_text(RUN + "device: cpu\nthreads: 1\n")
    return tmp_path / "run.yaml"


def test_costs_are_written(run: Path, tmp_path: Path, command: Command) -> None:
    code, out, err = command("profile", run, "loop.gradient_accumulation_steps=4", "--output", tmp_path / "costs.yaml")
    assert code == 0 and err == ""
    assert "microbatches of 4 samples of 128 tokens, in fp32, on cpu" in out.replace("\n", " ")
    found = read_costs(tmp_path / "costs.yaml")
    assert (found.samples, found.batch, len(found.modules[0].layers)) == (4, 16, 3)
    assert all(layer.forward > 0 for layer in found.modules[0].layers)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output", "nowhere/costs.yaml"], "there is no folder nowhere"),
        (["--output", "."], "is a folder"),
        (["--facts", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["device=abacus"], "device = abacus"),
        (["model.language_model.train=frozen"], "Nothing is trained"),
    ],
)
def test_mistakes_are_messages(run: Path, command: Command, arguments: list[str], said: str) -> None:
    code, _, err = command("profile", run, *arguments)
    assert code == 2 and said in err
