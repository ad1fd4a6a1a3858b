"""The cross-entropy of next words straight from hidden states and the head's weight, without all logits in memory.

Rows are taken in portions: logits of a portion -> its losses and, in their place, the logits' gradients -> gradients of
the hidden states and of the weight. So the backward pass has nothing left to compute, and only one portion's logits are
ever there. Shape letters: N rows (tokens), H width, V words (of this rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from cornstarch.compat import has_triton
from cornstarch.compute import torch_kernels
from cornstarch.models.multimodal_language_model.facts import IGNORED

# Logits of a portion, in bytes: enough rows that matrix products are as quick as they get, and little beside a step.
_PORTION = {"cuda": 1 << 30, "cpu": 1 << 27}
_ROWS = 128  # portions are multiples of it


@dataclass(frozen=True)
class LogitShape:
    """What a model does to its logits before the loss: `x * before`, or `tanh(x * before) * after`."""

    before: float = 1.0
    has_tanh: bool = False
    after: float = 1.0

    def scaled(self, factor: float) -> LogitShape:
        """Return it with one more factor."""
        if self.has_tanh:
            return LogitShape(self.before, True, self.after * factor)
        return LogitShape(self.before * factor)

    def bent(self) -> LogitShape | None:
        """Return it with a tanh, or None if it has one."""
        return None if self.has_tanh else LogitShape(self.before, True)

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits as the model has them."""
        if self.before != 1.0:
            logits = logits * self.before
        if self.has_tanh:
            logits = torch.tanh(logits) * self.after
        return logits


PLAIN = LogitShape()
"""Logits as the head makes them."""


class Words(Protocol):
    """Whose words a rank has, if they are dealt out."""

    @property
    def first(self) -> int:
        """The number of the first of them."""
        ...

    def largest(self, values: Tensor) -> None:
        """Replace values by the largest of all ranks."""

    def add_up(self, values: Tensor) -> None:
        """Replace values by the sums over all ranks."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shape: LogitShape = PLAIN,
    words: Words | None = None,
    at_most: int | None = None,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Return the sum of the cross-entropies of `hidden @ weight.T + bias`, in float32.

    Args:
        hidden: [..., H].
        weight: [V, H].
        labels: [...], the number of the right word; `ignore_index`: not trained on, and not computed either where
            `at_most` says how many there can be, or where looking costs nothing (on the CPU).
        bias: [V].
        shape: What is done to the logits before the loss.
        words: Of ranks that share the words: which this one has, and how they talk.
        at_most: A number of trained rows that is known before: never fewer than there are.
        ignore_index: The label that means none.
    """
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device)
    index = _trained_rows(labels, at_most, ignore_index)
    if index is not None:
        found = index >= 0
        index = index.clamp(min=0)
        rows, labels = rows.index_select(0, index), labels.index_select(0, index).masked_fill(~found, ignore_index)
    total: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, labels, shape, words, ignore_index)
    return total


def _trained_rows(labels: Tensor, at_most: int | None, ignore_index: int) -> Tensor | None:
    """Return the rows that are trained on, -1 behind them; None: all rows are taken."""
    if at_most is None and labels.is_cuda:
        return None  # to count them is to wait for the device
    trained = labels != ignore_index
    if at_most is None:
        return trained.nonzero().squeeze(-1)
    size = max(-(-at_most // _ROWS) * _ROWS, _ROWS)
    if size >= len(labels):
        return None
    return torch.nonzero_static(trained, size=size, fill_value=-1).squeeze(-1)


def portions(rows: int, words: int, bytes_each: int, device: torch.device) -> list[int]:
    """Return how many rows are taken at a time: equally many, and no more than fit."""
    most = max(_PORTION.get(device.type, _PORTION["cuda"]) // max(words * bytes_each, 1) // _ROWS, 1) * _ROWS
    count = max(-(-rows // most), 1)
    size = -(-rows // count)
    size = min(-(-size // _ROWS) * _ROWS, most)
    return [min(size, rows - start) for start in range(0, rows, max(size, 1))]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shape: LogitShape,
        words: Words | None,
        ignore_index: int,
    ) -> Tensor:
        kind = hidden.device.type
        context.dtypes = [None if one is None else one.dtype for one in (hidden, weight, bias)]
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        needs = context.needs_input_grad[:3]
        total = hidden.new_zeros((), dtype=torch.float32)
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if needs[2] and bias is not None else None
        place = 0
        with torch.autocast(kind, enabled=False):
            for size in portions(len(hidden), weight.shape[0], hidden.element_size(), hidden.device):
                rows, own = hidden[place : place + size], labels[place : place + size]
                logits = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
                total += losses_and_gradients(logits, own, shape, words, ignore_index, any(needs)).sum()
                if of_hidden is not None:
                    torch.mm(logits, weight, out=of_hidden[place : place + size])
                if of_weight is not None:
                    _add_product(of_weight, logits.t(), rows)
                if of_bias is not None:
                    of_bias += logits.sum(0, dtype=torch.float32)
                place += size
        context.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = gradients
        made = [
            None if one is None else kernels_for(one).scaled(one, factor, dtype)
            for one, dtype in zip(context.saved_tensors, context.dtypes, strict=True)
        ]
        return *made, None, None, None, None


def losses_and_gradients(
    logits: Tensor, labels: Tensor, shape: LogitShape, words: Words | None, ignore_index: int, wants_gradients: bool
) -> Tensor:
    """Return the loss of each row, and replace the logits [N, V] by the gradients of the losses' sum.

    What `shape` does to logits is part of it: the gradients are those of what was before it.
    """
    kernels, first = kernels_for(logits), 0 if words is None else words.first
    largest, total, picked = kernels.statistics(logits, labels, shape, first)
    if words is not None:
        own = largest.clone()
        words.largest(largest)
        total = torch.where(own == -torch.inf, 0, total * (own - largest).exp())
        both = torch.stack([total, picked])
        words.add_up(both)
        total, picked = both[0], both[1]
    above = total.log()  # kept apart from the largest: their sum would be rounded where logits are large
    if wants_gradients:
        kernels.gradients(logits, labels, largest, above, shape, first, ignore_index)
    return (largest - picked + above).masked_fill(labels == ignore_index, 0)


def kernels_for(values: Tensor) -> ModuleType:
    """Return what computes with rows: `triton_kernels` on a GPU, else `torch_kernels`."""
    if values.is_cuda and values.numel() and has_triton():
        from cornstarch.compute import triton_kernels

        return triton_kernels
    return torch_kernels


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices to a sum in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


__all__ = ["PLAIN", "LogitShape", "Words", "linear_cross_entropy", "losses_and_gradients", "portions"]
