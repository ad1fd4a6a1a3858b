"""A fuzz that cannot fail is no test: each way to be wrong is seen as such, and the machine goes on afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import sabotage, work
from tests.fuzz.runner import Runner
from tests.parity.pool import Pool

CASE: dict[str, Any] = {
    "seed": 1, "llm": "llama", "layers": 2, "llm_train": "full", "encoders": {}, "world": 2, "batch_size": 4,
    "accumulation": 1, "steps": 2, "kinds": [[0, 0, words, True] for words in (3, 20, 6, 2, 12, 1, 9, 4)],
    "data": {"shuffle": False}, "optimizer": {"name": "sgd", "learning_rate": 0.02, "clip": 100.0}, "loop": {},
    "parallel": {"data": {"kind": "ddp"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def impatient(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Return a runner that does not wait long for ranks that wait for ever."""
    yield Runner(workers, tmp_path_factory.mktemp("sabotaged"), seconds=60.0, apart=2.0)


@pytest.mark.parametrize(
    ("train", "kind", "said"),
    [
        (sabotage.scale_one_gradient, "wrong", "layers.0.mlp.up_proj.weight is off by"),
        (sabotage.train_alone, "crashed", "should hold the same weights"),
        (sabotage.log_another_rate, "wrong", "learning_rate of step 1 is 0.04 instead of 0.02"),
        (sabotage.refuse_before_any_step, "refused", "this cannot work"),
        (sabotage.refuse_after_a_step, "crashed", "refused after 1 steps: this cannot work"),
        (sabotage.refuse_on_one_rank, "crashed", "refused by ranks [1] only: this cannot work"),
        (sabotage.hang, "hung", "refused by ranks [0] only"),
        (sabotage.raise_error, "crashed", "RuntimeError: something odd"),
        (work.train, "equal", ""),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_verdict(impatient: Runner, monkeypatch: pytest.MonkeyPatch, train: Any, kind: str, said: str) -> None:
    monkeypatch.setattr(work, "train", train)
    verdict = impatient.run(CASE)
    assert (verdict.kind, said in verdict.reason) == (kind, True), verdict


def test_case_that_takes_too_long_is_hung(workers: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(workers, tmp_path)
    runner.run(CASE)  # so that what one process does is known
    monkeypatch.setattr(work, "train", sabotage.wait_in_all_ranks)
    runner._seconds = 1.0
    verdict = runner.run(CASE)
    assert verdict.kind == "hung" and "no word from rank 0, 1" in verdict.reason


def test_checkpoint_that_is_not_the_model_is_seen(impatient: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "load", _load_nothing)
    verdict = impatient.run(CASE)
    assert verdict.kind == "wrong" and "in the checkpoint" in verdict.reason


def _load_nothing(output: str) -> dict[str, Any]:
    return {}


def test_refusal_of_one_process_counts(impatient: Runner) -> None:
    verdict = impatient.run({**CASE, "loop": {"activation_budget": "1 kB"}})
    assert verdict.kind == "refused" and verdict.reason.startswith("one process: ")
