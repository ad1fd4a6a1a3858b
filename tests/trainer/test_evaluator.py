"""Measures source by source, against sums by hand; and training that does not notice."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cornstarch.config import SourceConfig
from cornstarch.data.formats import open_sources
from cornstarch.data.loader import source_names
from cornstarch.errors import ConfigError
from cornstarch.parallel.device import DevicePlacement
from cornstarch.tasks import build_task
from cornstarch.tasks.module import build_module_task
from cornstarch.tasks.task import Measures
from cornstarch.train import load_config
from cornstarch.trainer.evaluator import Evaluation, Evaluator
from tests.trainer.tiny import tiny_config

CPU = DevicePlacement(torch.device("cpu"), "fp32")


def names(*sources: str | tuple[str, str]) -> list[str]:
    given = [(one, None) if isinstance(one, str) else one for one in sources]
    return source_names([SourceConfig(path=path, name=name) for path, name in given])


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["data/test.json", "other/test.json", "test.json"], ["test.json", "test.json 2", "test.json 3"]),
        ([("a.json", "held out"), "b.json"], ["held out", "b.json"]),
        (["my.data:rows", "my.other:rows"], ["rows", "rows 2"]),
        (["data/folder/", "data/folder"], ["folder", "folder 2"]),
        ([("x", "a"), "a"], ["a", "a 2"]),
        ([("x", "a 2"), "a", "a"], ["a 2", "a", "a 3"]),  # never two of one name
        ([("x", "a b"), "a"], ["a b", "a"]),
        ([], []),
    ],
)
def test_every_source_has_a_name_of_its_own(sources: list[Any], expected: list[str]) -> None:
    assert names(*sources) == expected
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("sources", [[("x", "a"), ("y", "a")], ["a", ("y", "a")]])
def test_a_name_given_twice_is_told(sources: list[Any]) -> None:
    with pytest.raises(ConfigError, match="named 'a'"):
        names(*sources)


def test_all_sources_together_are_no_mean_of_means() -> None:
    sources = {"a": Measures({"loss": (10.0, 5), "accuracy": (1, 1)}), "b": Measures({"loss": (2.0, 1)})}
    record = Evaluation(sources, {"a": 1, "b": 1}).record()
    assert record == {
        "loss": 2.0,
        "accuracy": 1.0,
        "sources": {"a": {"loss": 2.0, "accuracy": 1.0, "count": 1}, "b": {"loss": 2.0, "count": 1}},
    }


# ------------------------------------------------------------------------------------------------ evaluating


class Noisy(nn.Module):
    """A line with dropout, and whatever draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.dropout = nn.Linear(1, 1), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3), np.random.rand(3), random.random()
        return self.dropout(self.line(x[:, None]))[:, 0]


def square(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    error = model(batch["x"]) - batch["y"]
    return {"loss": error.square().mean(), "accuracy": (error.abs() < 1).float().mean()}


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    """Seven rows in one file, and three in another."""
    draws = np.random.default_rng(0)
    found = []
    for name, count in (("seven", 7), ("three", 3)):
        rows = [{"x": float(draws.normal()), "y": float(draws.normal())} for _ in range(count)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
        found.append({"path": str(tmp_path / f"{name}.json"), "name": name, "format": "rows"})
    return found


def evaluator(module: nn.Module, sources: list[dict[str, Any]], **loop: Any) -> Evaluator:
    data = {"train": sources[:1], "evaluation": sources}
    config = load_config(None, base={"model": {"given": "Noisy"}, "data": data, "loop": loop})
    opened = open_sources(config.data.evaluation).sources
    task = build_module_task(module, square, None, config.data)
    return Evaluator(task, config, dict(zip(source_names(config.data.evaluation), opened, strict=True)), CPU)


@pytest.mark.parametrize("loop", [{"batch_size": 4}, {"batch_size": 4, "accumulation": 2}, {"batch_size": 100}])
def test_measures_are_those_of_all_samples_whatever_the_batches(
    sources: list[dict[str, Any]], loop: dict[str, int]
) -> None:
    module = Noisy()
    found = evaluator(module, sources, **loop).evaluate()
    weight, bias = module.line.weight.item(), module.line.bias.item()
    errors: dict[str, list[float]] = {}
    for source in sources:
        rows = json.loads(Path(source["path"]).read_text())
        errors[source["name"]] = [weight * row["x"] + bias - row["y"] for row in rows]
    for name, values in errors.items():
        measured = found.record()["sources"][name]
        assert measured["loss"] == pytest.approx(np.mean(np.square(values)), rel=1e-5)
        assert measured["accuracy"] == pytest.approx(np.mean(np.abs(values) < 1))
        assert measured["count"] == len(values)
    everything = [value for values in errors.values() for value in values]
    assert found.means()["loss"] == pytest.approx(np.mean(np.square(everything)), rel=1e-5)


def test_training_does_not_notice(sources: list[dict[str, Any]]) -> None:
    module = Noisy()
    module.dropout.eval()  # a user may have reasons
    measure = evaluator(module, sources, batch_size=2)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    measure.evaluate()
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) == expected
    assert [module.training, module.line.training, module.dropout.training] == [True, True, False]
    assert module.line.weight.grad is None


def test_too_much_that_is_broken_is_told(sources: list[dict[str, Any]]) -> None:
    Path(sources[1]["path"]).write_text('[{"x": 1.0, "y": null}, {"x": 1.0, "y": 1.0}, {"x": 1.0, "y": null}]')
    with pytest.raises(ConfigError, match=r"2 of 3 samples are broken.*\n  three.json:1: `y` is empty"):
        evaluator(Noisy(), sources).evaluate()


def test_exchanged_images_change_what_the_model_is_asked(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    held_out = {"evaluation": [{"path": str(tmp_path / "test.json"), "name": "held out"}]}
    config = tiny_config(tmp_path, data=held_out)
    torch.manual_seed(0)
    task = build_task(config)
    measure = Evaluator(task, config, {"held out": open_sources(config.data.evaluation)}, CPU)
    as_it_is, exchanged = measure.evaluate(), measure.evaluate_with_shuffled("image")
    assert (as_it_is.counts, exchanged.counts) == ({"held out": 9}, {"held out": 8})  # one has no image
    assert as_it_is.means()["loss"] != exchanged.means()["loss"]
    assert measure.evaluate_with_shuffled("image").means() == exchanged.means()
    assert measure.evaluate_with_shuffled("audio").sources == {}
