"""What one rank alone finds out is refused by all ranks, in the same words; a rank without samples refuses nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cornstarch.data.loader import StepBatch
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import StepResult
from cornstarch.parallel import distributed
from cornstarch.trainer.recording_trainer import RecordingTrainer
from tests.parity.cell import make_trainer
from tests.parity.pool import QUIET, pool
from tests.parity.samples import numbers


def fit_run(signs: str, options: dict[str, Any], folder: str) -> str:
    """Train on one sample per sign (`x`: broken); return how many steps that made, or what was refused."""
    samples = [numbers(number, sign, 1) for number, sign in enumerate(signs)]
    try:
        trainer = make_trainer(
            "mlp", samples, {"epochs": 2, "batch_size": 4}, {}, "", folder, evaluation_data=samples, **options
        )
        trainer.watching = False
        trainer.fit()
    except ConfigError as error:
        return str(error)
    return f"{trainer.position.step} steps, {trainer.evaluate().record()['sources']['samples']['count']} evaluated"


def run(tmp_path: Path, signs: str, **data: Any) -> list[str]:
    data["evaluation"] = [{"path": "samples", "format": "given"}]
    return pool().run(2, fit_run, signs, {"data": data}, str(tmp_path / "run"))


def test_a_rank_without_a_good_sample(tmp_path: Path) -> None:
    assert run(tmp_path, "..xx") == ["2 steps, 2 evaluated"] * 2


def test_fewer_samples_than_ranks(tmp_path: Path) -> None:
    assert run(tmp_path, ".") == ["2 steps, 1 evaluated"] * 2


def test_too_many_broken_samples(tmp_path: Path) -> None:
    one, other = run(tmp_path, "...x..xx" * 4, skip_limit=0.3)
    assert one == other and "7 of 20 samples are broken" in one and "samples:4" in one


def test_what_counts_is_the_fraction_of_all_ranks(tmp_path: Path) -> None:
    """Half of the samples are broken: all those of rank 1."""
    one, other = run(tmp_path / "few", "..xx" * 10, skip_limit=0.3)
    assert one == other and one.startswith("10 of 20 samples are broken, more than `data.skip_limit` = 0.3 allows.")
    assert "samples:3" in one and len(one.splitlines()) == 7
    assert run(tmp_path / "many", "..xx" * 10, skip_limit=0.6) == ["20 steps, 20 evaluated"] * 2


def test_not_one_good_sample(tmp_path: Path) -> None:
    one, other = run(tmp_path, "xxxx")
    assert one == other and "Not one of 4 samples can be used" in one


# ------------------------------------------------------------------------------------------------ one rank alone


def list_failed(kind: str, when: str, folder: str) -> str:
    """Fail on rank 1 alone, while others wait; return what this rank raises."""

    class Alone(RecordingTrainer):
        def fail(self, place: str) -> None:
            if place == when and self.rank == 1:
                raise ConfigError("rank 1 has no file") if kind == "refused" else KeyError("a mistake of ours")
            if place == when:
                distributed.sum_over_ranks([1.0])  # never comes about

        def verify_plan(self, model: Any) -> None:
            self.fail("setup")

        def step(self, batch: StepBatch) -> StepResult:
            self.fail("step")
            return super().step(batch)

    samples = [numbers(number, ".", 1) for number in range(8)]
    try:
        make_trainer("mlp", samples, {"epochs": 1, "batch_size": 4}, {}, "", folder, kind=Alone).fit()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("when", ["setup", "step"])
@pytest.mark.parametrize("kind", ["refused", "crashed"])
def test_what_one_rank_fails_with_all_fail_with(kind: str, when: str, tmp_path: Path) -> None:
    began = time.monotonic()
    one, other = pool().run(2, list_failed, kind, when, str(tmp_path / "run"))
    if kind == "refused":
        assert one == other == "ConfigError: rank 1 has no file"
    else:
        assert other == "KeyError: 'a mistake of ours'"
        assert one == "RuntimeError: Rank 1 has failed. KeyError: 'a mistake of ours'"
    assert time.monotonic() - began < QUIET["cpu"] / 2
