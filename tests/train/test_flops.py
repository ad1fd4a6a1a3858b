"""Operations of parts, against what layers multiply."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.train.config import DataConfig, ModelConfig, OptimizerConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.flops import forward_flops
from cornstarch.train.parts import parts_of
from cornstarch.train.precision import Placement
from cornstarch.train.tasks.conversation import ConversationTask
from cornstarch.train.tasks.module import module_task
from tests.models import small

CPU = Placement(torch.device("cpu"), "fp32")
ANY = DataConfig.model_validate({"train": "x"})


def flops(task: Any, inputs: dict[str, Any], samples: int) -> dict[str, float]:
    parts = parts_of(task.model, ModelConfig(given="model"), OptimizerConfig())
    batch = CollatedBatch(inputs, [str(n) for n in range(samples)], 1, 1, {})
    return forward_flops(task, parts, batch, CPU)


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).mean()


def test_layers_of_a_module() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    # A product of [3] and [3, 5] multiplies and adds 15 times; one sample.
    assert flops(module_task(module, mean, data=ANY), {"x": torch.ones(8, 3)}, 8) == {"model": 2 * (3 * 5 + 5 * 2)}
    assert module.training  # nothing has changed
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_convolution() -> None:
    module = nn.Conv2d(3, 4, kernel_size=2)
    found = flops(module_task(module, mean, data=ANY), {"x": torch.ones(2, 3, 6, 5)}, 2)
    assert found == {"model": 2 * (5 * 4) * 4 * (3 * 2 * 2)}  # 5 × 4 places, 4 channels, 12 numbers each


def test_what_multiplies_nothing_is_left_out() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    assert flops(module_task(Scale(), mean, data=ANY), {"x": torch.ones(2, 3)}, 2).get("model", 0) == 0


def test_the_parts_of_a_composed_model() -> None:
    model: Any = small.composed()
    inputs = small.ragged()
    task: Any = ConversationTask("multimodal", model, None)  # type: ignore[arg-type]
    found = flops(task, inputs, 4)
    assert set(found) == {
        "vision encoder", "vision projector", "audio encoder", "audio projector", "language model",
    }  # fmt: skip
    # The projectors: two layers on every token of 3 images and 2 sounds.
    for name, tokens in (("vision", 3 * small.PATCHES), ("audio", 2 * small.CLIP_TOKENS)):
        layers = [m for m in model.encoders[name].projector.modules() if isinstance(m, nn.Linear)]
        expected = sum(2 * tokens * layer.in_features * layer.out_features for layer in layers)
        assert found[f"{name} projector"] == expected / 4
    # The language model: at least its layers and its head on all tokens; attention comes on top.
    linear = [m for m in model.language_model.modules() if isinstance(m, nn.Linear)]
    least = sum(2 * inputs["input_ids"].numel() * m.in_features * m.out_features for m in linear)
    assert least / 4 <= found["language model"] <= 1.5 * least / 4
