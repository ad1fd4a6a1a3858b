"""A run with compiled layers: few variants whatever the model's cache setting, and a report that says so."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cornstarch.errors import ConfigError
from cornstarch.kernels import compile as compile_module
from cornstarch.train import Trainer
from tests.trainer.tiny import tiny_config, trainer_of

LAYERS = 9


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace as the default does, with torch's own kernels: what is counted are variants."""
    quick = functools.partial(compile_module.compile_variants, backend="eager")
    monkeypatch.setattr(compile_module, "compile_variants", quick)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(folder: Path, *overrides: str) -> Trainer:
    """Train a language model of several layers that keeps a key/value cache by its config, with evaluations."""
    language = {"num_hidden_layers": LAYERS, "use_cache": True, "attention_dropout": 0.0}
    config = tiny_config(
        folder, "compile=layers", "loop.evaluate_every=2", *overrides, model={"language_model": {"config": language}},
        data={"evaluation": [{"path": str(folder / "test.json")}]},
    )  # fmt: skip
    trainer = trainer_of(config)
    assert trainer.fit().status == "finished"
    return trainer


@pytest.mark.parametrize("packing", ["true", "false"])
def test_layers_have_few_variants_and_none_per_layer(tmp_path: Path, packing: str) -> None:
    log = run(tmp_path, f"data.packing={packing}", "loop.steps=8").run_model.acceleration.compile_log
    assert log.layers == {"vision": 1, "language_model": LAYERS} and not log.eager
    assert not any("past_key_values" in (one.reason or "") for one in log.compilations)
    variants = log.variants()
    # With and without gradients, one row and several, with a mask and without; nothing for each of the layers.
    assert 0 < variants["language_model", "LlamaDecoderLayer"] <= 8 < LAYERS
    assert 0 < variants["vision", "CLIPEncoderLayer"] <= 3  # any number of images from the first batch on, and one
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("event") == "recompiled" for line in lines) == log.recompilations
    assert [line["eager_layers"] for line in lines if line["kind"] == "train"] == [0] * 8
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Compiled layers" in page and "LlamaDecoderLayer" in page


def test_a_layer_that_torch_gives_up_on_is_an_error_or_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cornstarch.compat.compiler._MOST_COMPILED", 1)
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(ConfigError, match=r"torch gave up on \w+, .* guard that failed: .+\n  Use compile: auto"),
    ):
        run(tmp_path, "loop.steps=4")
