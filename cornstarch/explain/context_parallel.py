"""Context parallelism by Ulysses and by ring attention: the tokens and heads of each rank, and its messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cornstarch.errors import ConfigError
from cornstarch.explain.story import (
    NUMBER_BYTES,
    SERIES,
    Arrow,
    DiagramBox,
    DiagramRow,
    Formula,
    Story,
    StoryStep,
    format_byte_count,
    format_range,
    sum_sent,
)
from cornstarch.plan.communication import all_gather_bytes, all_to_all_bytes, send_bytes
from cornstarch.plan.token_distribution import TokenDistribution, choose_block_size, compute_mask_work, distribute

HEAD_WIDTH = 64
"""Numbers of a head."""
HEADS_PER_RANK = 2

Piece = tuple[int, int]
"""The tokens of one rank, and the heads of another."""


def distribute_tokens(tokens: int, ranks: int, how: str) -> TokenDistribution:
    """Return the tokens of each rank for a causal row, distributed as in a run."""
    pieces = ranks * (2 if how == "zigzag" else 1)
    if tokens % pieces or tokens < pieces:
        near = max(1, tokens // pieces) * pieces
        raise ConfigError(
            f"--elements {tokens}: this number of tokens cannot be cut into {pieces} equal pieces, as the formulas "
            "need. "
            f"Use {near} or {near + pieces}."
        )
    return distribute(
        compute_mask_work(np.ones((1, tokens), dtype=np.int64), block=choose_block_size(tokens, ranks)), ranks, how
    )


# ------------------------------------------------------------------------------------------------ all to all


def exchange_pieces(
    pieces: Sequence[Sequence[Piece]], ranks: int, by_heads: bool
) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """Return the pieces of each rank after an all-to-all, and those that it has sent.

    Args:
        pieces: The pieces of each rank before.
        ranks: The number of ranks.
        by_heads: Send a piece to the rank of its heads, not back to the rank of its tokens.
    """
    after: list[list[Piece]] = [[] for _ in range(ranks)]
    sent: list[list[Piece]] = [[] for _ in range(ranks)]
    for rank, own in enumerate(pieces):
        for piece in own:
            target = piece[1] if by_heads else piece[0]
            after[target].append(piece)
            if target != rank:
                sent[rank].append(piece)
    return [sorted(own) for own in after], sent


def build_ulysses(ranks: int, elements: int) -> Story:
    """Return attention by all-to-all; `elements` are tokens."""
    tokens = elements
    found = distribute_tokens(tokens, ranks, "uniform")
    heads = HEADS_PER_RANK * ranks
    before: list[list[Piece]] = [[(rank, head) for head in range(ranks)] for rank in range(ranks)]
    turned, there = exchange_pieces(before, ranks, by_heads=True)
    after, back = exchange_pieces(turned, ranks, by_heads=False)

    def weight(pieces: list[Piece]) -> float:
        return float(sum(len(found.tokens(owner)) * HEADS_PER_RANK * HEAD_WIDTH * NUMBER_BYTES for owner, _ in pieces))

    def step(
        title: str, description: str, pieces: list[list[Piece]], sent: list[list[Piece]], tensors: int
    ) -> StoryStep:
        rows = [
            DiagramRow(
                f"rank {rank}",
                tuple(_build_piece_box(found, at, piece, rank, bool(sent)) for at, piece in enumerate(own)),
                f"sends {format_byte_count(tensors * weight(sent[rank]))}" if sent else "",
            )
            for rank, own in enumerate(pieces)
        ]
        return StoryStep(title, description, tuple(rows), (), tuple(tensors * weight(own) for own in sent))

    steps = (
        step("Before", "Every rank holds queries, keys and values of its own tokens, with all heads: everything but "
             "attention looks at one token at a time.", before, [], 0),
        step("All-to-all of q, k and v", "Every rank sends to each other rank the heads that belong to it, and gets "
             "all tokens of its own heads: attention looks at all tokens of one head at a time.", turned, there, 3),
        step("Attention", "Every rank attends with whole rows, in its own heads, with any kernel.",
             turned, [], 0),
        step("All-to-all of the output", "The output goes back to the ranks of the tokens, with all heads again.",
             after, back, 1),
    )  # fmt: skip
    size = tokens // ranks * heads * HEAD_WIDTH * NUMBER_BYTES
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
                format_byte_count(4 * all_to_all_bytes(size, ranks)),
                format_range(sum_sent(steps)),
            ),
        ),
        (
            "Backward sends as much once more, the other way round.",
            "There can be no more ranks than heads. With fewer heads of keys than of queries it sends less.",
            "In a run this is cp_mode: all_to_all.",
        ),
    )


def _build_piece_box(found: TokenDistribution, at: int, piece: Piece, rank: int, moved: bool) -> DiagramBox:
    owner, head = piece
    tokens = format_spans(found.tokens(owner).tolist())
    first = head * HEADS_PER_RANK
    heads = f"{first}–{first + HEADS_PER_RANK - 1}"
    is_new = moved and owner != head
    tooltip = f"rank {rank}: tokens {tokens}, heads {heads}"
    return DiagramBox(at, at + 1, f"t{tokens} h{heads}", SERIES[head % len(SERIES)], tooltip, is_new)


# ------------------------------------------------------------------------------------------------ ring


def count_visible_pairs(queries: Sequence[int], keys: Sequence[int]) -> int:
    """Return the number of pairs of a query and a key at or before it."""
    return sum(key <= query for query in queries for key in keys)


def build_ring(ranks: int, elements: int) -> Story:
    """Return attention in a ring; `elements` are tokens."""
    tokens = elements
    found = distribute_tokens(tokens, ranks, "zigzag")
    own = [found.tokens(rank).tolist() for rank in range(ranks)]
    heads = HEADS_PER_RANK * ranks
    size = 2 * tokens // ranks * heads * HEAD_WIDTH * NUMBER_BYTES  # keys and values of a rank's tokens
    columns = ("queries", "keys, values", "this round", "together")
    head = tuple(DiagramBox(at, at + 1, name) for at, name in enumerate(columns))
    done = [0] * ranks
    steps: list[StoryStep] = []
    for number in range(ranks):
        rows = []
        last = number == ranks - 1
        for rank in range(ranks):
            owner = (rank - number) % ranks  # blocks move one rank further in every round
            pairs = count_visible_pairs(own[rank], own[owner])
            done[rank] += pairs
            queries, keys = f"t{format_spans(own[rank])}", f"t{format_spans(own[owner])}"
            boxes = (
                DiagramBox(0, 1, queries, SERIES[rank % 6], f"queries of rank {rank}"),
                DiagramBox(1, 2, keys, SERIES[owner % 6], f"keys and values of rank {owner}", number > 0),
                DiagramBox(2, 3, f"{pairs} pairs", "n", f"queries and keys that see each other in this round: {pairs}"),
                DiagramBox(3, 4, f"{done[rank]} so far", "n", f"of {int(found.loads[rank])}"),
            )
            rows.append(
                DiagramRow(f"rank {rank}", boxes, "" if last else f"sends {format_byte_count(send_bytes(size))}")
            )
        arrows = [] if last else [Arrow(rank, (rank + 1) % ranks, 1.5) for rank in range(ranks)]
        sent = () if last else (send_bytes(size),) * ranks
        title, description = f"Round {number + 1} of {ranks}", _describe_round(number, ranks)
        steps.append(StoryStep(title, description, tuple(rows), head, sent, tuple(arrows)))
    steps.append(_build_backward(steps[0], ranks, size))
    return Story(
        "ring",
        "Ring attention",
        "A row of tokens is cut over ranks. Queries stay where they are; keys and values go round, so that each rank "
        "sees all of them, one block at a time. In the picture t0–1 are the tokens 0 and 1.",
        tuple(steps),
        tuple(_build_ring_formulas(ranks, tokens, heads, size, steps, done)),
        (
            "Tokens are distributed in zigzag: a piece from the front and its mirror image from the back, so that all "
            f"ranks have as much to do under a causal mask: {', '.join(f'{load:g}' for load in found.loads)} pairs.",
            "Any number of heads will do. In a run this is cp_mode: ring_attn.",
        ),
    )


def _describe_round(number: int, ranks: int) -> str:
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


def _build_backward(first: StoryStep, ranks: int, size: int) -> StoryStep:
    sent = (2 * ranks - 1) * send_bytes(size)
    gradients = DiagramBox(2, 3, "gradients", "n", "of this rank's queries, keys and values", True)
    rows = tuple(
        DiagramRow(row.name, (*row.boxes[:2], gradients), f"sends {format_byte_count(sent)}") for row in first.rows
    )
    return StoryStep(
        "Backward",
        "Keys and values go round once more, and with each block the gradient that has been gathered for it, which at "
        f"last goes home: {ranks - 1} messages of the one and {ranks} of the other, because nothing was kept but a "
        "rank's own tokens.",
        rows,
        first.head,
        (sent,) * ranks,
    )


def _build_ring_formulas(
    ranks: int, tokens: int, heads: int, size: int, steps: Sequence[StoryStep], done: Sequence[int]
) -> list[Formula]:
    values = f"N = {ranks}, S = {tokens} tokens, H = {heads} heads of D = {HEAD_WIDTH}"
    return [
        Formula(
            "Bytes that each rank sends for a layer's forward",
            "(N − 1) / N × 2 S × H × D × 4 B",
            values,
            format_byte_count(all_gather_bytes(size * ranks, ranks)),
            format_range(sum_sent(steps[:-1])),
        ),
        Formula(
            "For its backward",
            "(2 N − 1) / N × 2 S × H × D × 4 B",
            values,
            format_byte_count((2 * ranks - 1) * size),
            format_range(steps[-1].sent),
        ),
        Formula(
            "Pairs of queries and keys, all ranks",
            "S (S + 1) / 2",
            f"{tokens} × {tokens + 1} / 2",
            f"{tokens * (tokens + 1) // 2:,}",
            f"{sum(done):,}",
        ),
    ]


def format_spans(places: Sequence[int]) -> str:
    """Return places of tokens as spans: 0–1,14–15."""
    spans: list[list[int]] = []
    for place in places:
        if spans and place == spans[-1][1] + 1:
            spans[-1][1] = place
        else:
            spans.append([place, place])
    return ",".join(f"{low}–{high}" if high > low else str(low) for low, high in spans)
