"""The step of the optimizer under a loss scale: the same in every layout, and left out everywhere if one overflows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from cornstarch.data.loader import StepBatch
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.parallel.gradients import LossScale
from cornstarch.train import Trainer
from tests.parity.pool import pool

HIGH = 2.0**18  # a scale that is not the first one


def build_trainer(folder: str, **config: Any) -> Trainer:
    """Return a trainer of a small network in fp16, ready for its first step."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    rows = [{"inputs": torch.randn(4), "labels": number % 2} for number in range(8)]

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["inputs"]).float(), batch["labels"])

    trainer = Trainer.from_objects(
        network,
        train_data=rows,
        loss=loss,
        console=Console(file=io.StringIO()),
        output=folder,
        device="cpu",
        precision="fp16",
        schedule={"name": "constant", "warmup": 0},
        loop={"steps": 2, "batch_size": 4},
        logging={"progress": "none", "samples": 0},
        **config,
    )
    trainer.setup()
    return trainer


def weights(trainer: Trainer) -> list[Tensor]:
    return [to_local_tensor(parameter.detach()).clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("optimizer", [{"name": "sgd", "momentum": 0.9}, {"name": "adamw"}], ids=["sgd", "adamw"])
def test_a_first_step_that_overflows_leaves_no_trace(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    trainer, other = (build_trainer(str(tmp_path / name), optimizer=optimizer) for name in ("one", "other"))
    batch = next(iter(trainer.batches()))
    before = weights(trainer)
    assert trainer.scaler is not None and other.scaler is not None
    trainer.scaler.value = 2.0**127
    assert not torch.isfinite(trainer.step(batch).grad_norm)
    assert trainer.scaler.value == 2.0**126 and not trainer.optimizer.state
    assert all(map(torch.equal, weights(trainer), before))
    trainer.scaler.value = other.scaler.value
    found, expected = trainer.step(batch), other.step(batch)
    assert float(found.grad_norm) == float(expected.grad_norm)
    assert all(map(torch.equal, weights(trainer), weights(other)))
    assert not all(map(torch.equal, weights(trainer), before))


class OverflowingOnLastRank(Trainer):
    """A trainer whose last rank finds an infinite gradient in what it alone holds, once."""

    def update_weights(self, batch: StepBatch, loss: Tensor) -> Tensor | None:
        if self.rank == self.ranks - 1 and self.position.step == 0:
            stepped = (one for group in self.optimizer.param_groups for one in group["params"])
            held = [one.grad for one in stepped if one.grad is not None and to_local_tensor(one.grad).numel()]
            to_local_tensor(held[-1]).view(-1)[0] = torch.inf
        return super().update_weights(batch, loss)


def train_two_steps(folder: str, kind: str) -> tuple[bool, bool, float]:
    """Return whether each of two steps has changed this rank's weights, and the scale after them."""
    trainer = build_trainer(folder, optimizer={"name": "sgd", "momentum": 0.9}, parallel={"data": {"kind": kind}})
    trainer.__class__ = OverflowingOnLastRank
    states = [weights(trainer)]
    for batch in trainer.batches():
        trainer.step(batch)
        states.append(weights(trainer))
    first, second = (not all(map(torch.equal, a, b)) for a, b in zip(states, states[1:], strict=False))
    assert trainer.scaler is not None
    return first, second, trainer.scaler.value


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "zero1"])
def test_all_ranks_leave_out_a_step_in_which_one_overflows(tmp_path: Path, kind: str) -> None:
    pool().renew()
    assert pool().run(2, train_two_steps, str(tmp_path), kind) == [(False, True, 2.0**15)] * 2


def test_a_loss_scale_goes_on_from_the_state_of_a_grad_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=HIGH, growth_interval=3)
    theirs.scale(torch.ones(()))
    ours = LossScale(growth_interval=2000, hysteresis=1)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict() and ours.value == HIGH
    for _ in range(3):
        ours.update(True)
    assert ours.value == 2 * HIGH
