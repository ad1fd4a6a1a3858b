"""Token distribution: which context-parallel rank computes which tokens; NumPy only, recomputed for every batch.

Tokens are assigned in blocks of up to 128. The work of a block is the pairs that its queries see (counted without
building the mask) plus the linear layers for its tokens. All rows of a batch are split alike.

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cornstarch.errors import ConfigError
from cornstarch.plan.balancing import assign_largest_first

DistributionMethod = Literal["uniform", "zigzag", "makespan_min", "auto"]
Integers = NDArray[np.int64]

BLOCK = 128
_BLOCKS_PER_RANK = 8  # with fewer blocks the work cannot be balanced
_BALANCED = 1.05  # largest over mean load that counts as even
_MAX_SWAPS = 64
PARTIAL = 1.3 * BLOCK * BLOCK
"""The extra cost, in pairs, of a tile of 128 × 128 pairs of which only some are visible: FlexAttention evaluates the
mask there (measured on an H200)."""


@dataclass(frozen=True, eq=False)
class BlockWork:
    """The cost of each block of tokens, in pairs of a query and a key."""

    blocks: NDArray[np.float64]
    """[number of blocks]"""
    block: int
    """Tokens of a block; the last one may have fewer."""
    tokens: int
    """Tokens of a row."""


@dataclass(frozen=True, eq=False)
class TokenDistribution:
    """The tokens of each rank."""

    blocks: tuple[Integers, ...]
    """By rank, ascending numbers of its blocks."""
    work: BlockWork
    how: str
    """The method; never auto."""
    reason: str

    def tokens(self, rank: int) -> Integers:
        """Return the ascending positions of a rank's tokens in the row."""
        starts = self.blocks[rank] * self.work.block
        positions = (starts[:, None] + np.arange(self.work.block)).reshape(-1)
        return positions[positions < self.work.tokens]

    @property
    def loads(self) -> NDArray[np.float64]:
        return np.array([self.work.blocks[own].sum() for own in self.blocks])

    @property
    def imbalance(self) -> float:
        """The largest load over the mean load: 1 is even."""
        loads = self.loads
        return float(loads.max() / loads.mean()) if loads.any() else 1.0

    @property
    def token_imbalance(self) -> float:
        """The most tokens of a rank over the mean: activation memory follows the number of tokens."""
        counts = [len(self.tokens(rank)) for rank in range(len(self.blocks))]
        return max(counts) * len(counts) / sum(counts)


Distribute = Callable[[BlockWork, int], TokenDistribution]


def choose_block_size(tokens: int, ranks: int) -> int:
    """Return the tokens of a block: 128, or fewer where that would leave too few blocks."""
    return max(1, min(BLOCK, tokens // (ranks * _BLOCKS_PER_RANK)))


def compute_mask_work(
    documents: NDArray[np.integer],
    spans: NDArray[np.integer] | None = None,
    *,
    block: int = BLOCK,
    linear: float = 0.0,
    windows: Sequence[int | None] = (None,),
    partial: float = 0.0,
) -> BlockWork:
    """Return the work of each block of tokens under a mask of documents and bidirectional spans, both [B, S].

    In `documents` 0 is padding; in `spans` -1 is text, and equal numbers in a document see each other both ways.
    `linear`: the cost of a token's linear layers, in pairs: parameters of a layer over twice its width. `windows`: that
    of each kind of layer (a chunk counts as one); the work is the mean over them. `partial`: as `PARTIAL`, or 0.
    """
    documents = np.atleast_2d(documents)
    rows, tokens = documents.shape
    seen, starts = np.zeros(tokens), np.arange(0, tokens, block)
    tiles = np.zeros(len(starts))
    for row in range(rows):
        before, after = _count_visible(documents[row], None if spans is None else np.atleast_2d(spans)[row])
        for window in windows:
            reach = before if window is None else np.minimum(before, window)
            seen += (reach + after) / len(windows)
            tiles += _count_partial_tiles(reach, after, starts) / len(windows) if partial else 0.0
    return BlockWork(np.add.reduceat(seen + linear * rows, starts) + partial * tiles, block, tokens)


def _count_partial_tiles(before: Integers, after: Integers, starts: Integers) -> Integers:
    """Return, for each block of queries, the tiles of 128 keys that it sees, but not with every query and key."""
    position = np.arange(len(before))
    first, last = position - before + 1, position + after
    touched = np.maximum.reduceat(last, starts) // BLOCK - np.minimum.reduceat(first, starts) // BLOCK + 1
    begin, end = -(-np.maximum.reduceat(first, starts) // BLOCK), (np.minimum.reduceat(last, starts) + 1) // BLOCK
    return touched - np.maximum(end - begin, 0)


def _count_visible(documents: NDArray[np.integer], spans: NDArray[np.integer] | None) -> tuple[Integers, Integers]:
    """Return, for each token, how many tokens it sees up to itself, and how many after itself."""
    changes = documents[1:] != documents[:-1]
    if spans is not None:
        changes |= spans[1:] != spans[:-1]
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    lengths = np.diff(starts, append=len(documents))
    offsets = np.arange(len(documents)) - np.repeat(starts, lengths)
    padding = documents[starts] <= 0
    earlier = np.where(padding, 0, _count_earlier(documents[starts], lengths))
    before = np.where(np.repeat(padding, lengths), 1, np.repeat(earlier, lengths) + offsets + 1)
    if spans is None:
        return before, np.zeros_like(before)
    inside = (spans[starts] >= 0) & ~padding
    # Tokens in later runs of the same span and document.
    keys = documents[starts].astype(np.int64) * (int(spans[starts].max(initial=0)) + 2) + spans[starts] + 1
    later = _count_earlier(keys[::-1], lengths[::-1])[::-1]
    after = np.repeat(np.where(inside, later + lengths - 1, 0), lengths)
    return before, np.where(np.repeat(inside, lengths), after - offsets, 0)


def _count_earlier(keys: NDArray[np.integer], lengths: Integers) -> Integers:
    """Return, for each run, the tokens in earlier runs of the same key."""
    order = np.argsort(keys, kind="stable")
    sorted_keys, sorted_lengths = keys[order], lengths[order]
    total = np.cumsum(sorted_lengths) - sorted_lengths
    firsts = np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]])
    base = np.maximum.accumulate(np.where(firsts, total, 0))
    counts = np.empty_like(total)
    counts[order] = total - base
    return counts


