"""Attention in pieces of rows: each token sees those of its document up to itself, and those behind it in its span.

Both are attended to by themselves; the two results are joined by the sums of their softmax, and the backward pass of
each is given the joined one.

Shape letters: T tokens of all rows, H heads, D width of a head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from cornstarch.attention.cudnn import Cudnn
from cornstarch.attention.joining import add, join
from cornstarch.attention.pieces import Cut, Pieces


class Kernel(Protocol):
    """Attention in pieces, and its gradients from an output and sums that may be of more than these pieces."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
        """Return the output [T, H, D] and the logarithms of the softmax's sums, float32 [T, H].

        Where a token is in no piece they are whatever was in memory.
        """

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
        """Return the gradients of query, key and value; where a token is in no piece, whatever was in memory."""


class OneByOne:
    """Piece after piece in plain torch: on the CPU, and what others are compared with."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
        """Attend."""
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        sums = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
        groups = query.shape[1] // key.shape[1]
        for asking, asked in _places(cut, len(query)):
            scores = _scores(query[asking], key[asked], cut)
            sums[asking] = scores.logsumexp(-1).transpose(0, 1)
            seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide(value[asked], groups))
            output[asking] = seen.to(query.dtype)
        return output, sums

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
        found = [torch.zeros(one.shape, device=one.device) for one in (query, key, value)]
        groups = query.shape[1] // key.shape[1]
        for asking, asked in _places(cut, len(query)):
            weights = (_scores(query[asking], key[asked], cut) - sums[asking].transpose(0, 1)[..., None]).exp()
            given = gradient[asking].float()
            of_weights = torch.einsum("qhd,khd->hqk", given, wide(value[asked], groups))
            of_sums = (given * output[asking].float()).sum(-1).transpose(0, 1)[..., None]
            of_scores = weights * (of_weights - of_sums) * cut.scale
            found[0][asking] += torch.einsum("hqk,khd->qhd", of_scores, wide(key[asked], groups))
            found[1][asked] += narrow(torch.einsum("hqk,qhd->khd", of_scores, query[asking].float()), groups)
            found[2][asked] += narrow(torch.einsum("hqk,qhd->khd", weights, given), groups)
        of_query, of_key, of_value = (one.to(query.dtype) for one in found)
        return of_query, of_key, of_value


def _places(cut: Cut, tokens: int) -> list[tuple[slice, slice]]:
    """Return, for every piece, the tokens that ask and the tokens that are asked."""
    if cut.pieces is None:
        begins, lengths = list(range(0, tokens, tokens // cut.rows)), [tokens // cut.rows] * cut.rows
    else:
        begins, lengths = cut.pieces.tolist()
    further = 1 if cut.ahead else 0
    return [
        (slice(begin, begin + length), slice(begin + further, begin + further + length))
        for begin, length in zip(begins, lengths, strict=True)
        if length
    ]


def wide(states: Tensor, groups: int) -> Tensor:
    """Return keys or values once for each head of a group, in float32."""
    return states.float().repeat_interleave(groups, dim=1)


def narrow(states: Tensor, groups: int) -> Tensor:
    """Add up what the heads of a group have."""
    return states.unflatten(1, (-1, groups)).sum(2)


def _scores(query: Tensor, key: Tensor, cut: Cut) -> Tensor:
    """Return the scores of a piece, float32 [H, asking, asked]."""
    scores = torch.einsum("qhd,khd->hqk", query.float(), wide(key, query.shape[1] // key.shape[1])) * cut.scale
    every = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
    return scores.masked_fill(every.tril(-1) if cut.ahead else every.triu(1), -torch.inf)


def _kernel(tensor: Tensor) -> Kernel:
    return Cudnn() if tensor.is_cuda else OneByOne()


# ---------------------------------------------------------------------------------------------------- both pieces


@torch.library.custom_op("cornstarch::attend_in_pieces", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Tensor,
    documents: Tensor | None,
    spans: Tensor | None,
    asking: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    rows, longest, longest_span = sizes.tolist()
    kernel = _kernel(query)
    output, sums = kernel(query, key, value, Cut(documents, rows, longest, scale, ahead=False))
    if spans is not None and asking is not None:
        more = kernel(query, key, value, Cut(spans, rows, longest_span, scale, ahead=True))
        join(output, sums, *more, asking)
    return output, sums


@_attend.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("cornstarch::attend_in_pieces_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    sizes: Tensor,
    documents: Tensor | None,
    spans: Tensor | None,
    asking: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, longest, longest_span = sizes.tolist()
    kernel, states = _kernel(query), (gradient, query, key, value, output, sums)
    found = kernel.backward(*states, Cut(documents, rows, longest, scale, ahead=False))
    if spans is not None and asking is not None:
        more = kernel.backward(*states, Cut(spans, rows, longest_span, scale, ahead=True))
        add(found, more, asking)
    return found


@_attend_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sizes, documents, spans, asking, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, sizes, documents, spans, asking)


def _differentiate(ctx: Any, gradient: Tensor, of_sums: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.cornstarch.attend_in_pieces_backward(gradient, *ctx.saved_tensors, ctx.scale)
    return (*found, *[None] * 5)


_attend.register_autograd(_differentiate, setup_context=_remember)


def attend_in_pieces(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float) -> Tensor:
    """Attend for a layer: [B, H, S, D], keys and values with as many heads or fewer -> [B, S, H, D]."""
    rows, _, tokens, _ = query.shape
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    output, _ = torch.ops.cornstarch.attend_in_pieces(
        *flat, pieces.sizes, pieces.documents, pieces.spans, pieces.asking, scale
    )
    found: Tensor = output.unflatten(0, (rows, tokens))
    return found
