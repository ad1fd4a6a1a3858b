"""Losses of logits and, in the logits' place, their gradients: in torch, and on a GPU by Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cornstarch.compat import has_triton

if TYPE_CHECKING:
    from cornstarch.compute.cross_entropy import LogitShape, Words


def losses_and_gradients(
    logits: Tensor,
    labels: Tensor,
    shape: LogitShape,
    words: Words | None,
    ignore_index: int,
    wants_gradients: bool,
) -> Tensor:
    """Return the loss of each row, and replace the logits [N, V] by the gradients of the losses' sum.

    What `shape` does to logits is part of it: the gradients are those of what was before it.
    """
    if logits.is_cuda and logits.shape[0] and logits.shape[1] and has_triton():
        from cornstarch.compute import triton_kernels as best

        largest, total, picked = best.statistics(logits, labels, shape, 0 if words is None else words.first)
    else:
        largest, total, picked = _statistics(logits, labels, shape, 0 if words is None else words.first)
    if words is not None:
        own = largest.clone()
        words.largest(largest)
        total = torch.where(own == -torch.inf, 0, total * (own - largest).exp())
        both = torch.stack([total, picked])
        words.add_up(both)
        total, picked = both[0], both[1]
    above = total.log()  # kept apart from the largest: their sum would be rounded where logits are large
    trained = labels != ignore_index
    if wants_gradients:
        first = 0 if words is None else words.first
        if logits.is_cuda and logits.shape[0] and logits.shape[1] and has_triton():
            best.gradients(logits, labels, largest, above, shape, first, ignore_index)
        else:
            _gradients(logits, labels, largest, above, shape, first, trained)
    return (largest - picked + above).masked_fill(~trained, 0)


def scaled(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values times a number on their device, in another precision."""
    if values.is_cuda and values.is_contiguous() and values.numel() and has_triton():
        from cornstarch.compute import triton_kernels as best

        return best.scaled(values, factor, dtype)
    return torch.mul(values, factor.float(), out=torch.empty_like(values, dtype=dtype))


def _own_labels(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    is_own = (labels >= first) & (labels < first + logits.shape[1])
    return is_own, (labels - first).masked_fill(~is_own, 0)


def _statistics(logits: Tensor, labels: Tensor, shape: LogitShape, first: int) -> tuple[Tensor, Tensor, Tensor]:
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


def _gradients(
    logits: Tensor, labels: Tensor, largest: Tensor, above: Tensor, shape: LogitShape, first: int, trained: Tensor
) -> None:
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
    gradient *= (trained * slope).unsqueeze(1)
    if bend is not None:
        gradient *= bend
    if gradient is not logits:
        logits.copy_(gradient)


__all__ = ["losses_and_gradients", "scaled"]
