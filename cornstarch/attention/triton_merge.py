"""Triton kernels that merge attention outputs and gradients in place, with one or more programs per token.

Import this module only where Triton is installed.
"""
# Triton resolves the annotations of kernels itself and knows only its own types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _merge_kernel(
    output, sums, more, more_sums, in_span, heads, width,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if tl.load(in_span + token) != 0:
        head, place = tl.arange(0, HEADS), tl.arange(0, WIDTH)
        at = token * heads + head
        old = tl.load(sums + at, mask=head < heads, other=0.0)
        new = tl.load(more_sums + at, mask=head < heads, other=0.0)
        most = tl.maximum(old, new)
        both = most + tl.log(tl.exp(old - most) + tl.exp(new - most))
        tl.store(sums + at, both, mask=head < heads)
        inside = (head < heads)[:, None] & (place < width)[None, :]
        each = at[:, None] * width + place[None, :]
        before = tl.load(output + each, mask=inside, other=0.0).to(tl.float32) * tl.exp(old - both)[:, None]
        behind = tl.load(more + each, mask=inside, other=0.0).to(tl.float32) * tl.exp(new - both)[:, None]
        tl.store(output + each, (before + behind).to(output.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_kernel(gradient, more, in_span, size, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    if tl.load(in_span + token - AHEAD, mask=token >= AHEAD, other=0) != 0:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = token * size + place
        both = tl.load(gradient + at, mask=place < size, other=0.0).to(tl.float32)
        both += tl.load(more + at, mask=place < size, other=0.0).to(tl.float32)
        tl.store(gradient + at, both.to(gradient.dtype.element_ty), mask=place < size)


def merge_outputs(output: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor, in_span: Tensor) -> None:
    """Merge outputs [T, H, D] by their logsumexp, float32 [T, H], of tokens in spans, bool [T]; all contiguous."""
    tokens, heads, width = output.shape
    with torch.cuda.device(output.device):
        _merge_kernel[(tokens,)](
            output, sums, more, more_sums, in_span.view(torch.uint8), heads, width,
            HEADS=triton.next_power_of_2(heads), WIDTH=triton.next_power_of_2(width),
        )  # fmt: skip


def add_gradients(gradient: Tensor, more: Tensor, in_span: Tensor, ahead: int) -> None:
    """Add gradients [T, H, D] of tokens that come `ahead` tokens after one in a span."""
    size = gradient[0].numel()
    block = min(_BLOCK, triton.next_power_of_2(size))
    with torch.cuda.device(gradient.device):
        _add_kernel[(len(gradient), triton.cdiv(size, block))](
            gradient, more, in_span.view(torch.uint8), size, AHEAD=ahead, BLOCK=block
        )
