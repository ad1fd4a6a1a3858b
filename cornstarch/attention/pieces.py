"""A mask of documents and spans as pieces of rows that are laid end to end, for kernels of two simple masks.

In a document a token sees those up to itself. In a span it sees those behind itself, too. So a kernel that knows two
masks, and takes where a piece begins and how long it is, does for both, and no block of a mask is ever looked at.

Shape letters: T tokens of all rows, N pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cornstarch.attention.mask import Counts, MaskSpec, changes


@dataclass(frozen=True, eq=False)
class Pieces:
    """Where pieces begin and how long they are, int64 [2, N + 1], the longest first, the last of them empty.

    Numbers are rounded up, so that batches of other sizes need no other kernels: there may be more that are empty.
    """

    sizes: Tensor
    """int64 [3] on the CPU: rows, tokens of the longest document, and of the longest span."""
    documents: Tensor | None
    """None: every row is one."""
    spans: Tensor | None
    """Without their last token, behind which there is none; None: there are no spans."""
    asking: Tensor | None
    """bool [T]: whether a token is in one of these spans, and not its last; None with them."""
    otherwise: Callable[[], BlockMask]
    """Makes the same as a block mask."""

    @cached_property
    def block_mask(self) -> BlockMask:
        """The same for FlexAttention."""
        return self.otherwise()


class Cut(NamedTuple):
    """What a kernel is asked for: in each piece a token sees those up to itself.

    Or, `ahead`, those behind itself, in a piece that goes on for one token more than it is long.
    """

    pieces: Tensor | None
    """As in `Pieces`; None: the rows."""
    rows: int
    longest: int
    """Tokens of the longest piece, or more."""
    scale: float
    """Of the scores."""
    ahead: bool


def pieces_of(spec: MaskSpec, counts: Counts, otherwise: Callable[[], BlockMask]) -> Pieces:
    """Return the pieces of a causal mask with spans. Nothing is read from the device."""
    rows, tokens = spec.documents.shape
    begins = changes(spec.documents).flatten()
    documents = spans = asking = None
    if not counts.whole_rows:
        documents = listed(begins, torch.ones_like(begins), rounded_up(counts.documents))
    if counts.longest_span > 1:
        inside = ((spec.spans >= 0) & (spec.documents > 0)).flatten()
        new_span = begins | changes(spec.spans).flatten()
        spans = listed(new_span & inside, inside, rounded_up(counts.spans))
        spans[1] = (spans[1] - 1).clamp(min=0)
        asking = torch.zeros_like(inside)
        asking[:-1] = inside[:-1] & inside[1:] & ~new_span[1:]
    documents, spans = (None if one is None else _longest_first(one) for one in (documents, spans))
    longest = tokens if counts.whole_rows else min(rounded_up(counts.longest), tokens)
    sizes = torch.tensor([rows, longest, min(rounded_up(counts.longest_span), tokens)])
    return Pieces(sizes, documents, spans, asking, otherwise)


def listed(begins: Tensor, inside: Tensor, count: int) -> Tensor:
    """Return where pieces begin and how long they are, given where tokens are in one at all."""
    piece = torch.where(inside, begins.cumsum(0) - 1, count)
    starts = torch.full((count + 1,), len(begins), device=begins.device)
    starts.scatter_reduce_(0, piece, torch.arange(len(begins), device=begins.device), "amin")
    lengths = torch.zeros_like(starts).scatter_add_(0, piece, inside.long())
    starts[count:].fill_(len(begins))
    lengths[count:].zero_()
    return torch.stack([starts, lengths])


def _longest_first(pieces: Tensor) -> Tensor:
    return pieces[:, pieces[1].argsort(descending=True, stable=True)]


def rounded_up(count: int) -> int:
    """Round up to a power of two, 2 or more: what is compiled for several is not for one."""
    return 1 << max(count - 1, 1).bit_length()
