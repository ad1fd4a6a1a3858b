"""FLOPs of a run: of its parts, and where they cannot be counted."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.config import DataConfig, RunConfig
from cornstarch.cost.flops import FlopCounter
from cornstarch.engine.step_counter import RunFlops
from cornstarch.plan.cluster import DEVICES, peak_flops
from cornstarch.tasks.conversation import ConversationTask
from cornstarch.tasks.module import build_module_task
from tests.models import small

ANY = DataConfig.model_validate({"train": "x"})
RUN = RunConfig.model_validate({"model": {"given": "model"}, "data": {"train": "x"}})


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).mean()


def never(text: str) -> None:
    raise AssertionError(text)


def test_a_custom_module() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    found = RunFlops(build_module_task(module, mean, data=ANY), RUN, never)
    forward, inputs = 8 * 2 * (3 * 5 + 5 * 2), 8 * 2 * 5 * 2
    assert found.total({"x": torch.ones(8, 3)}) == 2 * forward + inputs
    assert module.training and all(parameter.grad is None for parameter in module.parameters())  # nothing has changed


def test_a_convolution() -> None:
    found = RunFlops(build_module_task(nn.Conv2d(3, 4, kernel_size=2), mean, data=ANY), RUN, never)
    step = found.step({"x": torch.ones(2, 3, 6, 5)})
    assert step is not None
    assert step.parts["model"].forward == 2 * 2 * (5 * 4) * 4 * (3 * 2 * 2)  # 5 × 4 places, 4 channels, 12 numbers each


def test_a_module_without_products_has_no_flops() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    assert RunFlops(build_module_task(Scale(), mean, data=ANY), RUN, never).total({"x": torch.ones(2, 3)}) == 0


def test_a_failure_to_count_is_logged_once() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if float(x.sum()) > 0 else x

    said: list[str] = []
    found = RunFlops(build_module_task(Odd(), mean, data=ANY), RUN, said.append)
    assert [found.total({"x": torch.ones(2, 3)}) for _ in range(3)] == [0, 0, 0]
    assert len(said) == 1 and "The FLOPs of Odd cannot be counted" in said[0]


def test_a_module_that_cannot_be_copied_does_not_stop_a_run() -> None:
    module = nn.Linear(3, 3)
    module.lock = threading.Lock()  # type: ignore[assignment]
    said: list[str] = []
    assert RunFlops(build_module_task(module, mean, data=ANY), RUN, said.append).total({"x": torch.ones(2, 3)}) == 0
    assert len(said) == 1 and "FLOPs are not counted" in said[0]


def test_the_parts_of_a_composed_model() -> None:
    model: Any = small.compose_model()
    task: Any = ConversationTask("multimodal", model, None)  # type: ignore[arg-type]
    found = RunFlops(task, RUN, never).step(small.ragged())
    assert found is not None and found.total == FlopCounter(model).step(small.ragged()).total
    # The projectors: their layers on every token of 3 images and 2 sounds.
    for name, tokens in (("vision", 3 * small.PATCHES), ("audio", 2 * small.CLIP_TOKENS)):
        layers = [m for m in model.encoders[name].projector.modules() if isinstance(m, nn.Linear)]
        expected = sum(2 * tokens * layer.in_features * layer.out_features for layer in layers)
        assert found.parts[f"{name} projector"].forward == expected


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 989), ("NVIDIA H100 80GB HBM3", "bf16", 989), ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835), ("NVIDIA A100-SXM4-80GB", "fp16", 312), ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None), ("NVIDIA H200", "fp32", None), ("cpu", "bf16", None), ("Mystery 9", "bf16", None),
    ],
)  # fmt: skip
def test_peaks_of_devices(name: str, precision: str, tera: float | None) -> None:
    assert peak_flops(name, precision) == (None if tera is None else tera * 1e12)


def test_every_device_of_the_catalogue_has_a_peak() -> None:
    assert all(device.flops is not None and device.flops > 1e13 for device in DEVICES.values())
