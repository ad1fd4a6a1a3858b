"""Attention in which a query sees the keys from one place to another, in one kernel: where tokens are cut over ranks.

On a GPU it is FlashAttention-4's kernel, which skips blocks that nobody sees, and looks at places only in those that
are seen in part.

Shape letters: B rows, H heads, Q queries, K keys, D width of a head.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cornstarch.attention.flash import GRADIENTS, package
from cornstarch.attention.mask import BLOCK, Between
from cornstarch.attention.written_out import gradients_like

# ------------------------------------------------------------------------------------------------ on a GPU


@cache
def _rule(placed: bool) -> Any:
    """Return what is seen, in the language of FlashAttention-4's kernels, where keys have places or are all there."""
    cutlass, cute = import_module("cutlass"), import_module("cutlass.cute")
    scalar_to_ssa = import_module("flash_attn.cute.utils").scalar_to_ssa

    @cute.jit
    def within(row, head, query, key, lengths, given):  # type: ignore[no-untyped-def]
        first = scalar_to_ssa(given[0][row[0], query[0]], cutlass.Int32)
        last = scalar_to_ssa(given[1][row[0], query[0]], cutlass.Int32)
        return (key >= first) & (key <= last)

    @cute.jit
    def within_places(row, head, query, key, lengths, given):  # type: ignore[no-untyped-def]
        first = scalar_to_ssa(given[0][row[0], query[0]], cutlass.Int32)
        last = scalar_to_ssa(given[1][row[0], query[0]], cutlass.Int32)
        place = scalar_to_ssa(given[2][key[0]], cutlass.Int32)
        return (place >= first) & (place <= last)

    return within_places if placed else within


def _options(scale: float, first: Tensor, last: Tensor, places: Tensor | None, blocks: list[Tensor]) -> dict[str, Any]:
    sparse = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    return {
        "softmax_scale": scale,
        "mask_mod": _rule(places is not None),
        "aux_tensors": [one for one in (first, last, places) if one is not None],
        "block_sparse_tensors": sparse(*blocks, block_size=(BLOCK, BLOCK)),
        "pack_gqa": False,
    }


# ------------------------------------------------------------------------------------------------ written out


def _seen(first: Tensor, last: Tensor, places: Tensor | None, keys: int) -> Tensor:
    """Return what is seen: bool [B, 1, Q, K]."""
    place = torch.arange(keys, device=first.device) if places is None else places
    return ((place >= first[..., None]) & (place <= last[..., None]))[:, None]


def _wide(states: Tensor, heads: int) -> Tensor:
    """[B, K, G, D] -> float32 [B, H, K, D]."""
    return states.float().repeat_interleave(heads // states.shape[2], dim=2).transpose(1, 2)


# ------------------------------------------------------------------------------------------------ the operation


@torch.library.custom_op("cornstarch::attend_between", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    last: Tensor,
    places: Tensor | None,
    forward_blocks: list[Tensor],
    backward_blocks: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    if query.is_cuda:
        options = _options(scale, first, last, places, forward_blocks)
        output, sums = package()._flash_attn_fwd(query, key, value, return_lse=True, **options)[:2]
        return output, sums
    heads = query.shape[2]
    scores = query.float().transpose(1, 2) @ _wide(key, heads).transpose(2, 3) * scale
    scores = scores.masked_fill(~_seen(first, last, places, key.shape[1]), -torch.inf)
    output = (scores.softmax(-1) @ _wide(value, heads)).transpose(1, 2).to(query.dtype)
    return output.contiguous(), scores.logsumexp(-1)


@_attend.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rows, queries, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((rows, heads, queries), dtype=torch.float32)


@torch.library.custom_op("cornstarch::attend_between_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    first: Tensor,
    last: Tensor,
    places: Tensor | None,
    blocks: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        into = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
        options = {**_options(scale, first, last, places, blocks), **dict(zip(GRADIENTS, into, strict=True))}
        package()._flash_attn_bwd(query, key, value, output, gradient, sums, **options)
        return into
    heads, groups = query.shape[2], query.shape[2] // key.shape[2]
    keys, values, given = _wide(key, heads), _wide(value, heads), gradient.float().transpose(1, 2)
    scores = query.float().transpose(1, 2) @ keys.transpose(2, 3) * scale
    seen = _seen(first, last, places, key.shape[1])
    weights = (scores - sums[..., None]).exp().masked_fill(~seen, 0.0)
    of_sums = (given * output.float().transpose(1, 2)).sum(-1, keepdim=True)
    of_scores = weights * (given @ values.transpose(2, 3) - of_sums) * scale
    of_query = of_scores @ keys
    of_key, of_value = of_scores.transpose(2, 3) @ query.float().transpose(1, 2), weights.transpose(2, 3) @ given
    shared = [one.unflatten(1, (-1, groups)).sum(2) for one in (of_key, of_value)]
    found = [one.transpose(1, 2).to(query.dtype).contiguous() for one in (of_query, *shared)]
    return found[0], found[1], found[2]


_attend_backward.register_fake(gradients_like)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, first, last, places, _, backward_blocks, scale = inputs
    ctx.save_for_backward(query, key, value, *output, first, last, places, *backward_blocks)
    ctx.scale = scale


def _differentiate(ctx: Any, gradient: Tensor, of_sums: Tensor) -> tuple[Any, ...]:
    *states, first, last, places, one, two, three, four = ctx.saved_tensors
    asked = (first, last, places, [one, two, three, four], ctx.scale)
    found = torch.ops.cornstarch.attend_between_backward(gradient.contiguous(), *states, *asked)
    return (*found, None, None, None, [None] * 4, [None] * 4, None)


_attend.register_autograd(_differentiate, setup_context=_remember)


def attend_between(query: Tensor, key: Tensor, value: Tensor, mask: Between, scale: float) -> Tensor:
    """Attend for a layer: [B, H, Q, D], keys and values with as many heads or fewer -> [B, Q, H, D]."""
    states = [one.transpose(1, 2) for one in (query, key, value)]
    blocks = mask.block_mask
    to_keys = [blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices]
    to_queries = [blocks.q_num_blocks, blocks.q_indices, blocks.full_q_num_blocks, blocks.full_q_indices]
    output: Tensor
    output, _ = torch.ops.cornstarch.attend_between(
        *states, mask.first, mask.last, mask.places, to_keys, to_queries, scale
    )
    return output
