"""What `joining` does, in kernels of a program or more per token. Imported where there is Triton only."""
# Triton looks up what annotations of kernels name, and knows nothing but its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attention_join(
    output, sums, more, more_sums, asking, heads, width,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if tl.load(asking + token) != 0:
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
def _attention_add(found, more, asking, size, FURTHER: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    if tl.load(asking + token - FURTHER, mask=token >= FURTHER, other=0) != 0:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = token * size + place
        both = tl.load(found + at, mask=place < size, other=0.0).to(tl.float32)
        both += tl.load(more + at, mask=place < size, other=0.0).to(tl.float32)
        tl.store(found + at, both.to(found.dtype.element_ty), mask=place < size)


def join(output: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor, asking: Tensor) -> None:
    """See `joining.join`; all are laid out token after token."""
    tokens, heads, width = output.shape
    with torch.cuda.device(output.device):
        _attention_join[(tokens,)](
            output, sums, more, more_sums, asking.view(torch.uint8), heads, width,
            HEADS=triton.next_power_of_2(heads), WIDTH=triton.next_power_of_2(width),
        )  # fmt: skip


def add(found: Tensor, more: Tensor, asking: Tensor, further: int) -> None:
    """Add gradients of tokens, [T, H, D], that ask or come so much further on than those that do."""
    size = found[0].numel()
    block = min(_BLOCK, triton.next_power_of_2(size))
    with torch.cuda.device(found.device):
        _attention_add[(len(found), triton.cdiv(size, block))](
            found, more, asking.view(torch.uint8), size, FURTHER=further, BLOCK=block
        )
