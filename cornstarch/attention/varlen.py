"""Attention in pieces of rows: each token sees those of its document up to itself, and those behind it in its span.

Both are attended to by themselves; the two results are joined by the sums of their softmax, and the backward pass of
each is given the joined one.

Shape letters: T tokens of all rows, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from cornstarch.attention.cudnn import Cudnn
from cornstarch.attention.joining import add, join
from cornstarch.attention.pieces import Cut, Pieces
from cornstarch.attention.written_out import attended, differentiated, gradients_like


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
        for asking, asked, hidden in _places(cut, len(query)):
            own = attended(query[asking], key[asked], value[asked], hidden, cut.scale)
            output[asking], sums[asking] = own[0], own[1].transpose(0, 1)
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
        for asking, asked, hidden in _places(cut, len(query)):
            states = (gradient[asking], query[asking], key[asked], value[asked], output[asking])
            own = differentiated(*states, sums[asking].transpose(0, 1), hidden, cut.scale)
            for whole, where, part in zip(found, (asking, asked, asked), own, strict=True):
                whole[where] += part
        of_query, of_key, of_value = (one.to(query.dtype) for one in found)
        return of_query, of_key, of_value


def _places(cut: Cut, tokens: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield, for every piece, the tokens that ask, the tokens that are asked, and which are hidden from which."""
    if cut.pieces is None:
        begins, lengths = list(range(0, tokens, tokens // cut.rows)), [tokens // cut.rows] * cut.rows
    else:
        begins, lengths = cut.pieces.tolist()
    further = 1 if cut.ahead else 0
    for begin, length in zip(begins, lengths, strict=True):
        if length:
            every = torch.ones(length, length, dtype=torch.bool)
            asked = slice(begin + further, begin + further + length)
            yield slice(begin, begin + length), asked, every.tril(-1) if cut.ahead else every.triu(1)


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


_attend_backward.register_fake(gradients_like)


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
