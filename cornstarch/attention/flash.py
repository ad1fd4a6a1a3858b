"""FlashAttention-4's kernels for pieces of rows, by its own package (`flash-attn-4`).

torch calls the same two functions of it (`torch.nn.attention._fa4`), but hands on neither pieces that are shorter than
their room nor a backward pass of sums that are of more than one call. Both are needed here: spans have gaps between
them, and what a token sees before itself and behind itself is joined.

Tensors are [tokens of all rows, heads, width], token after token.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cornstarch.attention.pieces import Cut

_GPUS = (9, 10)  # Hopper and Blackwell, by the first number of their compute capability


@cache
def has_flash() -> bool:
    """Whether FlashAttention-4's package is there."""
    try:
        found = package()
    except (ImportError, OSError, RuntimeError):
        return False
    return hasattr(found, "_flash_attn_fwd") and hasattr(found, "_flash_attn_bwd")


@cache
def package() -> Any:
    """Return the package's kernels."""
    return importlib.import_module("flash_attn.cute.interface")


@cache
def has_kernels(width: int, device: torch.device) -> bool:
    """Whether there are kernels for heads of a width on a device."""
    return has_flash() and width % 8 == 0 and torch.cuda.get_device_capability(device)[0] in _GPUS


class Flash:
    """Attention in pieces of rows; see `cornstarch.attention.varlen.Kernel`."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
        """Attend."""
        attend = package()._flash_attn_fwd
        if cut.pieces is None:
            whole = [one.unflatten(0, (cut.rows, -1)) for one in (query, key, value)]
            output, sums = attend(*whole, softmax_scale=cut.scale, causal=True, return_lse=True)[:2]
            return output.flatten(0, 1), sums.transpose(1, 2).flatten(0, 1).contiguous()
        sums = torch.full((query.shape[1], len(query)), -torch.inf, dtype=torch.float32, device=query.device)
        key, value = _asked(cut, key, value)
        output = attend(query, key, value, lse=sums, return_lse=True, **_options(cut))[0]
        return output, sums.transpose(0, 1).contiguous()

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        sums: Tensor,
        cut: Cut,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients."""
        differentiate = package()._flash_attn_bwd
        again = {"deterministic": torch.are_deterministic_algorithms_enabled()}
        if cut.pieces is None:
            states = [one.unflatten(0, (cut.rows, -1)) for one in (query, key, value, output, gradient)]
            sums = sums.unflatten(0, (cut.rows, -1)).transpose(1, 2).contiguous()
            found = differentiate(*states, sums, softmax_scale=cut.scale, causal=True, **again)
            of_query, of_key, of_value = (one.flatten(0, 1) for one in found)
            return of_query, of_key, of_value
        make = torch.zeros_like if cut.ahead else torch.empty_like  # not all tokens are in a piece that looks ahead
        of_query, of_key, of_value = make(query), make(key), make(value)
        into = dict(zip(("dk", "dv"), _asked(cut, of_key, of_value), strict=True))
        states = [query, *_asked(cut, key, value), output, gradient]
        sums = sums.transpose(0, 1).contiguous()
        differentiate(*states, sums, dq=of_query, **into, **_options(cut), **again)
        return of_query, of_key, of_value


def _asked(cut: Cut, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values so that a token and the first that it sees ahead have the same place."""
    return (key[1:], value[1:]) if cut.ahead else (key, value)


def _options(cut: Cut) -> dict[str, Any]:
    """Return what both functions are told of pieces."""
    assert cut.pieces is not None
    begins, lengths = cut.pieces.to(torch.int32).unbind(0)
    options = {
        "softmax_scale": cut.scale,
        "cu_seqlens_q": begins,
        "cu_seqlens_k": begins,
        "max_seqlen_q": cut.longest,
        "max_seqlen_k": cut.longest,
    }
    if not cut.ahead:
        return {**options, "causal": True}
    used = lengths[:-1]
    return {**options, "window_size_left": 0, "seqused_q": used, "seqused_k": used}
