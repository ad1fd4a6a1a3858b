"""cuDNN's kernels for causal masks with documents and spans, as pieces of concatenated rows.

In a document a token sees the tokens up to itself; in a span it also sees the tokens after itself. A kernel that knows
these two masks, and takes the starts and lengths of pieces, runs once for documents and once for spans, and no mask is
ever read block by block. The two results are merged by their logsumexp, and the backward pass of each is given the
merged output. On a CPU the same operators run in plain torch.

Shape letters: T tokens of all rows concatenated, N pieces, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cornstarch.attention import cudnn_kernels
from cornstarch.attention.backends import DocumentBackend, register_attention_backend
from cornstarch.attention.mask import MaskSpec, find_starts, list_pieces, round_up
from cornstarch.attention.torch_attention import attend_plainly, attend_plainly_backward, empty_gradients
from cornstarch.compat import has_triton


@dataclass(frozen=True, eq=False)
class PieceMask:
    """The starts and lengths of pieces, int64 [2, N + 1], the longest first, the last of them empty.

    Numbers of pieces are rounded up, so that batches of other sizes need no other kernels: more pieces may be empty.
    """

    sizes: Tensor
    """int64 [3] on the CPU: rows, tokens of the longest document, tokens of the longest span."""
    documents: Tensor | None
    """None: every row is one document."""
    spans: Tensor | None
    """Without their last token, which sees nothing after itself; None: there are no spans."""
    in_span: Tensor | None
    """bool [T]: whether a token is in `spans`; None with them."""
    spec: MaskSpec

    @cached_property
    def block_mask(self) -> BlockMask:
        """The same mask for FlexAttention."""
        return self.spec.block_mask()


def build_piece_mask(spec: MaskSpec) -> PieceMask:
    """Build the mask of a causal spec with contiguous documents and spans. Nothing is read from the device."""
    counts = spec.counts
    rows, tokens = spec.documents.shape
    new_document = find_starts(spec.documents).flatten()
    documents = spans = in_span = None
    if not counts.whole_rows:
        documents = list_pieces(new_document, torch.ones_like(new_document), round_up(counts.documents))
        documents = _sort_by_length(documents)
    if counts.longest_span > 1:
        inside = ((spec.spans >= 0) & (spec.documents > 0)).flatten()
        new_span = new_document | find_starts(spec.spans).flatten()
        spans = list_pieces(new_span & inside, inside, round_up(counts.spans))
        spans[1] = (spans[1] - 1).clamp(min=0)
        spans = _sort_by_length(spans)
        in_span = torch.zeros_like(inside)
        in_span[:-1] = inside[:-1] & inside[1:] & ~new_span[1:]
    longest = tokens if counts.whole_rows else min(round_up(counts.longest), tokens)
    sizes = torch.tensor([rows, longest, min(round_up(counts.longest_span), tokens)])
    return PieceMask(sizes, documents, spans, in_span, spec)


def _sort_by_length(pieces: Tensor) -> Tensor:
    return pieces[:, pieces[1].argsort(descending=True, stable=True)]


# ------------------------------------------------------------------------------------------------ kernels


class PieceBatch(NamedTuple):
    """One call of a kernel: in each piece a token sees the tokens up to itself.

    With `looks_ahead`, it sees the tokens after itself, in a piece that continues for one token past its length.
    """

    pieces: Tensor | None
    """As in `PieceMask`; None: the rows."""
    rows: int
    longest: int
    """Tokens of the longest piece, or more."""
    scale: float
    looks_ahead: bool


class PlainKernel:
    """Attention piece by piece in plain torch, on a CPU.

    As in `CudnnKernel`, output and logsumexp in the backward pass may be of more than these pieces, and results of
    tokens outside of all pieces mean nothing.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, batch: PieceBatch) -> tuple[Tensor, Tensor]:
        """Return the output [T, H, D] and the logsumexp of the scores, float32 [T, H]."""
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        logsumexp = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
        for queries, keys, hidden in _iterate_pieces(batch, len(query)):
            found = attend_plainly(query[queries], key[keys], value[keys], hidden, batch.scale)
            output[queries], logsumexp[queries] = found[0], found[1].transpose(0, 1)
        return output, logsumexp

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        batch: PieceBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        gradients = [torch.zeros(one.shape, device=one.device) for one in (query, key, value)]
        for queries, keys, hidden in _iterate_pieces(batch, len(query)):
            states = (gradient[queries], query[queries], key[keys], value[keys], output[queries])
            found = attend_plainly_backward(*states, logsumexp[queries].transpose(0, 1), hidden, batch.scale)
            for whole, where, part in zip(gradients, (queries, keys, keys), found, strict=True):
                whole[where] += part
        grad_query, grad_key, grad_value = (one.to(query.dtype) for one in gradients)
        return grad_query, grad_key, grad_value


