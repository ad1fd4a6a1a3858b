"""A model that nobody has cut before is tried on a tiny twin; one that is cut wrongly is not trained."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from cornstarch.errors import ConfigError
from cornstarch.parallel import tested
from cornstarch.parallel.tested import Sweep, Verdict, is_tested
from cornstarch.train import Trainer
from cornstarch.verify import twin_trial as start_check
from tests import warm
from tests.generality.results import write_table
from tests.parity.pool import pool
from tests.trainer.odd import SIZES, OddLlama, OwnLlama
from tests.trainer.tiny import tiny_config


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 64, (8, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "labels": one} for one in ids]


def attempt(trainer: Trainer) -> str:
    """Train in this process, one of several; return what was refused."""
    try:
        trainer.fit()
    except ConfigError as error:
        return str(error)
    return ""


def given(kind: Any, folder: str, parallel: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Train a model made in Python; return what was refused, what was told, and which folders the check made."""
    made: list[str] = []

    class Noted(tempfile.TemporaryDirectory[str]):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self.name)

    start_check.TemporaryDirectory = Noted  # type: ignore[misc,assignment]
    told = io.StringIO()
    torch.manual_seed(0)
    trainer = Trainer.from_objects(
        kind(LlamaConfig(**SIZES)), train_data=rows(), output=folder, device="cpu", threads=1,
        loop={"steps": 1, "batch_size": 4}, parallel=parallel,
        logging={"progress": "none", "samples": 0}, console=Console(file=told, soft_wrap=True),
    )  # fmt: skip
    return attempt(trainer), told.getvalue(), made


def together(*job: Any) -> list[Any]:
    pool().renew()  # torch remembers meshes of an earlier job
    return pool().run(2, trying_quickly, warm.interpreter(), *job)


def trying_quickly(python: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function whose trials start processes."""
    with warm.used(python):
        return function(*arguments)


TP = {"modules": {"model": {"tp": 2}}}


def test_a_model_that_is_cut_wrongly_is_not_trained(tmp_path: Path) -> None:
    results = together(given, OddLlama, str(tmp_path / "run"), TP)
    for refused, _, _ in results:  # every process says so, and none waits
        assert "Not in the table of tested models: OddLlama (tp)." in refused
        assert "The plan does something else than one process. It begins in model.layers.0.mlp." in refused
        assert refused.endswith("To train without this check: parallel.verify=never.")
    assert "tried on a tiny twin" in results[0][1]
    assert len(results[0][2]) == 1 and not Path(results[0][2][0]).exists()


def test_the_check_can_be_turned_off(tmp_path: Path) -> None:
    for refused, _, made in together(given, OddLlama, str(tmp_path / "run"), {**TP, "verify": "never"}):
        assert refused == "" and not made


def test_an_unknown_model_that_is_right_is_trained(tmp_path: Path) -> None:
    results = together(given, OwnLlama, str(tmp_path / "run"), TP)
    assert [refused for refused, _, _ in results] == ["", ""]
    assert [len(made) for _, _, made in results] == [1, 0]


def test_a_tested_model_is_not_tried(tmp_path: Path) -> None:
    for refused, told, made in together(given, LlamaForCausalLM, str(tmp_path / "run"), TP):
        assert refused == "" and not made and "twin" not in told


def describe_run(folder: str, *overrides: str) -> tuple[str, str]:
    told = io.StringIO()
    trainer = Trainer(tiny_config(Path(folder), *overrides), console=Console(file=told, soft_wrap=True))
    return attempt(trainer), told.getvalue()


def test_a_run_that_asks_for_it(tmp_path: Path) -> None:
    tiny_config(tmp_path)  # writes the data
    changes = ["parallel.modules.model.tp=2", "parallel.verify=always", "loop.steps=1"]
    results = together(describe_run, str(tmp_path), *changes)
    assert [refused for refused, _ in results] == ["", ""]
    assert "tried on a tiny twin" in results[0][1]


def described_with_given_rows(folder: str) -> str:
    """Train a described model on rows that exist in this process alone: decoded images, and a broken row."""
    written: list[dict[str, Any]] = json.loads((Path(folder) / "train.json").read_text())
    for row in written:
        if "image" in row:
            row["image"] = Image.open(Path(folder) / row["image"]).copy()
    changes = ["parallel.modules.model.tp=2", "parallel.verify=always", "loop.steps=1"]
    config = tiny_config(Path(folder), *changes, "data.train.0={path: rows, format: given}")
    broken = {"conversations": "nothing"}
    return attempt(Trainer(config, train_data=[written[0], broken, *written[1:]], console=Console(file=io.StringIO())))


def test_a_trial_is_run_with_rows_given_in_python(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    assert together(described_with_given_rows, str(tmp_path)) == ["", ""]


def test_a_trial_that_fails_says_how_to_go_on(tmp_path: Path) -> None:
    local = together(given_locally, str(tmp_path / "run"))
    assert all("Local is not in a module that another process can import" in said for said in local)
    assert all("parallel.verify=never" in said for said in local)


def given_locally(folder: str) -> str:
    class Local(OwnLlama):
        pass

    return given(Local, folder, TP)[0]


# ------------------------------------------------------------------------------------------------ the table


def test_what_is_in_the_table() -> None:
    assert is_tested("LlamaForCausalLM", "tp", transformers.__version__)
    assert not is_tested("MambaForCausalLM", "tp", transformers.__version__)  # refused
    assert not is_tested("OwnLlama", "tp", transformers.__version__)
    assert not is_tested("LlamaForCausalLM", "tp", "99.0.0")  # its code may be another one there
    assert not is_tested("LlamaForCausalLM", "sideways", transformers.__version__)


def test_the_table_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    verdicts = {"A": Verdict("passed", whole=("B: why",)), "C": Verdict("refused", 'its "heads"')}
    table = {"tp": Sweep({"transformers": "5.22.2"}, {"language models": verdicts, "encoders": {}})}
    write_table(table, tmp_path / "table.json")
    assert tested.read_table(tmp_path / "table.json") == table
