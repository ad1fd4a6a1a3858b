"""`cornstarch inspect-data` on a run's own model and data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from cornstarch.plan.data_statistics import read_data_statistics
from cornstarch.planner.inspect_data import inspect_data
from cornstarch.train import load_config
from tests.cli.small_runs import AUDIO, Command, add_sounds, break_rows, write_config
from tests.trainer.tiny import WORDS


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose samples have texts of very different lengths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    path = write_config(tmp_path, model={"encoders": {"audio": AUDIO}})
    add_sounds(tmp_path)
    rows = json.loads((tmp_path / "train.json").read_text())
    random = np.random.default_rng(0)
    counts = random.lognormal(3, 1, len(rows)).astype(int) + 1
    counts[3] = 300
    for row, count in zip(rows, counts, strict=True):
        row["conversations"][-1]["value"] = " ".join(WORDS[n % 4] for n in range(count))
    (tmp_path / "train.json").write_text(json.dumps(rows))
    return path


BATCHES = ("loop.batch_size=16", "data.max_length=150")


def test_tables_and_recommendations_are_printed(run: Path, command: Command) -> None:
    code, said, error = command("inspect-data", str(run), *BATCHES)
    assert code == 0, error
    for name in ("train.0", "tokens", "vision items", "vision work", "audio work", "language_model work", "replicas"):
        assert name in said, name
    assert "1 sample is too long (skipped):" in said and "max_length is 150" in said and "train.json:" in said
    assert "padded *" in said and "Step time relative to the least possible" in said
    assert "data.packing=true would make steps" in said and "data.balance=cost would make steps" in said
    assert re.search(r"Packed rows of 150 tokens are 9\d\.\d% full \(data\.packing=true\)", said)


def test_configured_settings_are_marked_and_not_recommended(run: Path, command: Command) -> None:
    code, said, _ = command("inspect-data", str(run), *BATCHES, "data.packing=true", "data.balance=cost")
    assert code == 0 and "packed, balanced *" in said and "would make" not in said


def test_samples_with_many_images_can_be_split(run: Path, command: Command) -> None:
    code, said, _ = command("inspect-data", str(run), *BATCHES)
    assert code == 0 and "(audio); balancing cannot fix that" in said and "balance_encoders" not in said
    rows = json.loads(Path("train.json").read_text())
    for row in rows[:8]:
        row["image"] = [row["image"]] * 8
        row["conversations"][0]["value"] = "<image>" * 8
    Path("train.json").write_text(json.dumps(rows))
    code, said, _ = command("inspect-data", str(run), *BATCHES)
    assert code == 0 and "data.balance_encoders=true lets replicas encode items of one another (vision)" in said
    code, said, _ = command("inspect-data", str(run), *BATCHES, "data.balance_encoders=true")
    assert code == 0 and "balancing cannot fix that" in said and "balance_encoders" not in said


def test_facts_are_written(run: Path, command: Command) -> None:
    code, said, error = command("inspect-data", str(run), *BATCHES, "--output", "facts.yaml")
    assert code == 0 and "Wrote facts.yaml." in said, error
    facts = read_data_statistics(Path("facts.yaml"))
    found = inspect_data(load_config(run, BATCHES))
    assert facts == found.facts
    assert facts.tokens == pytest.approx(np.mean([size.tokens for size in found.sizes]))
    assert facts.largest_tokens <= 150 and facts.item_tokens == {"vision": 5.0, "audio": 5.0}
    assert facts.items["vision"] + facts.items["audio"] <= 1.0
    assert list(facts.straggler) == [1, 2, 4, 8, 16]
    balanced = inspect_data(load_config(run, [*BATCHES, "data.packing=true", "data.balance=cost"])).facts
    # 16 samples fill 4 rows: on more replicas than that, some compute rows without samples.
    assert all(balanced.straggler[n] <= facts.straggler[n] for n in (1, 2, 4))
    assert balanced.straggler[16] > 2 * balanced.straggler[4]


def test_only_headers_of_images_are_read(run: Path) -> None:
    whole = inspect_data(load_config(run, BATCHES)).facts
    for file in (run.parent / "images").glob("*.png"):
        file.write_bytes(file.read_bytes()[:60])
    assert inspect_data(load_config(run, BATCHES)).facts == whole


def test_samples_limits_the_inspection(run: Path, command: Command) -> None:
    code, said, _ = command("inspect-data", str(run), *BATCHES, "--samples", "10")
    assert code == 0 and re.search(r"\b33 +10\b", said)


def test_broken_samples_are_listed(run: Path, command: Command) -> None:
    names = break_rows(run.parent, "train.json")
    code, said, _ = command("inspect-data", str(run), *BATCHES)
    assert code == 0 and "3 samples are broken:" in said
    assert "silent.wav" in said and "missing.png" in said and len(names) == 3


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.max_length=3"], "Not one of 33 samples can be used"),
        (["data.max_lenght=5"], "Did you mean `max_length`?"),
    ],
)
def test_mistakes_end_in_a_message(run: Path, command: Command, overrides: list[str], told: str) -> None:
    code, said, error = command("inspect-data", str(run), *overrides)
    assert code == 2 and told in said + error and "Traceback" not in said + error


def test_an_unwritable_output_is_refused(run: Path, command: Command) -> None:
    code, _, error = command("inspect-data", str(run), *BATCHES, "--output", "nowhere/facts.yaml")
    assert code == 2 and "nowhere/facts.yaml cannot be written" in error


def test_other_tasks_are_refused(run: Path, command: Command) -> None:
    other = {"model": {"factory": {"function": "tests.tasks.small_factory:convolution"}}}
    described = {**other, "data": {"train": "train.json"}}
    Path("other.yaml").write_text(json.dumps(described))
    code, _, error = command("inspect-data", "other.yaml")
    assert code == 2 and "only conversations and documents" in error and "cornstarch data check" in error
