"""A step of AdamW on one tensor in one pass over memory. Imported where there is Triton only."""
# Triton looks up what annotations of kernels name, and knows nothing but its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _adamw(
    parameter, gradient, mean, square, step, divisor, skip, rate, decay, log1, log2, new1, new2, eps, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (place < count) & (tl.load(skip) == 0)
    number = tl.load(step).to(tl.float64)
    left1 = (1.0 - tl.exp(number * log1.to(tl.float64))).to(tl.float32)
    left2 = tl.sqrt(1.0 - tl.exp(number * log2.to(tl.float64))).to(tl.float32)
    w = tl.load(parameter + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) / tl.load(divisor)
    m = tl.load(mean + place, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + place, mask=inside, other=0.0).to(tl.float32)
    m = m + new1 * (g - m)
    v = v + new2 * (g * g - v)
    w = w * (1.0 - rate * decay)
    w = w - (rate / left1) * m / (tl.sqrt(v) / left2 + eps)
    tl.store(parameter + place, w.to(parameter.dtype.element_ty), mask=inside)
    tl.store(mean + place, m.to(mean.dtype.element_ty), mask=inside)
    tl.store(square + place, v.to(square.dtype.element_ty), mask=inside)


def adamw(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    divisor: Tensor,
    skip: Tensor,
    numbers: tuple[float, ...],
) -> None:
    """Change a parameter and its two averages, in place.

    Args:
        parameter: The parameter.
        gradient: Its gradient.
        mean: The average of its gradients.
        square: The average of their squares.
        step: The number of this step, from 1.
        divisor: What the gradient is divided by.
        skip: Not 0: nothing is changed.
        numbers: Learning rate, weight decay, the logarithms of the two betas, 1 less each of them, and epsilon.
    """
    count = parameter.numel()
    _adamw[(triton.cdiv(count, _BLOCK),)](
        parameter, gradient, mean, square, step, divisor, skip, *numbers, count, BLOCK=_BLOCK
    )
