"""Attention of some queries to some keys in plain torch, and its gradients: on a CPU, where there are no kernels.

Shape letters: Q queries, K keys, H heads of queries, G of keys and values, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attended(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [Q, H, D] and the logarithms of the softmax's sums, float32 [H, Q]; hidden: bool [Q, K]."""
    scores = _scores(query, key, hidden, scale)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _wide(value, query))
    return output.to(query.dtype), scores.logsumexp(-1)


def differentiated(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    hidden: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value in float32; output and sums may be of more keys than these."""
    given, asked = gradient.float(), query.float()
    weights = (_scores(query, key, hidden, scale) - sums[..., None]).exp()
    of_weights = torch.einsum("qhd,khd->hqk", given, _wide(value, query))
    of_sums = (given * output.float()).sum(-1).transpose(0, 1)[..., None]
    of_scores = weights * (of_weights - of_sums) * scale
    of_query = torch.einsum("hqk,khd->qhd", of_scores, _wide(key, query))
    of_key, of_value = (
        torch.einsum("hqk,qhd->khd", one, other).unflatten(1, (key.shape[1], -1)).sum(2)
        for one, other in ((of_scores, asked), (weights, given))
    )
    return of_query, of_key, of_value


def gradients_like(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of the gradients' shapes, for operations that return the gradients of query, key and value."""
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _scores(query: Tensor, key: Tensor, hidden: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query.float(), _wide(key, query)) * scale
    return scores.masked_fill(hidden, -torch.inf)


def _wide(states: Tensor, query: Tensor) -> Tensor:
    """Return keys or values [K, G, D] once for each head of queries, in float32."""
    return states.float().repeat_interleave(query.shape[1] // states.shape[1], dim=1)
