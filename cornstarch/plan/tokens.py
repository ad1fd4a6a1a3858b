"""Which rank of context parallelism holds which tokens; pure NumPy, made anew for every batch.

    work = mask_work(documents, spans, block=block_size(tokens, ranks), linear=24_000)
    found = distribute(work, ranks, "auto")
    found.tokens(rank), found.imbalance, found.reason

Tokens are dealt out in blocks of up to 128. A block's work is what its queries see (the mask's real work, never built
as a mask) and what the linear layers do with its tokens. All rows of a batch are cut alike.

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cornstarch.errors import ConfigError

How = Literal["uniform", "zigzag", "makespan_min", "auto"]
Integers = NDArray[np.int64]

BLOCK = 128
_BLOCKS_PER_RANK = 8  # fewer leave too little choice
_BALANCED = 1.05  # largest share over mean share that is as good as even
_SWAPS = 64
PARTIAL = 1.3 * BLOCK * BLOCK
"""What a tile of 128 × 128 pairs costs more if only some are visible than if all are, in pairs: FlexAttention looks up
who sees whom (measured on an H200)."""


@dataclass(frozen=True, eq=False)
class Work:
    """What each block of tokens costs, in pairs of a query and a key."""

    blocks: NDArray[np.float64]
    """[number of blocks]"""
    block: int
    """Tokens of a block; the last may have fewer."""
    tokens: int
    """Tokens of a row."""


@dataclass(frozen=True, eq=False)
class Distribution:
    """Who holds what."""

    blocks: tuple[Integers, ...]
    """For each rank the numbers of its blocks, ascending."""
    work: Work
    how: str
    """Which of the ways it is; never auto."""
    reason: str

    def tokens(self, rank: int) -> Integers:
        """Return the places in the row of a rank's tokens, ascending."""
        starts = self.blocks[rank] * self.work.block
        places = (starts[:, None] + np.arange(self.work.block)).reshape(-1)
        return places[places < self.work.tokens]

    @property
    def loads(self) -> NDArray[np.float64]:
        """The work of each rank."""
        return np.array([self.work.blocks[mine].sum() for mine in self.blocks])

    @property
    def imbalance(self) -> float:
        """The largest load over the mean load: 1 is even."""
        loads = self.loads
        return float(loads.max() / loads.mean()) if loads.any() else 1.0

    @property
    def token_spread(self) -> float:
        """The most tokens that a rank holds over the mean: what memory follows."""
        counts = [len(self.tokens(rank)) for rank in range(len(self.blocks))]
        return max(counts) * len(counts) / sum(counts)


Distribute = Callable[[Work, int], Distribution]


# ------------------------------------------------------------------------------------------------ work


def block_size(tokens: int, ranks: int) -> int:
    """Return how many tokens a block should have: 128, or fewer where that would leave too few blocks."""
    return max(1, min(BLOCK, tokens // (ranks * _BLOCKS_PER_RANK)))


def mask_work(
    documents: NDArray[np.integer],
    spans: NDArray[np.integer] | None = None,
    *,
    block: int = BLOCK,
    linear: float = 0.0,
    windows: Sequence[int | None] = (None,),
    partial: float = 0.0,
) -> Work:
    """Return the work of each block under a mask of documents and bidirectional spans.

    Args:
        documents: [B, S]: 0 is padding, equal positive numbers are one document.
        spans: [B, S]: -1 is text, equal numbers in a document see each other in both directions.
        block: Tokens of a block.
        linear: What linear layers do for a token, in pairs of attention: parameters of a layer over twice its width.
        windows: The window of each kind of layer (a chunk counts as one); the mean over them is taken.
        partial: What a tile of 128 keys costs more where a block's queries see only some of it, in pairs.
    """
    documents = np.atleast_2d(documents)
    rows, tokens = documents.shape
    seen, starts = np.zeros(tokens), np.arange(0, tokens, block)
    tiles = np.zeros(len(starts))
    for row in range(rows):
        before, behind = _visible(documents[row], None if spans is None else np.atleast_2d(spans)[row])
        for window in windows:
            reach = before if window is None else np.minimum(before, window)
            seen += (reach + behind) / len(windows)
            tiles += _partial_tiles(reach, behind, starts) / len(windows) if partial else 0.0
    return Work(np.add.reduceat(seen + linear * rows, starts) + partial * tiles, block, tokens)


def _partial_tiles(before: Integers, behind: Integers, starts: Integers) -> Integers:
    """Return for each block of queries how many tiles of 128 keys it sees, but not with every query and every key."""
    place = np.arange(len(before))
    first, last = place - before + 1, place + behind
    touched = np.maximum.reduceat(last, starts) // BLOCK - np.minimum.reduceat(first, starts) // BLOCK + 1
    begin, end = -(-np.maximum.reduceat(first, starts) // BLOCK), (np.minimum.reduceat(last, starts) + 1) // BLOCK
    return touched - np.maximum(end - begin, 0)


def _visible(documents: NDArray[np.integer], spans: NDArray[np.integer] | None) -> tuple[Integers, Integers]:
    """Return for each token how many it sees up to itself, and how many behind itself."""
    changes = documents[1:] != documents[:-1]
    if spans is not None:
        changes |= spans[1:] != spans[:-1]
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    lengths = np.diff(starts, append=len(documents))
    offsets = np.arange(len(documents)) - np.repeat(starts, lengths)
    padding = documents[starts] <= 0
    earlier = np.where(padding, 0, _earlier(documents[starts], lengths))
    before = np.where(np.repeat(padding, lengths), 1, np.repeat(earlier, lengths) + offsets + 1)
    if spans is None:
        return before, np.zeros_like(before)
    inside = (spans[starts] >= 0) & ~padding
    later = _later(documents[starts], spans[starts], lengths)
    behind = np.repeat(np.where(inside, later + lengths - 1, 0), lengths)
    return before, np.where(np.repeat(inside, lengths), behind - offsets, 0)


def _earlier(keys: NDArray[np.integer], lengths: Integers) -> Integers:
    """Return for each run how many tokens are in earlier runs of the same key."""
    order = np.argsort(keys, kind="stable")
    sorted_keys, sorted_lengths = keys[order], lengths[order]
    total = np.cumsum(sorted_lengths) - sorted_lengths
    firsts = np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]])
    base = np.maximum.accumulate(np.where(firsts, total, 0))
    found = np.empty_like(total)
    found[order] = total - base
    return found


