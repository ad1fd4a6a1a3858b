"""Attention by torch itself: FlexAttention, scaled_dot_product_attention, and the plain formula with its gradients.

Shape letters: B rows, H heads of queries, G heads of keys and values, Q queries, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from cornstarch.attention.backends import AttentionBackend, register_attention_backend
from cornstarch.attention.mask import evaluate_mask
from cornstarch.compat import allow_variants

_FLEX_MIN_HEAD_DIM = 16


def get_flex_attention() -> Callable[..., Any]:
    """Return transformers' FlexAttention, which compiles itself outside of compiled layers."""
    if not torch.compiler.is_compiling():
        # Past torch's limit of variants (layouts, dtypes), it would stop compiling and compute whole score matrices.
        allow_variants()
    found: Callable[..., Any] = AttentionInterface()["flex_attention"]
    return found


class FlexAttentionBackend(AttentionBackend):
    """FlexAttention: every mask function, softcap and sinks, but no dropout and no small heads."""

    name = "flex"
    mask_type = BlockMask

    def supports(self, query: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
        return options["dropout"] == 0 and query.shape[-1] >= _FLEX_MIN_HEAD_DIM

    def run(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        del options["dropout"]
        output, weights = get_flex_attention()(module, query, key, value, mask, **options)
        return output, weights

    def convert_mask(self, mask: BlockMask, query: Tensor, key: Tensor) -> Tensor:
        queries, keys = (torch.arange(states.shape[2], device=query.device) for states in (query, key))
        return evaluate_mask(mask.mask_mod, query.shape[0], queries, keys)


class SdpaBackend(AttentionBackend):
    """torch's scaled_dot_product_attention with a dense mask or none; the plain formula for softcap and sinks."""

    name = "sdpa"
    mask_type = Tensor

    def supports(self, query: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
        return True

    def run(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        softcap, sinks = options.pop("softcap"), options.pop("s_aux")
        if softcap is None and sinks is None:
            output, weights = AttentionInterface()["sdpa"](module, query, key, value, mask, **options)
            return output, weights
        scaling, dropout = options["scaling"], options["dropout"]
        queries, keys = query.shape[2], key.shape[2]
        # transformers omits the mask of one query that sees everything, and of a whole row from its start (the keys
        # behind it are the empty slots of a static cache).
        if mask is None and queries > 1 and options.get("is_causal", getattr(module, "is_causal", True)):
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        groups = query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = _softmax(scores, mask, sinks).to(query.dtype)
        weights = nn.functional.dropout(weights, p=dropout, training=module.training)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    def convert_mask(self, mask: Any, query: Tensor, key: Tensor) -> Any:
        raise AssertionError("sdpa supports every layer")


def _softmax(scores: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    # A sink is one more key per head that takes weight and gives nothing.
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]


register_attention_backend(FlexAttentionBackend())
register_attention_backend(SdpaBackend())

# ------------------------------------------------------------------------------------------------ plain formula
# Stands in for the kernels for documents on a CPU, and is the reference of their tests.


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [Q, H, D] and the logsumexp of the scores, float32 [H, Q]; hidden: bool [Q, K]."""
    scores = _compute_scores(query, key, hidden, scale)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _repeat_heads(value, query))
    return output.to(query.dtype), scores.logsumexp(-1)


def attend_plainly_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    hidden: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 gradients of query, key and value; output and logsumexp may be of more keys than these."""
    gradient = gradient.float()
    scores = _compute_scores(query, key, hidden, scale)
    weights = (scores - logsumexp[..., None]).exp().masked_fill(hidden, 0.0)  # a query that sees nothing has nan
    grad_weights = torch.einsum("qhd,khd->hqk", gradient, _repeat_heads(value, query))
    delta = (gradient * output.float()).sum(-1).transpose(0, 1)[..., None]
    grad_scores = weights * (grad_weights - delta) * scale
    grad_query = torch.einsum("hqk,khd->qhd", grad_scores, _repeat_heads(key, query))
    grad_key, grad_value = (
        torch.einsum("hqk,qhd->khd", left, right).unflatten(1, (key.shape[1], -1)).sum(2)
        for left, right in ((grad_scores, query.float()), (weights, gradient))
    )
    return grad_query, grad_key, grad_value


def empty_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized gradients of query, key and value; the fake implementation of backward operators."""
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _compute_scores(query: Tensor, key: Tensor, hidden: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query.float(), _repeat_heads(key, query)) * scale
    return scores.masked_fill(hidden, -torch.inf)


def _repeat_heads(states: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values [K, G, D] for each head of queries, in float32."""
    return states.float().repeat_interleave(query.shape[1] // states.shape[1], dim=1)
