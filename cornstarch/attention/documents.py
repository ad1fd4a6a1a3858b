"""A mask of documents and spans for one kernel: each token sees its document's, from the first up to a limit.

The limit is the token itself, or the last one of its span. So a key is seen by the queries of its document from one on:
itself, or the first one of its span. Both are looked up.

Shape letters: T tokens of all rows, laid end to end, N documents, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cornstarch.attention.flash import GRADIENTS, package
from cornstarch.attention.mask import BLOCK, Counts, MaskSpec, changes, ends_of_runs
from cornstarch.attention.pieces import listed, rounded_up
from cornstarch.attention.written_out import attended, differentiated, gradients_like

ENTRY = 4
"""Numbers of an entry of an order: a document, or -1, how many blocks are before it, its length, where it begins."""
_PAIR = 2  # heads of a group whose gradients of keys and values are added up in half precision


@dataclass(frozen=True, eq=False)
class Documents:
    """What tokens see, as two lists of numbers, int32.

    In front where documents begin [N + 1], the last of them empty; then a number for each token, counted from where its
    document begins [T]; then an entry for each block of each document, the longest first, in which a kernel looks up
    what it computes. Numbers of documents are rounded up, so that batches of other sizes need no other kernels.
    """

    sizes: Tensor
    """int64 [3] on the CPU: rows, how many numbers are in front, tokens of the longest document or more."""
    ends: Tensor | None
    """How many tokens of its document a token sees; None: rows are documents without spans."""
    firsts: Tensor | None
    """Which is the first that sees it; None likewise."""
    otherwise: Callable[[], BlockMask]
    """Makes the same as a block mask."""

    @cached_property
    def block_mask(self) -> BlockMask:
        """The same for FlexAttention."""
        return self.otherwise()


def documents_of(spec: MaskSpec, counts: Counts, otherwise: Callable[[], BlockMask]) -> Documents:
    """Return the documents of a causal mask with spans. Nothing is read from the device."""
    rows, tokens = spec.documents.shape
    total, device = rows * tokens, spec.documents.device
    if counts.whole_rows and counts.longest_span < 2:
        return Documents(torch.tensor([rows, 0, tokens]), None, None, otherwise)
    index, new_document = torch.arange(total, device=device), changes(spec.documents).flatten()
    if counts.whole_rows:
        begins, begin, longest = torch.arange(rows + 1, device=device) * tokens, index // tokens * tokens, tokens
    else:
        begins = listed(new_document, torch.ones_like(new_document), rounded_up(counts.documents))[0]
        begin, longest = ends_of_runs(new_document, index)[0], min(rounded_up(counts.longest), tokens)
    outside = ((spec.spans < 0) | (spec.documents <= 0)).flatten()
    first, last = ends_of_runs(new_document | outside | changes(spec.spans).flatten(), index)
    order = _order(begins, total)
    ends, firsts = (torch.cat([begins, one, order]).int() for one in (last + 1 - begin, first - begin))
    return Documents(torch.tensor([rows, len(begins), longest]), ends, firsts, otherwise)


def _order(begins: Tensor, tokens: int) -> Tensor:
    """Return the entries of all blocks, the longest documents first, as one list."""
    lengths = begins.diff()
    by_length = lengths.argsort(descending=True, stable=True)
    lengths = lengths[by_length]
    blocks = (lengths + BLOCK - 1) // BLOCK
    entries = torch.stack([by_length, blocks.cumsum(0) - blocks, lengths, begins[by_length]], dim=1)
    nothing = torch.ones_like(entries[:1])
    nothing[:, 0].fill_(-1)
    count = (tokens + len(lengths) * (BLOCK - 1)) // BLOCK  # so many there may be
    repeats = torch.cat([blocks, count - blocks.sum(0, keepdim=True)])
    return torch.cat([entries, nothing]).repeat_interleave(repeats, 0, output_size=count).flatten()


# ------------------------------------------------------------------------------------------------ on a GPU


def _options(sizes: Tensor, numbers: Tensor, scale: float) -> dict[str, Any]:
    _, front, longest = sizes.tolist()
    return {
        "softmax_scale": scale,
        "causal": True,
        "cu_seqlens_q": numbers[:front],
        "cu_seqlens_k": numbers[:front],
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _kernels(adding: bool = False) -> Any:
    from cornstarch.attention.flash_kernels import kernels

    return kernels(adding)


def _backward_on_gpu(
    states: list[Tensor], sums: Tensor, found: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
) -> None:
    """Write gradients: of keys and values of two heads in a group one after the other.

    The kernels would add them up in float32 instead, which is cleared before and rounded behind: as long as it takes to
    read all states once more. Of more heads more would be lost by rounding.
    """
    query, key, value, output, gradient = states
    groups = query.shape[1] // key.shape[1]
    if groups != _PAIR:
        into = dict(zip(GRADIENTS, found, strict=True))
        _kernels()._flash_attn_bwd(*states, sums, **into, **options)
        return
    for head in range(groups):
        every = slice(head, None, groups)
        own = (query[:, every], key, value, output[:, every], gradient[:, every], sums[every])
        into = dict(zip(GRADIENTS, (found[0][:, every], *found[1:]), strict=True))
        _kernels(adding=head > 0)._flash_attn_bwd(*own, **into, **options)


# ------------------------------------------------------------------------------------------------ written out


def _each(sizes: Tensor, numbers: Tensor | None, tokens: int, plain: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield where each document is, and its tokens' numbers; where none are given, their places and `plain` more."""
    rows, front, _ = sizes.tolist()
    if numbers is None:
        length = tokens // rows
        for row in range(rows):
            yield slice(row * length, (row + 1) * length), torch.arange(length) + plain
        return
    begins = numbers[:front].tolist()
    for begin, end in zip(begins[:-1], begins[1:], strict=True):
        if begin < end:
            yield slice(begin, end), numbers[front + begin : front + end]


