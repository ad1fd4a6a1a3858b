"""Kernels for rows of logits: one program per row, or per piece of a row. Imported where there is Triton only."""
# Triton looks up what annotations of kernels name, and knows nothing but its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor
from triton.language.extra.libdevice import tanh  # type: ignore[import-not-found, unused-ignore]

if TYPE_CHECKING:
    from cornstarch.compute.cross_entropy import LogitShape

_STATISTICS_BLOCK = 8192
_GRADIENT_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _statistics(
    logits, labels, largest, total, picked, stride, words, first, before, after,
    HAS_TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    place = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, words, BLOCK):
        inside = begin + place < words
        x = tl.load(start + begin + place, mask=inside, other=0.0).to(tl.float32) * before
        if HAS_TANH:
            x = tanh(x) * after
        x = tl.where(inside, x, float("-inf"))
        higher = tl.maximum(most, x)
        # A place that has met nothing yet has no sum to be scaled.
        sums = tl.where(most == float("-inf"), 0.0, sums * tl.exp(most - higher))
        sums += tl.where(inside, tl.exp(x - higher), 0.0)
        most = higher
    peak = tl.max(most, 0)
    tl.store(largest + row, peak)
    tl.store(total + row, tl.sum(tl.where(most == float("-inf"), 0.0, sums * tl.exp(most - peak)), 0))
    label = tl.load(labels + row) - first
    is_own = (label >= 0) & (label < words)
    x = tl.load(start + label, mask=is_own, other=0.0).to(tl.float32) * before
    if HAS_TANH:
        x = tanh(x) * after
    tl.store(picked + row, tl.where(is_own, x, 0.0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gradients(
    logits, labels, largest, above, stride, words, first, before, after, ignored,
    HAS_TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < words
    at = logits + row * stride + place
    label = tl.load(labels + row)
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * before
    slope = before
    if HAS_TANH:
        bent = tanh(x)
        x = bent * after
        slope = before * after * (1 - bent * bent)
    gradient = tl.exp(x - tl.load(largest + row) - tl.load(above + row))
    gradient = tl.where(place == label - first, gradient - 1.0, gradient) * slope
    gradient = tl.where(label == ignored, 0.0, gradient)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scaled(source, factor, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(source + place, mask=inside).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(target + place, value.to(target.dtype.element_ty), mask=inside)


def scaled(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor times a number on its device, in another precision."""
    made = torch.empty_like(source, dtype=dtype)
    with torch.cuda.device(source.device):
        _scaled[(triton.cdiv(source.numel(), _GRADIENT_BLOCK),)](
            source, factor, made, source.numel(), BLOCK=_GRADIENT_BLOCK, num_warps=8
        )
    return made


def statistics(logits: Tensor, labels: Tensor, shape: LogitShape, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, by row, the largest, the sum of exponentials above it, and the label's logit (0: not here)."""
    rows, words = logits.shape
    largest, total, picked = torch.empty(3, rows, dtype=torch.float32, device=logits.device).unbind()
    with torch.cuda.device(logits.device):
        _statistics[(rows,)](
            logits, labels, largest, total, picked, logits.stride(0), words, first, shape.before, shape.after,
            HAS_TANH=shape.has_tanh, BLOCK=_STATISTICS_BLOCK, num_warps=16,
        )  # fmt: skip
    return largest, total, picked


def gradients(
    logits: Tensor, labels: Tensor, largest: Tensor, above: Tensor, shape: LogitShape, first: int, ignore_index: int
) -> None:
    """Replace logits by the gradients of the sum of the losses."""
    rows, words = logits.shape
    with torch.cuda.device(logits.device):
        _gradients[(rows, triton.cdiv(words, _GRADIENT_BLOCK))](
            logits, labels, largest, above, logits.stride(0), words, first, shape.before, shape.after, ignore_index,
            HAS_TANH=shape.has_tanh, BLOCK=_GRADIENT_BLOCK, num_warps=8,
        )  # fmt: skip


__all__ = ["gradients", "scaled", "statistics"]