def _later(documents: NDArray[np.integer], spans: NDArray[np.integer], lengths: Integers) -> Integers:
    """Return for each run how many tokens are in later runs of the same span of the same document."""
    width = int(spans.max(initial=0)) + 2
    keys = documents.astype(np.int64) * width + spans + 1
    return _earlier(keys[::-1], lengths[::-1])[::-1]


# ------------------------------------------------------------------------------------------------ distributions


def distribute(work: Work, ranks: int, how: str = "auto") -> Distribution:
    """Deal out the blocks of a row over ranks.

    Args:
        work: What each block costs.
        ranks: How many share the row; every one gets at least one block.
        how: "uniform": one piece each; "zigzag": one piece from the front and its mirror image from the back, even
            for causal text; "makespan_min": whatever is most even under this mask; "auto": the first of them that is
            even within 5 %.
    """
    if how not in get_args(How):
        raise ConfigError(f"distribution = {how!r}: expected one of {', '.join(get_args(How))}.")
    if ranks < 1 or len(work.blocks) < ranks:
        raise ConfigError(
            f"{work.tokens} tokens in blocks of {work.block} are {len(work.blocks)} blocks, which cannot be cut over "
            f"{ranks} ranks. Use fewer ranks, smaller blocks or longer rows."
        )
    if how != "auto":
        return _WAYS[how](work, ranks)
    tried = []
    for way in _WAYS.values():
        found = way(work, ranks)
        tried.append(f"{found.how} {found.imbalance:.2f}")
        if found.imbalance <= _BALANCED:
            break
    return Distribution(found.blocks, work, found.how, f"largest over mean work: {', '.join(tried)}")


def _uniform(work: Work, ranks: int) -> Distribution:
    pieces = np.array_split(np.arange(len(work.blocks)), ranks)
    return Distribution(tuple(pieces), work, "uniform", "one piece of the row each")


def _zigzag(work: Work, ranks: int) -> Distribution:
    pieces = np.array_split(np.arange(len(work.blocks)), 2 * ranks)
    pairs = tuple(np.concatenate([pieces[rank], pieces[-1 - rank]]) for rank in range(ranks))
    return Distribution(pairs, work, "zigzag", "a piece from the front and its mirror image from the back")


def _makespan_min(work: Work, ranks: int) -> Distribution:
    """Deal out as many blocks to each rank, which keeps memory even; by work alone only if that is more even."""
    best = _distribution(work, ranks, _refined(work, ranks, _in_rounds(work, ranks)), "as many blocks each")
    if best.imbalance > 1 + (_BALANCED - 1) / 2:
        free = _refined(work, ranks, _largest_first(work, ranks))
        other = _distribution(work, ranks, free, "the heaviest blocks first to whoever has least")
        best = min(best, other, key=lambda one: one.imbalance)
    return best


def _distribution(work: Work, ranks: int, owners: Integers, reason: str) -> Distribution:
    order = np.argsort(owners, kind="stable")
    pieces = np.split(order, np.cumsum(np.bincount(owners, minlength=ranks))[:-1])
    return Distribution(tuple(pieces), work, "makespan_min", reason)


def _in_rounds(work: Work, ranks: int) -> Integers:
    """Deal out in rounds, in each of which every rank gets a block: the heaviest to whoever has least."""
    order = np.argsort(-work.blocks, kind="stable")
    owners = np.empty(len(order), dtype=np.int64)
    loads = np.zeros(ranks)
    for start in range(0, len(order), ranks):
        dealt = order[start : start + ranks]
        takers = np.argsort(loads, kind="stable")[: len(dealt)]
        owners[dealt] = takers
        loads[takers] += work.blocks[dealt]
    return owners


def _largest_first(work: Work, ranks: int) -> Integers:
    """Deal out the heaviest first, always to whoever has least (LPT)."""
    owners = np.empty(len(work.blocks), dtype=np.int64)
    loads = [(0.0, rank) for rank in range(ranks)]
    for number in np.argsort(-work.blocks, kind="stable").tolist():
        load, rank = loads[0]
        owners[number] = rank
        heapq.heapreplace(loads, (load + max(float(work.blocks[number]), 1e-9), rank))
    return owners


def _refined(work: Work, ranks: int, owners: Integers) -> Integers:
    """Swap a block of the rank with most for a lighter one of another, as long as that helps."""
    owners = owners.copy()
    loads = np.bincount(owners, weights=work.blocks, minlength=ranks)
    for _ in range(_SWAPS):
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


_WAYS: dict[str, Distribute] = {"uniform": _uniform, "zigzag": _zigzag, "makespan_min": _makespan_min}