def distribute(work: BlockWork, ranks: int, how: str = "auto") -> TokenDistribution:
    """Distribute the blocks of a row over ranks.

    Each gets at least one block. uniform: one piece each; zigzag: a piece from the front and its mirror image from the
    back, even for causal text; makespan_min: the most even under this mask; auto: the first that is even within 5 %.
    """
    if how not in get_args(DistributionMethod):
        raise ConfigError(f"distribution = {how!r}: expected one of {', '.join(get_args(DistributionMethod))}.")
    if ranks < 1 or len(work.blocks) < ranks:
        raise ConfigError(
            f"{work.tokens} tokens in blocks of {work.block} are {len(work.blocks)} blocks, which cannot be split over "
            f"{ranks} ranks. Use fewer ranks, smaller blocks or longer rows."
        )
    if how != "auto":
        return _distribute(work, ranks, how)
    tried = []
    for method in ("uniform", "zigzag", "makespan_min"):
        found = _distribute(work, ranks, method)
        tried.append(f"{found.how} {found.imbalance:.2f}")
        if found.imbalance <= _BALANCED:
            break
    return TokenDistribution(found.blocks, work, found.how, f"largest over mean work: {', '.join(tried)}")


def _distribute(work: BlockWork, ranks: int, how: str) -> TokenDistribution:
    if how == "makespan_min":
        return _distribute_makespan_min(work, ranks)
    pieces = np.array_split(np.arange(len(work.blocks)), ranks if how == "uniform" else 2 * ranks)
    if how == "uniform":
        return TokenDistribution(tuple(pieces), work, how, "one piece of the row each")
    pairs = tuple(np.concatenate([pieces[rank], pieces[-1 - rank]]) for rank in range(ranks))
    return TokenDistribution(pairs, work, how, "a piece from the front and its mirror image from the back")


def _distribute_makespan_min(work: BlockWork, ranks: int) -> TokenDistribution:
    """Give each rank equally many blocks, which keeps memory even; by work alone only if that is more even."""
    best = _from_owners(work, ranks, _swap_blocks(work, ranks, _assign_in_rounds(work, ranks)), "as many blocks each")
    if best.imbalance > 1 + (_BALANCED - 1) / 2:
        # Blocks without work must be distributed, too: every rank needs at least one.
        heaviest_first = assign_largest_first(np.maximum(work.blocks, 1e-9).tolist(), ranks)
        free = _swap_blocks(work, ranks, np.array(heaviest_first, dtype=np.int64))
        other = _from_owners(work, ranks, free, "the heaviest blocks first, to the least loaded rank")
        best = min(best, other, key=lambda one: one.imbalance)
    return best


def _from_owners(work: BlockWork, ranks: int, owners: Integers, reason: str) -> TokenDistribution:
    order = np.argsort(owners, kind="stable")
    pieces = np.split(order, np.cumsum(np.bincount(owners, minlength=ranks))[:-1])
    return TokenDistribution(tuple(pieces), work, "makespan_min", reason)


def _assign_in_rounds(work: BlockWork, ranks: int) -> Integers:
    """Assign one block to every rank in each round: the heaviest block to the least loaded rank."""
    order = np.argsort(-work.blocks, kind="stable")
    owners = np.empty(len(order), dtype=np.int64)
    loads = np.zeros(ranks)
    for start in range(0, len(order), ranks):
        blocks = order[start : start + ranks]
        takers = np.argsort(loads, kind="stable")[: len(blocks)]
        owners[blocks] = takers
        loads[takers] += work.blocks[blocks]
    return owners


def _swap_blocks(work: BlockWork, ranks: int, owners: Integers) -> Integers:
    """Swap a block of the most loaded rank for a lighter one of the least loaded rank while that helps."""
    owners = owners.copy()
    loads = np.bincount(owners, weights=work.blocks, minlength=ranks)
    for _ in range(_MAX_SWAPS):
        heaviest, lightest = int(loads.argmax()), int(loads.argmin())
        mine, theirs = np.flatnonzero(owners == heaviest), np.flatnonzero(owners == lightest)
        gap = loads[heaviest] - loads[lightest]
        if gap <= 1e-3 * loads.mean():
            break
        moved = work.blocks[mine][:, None] - work.blocks[theirs][None, :]
        best = int(np.abs(moved - gap / 2).argmin())
        here, there = mine[best // len(theirs)], theirs[best % len(theirs)]
        difference = work.blocks[here] - work.blocks[there]
        if not 0 < difference < gap:
            break
        owners[here], owners[there] = lightest, heaviest
        loads[heaviest] -= difference
        loads[lightest] += difference
    return owners