def _iterate_pieces(batch: PieceBatch, tokens: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the queries, the keys, and the hidden pairs of every piece."""
    if batch.pieces is None:
        starts, lengths = list(range(0, tokens, tokens // batch.rows)), [tokens // batch.rows] * batch.rows
    else:
        starts, lengths = batch.pieces.tolist()
    ahead = 1 if batch.looks_ahead else 0
    for start, length in zip(starts, lengths, strict=True):
        if length:
            pairs = torch.ones(length, length, dtype=torch.bool)
            keys = slice(start + ahead, start + ahead + length)
            yield slice(start, start + length), keys, pairs.tril(-1) if batch.looks_ahead else pairs.triu(1)


def _select_kernel(tensor: Tensor) -> PlainKernel | cudnn_kernels.CudnnKernel:
    return cudnn_kernels.CudnnKernel() if tensor.is_cuda else PlainKernel()


# ------------------------------------------------------------------------------------------------ merging
# In place, and only tokens in spans are touched: the results are as large as a layer's states, and reading them costs
# time.


def _merge_outputs(output: Tensor, logsumexp: Tensor, more: Tensor, more_logsumexp: Tensor, in_span: Tensor) -> None:
    if output.is_cuda and has_triton():
        from cornstarch.attention import triton_merge

        return triton_merge.merge_outputs(output, logsumexp, more, more_logsumexp, in_span)
    both = torch.logaddexp(logsumexp, more_logsumexp)
    old, new = (logsumexp - both).exp().unsqueeze(-1), (more_logsumexp - both).exp().unsqueeze(-1)
    output.copy_(torch.where(in_span[:, None, None], output * old + more * new, output))
    logsumexp.copy_(torch.where(in_span[:, None], both, logsumexp))


def _add_gradients(gradient: Tensor, more: Tensor, in_span: Tensor, ahead: int) -> None:
    """Add gradients of tokens that come `ahead` tokens after one in a span."""
    if gradient.is_cuda and has_triton():
        from cornstarch.attention import triton_merge

        return triton_merge.add_gradients(gradient, more, in_span, ahead)
    here = torch.zeros_like(in_span)
    here[ahead:] = in_span[: len(in_span) - ahead]
    gradient.copy_(torch.where(here[:, None, None], gradient + more, gradient))


# ------------------------------------------------------------------------------------------------ operators


@torch.library.custom_op("cornstarch::attend_pieces", mutates_args=())
def _attend_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Tensor,
    documents: Tensor | None,
    spans: Tensor | None,
    in_span: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    rows, longest, longest_span = sizes.tolist()
    kernel = _select_kernel(query)
    output, logsumexp = kernel(query, key, value, PieceBatch(documents, rows, longest, scale, looks_ahead=False))
    if spans is not None and in_span is not None:
        more = kernel(query, key, value, PieceBatch(spans, rows, longest_span, scale, looks_ahead=True))
        _merge_outputs(output, logsumexp, *more, in_span)
    return output, logsumexp


@_attend_pieces.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("cornstarch::attend_pieces_backward", mutates_args=())
def _attend_pieces_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    sizes: Tensor,
    documents: Tensor | None,
    spans: Tensor | None,
    in_span: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, longest, longest_span = sizes.tolist()
    kernel, states = _select_kernel(query), (gradient, query, key, value, output, logsumexp)
    gradients = kernel.backward(*states, PieceBatch(documents, rows, longest, scale, looks_ahead=False))
    if spans is not None and in_span is not None:
        more = kernel.backward(*states, PieceBatch(spans, rows, longest_span, scale, looks_ahead=True))
        for found, other, ahead in zip(gradients, more, (0, 1, 1), strict=True):  # keys are one token further on
            _add_gradients(found, other, in_span, ahead)
    return gradients


_attend_pieces_backward.register_fake(empty_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sizes, documents, spans, in_span, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, sizes, documents, spans, in_span)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.cornstarch.attend_pieces_backward(gradient, *ctx.saved_tensors, ctx.scale)
    return (*found, *[None] * 5)


_attend_pieces.register_autograd(_differentiate, setup_context=_save)


def attend_pieces(query: Tensor, key: Tensor, value: Tensor, pieces: PieceMask, scale: float) -> Tensor:
    """Attend: [B, H, S, D], keys and values with as many heads or fewer -> [B, S, H, D]."""
    rows, _, tokens, _ = query.shape
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    output, _ = torch.ops.cornstarch.attend_pieces(
        *flat, pieces.sizes, pieces.documents, pieces.spans, pieces.in_span, scale
    )
    found: Tensor = output.unflatten(0, (rows, tokens))
    return found


class CudnnBackend(DocumentBackend):
    """cuDNN for whole rows."""

    name = "cudnn"
    mask_type = PieceMask
    choices = ("auto", "varlen", "cudnn")
    priority = 10
    package = "nvidia-cudnn-frontend"
    head_dim_multiple = 8

    def is_installed(self) -> bool:
        return cudnn_kernels.has_cudnn()

    def is_available(self, device: torch.device, head_dim: int | None) -> bool:
        if head_dim is None or not self.supports_head_dim(head_dim):
            return False
        return cudnn_kernels.has_cudnn() and cudnn_kernels.has_kernels(head_dim, device)

    def build_mask(self, spec: MaskSpec, queries: Tensor | None = None, keys: Tensor | None = None) -> Any:
        return build_piece_mask(spec)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        return attend_pieces(query, key, value, mask, scale)


register_attention_backend(CudnnBackend())
