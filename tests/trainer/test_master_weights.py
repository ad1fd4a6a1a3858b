"""Runs with weights in bf16 and float32 masters: losses, checkpoints, resuming, averages, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.checkpoint import CheckpointStore
from cornstarch.errors import ConfigError
from cornstarch.kernels.master_weights import REMAINDER, find_master
from cornstarch.train import Trainer
from tests.trainer.tiny import losses, tiny_config, trainer_of

MASTERS = ("precision=bf16", "optimizer.master_weights=true")
PLAIN = ("precision=bf16", "optimizer.master_weights=false")


def get_trained(trainer: Trainer) -> dict[str, nn.Parameter]:
    return {name: one for part in trainer.run_model.parts for name, one in part.trained.items()}


def read_masters(trainer: Trainer) -> dict[str, Tensor]:
    trained = get_trained(trainer)
    found = {name: find_master(trainer.optimizer, one) for name, one in trained.items()}
    return {name: trained[name].detach() if one is None else one.read() for name, one in found.items()}


def run(folder: Path, *overrides: str, **sections: Any) -> Trainer:
    trainer = trainer_of(tiny_config(folder, *overrides, **sections))
    trainer.fit()
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_are_those_of_float32_weights(tmp_path: Path, accumulation: int) -> None:
    more = (f"loop.gradient_accumulation_steps={accumulation}", "loop.steps=20", "optimizer.learning_rate=1e-3")
    with_masters = run(tmp_path, *MASTERS, *more, f"output={tmp_path / 'a'}")
    run(tmp_path, *PLAIN, *more, f"output={tmp_path / 'b'}")
    first, second = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert max(abs(first[step] / second[step] - 1) for step in second) < 5e-3
    trained = get_trained(with_masters)
    assert {one.dtype for one in trained.values()} == {torch.bfloat16}
    assert {one.grad_dtype for one in trained.values()} == {torch.float32 if accumulation > 1 else torch.bfloat16}
    kept = [with_masters.optimizer.state[one] for one in trained.values()]
    assert {one[REMAINDER].dtype for one in kept} == {torch.int16}
    assert {one["exp_avg"].dtype for one in kept if "exp_avg" in one} == {torch.float32}  # not of what no loss reaches
    assert any(one[REMAINDER].any() for one in kept)


def test_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    more = {"loop": {"ema_decay": 0.9}, "checkpoint": {"every": 3}}
    run(tmp_path, *MASTERS, "loop.steps=3", "schedule.name=constant", f"output={tmp_path / 'cut'}", **more)
    first = run(tmp_path, *MASTERS, "schedule.name=constant", f"output={tmp_path / 'one'}", **more)
    options = {"allow_changes": True}
    again = trainer_of(
        tiny_config(tmp_path, *MASTERS, "schedule.name=constant", f"output={tmp_path / 'cut'}", **more), **options
    )
    again.fit()
    expected, found = read_masters(first), read_masters(again)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    averages = first.averages, again.averages
    assert averages[0] is not None and averages[1] is not None
    for name, value in averages[0].averages.items():
        assert torch.equal(value, averages[1].averages[name])


@pytest.mark.parametrize(("before", "after"), [(MASTERS, PLAIN), (PLAIN, MASTERS)])
def test_checkpoints_do_not_tell_how_weights_were_kept(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    first = run(tmp_path, *before, "loop.steps=3")
    expected = read_masters(first)
    checkpoint = CheckpointStore(tmp_path / "run" / "checkpoints", keep=1).latest()
    assert checkpoint is not None
    with checkpoint.tensors() as tensors:
        assert not any(REMAINDER in name for name in tensors)
        for name, value in expected.items():
            assert tensors.dtype(f"parameters/{name}") == torch.float32
            assert torch.equal(tensors[f"parameters/{name}"], value)
    again = trainer_of(tiny_config(tmp_path, *after, "loop.steps=3"), allow_changes=True)
    again.fit()  # there is no step left: what was restored is what was saved
    found = read_masters(again)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_masters_are_refused_where_they_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="computes in float32"):
        run(tmp_path, "precision=fp32", "optimizer.master_weights=true")
    with pytest.raises(ConfigError, match="Only `adamw`"):
        run(tmp_path, *MASTERS, "optimizer.name=sgd")
