"""The task of slow_network.py: a model of 4.5 M parameters that predicts the next byte of Python's handbook.

It has many parameters relative to its computation, so that reducing gradients is most of a step on a slow network.
"""

from __future__ import annotations

from pydoc_data import topics  # the language reference, as in `help()`: text that every Python includes

import torch
from torch import Tensor, nn

CONTEXT = 16  # context length in bytes
BATCH = 64  # of a rank
RATE = 1e-3
_SEED = 0
_HELD_OUT = 0.1  # the last part of the text
_EVERY = 7  # stride between evaluated positions of the held-out text, in bytes


class Task:
    """The model, its optimizer and its batches, identical on every rank."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(_SEED)
        self.model = nn.Sequential(
            nn.Embedding(256, 48), nn.Flatten(), nn.Linear(48 * CONTEXT, 2048), nn.GELU(), nn.Linear(2048, 1280),
            nn.GELU(), nn.Linear(1280, 256),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, fused=True)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=steps)
        content = "\n".join(topics.topics.values()).encode()
        self._text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
        self._chance = torch.Generator().manual_seed(_SEED)

    @property
    def numbers(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def batch(self, rank: int, ranks: int) -> Tensor:
        """Return this rank's part of the next global batch."""
        last = int(len(self._text) * (1 - _HELD_OUT)) - CONTEXT - 1
        starts = torch.randint(0, last, (ranks, BATCH), generator=self._chance)[rank]
        return self._windows(starts)

    def loss(self, module: nn.Module, windows: Tensor) -> Tensor:
        """Return the cross-entropy in nats."""
        return nn.functional.cross_entropy(module(windows[:, :CONTEXT]), windows[:, CONTEXT])

    def held_out_loss(self) -> float:
        """Return the loss on the held-out text."""
        first = int(len(self._text) * (1 - _HELD_OUT))
        starts = torch.arange(first, len(self._text) - CONTEXT - 1, _EVERY)
        with torch.no_grad():
            return float(self.loss(self.model, self._windows(starts)))

    def _windows(self, starts: Tensor) -> Tensor:
        return self._text[starts[:, None] + torch.arange(CONTEXT + 1)]
