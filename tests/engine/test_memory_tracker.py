"""What each rank really holds after a backward pass, against what was estimated: every kind, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cornstarch.config import ModelConfig, OptimizerConfig
from cornstarch.engine.memory_tracker import MemoryTracker, measure_bytes, model_size, state_size
from cornstarch.engine.model_parts import cast_parts, split_into_parts
from cornstarch.engine.optimizer import AveragedWeights, make_optimizer
from cornstarch.parallel import Zero1, apply_data_parallel, data_mesh
from cornstarch.plan import DataPlan
from cornstarch.plan.cluster import Device
from cornstarch.plan.memory import Memory, StateSize, memory_of
from cornstarch.planner.estimate import estimate
from tests.parallel.work import batch_of, multimodal
from tests.parity.pool import pool
from tests.trainer.tiny import tiny_config, trainer_of

TOLERANCE = 0.03
SGD = {"name": "sgd"}
KINDS = ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp")
CASES: dict[str, dict[str, Any]] = {
    "all trained, fp32": {"encoder": (True, True), "llm": True},
    "frozen encoder, fp32, SGD": {"encoder": (False, True), "llm": True, "optimizer": SGD},
    "frozen encoder, bf16, averaged": {"encoder": (False, True), "llm": True, "dtype": "bf16", "averaged": True},
    "encoder in fp32, the LLM frozen in bf16": {"encoder": (True, True), "llm": False, "frozen": "bf16"},
}
REFUSED = {("fsdp1", "encoder in fp32, the LLM frozen in bf16")}  # parameters of two types
Found = dict[tuple[str, str], tuple[dict[str, int], Memory]]


def every_cell(ranks: int) -> Found:
    """Return what this process holds, and what it should hold: for every kind and case, with 4 ranks for half of them.

    The half has every kind with two cases, and every case with three kinds or more.
    """
    places = product(enumerate(KINDS), enumerate(CASES))
    cells = [(kind, name) for (k, kind), (n, name) in places if ranks == 2 or (k + n) % 2 == 0]
    return {cell: measure_and_estimate(cell[0], **CASES[cell[1]]) for cell in cells if cell not in REFUSED}


def measure_and_estimate(
    kind: Any,
    encoder: tuple[bool, bool],
    llm: bool,
    optimizer: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    frozen: str = "fp32",
    averaged: bool = False,
) -> tuple[dict[str, int], Memory]:
    """Do a step and a half; return what is held after the second backward pass."""
    ranks = dist.get_world_size()
    copies = ranks // 2 if kind == "hsdp" else None
    data, chosen = DataPlan(kind, replicate=copies), OptimizerConfig.model_validate(optimizer or {})
    model = multimodal(encoder, llm)
    described = ModelConfig.model_validate({"given": "model"})
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if dtype is not None:
        model.to(types[dtype])
    else:
        cast_parts(split_into_parts(model, described, chosen), types[frozen])
    size = model_size(model, data, chosen, averaged)
    wrapped = apply_data_parallel(model, data_mesh("cpu", copies), data)
    parts = split_into_parts(model, described, chosen)
    trained = {name: parameter for part in parts for name, parameter in part.trained.items()}
    zero1 = Zero1(trained) if kind == "zero1" else None
    stepped = make_optimizer(chosen, parts, None if zero1 is None else zero1.shards)
    averages = AveragedWeights(trained, 0.9) if averaged else None
    for number in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=frozen == "bf16"):
            inputs = batch_of(["tt*tt", "ttt"], number)
            inputs["pixel_values"] = inputs["pixel_values"].to(types[dtype or "fp32"])
            wrapped(**inputs).loss.backward()
        if number == 0:
            if zero1 is not None:
                zero1.reduce_gradients()
            stepped.step()
            stepped.zero_grad()
    found = measure_bytes(model, stepped, averages)
    return found, memory_of(size, data, ranks, dist.get_rank(), copies or 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_measured_memory_equals_the_estimate_for_every_kind(ranks: int) -> None:
    wrong = []
    for rank, cells in enumerate(pool().run(ranks, every_cell, ranks)):
        for (kind, name), (found, expected) in cells.items():
            both = {key: (size, getattr(expected, key)) for key, size in found.items()}
            both["all"] = (sum(found.values()), expected.persistent)
            for key, (there, estimated) in both.items():
                if abs(there - estimated) > TOLERANCE * there:
                    wrong.append(f"{kind}, {name}, rank {rank}: {key} {there}, estimated {estimated}")
            assert found["parameters"] and found["gradients"] and found["optimizer"]
            assert (found["averages"] > 0) == ("averaged" in name)
    assert not wrong, "\n" + "\n".join(wrong)


def test_a_run_logs_measured_and_estimated_memory_once(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path, "loop.steps=4"))
    trainer.setup()
    lines = []
    for batch in trainer.batches():
        trainer.step(batch)
        lines.append(trainer.run_model.memory_tracker.line())
    assert [line is not None for line in lines] == [False, True, False, False]
    told = str(lines[1]).replace("\u00a0", " ")
    # One norm of CLIP's is not used for its tokens: it has no gradient and no states.
    assert told == (
        "memory: 126.1 KiB measured, 126.5 KiB estimated (-0.3%): "
        "parameters 31.6 KiB, gradients 31.4 KiB, optimizer 63 KiB"
    )


class Picky(torch.optim.SGD):
    """An optimizer that wants a GPU."""

    def step(self, closure: Any = None) -> None:
        """Refuse."""
        raise RuntimeError("no kernel for the CPU")


def test_an_optimizer_without_an_estimate_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Picky", Picky, raising=False)
    config = tiny_config(tmp_path, "optimizer.name=torch.optim.Picky")
    trainer = trainer_of(tiny_config(tmp_path))
    trainer.setup()
    tracker = MemoryTracker(trainer.model, config, trainer.context)
    tracker.measure(trainer.optimizer, trainer.averages)
    assert "The size of its state cannot be determined: RuntimeError: no kernel" in str(tracker.line())
    assert tracker.line() is None
    advice = estimate(config, Device("test", 10**9), 2).advice
    assert advice.startswith("Nothing can be estimated: The size of its state cannot be determined")


STATES = [
    # name, arguments, dtype, of a matrix, of a vector
    ("adamw", {}, torch.float32, StateSize(8, constant=4), StateSize(8, constant=4)),
    ("adamw", {"amsgrad": True}, torch.float32, StateSize(12, constant=4), StateSize(12, constant=4)),
    ("adamw", {}, torch.bfloat16, StateSize(4, constant=4), StateSize(4, constant=4)),
    ("sgd", {}, torch.float32, StateSize(4), StateSize(4)),
    ("torch.optim.SGD", {}, torch.float32, StateSize(), StateSize()),
    ("torch.optim.Adagrad", {}, torch.float32, StateSize(4, constant=4), StateSize(4, constant=4)),
    ("torch.optim.Adafactor", {}, torch.float32, StateSize(0, 4, 4, 4), StateSize(4, constant=4)),
]


@pytest.mark.parametrize(("name", "arguments", "dtype", "matrix", "vector"), STATES)
def test_state_sizes_of_optimizers(name: str, arguments: Any, dtype: Any, matrix: StateSize, vector: StateSize) -> None:
    config = OptimizerConfig(name=name, arguments=arguments)
    assert state_size(config, dtype, is_matrix=True) == matrix
    assert state_size(config, dtype, is_matrix=False) == vector
