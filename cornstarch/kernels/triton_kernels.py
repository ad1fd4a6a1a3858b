"""Triton kernels for the cross-entropy of rows of logits, and for a step of AdamW.

Import this module only where Triton is installed.
"""
# Triton resolves the annotations of kernels itself and knows only its own types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor
from triton.language.extra.libdevice import tanh  # type: ignore[import-not-found, unused-ignore]

if TYPE_CHECKING:
    from cornstarch.kernels.cross_entropy import LogitTransform, RowNormalizer

_STATISTICS_BLOCK = 8192
_GRADIENT_BLOCK = 4096
_ADAMW_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _row_statistics_kernel(
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
        # A lane whose maximum is still -inf has no sum to rescale; -inf - -inf would be nan.
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
def _gradients_kernel(
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
def _scale_kernel(source, factor, target, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(source + place, mask=inside).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(target + place, value.to(target.dtype.element_ty), mask=inside)


def scale(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    target = torch.empty_like(source, dtype=dtype)
    with torch.cuda.device(source.device):
        _scale_kernel[(triton.cdiv(source.numel(), _GRADIENT_BLOCK),)](
            source, factor, target, source.numel(), BLOCK=_GRADIENT_BLOCK, num_warps=8
        )
    return target


def compute_row_statistics(
    logits: Tensor, labels: Tensor, transform: LogitTransform, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, words = logits.shape
    largest, total, picked = torch.empty(3, rows, dtype=torch.float32, device=logits.device).unbind()
    with torch.cuda.device(logits.device):
        _row_statistics_kernel[(rows,)](
            logits, labels, largest, total, picked, logits.stride(0), words, first, transform.before, transform.after,
            HAS_TANH=transform.has_tanh, BLOCK=_STATISTICS_BLOCK, num_warps=16,
        )  # fmt: skip
    return largest, total, picked


def replace_by_gradients(
    logits: Tensor, labels: Tensor, normalizer: RowNormalizer, transform: LogitTransform, first: int, ignored: int
) -> None:
    (rows, words), (largest, log_total) = logits.shape, normalizer
    with torch.cuda.device(logits.device):
        _gradients_kernel[(rows, triton.cdiv(words, _GRADIENT_BLOCK))](
            logits, labels, largest, log_total, logits.stride(0), words, first, transform.before, transform.after,
            ignored, HAS_TANH=transform.has_tanh, BLOCK=_GRADIENT_BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _adamw_kernel(
    parameter, remainder, gradient, mean, square, step, divisor, skip, rate, decay, log1, log2, new1, new2, eps, count,
    HAS_MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (place < count) & (tl.load(skip) == 0)
    # Bias corrections in float64: 1 - beta ** step cancels in float32.
    number = tl.load(step).to(tl.float64)
    left1 = (1.0 - tl.exp(number * log1.to(tl.float64))).to(tl.float32)
    left2 = tl.sqrt(1.0 - tl.exp(number * log2.to(tl.float64))).to(tl.float32)
    w = tl.load(parameter + place, mask=inside, other=0.0)
    if HAS_MASTER:  # as `join_master` in master_weights.py
        low = tl.load(remainder + place, mask=inside, other=0).to(tl.int32)
        w = ((w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    w = w.to(tl.float32)
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) / tl.load(divisor)
    m = tl.load(mean + place, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + place, mask=inside, other=0.0).to(tl.float32)
    m = m + new1 * (g - m)
    v = v + new2 * (g * g - v)
    w = w * (1.0 - rate * decay)
    w = w - (rate / left1) * m / (tl.sqrt(v) / left2 + eps)
    if HAS_MASTER:  # as `split_master`
        bits = w.to(tl.int32, bitcast=True)
        upper = (bits + 0x8000) >> 16
        low = tl.where(w != w, 0, bits - (upper << 16))
        upper = tl.where(w != w, 0x7FC0, upper)
        tl.store(remainder + place, low.to(tl.int16), mask=inside)
        tl.store(parameter + place, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(parameter + place, w.to(parameter.dtype.element_ty), mask=inside)
    tl.store(mean + place, m.to(mean.dtype.element_ty), mask=inside)
    tl.store(square + place, v.to(square.dtype.element_ty), mask=inside)


def apply_adamw(
    parameter: Tensor, remainder: Tensor | None, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor,
    divisor: Tensor, skip: Tensor, numbers: tuple[float, ...],
) -> None:  # fmt: skip
    """Update a parameter and its two moments in place, in one pass over memory.

    `remainder`: of a parameter in bf16 with a float32 master (`cornstarch.kernels.master_weights`), updated, too.
    `step` counts from 1. The gradient is divided by `divisor`, and nothing changes if `skip` is not 0. `numbers` are
    the learning rate, weight decay, the logarithms of both betas, 1 minus each beta, and epsilon.
    """
    count = parameter.numel()
    _adamw_kernel[(triton.cdiv(count, _ADAMW_BLOCK),)](
        parameter, parameter if remainder is None else remainder, gradient, mean, square, step, divisor, skip,
        *numbers, count, HAS_MASTER=remainder is not None, BLOCK=_ADAMW_BLOCK,
    )  # fmt: skip
