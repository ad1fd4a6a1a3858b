"""Functions that a description may name."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

NUMBER = 3


class Tied(nn.Module):
    """Two layers that share their weight, and a loss of its own."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, width), nn.Linear(width, width)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.up(self.down(x)) - y) ** 2).mean()}


def tied(width: int = 4) -> nn.Module:
    return Tied(width)


def convolution(classes: int = 3) -> nn.Module:
    """A small network for images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, classes)
    )


def label_loss(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    logits = module(batch["image"])
    right = (logits.argmax(-1) == batch["label"]).float().mean()
    return {"loss": cross_entropy(logits, batch["label"]), "accuracy": right}


def convolution_with_loss(classes: int = 3) -> tuple[nn.Module, Any]:
    return convolution(classes), label_loss


def with_noise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Draw from all three sources of random numbers."""
    pixels = torch.stack([torch.tensor(np.asarray(row["image"].resize((8, 8)))) for row in rows])
    noise = torch.rand(len(rows)) + torch.from_numpy(np.random.rand(len(rows))) + random.random()
    images = pixels.permute(0, 3, 1, 2) / 255 + noise[:, None, None, None].float()
    return {"image": images, "label": torch.tensor([row["label"] for row in rows])}


def not_a_module() -> str:
    return "no module"


def raises(*arguments: Any, **named: Any) -> None:
    raise RuntimeError("on purpose")


def no_loss(module: nn.Module, batch: Mapping[str, Any]) -> Any:
    return None


def detached(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return torch.zeros(())


def several(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return module(batch["image"])


def odd_measure(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    return {"loss": module(batch["image"]).mean(), "note": "fine"}


def a_list(rows: list[dict[str, Any]]) -> Any:
    return rows
