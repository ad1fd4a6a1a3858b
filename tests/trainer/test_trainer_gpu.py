"""The loop on a GPU: late reading of losses, bf16 by default, the scaler of fp16, memory that runs out."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.engine.failure import TrainingError
from cornstarch.train import Trainer, load_run
from tests.trainer.tiny import losses, quiet, tiny_config, trainer_of

pytestmark = pytest.mark.gpu


def test_bf16_is_the_default_and_learns(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path, "device=cuda", "loop.steps=20"))
    trainer.fit()
    assert trainer.placement.precision == "bf16"
    found = losses(tmp_path / "run")
    assert found[20] < found[1]
    assert next(load_run(tmp_path / "run").task.model.parameters()).device.type == "cuda"


def test_fp32_on_a_gpu_is_what_a_cpu_does(tmp_path: Path) -> None:
    calm = {
        "model": {
            "encoders": {"vision": {"config": {"attention_dropout": 0.0}}},
            "language_model": {"config": {"attention_dropout": 0.0}},
        }
    }
    for device in ("cuda", "cpu"):
        trainer_of(
            tiny_config(tmp_path, f"device={device}", "precision=fp32", f"output={tmp_path / device}", **calm)
        ).fit()
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_resumed_run_goes_on_as_it_would_have(tmp_path: Path) -> None:
    trainer_of(tiny_config(tmp_path, "device=cuda", f"output={tmp_path / 'whole'}")).fit()
    first = trainer_of(tiny_config(tmp_path, "device=cuda"))
    with closing(first):
        first.setup()
        for batch in first.batches():
            first.step(batch)
            if first.position.step == 3:
                first.save()
                break
    second = trainer_of(tiny_config(tmp_path, "device=cuda"))
    second.fit()
    after = {step: loss for step, loss in losses(tmp_path / "whole").items() if step > 3}
    assert {step: loss for step, loss in losses(tmp_path / "run").items() if step > 3} == pytest.approx(after, rel=1e-6)


def test_fp16_with_its_scaler_learns(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path, "device=cuda", "precision=fp16", "loop.steps=30"))
    trainer.fit()
    found = losses(tmp_path / "run")
    assert found[30] < found[1]
    assert {p.dtype for p in named_parameters(trainer.model).values()} == {torch.float32}


def test_a_loss_that_is_no_number_stops_before_a_checkpoint(tmp_path: Path) -> None:
    wild = ["optimizer.name=sgd", "optimizer.learning_rate=1e30", "optimizer.max_grad_norm=null", "schedule.warmup=0"]
    trainer = trainer_of(tiny_config(tmp_path, "device=cuda", *wild, "loop.steps=20", "checkpoint.every=1"))
    with pytest.raises(TrainingError, match=r"in step \d+"):
        trainer.fit()
    newest = trainer.checkpoints.latest()
    if newest is not None:
        with newest.tensors() as tensors:
            assert all(torch.isfinite(tensors[name]).all() for name in tensors if name.startswith("parameters/"))


class Hungry(nn.Module):
    """Keeps far more activations than a GPU holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(2**27, 1)
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


def test_memory_that_runs_out_names_the_part_and_what_to_try(tmp_path: Path) -> None:
    trainer = Trainer.from_objects(
        Hungry(),
        train_data=[{"x": [1.0] * 64}] * 8,
        loss=lambda model, batch: model(batch["x"]),
        collate=lambda rows: {"x": torch.tensor([row["x"] for row in rows])},
        output=str(tmp_path / "run"),
        console=quiet(),
    )
    with pytest.raises(TrainingError, match=r"(?s)Memory ran out in the forward pass of the model.*accumulation"):
        trainer.fit()
