"""What `triton_kernels` does, in torch: losses of rows of logits and, in the logits' place, their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cornstarch.compute.cross_entropy import LogitShape


def _own_labels(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    is_own = (labels >= first) & (labels < first + logits.shape[1])
    return is_own, (labels - first).masked_fill(~is_own, 0)


def statistics(logits: Tensor, labels: Tensor, shape: LogitShape, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, by row, the largest, the sum of exponentials above it, and the label's logit (0: not here)."""
    scores = shape.apply(logits.float())
    rows = len(scores)
    if not scores.shape[1]:
        nothing = scores.new_zeros(rows)
        return nothing - torch.inf, nothing, nothing.clone()
    is_own, place = _own_labels(scores, labels, first)
    largest = scores.amax(1)
    picked = scores.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(~is_own, 0)
    return largest, (scores - largest.unsqueeze(1)).exp_().sum(1), picked


def gradients(
    logits: Tensor, labels: Tensor, largest: Tensor, above: Tensor, shape: LogitShape, first: int, ignore_index: int
) -> None:
    """Replace logits by the gradients of the sum of the losses."""
    if not logits.shape[1]:
        return
    scores = shape.apply(logits.float())
    slope = shape.before
    bend = None
    if shape.has_tanh:
        bend = 1 - (scores / shape.after) ** 2
        slope = shape.before * shape.after
    gradient = scores.sub_(largest.unsqueeze(1)).sub_(above.unsqueeze(1)).exp_()
    is_own, place = _own_labels(logits, labels, first)
    gradient.scatter_add_(1, place.unsqueeze(1), -is_own.unsqueeze(1).to(gradient.dtype))
    gradient *= ((labels != ignore_index) * slope).unsqueeze(1)
    if bend is not None:
        gradient *= bend
    if gradient is not logits:
        logits.copy_(gradient)


def scaled(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor times a number on its device, in another precision."""
    return torch.mul(source, factor.float(), out=torch.empty_like(source, dtype=dtype))


__all__ = ["gradients", "scaled", "statistics"]
