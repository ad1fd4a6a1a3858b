"""torch's attention kernels for items that lie end to end in a row, by their private operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# torch's kernels for items of a row [T, H, D], bounds int32 [N + 1], each beside its backward pass, which takes
# gradient, query, key, value, output and logsumexp. The public `torch.nn.attention.varlen.varlen_attn` has no scale in
# torch 2.10, and no float32 and no CPU in any version up to 2.13.


def attend_varlen_flash(states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and the logsumexp [H, T]; half precision on a GPU."""
    numbers = (bounds, bounds, longest, longest, 0.0, False, False)
    output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(*states, *numbers, scale=scale)
    return output, logsumexp


def attend_varlen_flash_backward(
    states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, ...]:
    unused = torch.zeros(2, dtype=torch.uint64, device=bounds.device)  # of random numbers: there is no dropout
    numbers = (bounds, bounds, longest, longest, 0.0, False, unused, unused[:0])
    found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(*states, *numbers, scale=scale)
    return found


def attend_varlen_efficient(
    states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the logsumexp [N, H, longest or more]; all precisions on a GPU."""
    given = [one[None] for one in states]
    options = (None, bounds, bounds, longest, longest, 0.0, 0, True)
    output, logsumexp, *_ = torch.ops.aten._efficient_attention_forward(*given, *options, scale=scale)
    return output[0], logsumexp


def attend_varlen_efficient_backward(
    states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, ...]:
    gradient, query, key, value, output = (one[None] for one in states[:5])
    unused = torch.zeros((), dtype=torch.int64, device=bounds.device)
    places = (bounds, bounds, longest, longest, states[5], 0.0, unused, unused, 0, False)
    found = torch.ops.aten._efficient_attention_backward(
        gradient, query, key, value, None, output, *places, scale=scale
    )
    return tuple(one[0] for one in found[:3])


def attend_on_cpu(states: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and the logsumexp [B, H, S] of states [B, H, S, D]: what torch's attention runs on a CPU."""
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*states, 0.0, False, scale=scale)
    return output, logsumexp


def attend_on_cpu_backward(states: Sequence[Tensor], scale: float) -> tuple[Tensor, ...]:
    *others, logsumexp = states
    sums = logsumexp.double() if others[0].dtype == torch.float64 else logsumexp
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: tuple[Tensor, ...] = backward(*others, sums, 0.0, False, scale=scale)
    return found
