"""Frozen encoders that run once for all microbatchs of a step: the same losses and gradients, in fewer runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.engine.feature_cache import count_items
from cornstarch.train import Trainer
from tests.trainer.tiny import losses, tiny_config, trainer_of

FROZEN = {"encoders": {"vision": {"train": "projector"}}}


def build_trainer(folder: Path, name: str, ahead: bool, **sections: Any) -> Trainer:
    loop = {"accumulation": 4, "batch_size": 8, "steps": 3}
    config = tiny_config(
        folder, f"output={folder / name}", f"features.ahead={str(ahead).lower()}", model=FROZEN, loop=loop, **sections
    )
    return trainer_of(config)


def first_step(trainer: Trainer) -> tuple[int, float, dict[str, Tensor]]:
    """Return how often the encoder ran in a step, the loss, and the gradients."""
    trainer.setup()
    gradients: dict[str, Tensor] = {}
    runs: list[int] = []
    zero_grad = trainer.train_step.zero_grad

    def record() -> None:
        gradients.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        zero_grad()

    trainer.train_step.zero_grad = record  # type: ignore[method-assign]
    encoder = trainer.model.vision_encoder.module
    encoder.register_forward_pre_hook(lambda *_: runs.append(1))
    result = trainer.step(next(iter(trainer.batches())))
    return len(runs), float(result.loss), gradients


def test_prefetch_runs_the_encoder_once_with_equal_gradients(tmp_path: Path) -> None:
    many, loss, expected = first_step(build_trainer(tmp_path, "each", ahead=False))
    once, same, found = first_step(build_trainer(tmp_path, "ahead", ahead=True))
    assert (many, once) == (4, 1)
    assert same == pytest.approx(loss, rel=1e-5)
    assert found.keys() == expected.keys() and any("projector" in name for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("packing", [False, True])
def test_losses_of_a_run_are_equal_with_prefetch(tmp_path: Path, packing: bool) -> None:
    for name, ahead in (("each", False), ("ahead", True)):
        trainer = build_trainer(tmp_path, name, ahead, data={"packing": packing})
        trainer.fit()
        assert (trainer.run_model.prefetch is not None) == ahead
    each, ahead_of = losses(tmp_path / "each"), losses(tmp_path / "ahead")
    assert each.keys() == ahead_of.keys()
    for step, loss in each.items():
        assert ahead_of[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        ({"loop": {"steps": 1}}, FROZEN),
        ({"features": {"cache": True}, "loop": {"accumulation": 2, "steps": 1}}, FROZEN),
        ({"loop": {"accumulation": 2, "steps": 1}}, {"encoders": {"vision": {"train": "full"}}}),
    ],
)
def test_no_prefetch_where_useless_or_inexact(tmp_path: Path, overrides: Any, model: Any) -> None:
    trainer = trainer_of(tiny_config(tmp_path, model=model, **overrides))
    trainer.setup()
    assert trainer.run_model.prefetch is None


def test_microbatches_with_many_items_are_unchanged(tmp_path: Path) -> None:
    loop = {"accumulation": 2, "batch_size": 20, "steps": 1}
    trainer = trainer_of(tiny_config(tmp_path, model=FROZEN, loop=loop))
    trainer.setup()
    assert trainer.run_model.prefetch is not None
    batch = next(iter(trainer.batches()))
    encoded = trainer.run_model.prefetch(batch)
    assert [one is other for one, other in zip(encoded.microbatches, batch.microbatches, strict=True)] == [True] * 2


def test_a_frozen_encoder_runs_in_inference_mode_and_its_tokens_can_be_trained_on(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, "run", ahead=False)
    trainer.setup()
    modes: list[bool] = []
    encoder = trainer.model.vision_encoder
    encoder.module.register_forward_pre_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    projected: list[Tensor] = []
    encoder.projector.register_forward_pre_hook(lambda _, given: projected.append(given[0]))
    trainer.step(next(iter(trainer.batches())))
    assert modes == [True] * 4 and not any(tokens.is_inference() for tokens in projected)
    modes.clear()
    trainer.model.train(encoders_mode={"vision": (True, True)}, llm_mode=True)
    trainer.step(next(iter(trainer.batches())))
    assert modes == [False] * 4
    assert not encoder.enable_inference_mode()  # it is trained now, and has hooks


def test_items_are_counted_by_sizes_or_first_dimension() -> None:
    assert count_items({"pixel_values": torch.zeros(3, 3, 8, 8)}) == 3
    assert count_items({"hidden_states": torch.zeros(40, 12), "grid_thw": torch.ones(2, 3)}) == 2


def test_encoder_with_hooks_is_not_settled(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, "run", ahead=False)
    trainer.setup()
    encoder = trainer.model.vision_encoder
    assert encoder.enable_inference_mode()
    handle = next(module for module in encoder.module.modules() if isinstance(module, nn.Linear)).register_forward_hook(
        lambda *_: None
    )
    assert not encoder.enable_inference_mode()
    handle.remove()
    assert encoder.enable_inference_mode()