# ------------------------------------------------------------------------------------------------ the operation


@torch.library.custom_op("cornstarch::attend_in_documents", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Tensor,
    ends: Tensor | None,
    firsts: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    if query.is_cuda and ends is None:
        states = [one.unflatten(0, (int(sizes[0]), -1)) for one in (query, key, value)]
        output, sums = package()._flash_attn_fwd(*states, softmax_scale=scale, causal=True, return_lse=True)[:2]
        return output.flatten(0, 1), sums.view(heads, tokens)  # row after row
    if query.is_cuda and ends is not None:
        states = [query, key, value]
        output, sums = _kernels()._flash_attn_fwd(*states, return_lse=True, **_options(sizes, ends, scale))[:2]
        return output, sums
    output, sums = query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32)
    for here, end in _each(sizes, ends, tokens, plain=1):
        hidden = torch.arange(len(end)) >= end[:, None]
        output[here], sums[:, here] = attended(query[here], key[here], value[here], hidden, scale)
    return output, sums


@_attend.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("cornstarch::attend_in_documents_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    sizes: Tensor,
    firsts: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    found = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    states = [query, key, value, output, gradient]
    if query.is_cuda and firsts is None:
        rows = (int(sizes[0]), -1)
        into = {name: one.unflatten(0, rows) for name, one in zip(GRADIENTS, found, strict=True)}
        states = [one.unflatten(0, rows) for one in states]
        by_row = sums.view(rows[0], query.shape[1], -1)
        package()._flash_attn_bwd(*states, by_row, softmax_scale=scale, causal=True, **into)
    elif query.is_cuda and firsts is not None:
        _backward_on_gpu(states, sums, found, _options(sizes, firsts, scale))
    else:
        for here, first in _each(sizes, firsts, len(query), plain=0):
            hidden = torch.arange(len(first))[:, None] < first
            parts = gradient[here], query[here], key[here], value[here], output[here], sums[:, here]
            own = differentiated(*parts, hidden, scale)
            for whole, part in zip(found, own, strict=True):
                whole[here] = part.to(query.dtype)
    return found


_attend_backward.register_fake(gradients_like)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sizes, _, firsts, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, sizes, firsts)


def _differentiate(ctx: Any, gradient: Tensor, of_sums: Tensor) -> tuple[Tensor | None, ...]:
    given = gradient.contiguous()  # it may be one number for all
    found = torch.ops.cornstarch.attend_in_documents_backward(given, *ctx.saved_tensors, ctx.scale)
    return (*found, *[None] * 4)


_attend.register_autograd(_differentiate, setup_context=_remember)


def attend_in_documents(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float) -> Tensor:
    """Attend for a layer: [B, H, S, D], keys and values with as many heads or fewer -> [B, S, H, D]."""
    rows, _, tokens, _ = query.shape
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    output, _ = torch.ops.cornstarch.attend_in_documents(
        *flat, documents.sizes, documents.ends, documents.firsts, scale
    )
    found: Tensor = output.unflatten(0, (rows, tokens))
    return found
