"""Whole runs of models that are cut into stages: they train, evaluate, answer, stop and go on as one process does."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cornstarch.config.run_folder import SUMMARY
from cornstarch.train import Trainer, load_config
from tests.models import local_processors
from tests.parity.cell import OPTIMIZER, _replace
from tests.parity.pool import pool
from tests.parity.rows import ROWS, TOKENIZER
from tests.parity.samples import alike

STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "vision, pp 2": (3, {"modules": {"vision": {}, "language_model": {"stages": 2}}}),
    "vision inside, pp 2 x dp 2": (
        4,
        {"modules": {"vision": {}, "language_model": {"stages": 2}}, "ranks": "first_stage"},
    ),
    "vision inside, interleaved": (
        2,
        {
            "modules": {"vision": {}, "language_model": {"stages": 2, "virtual_stages": 2}},
            "ranks": "first_stage",
            "schedule": "interleaved",
        },
    ),
}


def fit_run(parallel: Mapping[str, Any], tokenizer: str, folder: str, steps: int, **more: Any) -> dict[str, Any]:
    """Run a config to its end and return what this process says about it."""
    samples = alike(ROWS["frozen_vision"].make, 24)
    described = {
        "output": folder,
        "device": "cpu",
        "threads": 1,
        "precision": "fp32",
        "model": _replace(ROWS["frozen_vision"].model, TOKENIZER, tokenizer),
        "data": {
            "train": [{"path": "samples", "format": "given"}],
            "evaluation": [{"path": "others", "format": "given"}],
            "shuffle": False,
        },
        "optimizer": OPTIMIZER,
        "schedule": {"name": "constant", "warmup": 0},
        "loop": {"steps": steps, "batch_size": 8, "accumulation": 4, "exchange_check": False},
        "checkpoint": {"every": 2},
        "logging": {"progress": "none", "samples": 2},
        "parallel": dict(parallel),
    }
    told = io.StringIO()
    config = load_config(None, base=described)
    trainer = Trainer(config, train_data=samples, evaluation_data=samples[:10], console=Console(file=told), **more)
    result = trainer.fit()
    return {"step": result.step, "evaluation": result.evaluation, "told": told.getvalue()}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    local_processors.tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.mark.parametrize("name", [name for name in STAGES if name != "one process"])
def test_a_run_evaluates_and_answers_as_one_process_does(name: str, tokenizer: str, tmp_path: Path) -> None:
    found = {}
    for each in ("one process", name):
        ranks, parallel = STAGES[each]
        folder = tmp_path / each.replace(" ", "_")
        (first, *_) = pool().run(ranks, fit_run, parallel, tokenizer, str(folder), 3)
        summary = json.loads((folder / SUMMARY).read_text())
        found[each] = first["evaluation"], summary["answers"], summary["parts"]
        assert first["step"] == 3
    (expected, answers, parts), (evaluation, said, shown) = found["one process"], found[name]
    for measure in ("loss", "token_accuracy", "accuracy"):
        assert evaluation[measure] == pytest.approx(expected[measure], rel=1e-4)
    assert [one["answer"] for one in said] == [one["answer"] for one in answers]
    kept = ("name", "parameters", "trained")
    assert [[one.get(key) for key in kept] for one in shown] == [[one.get(key) for key in kept] for one in parts]


def test_a_pipelined_run_goes_on_from_its_checkpoint(tokenizer: str, tmp_path: Path) -> None:
    ranks, parallel = STAGES["vision, pp 2"]
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    (expected, *_) = pool().run(ranks, fit_run, parallel, tokenizer, whole, 4)
    pool().run(ranks, fit_run, parallel, tokenizer, cut, 2)
    results = pool().run(ranks, fit_on, parallel, tokenizer, cut, 4)
    assert results[0]["step"] == 4
    assert results[0]["evaluation"]["loss"] == pytest.approx(expected["evaluation"]["loss"], rel=1e-6)


def fit_on(parallel: Mapping[str, Any], tokenizer: str, folder: str, steps: int) -> dict[str, Any]:
    """Go on with more steps than before."""
    return fit_run(parallel, tokenizer, folder, steps, allow_changes=True)
