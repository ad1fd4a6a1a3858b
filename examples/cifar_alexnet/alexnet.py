"""An AlexNet for images of 32 × 32 pixels, and its loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class AlexNet(nn.Module):
    """Five convolutions and three linear layers, as in AlexNet, but for small images and with batch normalization.

    Args:
        classes: The number of classes.
        width: Channels of the first convolution; the other layers scale with it.
    """

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(3, width, 5),
            nn.MaxPool2d(2),
            *_convolution(width, 3 * width, 5),
            nn.MaxPool2d(2),
            *_convolution(3 * width, 6 * width, 3),
            *_convolution(6 * width, 4 * width, 3),
            *_convolution(4 * width, 4 * width, 3),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(4 * width * 4 * 4, 16 * width),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(16 * width, 16 * width),
            nn.ReLU(),
            nn.Linear(16 * width, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits of images [N, 3, 32, 32] with values from 0 to 1."""
        if self.training:  # torch's random state, which a resumed run restores
            mirrored = torch.rand(len(image), 1, 1, 1, device=image.device) < 0.5
            image = torch.where(mirrored, image.flip(-1), image)
        return self.classifier(self.features(2 * image - 1))


def _convolution(inputs: int, outputs: int, size: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, padding="same", bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def build(classes: int, width: int = 64) -> AlexNet:
    """Build the network: `model.factory.function` in run.yaml."""
    return AlexNet(classes, width)


def loss(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return means over a batch: `model.factory.loss` in run.yaml. Evaluations report all returned values."""
    logits = module(batch["image"])
    right = (logits.argmax(-1) == batch["label"]).float().mean()
    return {"loss": nn.functional.cross_entropy(logits, batch["label"]), "accuracy": right}
