"""Attention masks as data: which token of a batch sees which, rendered as a dense mask or a FlexAttention block mask.

Shape letters: B rows of the batch, S tokens of a row, Q queries, K keys.

One function, `MaskSpec.mask_function`, states the rule. The dense mask evaluates it on all pairs at once, and a
FlexAttention block mask can pass the same function to the kernel. If documents and spans are contiguous, a query sees a
contiguous range of positions (`MaskSpec.visible_range`): a kernel then compares the position of a key with two numbers,
and the blocks are found without evaluating pairs.
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

# (row, head, query, key) -> bool, elementwise, as in FlexAttention and transformers.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MaskPattern:
    """The pattern of a layer itself; distances are counted within a document."""

    window: int | None = None
    """Sliding window: a token sees the `window` tokens that end with itself (on both sides if not causal)."""
    chunk: int | None = None
    """Chunked attention: a token sees only the chunk of `chunk` tokens of the document that it is in."""
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

BLOCK_SIZE = 128
"""Tokens of a block of a block mask. For shorter rows a dense mask costs less."""
_BLOCK_ROWS = 16  # evaluated at a time


@dataclass(frozen=True)
class DocumentCounts:
    """How many documents and spans a batch has: known on the CPU, so that nothing has to be read from a GPU."""

    documents: int
    """Documents of all rows; a run of padding counts as one."""
    longest: int
    """Tokens of the longest document."""
    whole_rows: bool
    """Whether every row is one document, optionally followed by padding."""
    spans: int = 0
    """An upper bound of the number of spans of all rows."""
    longest_span: int = 0
    """An upper bound of the tokens of the longest span."""
    are_contiguous: bool = True
    """Whether each document and span is contiguous; if not, the other numbers mean nothing."""


@dataclass(frozen=True, eq=False)
class RangeMask:
    """A mask in which each query sees a contiguous range of positions."""

    first: Tensor
    """int32 [B, Q]: the first position that a query sees."""
    last: Tensor
    """int32 [B, Q]: the last position that a query sees."""
    positions: Tensor | None
    """int32 [K]: the positions of the keys; None: the keys are the whole row in order."""
    block_mask: BlockMask
    """The same mask for FlexAttention."""


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """Which token of a batch sees which, as data.

    A token sees the tokens of its own document that the layer's pattern allows, and all tokens of its own span.
    No token sees padding, and padding sees only itself, so that its softmax stays finite.
    """

    documents: Tensor
    """[B, S] integers: 0 is padding; equal positive numbers in a row are one document."""
    spans: Tensor
    """[B, S] integers: -1 is text; equal numbers >= 0 in a document see each other in both directions."""
    known_plain: bool | None = None
    """The value of `is_plain`, if it is known: otherwise it is read from the tensors, which waits for a GPU."""
    known_counts: DocumentCounts | None = None
    """The value of `counts`, if it is known."""

    def __post_init__(self) -> None:
        for name, tensor in (("documents", self.documents), ("spans", self.spans)):
            if tensor.ndim != 2 or tensor.is_floating_point() or tensor.dtype == torch.bool:
                raise ConfigError(
                    f"{name} is a {tensor.dtype} tensor of shape {list(tensor.shape)}; give integers of shape "
                    "[batch, tokens]."
                )
        if self.documents.shape != self.spans.shape:
            raise ConfigError(
                f"documents has shape {list(self.documents.shape)}, spans has shape {list(self.spans.shape)}; "
                "give both the shape of input_ids."
            )

    @classmethod
    def from_documents(cls, documents: Tensor) -> MaskSpec:
        """Build the spec of packed rows of text: [B, S], 0 is padding, equal positive numbers are one document."""
        return cls(documents, torch.full_like(documents, -1))

    @classmethod
    def from_padding(cls, attention_mask: Tensor) -> MaskSpec:
        """Build the spec of one document of text per row: [B, S], 0 or False is padding."""
        if attention_mask.ndim != 2:
            raise ConfigError(
                f"attention_mask has shape {list(attention_mask.shape)}; a MaskSpec is made from [batch, tokens]."
            )
        return cls.from_documents((attention_mask != 0).long())

    def with_spans(self, spans: Tensor) -> MaskSpec:
        """Return the same documents with these spans."""
        return replace(self, spans=spans, known_plain=None, known_counts=None)

    def to(self, device: torch.device | str) -> MaskSpec:
        """Return the spec on another device, or itself if it is already there."""
        documents, spans = self.documents.to(device), self.spans.to(device)
        if documents is self.documents and spans is self.spans:
            return self
        return MaskSpec(documents, spans, self.known_plain, self.known_counts)

    def repeat_interleave(self, times: int) -> MaskSpec:
        """Repeat each row `times` times, as generation does for beams and samples."""
        return MaskSpec(self.documents.repeat_interleave(times, dim=0), self.spans.repeat_interleave(times, dim=0))

    def extend(self, length: int) -> MaskSpec:
        """Return a spec of at least `length` tokens: new tokens are text of each row's last document."""
        rows, tokens = self.documents.shape
        if length <= tokens:
            return self
        index = torch.arange(tokens, device=self.documents.device)
        last = torch.where(self.documents > 0, index, 0).amax(dim=1, keepdim=True)
        added = self.documents.gather(1, last).expand(rows, length - tokens)
        spans = torch.cat([self.spans, torch.full_like(added, -1)], dim=1)
        return MaskSpec(torch.cat([self.documents, added], dim=1), spans)

    def positions(self) -> Tensor:
        """Return the index of each token within its document, [B, S]; 0 for padding."""
        return self._positions

    @cached_property
    def _positions(self) -> Tensor:
        # Rank within the group of equal numbers: documents need not be contiguous, because a row that is padded on the
        # right continues behind its padding during generation.
        order = self.documents.argsort(dim=1, stable=True)
        grouped = self.documents.gather(1, order)
        index = torch.arange(grouped.shape[1], device=grouped.device).expand_as(grouped)
        rank = index - torch.where(find_starts(grouped), index, 0).cummax(dim=1).values
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
    def counts(self) -> DocumentCounts:
        if self.known_counts is not None:
            return self.known_counts
        documents, spans = self.documents.cpu(), self.spans.cpu()
        found = count_documents(documents)
        if not found.are_contiguous or not bool((spans >= 0).any()):
            return found
        groups = documents * (int(spans.max()) + 2) + spans + 1  # a unique number for each span of a document
        runs = _find_runs(torch.where(spans >= 0, groups, 0))
        lengths = runs.lengths[runs.numbers > 0]
        return replace(found, spans=len(lengths), longest_span=int(lengths.max()), are_contiguous=runs.are_unique())

    def mask_function(self, pattern: MaskFunction = CAUSAL) -> MaskFunction:
        """Return the rule on token indices; `pattern` is called with positions within the document."""
        documents, spans, positions = self.documents, self.spans, self.positions()

        def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            document, span = documents[row, query], spans[row, query]
            same_document = (document == documents[row, key]) & (document > 0)
            same_span = (span == spans[row, key]) & (span >= 0)
            in_pattern = pattern(row, head, positions[row, query], positions[row, key])
            itself_as_padding = (document <= 0) & (query == key)
            return (same_document & (in_pattern | same_span)) | itself_as_padding

        return visible

    def visible_range(self, pattern: MaskPattern = CAUSAL) -> tuple[Tensor, Tensor]:
        """Return the first and last position that a token sees, int32 [B, S]: all between, if `are_contiguous`."""
        index = torch.arange(self.documents.shape[1], device=self.documents.device, dtype=torch.int32)
        index = index.expand(self.documents.shape)
        new_document = find_starts(self.documents)
        first, end = find_run_bounds(new_document, index)
        start = first
        last = index if pattern.causal else end
        if pattern.window is not None:
            first, last = first.maximum(index - (pattern.window - 1)), last.minimum(index + (pattern.window - 1))
        if pattern.chunk is not None:
            chunk = index - (index - start) % pattern.chunk
            first, last = first.maximum(chunk), last.minimum(chunk + (pattern.chunk - 1))
        span_first, span_last = find_run_bounds(new_document | find_starts(self.spans), index)
        in_span, is_padding = self.spans >= 0, self.documents <= 0
        first = torch.where(in_span, first.minimum(span_first), first)
        last = torch.where(in_span, last.maximum(span_last), last)
        return torch.where(is_padding, index, first), torch.where(is_padding, index, last)

    def dense(
        self, pattern: MaskFunction = CAUSAL, queries: Tensor | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """Return the mask as bool [B, 1, Q, K]: of all tokens, or of these token indices."""
        index = torch.arange(self.documents.shape[1], device=self.documents.device)
        queries, keys = (index if one is None else one for one in (queries, keys))
        return evaluate_mask(self.mask_function(pattern), len(self.documents), queries, keys)

    def block_mask(
        self, pattern: MaskFunction = CAUSAL, queries: Tensor | None = None, keys: Tensor | None = None
    ) -> BlockMask:
        """Return the mask as a FlexAttention block mask: of all tokens, or of these token indices.

        Equal to torch's `create_block_mask`, which either compiles for half a minute or builds the dense mask first.
        """
        if isinstance(pattern, MaskPattern) and self.counts.are_contiguous:
            return self.build_range_mask(pattern, queries, keys).block_mask
        rows, tokens = self.documents.shape
        index = torch.arange(tokens, device=self.documents.device)
        rule, whole = self.mask_function(pattern), queries is None and keys is None
        queries, keys = index if queries is None else queries, index if keys is None else keys
        some, every = _find_blocks(rule, rows, queries, keys)
        among = rule if whole else lambda row, head, query, key: rule(row, head, queries[query], keys[key])
        return _build_block_mask(some, every, among, len(queries), len(keys))

    def build_range_mask(
        self, pattern: MaskPattern = CAUSAL, queries: Tensor | None = None, keys: Tensor | None = None
    ) -> RangeMask:
        """Return the mask as visible ranges of positions; needs `counts.are_contiguous`."""
        index = torch.arange(self.documents.shape[1], device=self.documents.device) if keys is None else keys
        first, last = (one if queries is None else one[:, queries].contiguous() for one in self.visible_range(pattern))
        positions = None if keys is None else index.int()
        some, every = _find_blocks_in_range(first, last, index)
        blocks = _build_block_mask(some, every, _range_rule(first, last, positions), first.shape[1], len(index))
        return RangeMask(first, last, positions, blocks)


@dataclass(frozen=True, eq=False)
class CausalMask:
    """The mask of a causal spec with documents and spans, in the form that a kernel reads."""

    spec: MaskSpec

    @cached_property
    def block_mask(self) -> BlockMask:
        return self.spec.block_mask()


class _Runs(NamedTuple):
    """Runs of equal numbers in rows."""

    rows: Tensor
    starts: Tensor
    """Within the row."""
    numbers: Tensor
    lengths: Tensor

    def are_unique(self) -> bool:
        keys = torch.stack([self.rows, self.numbers])[:, self.numbers > 0]
        return keys.unique(dim=1).shape[1] == keys.shape[1]


def _find_runs(numbers: Tensor) -> _Runs:
    tokens = numbers.shape[1]
    starts = find_starts(numbers).flatten().nonzero().flatten()
    lengths = torch.diff(starts, append=torch.tensor([numbers.numel()]))
    return _Runs(starts // tokens, starts % tokens, numbers.flatten()[starts], lengths)


def count_documents(documents: Tensor) -> DocumentCounts:
    runs = _find_runs(documents)
    trailing = (runs.numbers <= 0) & (runs.starts > 0)
    whole_rows = bool((documents[:, 0] > 0).all()) and len(trailing) - int(trailing.sum()) == len(documents)
    return DocumentCounts(len(trailing), int(runs.lengths.max()), whole_rows, are_contiguous=runs.are_unique())


def find_starts(numbers: Tensor) -> Tensor:
    """Return where a number in a row differs from the one before it: bool [B, S]."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return starts


def find_run_bounds(starts: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last position of each token's run, given where runs start: [..., S]."""
    first = torch.where(starts, index, 0).cummax(dim=-1).values
    ends = torch.ones_like(starts)
    ends[..., :-1] = starts[..., 1:]
    last = torch.where(ends, index, starts.shape[-1] - 1).flip(-1).cummin(dim=-1).values.flip(-1)
    return first, last


def list_pieces(starts: Tensor, inside: Tensor, count: int) -> Tensor:
    """Return the starts and lengths of `count` pieces and an empty one, from bool [T]: starts, and tokens in pieces."""
    piece = torch.where(inside, starts.cumsum(0) - 1, count)
    first = torch.full((count + 1,), len(starts), device=starts.device)
    first.scatter_reduce_(0, piece, torch.arange(len(starts), device=starts.device), "amin")
    lengths = torch.zeros_like(first).scatter_add_(0, piece, inside.long())
    first[count:].fill_(len(starts))
    lengths[count:].zero_()
    return torch.stack([first, lengths])


def round_up(count: int) -> int:
    """Round up to a power of two, at least 2: kernels compiled for several are not compiled for one."""
    return 1 << max(count - 1, 1).bit_length()


def evaluate_mask(rule: MaskFunction, rows: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Evaluate an elementwise rule on all pairs at once: bool [B, 1, Q, K]."""
    row = torch.arange(rows, device=queries.device)[:, None, None, None]
    mask = rule(row, torch.zeros_like(row), queries[None, None, :, None], keys[None, None, None, :])
    return mask.expand(rows, 1, len(queries), len(keys))


def _range_rule(first: Tensor, last: Tensor, positions: Tensor | None) -> MaskFunction:
    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = key if positions is None else positions[key]
        return (position >= first[row, query]) & (position <= last[row, query])

    return visible


def _build_block_mask(some: Tensor, every: Tensor, rule: MaskFunction, queries: int, keys: int) -> BlockMask:
    """Build a block mask from where blocks have some visible pairs and only visible pairs, bool [B, 1, Q', K']."""
    lists = (*_list_blocks(some & ~every), *_list_blocks(every))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK_SIZE, mask_mod=rule, seq_lengths=(queries, keys))


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks per row of blocks, and their indices in front of the others."""
    flags = blocks.to(torch.int32)
    return flags.sum(dim=-1, dtype=torch.int32), flags.argsort(dim=-1, descending=True, stable=True).int()


def _find_blocks_in_range(first: Tensor, last: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_find_blocks` does, for visible ranges of positions."""
    # The keys of a block may have gaps between their positions, so that a block without visible pairs can be among
    # those that have some.
    missing = -len(positions) % BLOCK_SIZE
    blocks = nn.functional.pad(positions, (0, missing), value=-1).unflatten(0, (-1, BLOCK_SIZE))
    highest = blocks.amax(dim=1)
    lowest = torch.where(blocks < 0, highest[:, None], blocks).amin(dim=1)
    first, last = first[:, None, :, None], last[:, None, :, None]
    some, every = (first <= highest) & (last >= lowest), (first <= lowest) & (last >= highest)
    if missing:  # the last block has keys that do not exist
        every[..., -1].fill_(False)
    gap = (0, 0, 0, -first.shape[2] % BLOCK_SIZE)
    some, every = (nn.functional.pad(one, gap).unflatten(2, (-1, BLOCK_SIZE)) for one in (some, every))
    return some.any(dim=3), every.all(dim=3)


def _find_blocks(rule: MaskFunction, rows: int, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return which blocks have some visible pairs, and which only visible pairs: bool [B, 1, Q/block, K/block]."""
    some, every = [], []
    for strip in queries.split(_BLOCK_ROWS * BLOCK_SIZE):  # so that the dense mask is never in memory
        mask = evaluate_mask(rule, rows, strip, keys)
        mask = nn.functional.pad(mask, (0, -len(keys) % BLOCK_SIZE, 0, -len(strip) % BLOCK_SIZE))
        blocks = mask.unflatten(3, (-1, BLOCK_SIZE)).unflatten(2, (-1, BLOCK_SIZE))
        some.append(blocks.any(dim=-1).any(dim=3))
        every.append(blocks.all(dim=-1).all(dim=3))
    return torch.cat(some, dim=2), torch.cat(every, dim=2)
