"""Which token of a batch may see which, as data, and its two renderings.

Shape letters: B rows of the batch, S tokens of a row, Q queries, K keys.

One function, `MaskSpec.visibility`, states the rule. The dense mask evaluates it on all pairs at once, and a
FlexAttention block mask can hand the very same function to the kernel. Where documents and spans are each in one piece,
what a token sees is a piece of the row too, and `MaskSpec.reach` says which: a kernel then has two numbers to look up
for a query and compares them with the place of a key, and blocks are found without looking at pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from cornstarch.errors import ConfigError

# (row, head, query, key) -> bool, elementwise; the form that FlexAttention and transformers use too.
Visibility = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MaskPattern:
    """What a layer itself asks for; distances are counted within a document."""

    window: int | None = None
    """Sliding window: a token sees the `window` tokens that end with itself (on both sides if not causal)."""
    chunk: int | None = None
    """Chunked attention: a token sees only its own chunk of that many tokens of the document."""
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name} = {size}: a token must at least see itself; give 1 or more, or None.")

    def __call__(self, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether the token at position `query` of a document may see the one at position `key`."""
        seen = key <= query if self.causal else key >= 0 * query
        if self.window is not None:
            seen = seen & (key > query - self.window) & (key < query + self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen


CAUSAL = MaskPattern()

BLOCK = 128
"""Tokens of a block of a mask; what is shorter is one, where a dense mask costs less."""
_BLOCK_ROWS = 16


@dataclass(frozen=True)
class Counts:
    """How many documents and spans a batch has, so that nothing has to be read from a GPU to know it."""

    documents: int
    """Documents of all rows; a run of padding counts as one."""
    longest: int
    """Tokens of the longest."""
    whole_rows: bool
    """Whether every row is one document, with padding at most behind it."""
    spans: int = 0
    """Spans of all rows, at most."""
    longest_span: int = 0
    """Tokens of the longest, at most."""
    in_pieces: bool = True
    """Whether each of them is in one piece; else the other numbers say nothing."""


@dataclass(frozen=True, eq=False)
class Between:
    """A mask in which each query sees the keys from one place to another."""

    first: Tensor
    """int32 [B, Q]: the first place that a query sees."""
    last: Tensor
    """int32 [B, Q]: the last."""
    places: Tensor | None
    """int32 [K]: of the keys; None: they are those of the row, one after the other."""
    block_mask: BlockMask
    """The same for FlexAttention."""


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """Which token of a batch may see which, as data.

    A token sees the tokens of its own document that the layer's pattern allows, and all tokens of its own span.
    Padding is seen by no one and sees only itself, so that its softmax stays finite.
    """

    documents: Tensor
    """[B, S] integers: 0 is padding; equal positive numbers in a row are one document."""
    spans: Tensor
    """[B, S] integers: -1 is text; equal numbers >= 0 in a document see each other in both directions."""
    known_plain: bool | None = None
    """Whether it is plain (`is_plain`), if that is known: else it is read from the tensors, and a GPU waited for."""
    known_counts: Counts | None = None
    """What `counts` says, if that is known, likewise."""

    def __post_init__(self) -> None:
        for name in ("documents", "spans"):
            _check_integers(name, getattr(self, name))
        if self.documents.shape != self.spans.shape:
            raise ConfigError(
                f"documents has shape {list(self.documents.shape)}, spans has shape {list(self.spans.shape)}; "
                "give both the shape of input_ids."
            )

    @classmethod
    def from_documents(cls, documents: Tensor) -> MaskSpec:
        """Packed rows of text: [B, S], 0 is padding, equal positive numbers are one document."""
        return cls(documents, torch.full_like(documents, -1))

    @classmethod
    def from_padding(cls, attention_mask: Tensor) -> MaskSpec:
        """One document of text per row: [B, S], 0 or False is padding."""
        if attention_mask.ndim != 2:
            raise ConfigError(
                f"attention_mask has shape {list(attention_mask.shape)}; a MaskSpec is made from [batch, tokens]."
            )
        return cls.from_documents((attention_mask != 0).long())

    def with_spans(self, spans: Tensor) -> MaskSpec:
        """Return the same documents with these spans."""
        return replace(self, spans=spans, known_plain=None, known_counts=None)

    def to(self, device: torch.device | str) -> MaskSpec:
        """Return the spec on another device, or itself if it is there already."""
        documents, spans = self.documents.to(device), self.spans.to(device)
        if documents is self.documents and spans is self.spans:
            return self
        return MaskSpec(documents, spans, self.known_plain, self.known_counts)

    def repeat_interleave(self, times: int) -> MaskSpec:
        """Return a spec with each row `times` times in a row, as generation does for beams and samples."""
        return MaskSpec(self.documents.repeat_interleave(times, dim=0), self.spans.repeat_interleave(times, dim=0))

    def extended(self, length: int) -> MaskSpec:
        """Return a spec of at least `length` tokens: the new ones are text of each row's last document."""
        rows, tokens = self.documents.shape
        if length <= tokens:
            return self
        index = torch.arange(tokens, device=self.documents.device)
        last = torch.where(self.documents > 0, index, 0).amax(dim=1, keepdim=True)
        added = self.documents.gather(1, last).expand(rows, length - tokens)
        return MaskSpec(
            torch.cat([self.documents, added], dim=1),
            torch.cat([self.spans, torch.full_like(added, -1)], dim=1),
        )

    def positions(self) -> Tensor:
        """[B, S] index of each token within its document; 0 for padding."""
        return self._positions

    @cached_property
    def _positions(self) -> Tensor:
        # Rank within the group of equal numbers: documents need not lie in one piece, because a row that was
        # padded on the right goes on behind its padding when it generates.
        order = self.documents.argsort(dim=1, stable=True)
        grouped = self.documents.gather(1, order)
        index = torch.arange(grouped.shape[1], device=grouped.device).expand_as(grouped)
        rank = index - torch.where(changes(grouped), index, 0).cummax(dim=1).values
        positions = torch.empty_like(rank).scatter_(1, order, rank)
        return positions.masked_fill(self.documents <= 0, 0)

    @cached_property
    def is_plain(self) -> bool:
        """Whether every row is one document of text without padding, so that no special mask is needed."""
        if self.known_plain is not None:
            return self.known_plain
        one_document = (self.documents > 0) & (self.documents == self.documents[:, :1])
        return bool((one_document & (self.spans < 0)).all())

    @cached_property
    def counts(self) -> Counts:
        """How many documents and spans there are."""
        if self.known_counts is not None:
            return self.known_counts
        documents, spans = self.documents.cpu(), self.spans.cpu()
        found = count_documents(documents)
        if not found.in_pieces or not bool((spans >= 0).any()):
            return found
        groups = documents * (int(spans.max()) + 2) + spans + 1  # another number for each span of a document
        runs = _runs(torch.where(spans >= 0, groups, 0))
        lengths = runs.lengths[runs.numbers > 0]
        return replace(
            found, spans=len(lengths), longest_span=int(lengths.max()), in_pieces=runs.are_all_of_their_number()
        )

    def visibility(self, pattern: Visibility = CAUSAL) -> Visibility:
        """Return the rule on token indices; `pattern` is asked with positions within the document."""
        documents, spans, positions = self.documents, self.spans, self.positions()

        def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            document, span = documents[row, query], spans[row, query]
            same_document = (document == documents[row, key]) & (document > 0)
            same_span = (span == spans[row, key]) & (span >= 0)
            in_pattern = pattern(row, head, positions[row, query], positions[row, key])
            itself_as_padding = (document <= 0) & (query == key)
            return (same_document & (in_pattern | same_span)) | itself_as_padding

        return visible

    def reach(self, pattern: MaskPattern = CAUSAL) -> tuple[Tensor, Tensor]:
        """Return the first and the last place that each token sees: int32 [B, S].

        It sees all between them, if `counts.in_pieces`.
        """
        index = torch.arange(self.documents.shape[1], device=self.documents.device, dtype=torch.int32)
        index = index.expand(self.documents.shape)
        new_document = changes(self.documents)
        first, end = ends_of_runs(new_document, index)
        start = first
        last = index if pattern.causal else end
        if pattern.window is not None:
            first, last = first.maximum(index - (pattern.window - 1)), last.minimum(index + (pattern.window - 1))
        if pattern.chunk is not None:
            chunk = index - (index - start) % pattern.chunk
            first, last = first.maximum(chunk), last.minimum(chunk + (pattern.chunk - 1))
        span_first, span_last = ends_of_runs(new_document | changes(self.spans), index)
        in_span, is_padding = self.spans >= 0, self.documents <= 0
        first = torch.where(in_span, first.minimum(span_first), first)
        last = torch.where(in_span, last.maximum(span_last), last)
        return torch.where(is_padding, index, first), torch.where(is_padding, index, last)

    def dense(self, pattern: Visibility = CAUSAL, queries: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Return the mask as bool [B, 1, Q, K]: of all tokens, or of these token indices."""
        rows, tokens = self.documents.shape
        everyone = torch.arange(tokens, device=self.documents.device)
        return evaluate(
            self.visibility(pattern),
            rows,
            everyone if queries is None else queries,
            everyone if keys is None else keys,
        )

    def block_mask(
        self, pattern: Visibility = CAUSAL, queries: Tensor | None = None, keys: Tensor | None = None
    ) -> BlockMask:
        """Return the mask as a FlexAttention block mask: of all tokens, or of these token indices.

        Equal to torch's `create_block_mask`, which either compiles for half a minute or builds the whole mask first.
        """
        if isinstance(pattern, MaskPattern) and self.counts.in_pieces:
            return self.between(pattern, queries, keys).block_mask
        rows, tokens = self.documents.shape
        everyone = torch.arange(tokens, device=self.documents.device)
        asking = everyone if queries is None else queries
        asked = everyone if keys is None else keys
        visibility = self.visibility(pattern)
        some, every = _blocks(visibility, rows, asking, asked)
        visibility = visibility if queries is None and keys is None else _placed(visibility, asking, asked)
        return _block_mask(some, every, visibility, len(asking), len(asked))

    def between(
        self, pattern: MaskPattern = CAUSAL, queries: Tensor | None = None, keys: Tensor | None = None
    ) -> Between:
        """Return the mask as the first and the last place that is seen, if `counts.in_pieces`."""
        tokens = self.documents.shape[1]
        asked = torch.arange(tokens, device=self.documents.device) if keys is None else keys
        first, last = (one if queries is None else one[:, queries].contiguous() for one in self.reach(pattern))
        places = None if keys is None else asked.int()
        some, every = _blocks_within(first, last, asked)
        blocks = _block_mask(some, every, _within(first, last, places), first.shape[1], len(asked))
        return Between(first, last, places, blocks)


class _Runs(NamedTuple):
    """Where equal numbers follow each other in rows."""

    rows: Tensor
    places: Tensor
    """In the row."""
    numbers: Tensor
    lengths: Tensor

    def are_all_of_their_number(self) -> bool:
        """Whether no number above 0 is in a row twice."""
        named = torch.stack([self.rows, self.numbers])[:, self.numbers > 0]
        return named.unique(dim=1).shape[1] == named.shape[1]


def _runs(numbers: Tensor) -> _Runs:
    tokens = numbers.shape[1]
    places = changes(numbers).flatten().nonzero().flatten()
    lengths = torch.diff(places, append=torch.tensor([numbers.numel()]))
    return _Runs(places // tokens, places % tokens, numbers.flatten()[places], lengths)


def count_documents(documents: Tensor) -> Counts:
    """Return how many documents the rows have [B, S]."""
    runs = _runs(documents)
    behind = (runs.numbers <= 0) & (runs.places > 0)
    whole_rows = bool((documents[:, 0] > 0).all()) and len(behind) - int(behind.sum()) == len(documents)
    return Counts(len(behind), int(runs.lengths.max()), whole_rows, in_pieces=runs.are_all_of_their_number())


def _block_mask(some: Tensor, every: Tensor, visibility: Visibility, queries: int, keys: int) -> BlockMask:
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=visibility,
        seq_lengths=(queries, keys),
    )


def _placed(visibility: Visibility, queries: Tensor, keys: Tensor) -> Visibility:
    """Return a rule on numbers of queries and keys instead of token indices."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visibility(row, head, queries[query], keys[key])

    return visible


def changes(numbers: Tensor) -> Tensor:
    """Return where a number in a row is not the one before it: bool [B, S]."""
    found = torch.ones_like(numbers, dtype=torch.bool)
    found[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return found


def ends_of_runs(begins: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and last place of the run that each token is in, given where runs begin: [..., S]."""
    first = torch.where(begins, index, 0).cummax(dim=-1).values
    ends = torch.ones_like(begins)
    ends[..., :-1] = begins[..., 1:]
    behind = begins.shape[-1] - 1
    last = torch.where(ends, index, behind).flip(-1).cummin(dim=-1).values.flip(-1)
    return first, last


def _within(first: Tensor, last: Tensor, places: Tensor | None) -> Visibility:
    """Return the rule that a query sees the keys from one place to another; without `places` a key's is its number."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = key if places is None else places[key]
        return (place >= first[row, query]) & (place <= last[row, query])

    return visible


def _blocks_within(first: Tensor, last: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_blocks` does, for queries that see from one place to another.

    Between keys of a block there may be gaps; a block of whose keys none is seen can then be among those of which some
    are.
    """
    missing = -len(places) % BLOCK
    blocks = nn.functional.pad(places, (0, missing), value=-1).unflatten(0, (-1, BLOCK))
    highest = blocks.amax(dim=1)
    lowest = torch.where(blocks < 0, highest[:, None], blocks).amin(dim=1)
    first, last = first[:, None, :, None], last[:, None, :, None]
    some, every = (first <= highest) & (last >= lowest), (first <= lowest) & (last >= highest)
    if missing:  # of a block that is not full not every key is seen
        every[..., -1].fill_(False)
    gap = (0, 0, 0, -first.shape[2] % BLOCK)
    some, every = (nn.functional.pad(one, gap).unflatten(2, (-1, BLOCK)) for one in (some, every))
    return some.any(dim=3), every.all(dim=3)


def _blocks(visibility: Visibility, rows: int, asking: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return in which blocks some query sees some key, and in which every one every: bool [B, 1, Q/block, K/block]."""
    some, every = [], []
    for queries in asking.split(_BLOCK_ROWS * BLOCK):  # in strips, so that the whole mask is never in memory
        mask = evaluate(visibility, rows, queries, keys)
        mask = nn.functional.pad(mask, (0, -len(keys) % BLOCK, 0, -len(queries) % BLOCK))
        blocks = mask.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        some.append(blocks.any(dim=-1).any(dim=3))
        every.append(blocks.all(dim=-1).all(dim=3))
    return torch.cat(some, dim=2), torch.cat(every, dim=2)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of blocks has, and their indices in front of the others."""
    numbers = blocks.to(torch.int32)
    return numbers.sum(dim=-1, dtype=torch.int32), numbers.argsort(dim=-1, descending=True, stable=True).int()


def evaluate(visibility: Visibility, rows: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Ask an elementwise rule about all pairs at once: bool [B, 1, Q, K]."""
    row = torch.arange(rows, device=queries.device)[:, None, None, None]
    mask = visibility(row, torch.zeros_like(row), queries[None, None, :, None], keys[None, None, None, :])
    return mask.expand(rows, 1, len(queries), len(keys))


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.ndim != 2 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ConfigError(
            f"{name} is a {tensor.dtype} tensor of shape {list(tensor.shape)}; give integers of shape [batch, tokens]."
        )
