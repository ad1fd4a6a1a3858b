"""Activations that are computed again: of which modules, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.cost.activations import SavedTensors
from cornstarch.engine.recompute import recompute_planned
from cornstarch.errors import ConfigError
from cornstarch.plan import Layout, ModulePlan, Plan
from tests.api.work import Case, Samples, collate, make_model
from tests.trainer.tiny import losses, tiny_config, trainer_of

AGAIN, KEPT = ModulePlan(activation_checkpointing=True), ModulePlan()


def compute(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[dict[str, int], int, dict[str, Tensor]]:
    """Return how often layers of each part were computed in a step, the bytes kept for the backward, the gradients."""
    calls: Counter[str] = Counter()

    def count(part: str) -> Any:
        return lambda *_: calls.update([part])

    for name, module in model.named_modules():
        if name.rpartition(".")[2].isdigit():
            module.register_forward_pre_hook(count(name.split(".")[0]))
    saved = SavedTensors(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        output = model(**inputs)
    output["loss"].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return dict(calls), saved.activations().saved, gradients


def planned(model: nn.Module, plans: dict[str, ModulePlan]) -> nn.Module:
    recompute_planned(model, Layout.of(Plan(plans), world=1))
    return model


def inputs() -> dict[str, Tensor]:
    rows = ("tt*ttt*t", "t*+tt")
    return collate([Samples(rows)[number] for number in range(2)])


@pytest.mark.parametrize("again", [("vision",), ("language_model",), ("audio", "language_model")])
def test_modules_compute_again_what_the_plan_says(again: tuple[str, ...]) -> None:
    case = Case(encoders=("vision", "audio"))
    names = {"vision": "vision_encoder", "audio": "audio_encoder", "language_model": "language_model"}
    calls, kept, expected = compute(make_model(case), inputs())
    plans = {name: AGAIN if name in again else KEPT for name in names}
    more, less, found = compute(planned(make_model(case), plans), inputs())
    assert more == {names[name]: calls[names[name]] * (2 if name in again else 1) for name in names}
    assert less < kept
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


class Counted(nn.Linear):
    """A layer that knows how often it was computed."""

    calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(rows)


def test_a_plain_module_computes_its_layers_again() -> None:
    torch.manual_seed(0)
    kept = nn.Sequential(Counted(6, 16), nn.GELU(), Counted(16, 2))
    again = deepcopy(kept)
    planned(again, {"model": AGAIN})
    rows = torch.randn(4, 6)
    for model in (kept, again):
        model(rows).pow(2).mean().backward()
    assert [model[2].calls for model in (kept, again)] == [1, 2]
    for name, parameter in kept.named_parameters():
        assert torch.equal(again.get_parameter(name).grad, parameter.grad), name
    with pytest.raises(ConfigError, match="activation_checkpointing: Linear has no list of layers"):
        planned(nn.Linear(2, 2), {"model": AGAIN})


def test_a_run_whose_encoder_computes_again_is_the_same(tmp_path: Path) -> None:
    trainer_of(tiny_config(tmp_path)).fit()
    modules = {"vision": {"activation_checkpointing": True}, "language_model": {}}
    again = trainer_of(tiny_config(tmp_path, f"output={tmp_path / 'again'}", parallel={"modules": modules}))
    again.fit()
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    encoder = again.model.vision_encoder.module
    assert encoder.is_gradient_checkpointing and not again.model.language_model.is_gradient_checkpointing


def test_backward_passes_that_are_taken_apart_do_not_compute_again(tmp_path: Path) -> None:
    staged = {"modules": {"vision": {}, "language_model": {"stages": 2}}, "schedule": "zero_bubble"}
    with pytest.raises(ConfigError, match="activations would be computed again for the gradients of inputs"):
        tiny_config(tmp_path, "loop.activation_checkpointing=true", parallel=staged)
    alone = tiny_config(tmp_path, "loop.activation_checkpointing=true", "parallel.schedule=zero_bubble")
    assert alone.loop.activation_checkpointing  # without stages a schedule says nothing
