"""What tokens of a span see behind themselves, joined with what they see before; only these tokens are touched.

Everything is done in place: results of kernels are as large as a layer's states, and reading them costs time.

Shape letters: T tokens of all rows, H heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cornstarch.compat import has_triton


def join(output: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor, asking: Tensor) -> None:
    """Join outputs [T, H, D] by the logarithms of their softmax's sums, float32 [T, H], where tokens ask: bool [T]."""
    if output.is_cuda and has_triton():
        from cornstarch.attention import triton_joining

        return triton_joining.join(output, sums, more, more_sums, asking)
    both = torch.logaddexp(sums, more_sums)
    old, new = (sums - both).exp().unsqueeze(-1), (more_sums - both).exp().unsqueeze(-1)
    output.copy_(torch.where(asking[:, None, None], output * old + more * new, output))
    sums.copy_(torch.where(asking[:, None], both, sums))


def add(found: tuple[Tensor, Tensor, Tensor], more: tuple[Tensor, Tensor, Tensor], asking: Tensor) -> None:
    """Add gradients of queries where tokens ask, and of keys and values where they are asked: one token further on."""
    for one, other, further in zip(found, more, (0, 1, 1), strict=True):
        _add(one, other, asking, further)


def _add(found: Tensor, more: Tensor, asking: Tensor, further: int) -> None:
    if found.is_cuda and has_triton():
        from cornstarch.attention import triton_joining

        return triton_joining.add(found, more, asking, further)
    here = torch.zeros_like(asking)
    here[further:] = asking[: len(asking) - further]
    found.copy_(torch.where(here[:, None, None], found + more, found))
