"""Runs beside each other share compiled code: the second one starts warm."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._dynamo.utils import counters

from cornstarch.engine.context import DistributedContext
from cornstarch.engine.run_model import open_compile_cache
from cornstarch.parallel.device import choose_placement
from cornstarch.plan.layout import Layout
from cornstarch.train import Trainer
from tests.trainer.tiny import tiny_config


class Product(nn.Module):
    """A layer of one matrix product, which needs no C++ compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weight


class Stack(nn.Module):
    """Two of them, which share their code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Product(), Product()])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x - y).square().mean()}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    torch.compiler.reset()


def train(folder: Path, machine: str, monkeypatch: pytest.MonkeyPatch, cache: str | None = None) -> tuple[str, int]:
    """Train on a machine without compiled code; return what was printed, and how many graphs were compiled anew."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder.parent / machine))
    torch.compiler.reset()
    counters.clear()
    rows = [{"x": torch.ones(4) * k, "y": torch.zeros(4)} for k in range(8)]
    text = io.StringIO()
    config = {"loop": {"steps": 2, "batch_size": 4}, "compile": "layers", "output": folder, "device": "cpu"}
    trainer = Trainer.from_objects(
        Stack(), train_data=rows, console=Console(file=text, width=300), compile_cache=cache, **config
    )
    assert trainer.fit().status == "finished"
    assert trainer.run_model.acceleration.compile_log.compilations
    return text.getvalue(), counters["aot_autograd"]["autograd_cache_miss"]


def test_the_second_run_beside_the_first_compiles_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, compiled = train(tmp_path / "first", "a", monkeypatch)
    assert compiled > 0 and "compile cache" not in text
    text, compiled = train(tmp_path / "second", "b", monkeypatch)
    assert compiled == 0 and f"of an earlier start from {tmp_path / 'compile_cache'}" in text
    text, compiled = train(tmp_path / "third", "c", monkeypatch, cache="off")
    assert compiled > 0 and "compile cache" not in text


def test_ranks_on_equal_devices_of_several_nodes_share_a_file_and_one_writes_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "compile=layers", f"compile_cache={tmp_path}")
    layout, opened = Layout.of(config.parallel, 4, ranks_per_node=2), []
    for rank in range(4):
        context = DistributedContext(layout, choose_placement("cpu", "fp32"))
        context.__dict__["rank"] = rank
        cache = open_compile_cache(config, context, print)
        assert cache is not None
        opened.append((cache.file, cache._is_writer))
    files = [file for file, _ in opened]
    assert files[0] == files[2] != files[1] == files[3] and files[0].parent == tmp_path
    assert [is_writer for _, is_writer in opened] == [True, True, False, False]


@pytest.mark.parametrize("override", ["precision=bf16", "model.language_model.config.num_hidden_layers=3"])
def test_runs_whose_code_differs_have_files_of_their_own(tmp_path: Path, override: str) -> None:
    files = set()
    for more in (override, "optimizer.learning_rate=0.5"):
        config = tiny_config(tmp_path, "compile=layers", more)
        context = DistributedContext(Layout.of(config.parallel, 1), choose_placement("cpu", config.precision))
        cache = open_compile_cache(config, context, print)
        assert cache is not None
        files.add(cache.file)
    assert len(files) == 2


def test_a_run_that_compiles_nothing_has_no_cache(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    context = DistributedContext(Layout.of(config.parallel, 1), choose_placement("cpu", "fp32"))
    assert open_compile_cache(config, context, print) is None
