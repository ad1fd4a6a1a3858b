"""Runs whose replicas exchange less, later or with fewer others: they train, they are logged, they go on to the bit."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.train import Trainer
from tests.parity.pool import pool
from tests.trainer.tiny import tiny_config

DATA = "parallel.data."
PLANS: dict[str, tuple[int, list[str]]] = {
    "topk, microbatches": (2, ["compression.kind=topk", "compression.ratio=0.05", "compression.block=64"]),
    "zero1, chance": (2, ["kind=zero1", "compression.kind=quantize", "compression.bits=4", "compression.block=64"]),
    "powersgd": (2, ["compression.kind=powersgd", "compression.rank=1"]),
    "hsdp, signs": (4, ["kind=hsdp", "replicate=2", "compression.kind=quantize", "compression.bits=1"]),
    "hsdp, tp": (4, ["kind=hsdp", "replicate=2", "compression.kind=bf16"]),
    "local_sgd": (2, ["kind=local_sgd", "local.every=2"]),
    "diloco": (2, ["kind=diloco", "local.every=2", "local.overlap=true", "compression.kind=quantize"]),
    "gossip": (3, ["kind=gossip"]),
    "async, in step": (2, ["kind=async", "asynchronous.staleness=0"]),
}


def begun(folder: str, output: str, *overrides: str) -> Trainer:
    config = tiny_config(Path(folder), f"output={output}", *overrides)
    trainer = Trainer(config, console=Console(file=io.StringIO()), allow_changes=True)
    trainer.setup()
    return trainer


def train_run(folder: str, output: str, until: int, *overrides: str) -> tuple[list[float], dict[str, Any], bool]:
    """Train to a step, saving after the third; return losses, weights, and whether all processes have the same."""
    trainer = begun(folder, output, *overrides)
    losses: list[float] = []
    for batch in trainer.batches():
        losses.append(float(trainer.step(batch).loss))
        if trainer.position.step in (3, until):
            trainer.save()
        if trainer.position.step == until:
            break
    weights = {name: to_local_tensor(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    told = distributed.all_gather_json([float(weight.double().sum()) for weight in weights.values()])
    trainer.replica_sync.finish()
    return losses, weights, all(one == told[0] for one in told)


def run(ranks: int, function: Any, *arguments: object) -> Any:
    pool().renew()  # torch remembers meshes of an earlier job
    return pool().run(ranks, function, *arguments)


@pytest.mark.parametrize("name", PLANS)
def test_a_run_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    tiny_config(tmp_path)  # writes the data
    ranks, plan = PLANS[name]
    options = [DATA + one for one in plan] + ["loop.gradient_accumulation_steps=2", f"loop.batch_size={2 * ranks}"]
    options += ["parallel.modules.model.tp=2"] if name.endswith("tp") else []
    whole = run(ranks, train_run, str(tmp_path), str(tmp_path / "whole"), 6, *options)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for checkpoint in (tmp_path / "again/checkpoints").glob("step_00000006*"):  # as if it had ended after the third
        shutil.rmtree(checkpoint)
    second = run(ranks, train_run, str(tmp_path), str(tmp_path / "again"), 6, *options)
    for (losses, weights, alike), (later, found, _) in zip(whole, second, strict=True):
        assert losses[3:] == later
        for key, weight in weights.items():
            assert torch.equal(found[key], weight), key
        assert alike == (name not in ("diloco", "gossip") and not name.startswith("hsdp"))


@pytest.mark.parametrize(
    ("ranks", "kind", "more"),
    [(3, "kind=ddp", []), (4, "kind=hsdp", ["replicate=2"]), (4, "kind=hsdp, tp", ["replicate=2"])],
)
def test_a_run_whose_gradients_are_hardly_compressed_is_hardly_another(
    tmp_path: Path, ranks: int, kind: str, more: list[str]
) -> None:
    tiny_config(tmp_path)
    options = [DATA + one for one in (kind.removesuffix(", tp"), *more)] + [f"loop.batch_size={2 * ranks}"]
    options += ["loop.gradient_accumulation_steps=2"] + (["parallel.modules.model.tp=2"] if kind.endswith("tp") else [])
    plain = run(ranks, train_run, str(tmp_path), str(tmp_path / "plain"), 6, *options)
    options.append(DATA + "compression.kind=bf16")
    found = run(ranks, train_run, str(tmp_path), str(tmp_path / "compressed"), 6, *options)
    for (expected, _, _), (losses, _, _) in zip(plain, found, strict=True):
        assert losses != expected  # or nothing was compressed at all
        assert losses == pytest.approx(expected, rel=2e-2)


def fit_run(folder: str, *overrides: str) -> list[dict[str, Any]]:
    config = tiny_config(Path(folder), f"output={folder}/run", *overrides)
    told = io.StringIO()
    Trainer(config, console=Console(file=told)).fit()
    return [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "plan",
    [
        ["compression.kind=randomk", "compression.ratio=0.1"],
        ["kind=async"],
        ["kind=gossip", "gossip.wait=false"],
        ["kind=local_sgd", "local.every=4"],
    ],
    ids=["randomk", "async", "gossip", "local_sgd"],
)
def test_a_run_trains_evaluates_and_logs_what_it_sends(tmp_path: Path, plan: list[str]) -> None:
    tiny_config(tmp_path)
    evaluation = f'data.evaluation=[{{"path": "{tmp_path / "test.json"}"}}]'
    more = [evaluation, "loop.steps=8", "loop.evaluate_every=4", "checkpoint.every=4"]
    lines = run(2, fit_run, str(tmp_path), *more, *(DATA + one for one in plan))[0]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, 9))
    sent = [line["bytes_sent"] for line in steps]
    assert sent == sorted(sent) and sent[-1] > 0
    evaluated = [line["loss"] for line in lines if line["kind"] == "evaluation"]
    assert len(evaluated) == 2 and all(loss > 0 for loss in evaluated)


def counted(folder: str, output: str, until: int, *overrides: str) -> str:
    """Train, or go on; return what was told."""
    config = tiny_config(Path(folder), f"output={output}", *overrides)
    told = io.StringIO()
    trainer = Trainer(config, console=Console(file=told, width=200), allow_changes=True)
    trainer.setup()
    for batch in trainer.batches():
        trainer.step(batch)
        if trainer.position.step == until:
            break
    trainer.save()
    trainer.replica_sync.finish()
    return told.getvalue()


def test_a_run_goes_on_with_other_processes_from_what_all_have_in_common(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    arguments = (str(tmp_path), str(tmp_path / "run"))
    options = ("loop.batch_size=6", DATA + "kind=gossip")
    run(2, counted, *arguments, 2, *options)
    assert "left behind" in run(3, counted, *arguments, 4, *options)[0]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([DATA + "kind=gossip", "loop.ema_decay=0.9"], "`loop.ema_decay` with `parallel.data.kind` = gossip"),
        ([DATA + "kind=async", "precision=fp16"], "each process would scale its losses otherwise"),
        ([DATA + "kind=zero3", DATA + "compression.kind=topk"], "zero3 has no place for it"),
        ([DATA + "compression.kind=topk", DATA + "static_graph=true"], "the buckets must stay as they are"),
        ([DATA + "kind=diloco", DATA + "compression.kind=powersgd"], "factors of whole matrices of gradients"),
        ([DATA + "compression.kind=topk", DATA + "compression.bits=4"], "It goes with quantize"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(tmp_path: Path, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tiny_config(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([DATA + "kind=gossip", "parallel.modules.model.tp=2"], "each rank trains a whole model by itself.* has tp 2"),
        ([DATA + "compression.kind=topk", "parallel.modules.model.tp=2"], "with tp the ranks exchange shards"),
    ],
)
def test_what_cannot_be_run_is_refused_before_processes_meet(tmp_path: Path, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Trainer(tiny_config(tmp_path, *overrides), console=Console(file=io.StringIO()))
