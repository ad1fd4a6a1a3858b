"""Context parallelism: which tokens and heads each rank holds, and what it sends: Ulysses and the ring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cornstarch.errors import ConfigError
from cornstarch.explain.story import (
    NUMBER_BYTES,
    SERIES,
    Arrow,
    Box,
    Formula,
    Row,
    Step,
    Story,
    byte_count,
    same_or_range,
)
from cornstarch.plan.communication import all_gather_bytes, all_to_all_bytes, send_bytes
from cornstarch.plan.tokens import Distribution, block_size, distribute, mask_work

HEAD_WIDTH = 64
"""Numbers of a head."""
HEADS_PER_RANK = 2

Piece = tuple[int, int]
"""The tokens of one rank's share, and the heads of another's."""


def shared_out(tokens: int, ranks: int, how: str) -> Distribution:
    """Return who holds which tokens of a causal row, as a run deals them out."""
    pieces = ranks * (2 if how == "zigzag" else 1)
    if tokens % pieces or tokens < pieces:
        near = max(1, tokens // pieces) * pieces
        raise ConfigError(
            f"--elements {tokens}: so many tokens cannot be cut into {pieces} equal pieces, as the formula wants it. "
            f"Use {near} or {near + pieces}."
        )
    return distribute(mask_work(np.ones((1, tokens), dtype=np.int64), block=block_size(tokens, ranks)), ranks, how)


# ------------------------------------------------------------------------------------------------ all to all


def exchanged(
    held: Sequence[Sequence[Piece]], ranks: int, by_heads: bool
) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """Return what each rank holds after an all-to-all, and what each has sent.

    by_heads: a piece goes to the rank of its heads; else back to the rank of its tokens.
    """
    after: list[list[Piece]] = [[] for _ in range(ranks)]
    sent: list[list[Piece]] = [[] for _ in range(ranks)]
    for rank, own in enumerate(held):
        for piece in own:
            target = piece[1] if by_heads else piece[0]
            after[target].append(piece)
            if target != rank:
                sent[rank].append(piece)
    return [sorted(own) for own in after], sent


def ulysses_story(ranks: int, elements: int) -> Story:
    """Return attention by all-to-all; `elements` are tokens."""
    tokens = elements
    found = shared_out(tokens, ranks, "uniform")
    heads = HEADS_PER_RANK * ranks
    before: list[list[Piece]] = [[(rank, head) for head in range(ranks)] for rank in range(ranks)]
    turned, there = exchanged(before, ranks, by_heads=True)
    after, back = exchanged(turned, ranks, by_heads=False)

    def weight(pieces: list[Piece]) -> float:
        return float(sum(len(found.tokens(share)) * HEADS_PER_RANK * HEAD_WIDTH * NUMBER_BYTES for share, _ in pieces))

    def step(title: str, says: str, held: list[list[Piece]], sent: list[list[Piece]], tensors: int) -> Step:
        rows = [
            Row(
                f"rank {rank}",
                tuple(_piece_box(found, at, piece, rank, bool(sent)) for at, piece in enumerate(own)),
                f"sends {byte_count(tensors * weight(sent[rank]))}" if sent else "",
            )
            for rank, own in enumerate(held)
        ]
        return Step(title, says, tuple(rows), (), tuple(tensors * weight(own) for own in sent))

    steps = (
        step("Before", "Every rank holds queries, keys and values of its own tokens, with all heads: everything but "
             "attention looks at one token at a time.", before, [], 0),
        step("All-to-all of q, k and v", "Every rank sends to each other rank the heads that belong to it, and gets "
             "all tokens of its own heads: attention looks at all tokens of one head at a time.", turned, there, 3),
        step("Attention", "Every rank attends with whole rows, in its own heads, by whatever kernel there is.",
             turned, [], 0),
        step("All-to-all of the output", "What came out goes back to the ranks of the tokens, with all heads again.",
             after, back, 1),
    )  # fmt: skip
    size = tokens // ranks * heads * HEAD_WIDTH * NUMBER_BYTES
    counted = tuple(sum(one.sent[rank] for one in steps if one.sent) for rank in range(ranks))
    return Story(
        "ulysses",
        "Ulysses: context parallelism by all-to-all",
        "A row of tokens is cut over ranks. For attention the cut is turned: from some tokens of all heads to all "
        "tokens of some heads, and back. In the picture t0–3 h0–1 are the tokens 0 to 3 of the heads 0 and 1.",
        steps,
        (
            Formula(
                "Bytes that each rank sends for a layer's forward",
                "4 (N − 1) / N × S / N × H × D × 4 B",
                f"N = {ranks}, S = {tokens} tokens, H = {heads} heads of D = {HEAD_WIDTH}",
                byte_count(4 * all_to_all_bytes(size, ranks)),
                same_or_range(counted),
            ),
        ),
        (
            "Backward sends as much once more, the other way round.",
            "There can be no more ranks than heads. With fewer heads of keys than of queries it sends less.",
            "In a run this is cp_mode: all_to_all.",
        ),
    )


def _piece_box(found: Distribution, at: int, piece: Piece, rank: int, moved: bool) -> Box:
    share, head = piece
    tokens = span_words(found.tokens(share).tolist())
    first = head * HEADS_PER_RANK
    heads = f"{first}–{first + HEADS_PER_RANK - 1}"
    came = moved and share != head
    said = f"rank {rank}: tokens {tokens}, heads {heads}"
    return Box(at, at + 1, f"t{tokens} h{heads}", SERIES[head % len(SERIES)], said, came)


# ------------------------------------------------------------------------------------------------ ring


def seen_pairs(queries: Sequence[int], keys: Sequence[int]) -> int:
    """Return how many pairs of a query and a key there are in which the key is not behind the query."""
    return sum(key <= query for query in queries for key in keys)


def ring_story(ranks: int, elements: int) -> Story:
    """Return attention in a ring; `elements` are tokens."""
    tokens = elements
    found = shared_out(tokens, ranks, "zigzag")
    own = [found.tokens(rank).tolist() for rank in range(ranks)]
    heads = HEADS_PER_RANK * ranks
    size = 2 * tokens // ranks * heads * HEAD_WIDTH * NUMBER_BYTES  # keys and values of a rank's tokens
    done = [0] * ranks
    steps = []
    for number in range(ranks):
        rows = []
        last = number == ranks - 1
        for rank in range(ranks):
            owner = (rank - number) % ranks
            pairs = seen_pairs(own[rank], own[owner])
            done[rank] += pairs
            boxes = (
                Box(0, 1, f"t{span_words(own[rank])}", SERIES[rank % 6], f"queries of rank {rank}"),
                Box(
                    1,
                    2,
                    f"t{span_words(own[owner])}",
                    SERIES[owner % 6],
                    f"keys and values of rank {owner}",
                    number > 0,
                ),
                Box(2, 3, f"{pairs} pairs", "n", f"queries and keys that see each other in this round: {pairs}"),
                Box(3, 4, f"{done[rank]} so far", "n", f"of {int(found.loads[rank])}"),
            )
            rows.append(Row(f"rank {rank}", boxes, "" if last else f"sends {byte_count(send_bytes(size))}"))
        arrows = [] if last else [Arrow(rank, (rank + 1) % ranks, 1.5) for rank in range(ranks)]
        sent = () if last else (send_bytes(size),) * ranks
        title, says = f"Round {number + 1} of {ranks}", _ring_sentence(number, ranks)
        steps.append(Step(title, says, tuple(rows), _ring_head(), sent, tuple(arrows)))
    steps.append(_ring_backward(steps[0], ranks, size))
    return Story(
        "ring",
        "Ring attention",
        "A row of tokens is cut over ranks. Queries stay where they are; keys and values go round, so that each rank "
        "sees all of them, one block at a time. In the picture t0–1 are the tokens 0 and 1.",
        tuple(steps),
        tuple(_ring_formulas(ranks, tokens, heads, size, steps, done, found)),
        (
            "Tokens are dealt out in zigzag: a piece from the front and its mirror image from the back, so that all "
            f"ranks have as much to do under a causal mask: {', '.join(f'{load:g}' for load in found.loads)} pairs.",
            "Any number of heads will do. In a run this is cp_mode: ring_attn.",
        ),
    )


def _ring_sentence(number: int, ranks: int) -> str:
    if ranks == 1 or number == ranks - 1:
        return (
            "Every rank attends to the last block; all have seen everything, and the softmax is put together exactly."
        )
    if number == 0:
        return (
            "Every rank attends with its queries to its own keys and values, while it already sends them to the next "
            "rank: transfer and computation overlap."
        )
    return "Every rank attends to the block that has come from the rank before, and passes it on meanwhile."


def _ring_head() -> tuple[Box, ...]:
    names = ("queries", "keys, values", "this round", "together")
    return tuple(Box(at, at + 1, name) for at, name in enumerate(names))


def _ring_backward(first: Step, ranks: int, size: int) -> Step:
    rows = tuple(
        Row(row.name, (*row.boxes[:2], Box(2, 3, "gradients", "n", "of this rank's queries, keys and values", True)),
            f"sends {byte_count((2 * ranks - 1) * send_bytes(size))}")
        for row in first.rows
    )  # fmt: skip
    return Step(
        "Backward",
        "Keys and values go round once more, and with each block the gradient that has been gathered for it, which at "
        f"last goes home: {ranks - 1} messages of the one and {ranks} of the other, because nothing was kept but a "
        "rank's own tokens.",
        rows,
        first.head,
        ((2 * ranks - 1) * send_bytes(size),) * ranks,
    )


def _ring_formulas(
    ranks: int, tokens: int, heads: int, size: int, steps: Sequence[Step], done: Sequence[int], found: Distribution
) -> list[Formula]:
    values = f"N = {ranks}, S = {tokens} tokens, H = {heads} heads of D = {HEAD_WIDTH}"
    forward = tuple(sum(step.sent[rank] for step in steps[:-1] if step.sent) for rank in range(ranks))
    return [
        Formula(
            "Bytes that each rank sends for a layer's forward",
            "(N − 1) / N × 2 S × H × D × 4 B",
            values,
            byte_count(all_gather_bytes(size * ranks, ranks)),
            same_or_range(forward),
        ),
        Formula(
            "For its backward",
            "(2 N − 1) / N × 2 S × H × D × 4 B",
            values,
            byte_count((2 * ranks - 1) * size),
            same_or_range(steps[-1].sent),
        ),
        Formula(
            "Pairs of queries and keys, all ranks",
            "S (S + 1) / 2",
            f"{tokens} × {tokens + 1} / 2",
            f"{tokens * (tokens + 1) // 2:,}",
            f"{sum(done):,}",
        ),
    ]


def span_words(places: Sequence[int]) -> str:
    """Return places in a row as spans: 0–1,14–15."""
    spans: list[list[int]] = []
    for place in places:
        if spans and place == spans[-1][1] + 1:
            spans[-1][1] = place
        else:
            spans.append([place, place])
    return ",".join(f"{low}–{high}" if high > low else str(low) for low, high in spans)
