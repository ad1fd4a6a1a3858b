"""A layer over ranks: attention by Ulysses and by ring (context parallelism), a feed-forward by tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cornstarch.explain import story
from cornstarch.explain.story import NUMBER_BYTES, SERIES, DiagramBox, DiagramRow, Formula, Story, StoryStep, Tone
from cornstarch.plan.communication import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, send_bytes
from cornstarch.plan.token_distribution import TokenDistribution, choose_block_size, compute_mask_work, distribute

HEAD_WIDTH = 64
"""Numbers of a head."""
HEADS_PER_RANK = 2
WIDTH = 2
"""Numbers of a token in the feed-forward layer."""
_MAX_COLUMNS = 4  # of a matrix that are drawn
_RING_ROUNDS = (  # the first, those in between, and the last
    "Every rank attends with its queries to its own keys and values, while it already sends them to the next rank: "
    "transfer and computation overlap.",
    "Every rank attends to the block that has come from the rank before, and passes it on meanwhile.",
    "Every rank attends to the last block; all have seen everything, and the softmax is put together exactly.",
)

Piece = tuple[int, int]
"""The tokens of one rank, and the heads of another."""
Vector = list[int]
Matrix = list[Vector]


def distribute_tokens(tokens: int, ranks: int, how: str) -> TokenDistribution:
    """Return the tokens of each rank for a causal row, distributed as in a run."""
    pieces = ranks * (2 if how == "zigzag" else 1)
    reason = f"this number of tokens cannot be cut into {pieces} equal pieces, as the formulas need"
    story.check_divisible(tokens, pieces, reason)
    block = choose_block_size(tokens, ranks)
    return distribute(compute_mask_work(np.ones((1, tokens), dtype=np.int64), block=block), ranks, how)


def format_spans(places: Sequence[int]) -> str:
    """Return places of tokens as spans: 0–1,14–15."""
    spans: list[list[int]] = []
    for place in places:
        if spans and place == spans[-1][1] + 1:
            spans[-1][1] = place
        else:
            spans.append([place, place])
    return ",".join(f"{low}–{high}" if high > low else str(low) for low, high in spans)


def exchange_pieces(
    pieces: Sequence[Sequence[Piece]], ranks: int, by_heads: bool
) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """Return the pieces of each rank after an all-to-all, by the ranks of their heads or tokens, and those it sent."""
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
    spans = [format_spans(found.tokens(rank).tolist()) for rank in range(ranks)]
    before: list[list[Piece]] = [[(rank, head) for head in range(ranks)] for rank in range(ranks)]
    turned, there = exchange_pieces(before, ranks, by_heads=True)
    after, back = exchange_pieces(turned, ranks, by_heads=False)

    def step(
        title: str, description: str, pieces: list[list[Piece]], moved: list[list[Piece]], tensors: int
    ) -> StoryStep:
        token_bytes = tensors * HEADS_PER_RANK * HEAD_WIDTH * NUMBER_BYTES  # of the heads in one piece
        sent = [float(sum(len(found.tokens(owner)) * token_bytes for owner, _ in own)) for own in moved]
        rows = []
        for rank, own in enumerate(pieces):
            boxes = []
            for at, (owner, head) in enumerate(own):
                heads = f"{head * HEADS_PER_RANK}–{(head + 1) * HEADS_PER_RANK - 1}"
                tooltip, tone = f"rank {rank}: tokens {spans[owner]}, heads {heads}", SERIES[head % len(SERIES)]
                is_fresh = bool(moved) and owner != head
                boxes.append(DiagramBox(at, at + 1, f"t{spans[owner]} h{heads}", tone, tooltip, is_fresh))
            beside = f"sends {story.format_byte_count(sent[rank])}" if moved else ""
            rows.append(DiagramRow(f"rank {rank}", boxes, beside))
        return StoryStep(title, description, rows, (), sent)

    steps = [
        step("Before", "Every rank holds queries, keys and values of its own tokens, with all heads: everything but "
             "attention looks at one token at a time.", before, [], 0),
        step("All-to-all of q, k and v", "Every rank sends to each other rank the heads that belong to it, and gets "
             "all tokens of its own heads: attention looks at all tokens of one head at a time.", turned, there, 3),
        step("Attention", "Every rank attends with whole rows, in its own heads, with any kernel.",
             turned, [], 0),
        step("All-to-all of the output", "The output goes back to the ranks of the tokens, with all heads again.",
             after, back, 1),
    ]  # fmt: skip
    size = tokens // ranks * HEADS_PER_RANK * ranks * HEAD_WIDTH * NUMBER_BYTES
    symbols = "4 (N − 1) / N × S / N × H × D × 4 B"
    return Story(
        "ulysses",
        "Ulysses: context parallelism by all-to-all",
        "A row of tokens is cut over ranks. For attention the cut is turned: from some tokens of all heads to all "
        "tokens of some heads, and back. In the picture t0–3 h0–1 are the tokens 0 to 3 of the heads 0 and 1.",
        steps,
        [_build_forward_formula(symbols, ranks, tokens, 4 * all_to_all_bytes(size, ranks), steps)],
        [
            "Backward sends as much once more, the other way round.",
            "There can be no more ranks than heads. With fewer heads of keys than of queries it sends less.",
            "In a run this is cp_mode: all_to_all.",
        ],
    )


def _build_forward_formula(symbols: str, ranks: int, tokens: int, result: float, steps: Sequence[StoryStep]) -> Formula:
    values = f"N = {ranks}, S = {tokens} tokens, H = {HEADS_PER_RANK * ranks} heads of D = {HEAD_WIDTH}"
    name = "Bytes that each rank sends for a layer's forward"
    return Formula.of_bytes(name, symbols, values, result, story.sum_sent(steps))


def build_ring(ranks: int, elements: int) -> Story:
    """Return attention in a ring; `elements` are tokens."""
    tokens = elements
    found = distribute_tokens(tokens, ranks, "zigzag")
    own = [found.tokens(rank).tolist() for rank in range(ranks)]
    size = 2 * tokens // ranks * HEADS_PER_RANK * ranks * HEAD_WIDTH * NUMBER_BYTES  # keys and values of a rank
    head = story.build_head(("queries", "keys, values", "this round", "together"))
    done = [0] * ranks
    first, middle, last = _RING_ROUNDS
    steps: list[StoryStep] = []
    for number, description in enumerate([first, *[middle] * (ranks - 2), last]):
        sent = [send_bytes(size)] * ranks if description is not last else []
        rows = []
        for rank in range(ranks):
            owner = (rank - number) % ranks  # blocks move one rank further in every round
            pairs = sum(key <= query for query in own[rank] for key in own[owner])
            done[rank] += pairs
            queries, keys = f"t{format_spans(own[rank])}", f"t{format_spans(own[owner])}"
            boxes = [
                DiagramBox(0, 1, queries, SERIES[rank % 6], f"queries of rank {rank}"),
                DiagramBox(1, 2, keys, SERIES[owner % 6], f"keys and values of rank {owner}", number > 0),
                DiagramBox(2, 3, f"{pairs} pairs", "n", f"queries and keys that see each other in this round: {pairs}"),
                DiagramBox(3, 4, f"{done[rank]} so far", "n", f"of {int(found.loads[rank])}"),
            ]
            beside = f"sends {story.format_byte_count(sent[rank])}" if sent else ""
            rows.append(DiagramRow(f"rank {rank}", boxes, beside))
        arrows = [story.Arrow(rank, (rank + 1) % ranks, 1.5) for rank in range(len(sent))]
        steps.append(StoryStep(f"Round {number + 1} of {ranks}", description, rows, head, sent, arrows))
    forward = _build_forward_formula(
        "(N − 1) / N × 2 S × H × D × 4 B", ranks, tokens, all_gather_bytes(size * ranks, ranks), steps
    )
    text = (
        "Keys and values go round once more, and with each block the gradient that has been gathered for it, which at "
        f"last goes home: {ranks - 1} messages of the one and {ranks} of the other, because nothing was kept but a "
        "rank's own tokens."
    )
    sent_back = (2 * ranks - 1) * send_bytes(size)
    gradients = DiagramBox(2, 3, "gradients", "n", "of this rank's queries, keys and values", True)
    beside = f"sends {story.format_byte_count(sent_back)}"
    rows = [DiagramRow(row.name, [*row.boxes[:2], gradients], beside) for row in steps[0].rows]
    backward = StoryStep("Backward", text, rows, head, [sent_back] * ranks)
    return Story(
        "ring",
        "Ring attention",
        "A row of tokens is cut over ranks. Queries stay where they are; keys and values go round, so that each rank "
        "sees all of them, one block at a time. In the picture t0–1 are the tokens 0 and 1.",
        [*steps, backward],
        [
            forward,
            Formula.of_bytes("For its backward", "(2 N − 1) / N × 2 S × H × D × 4 B", forward.numbers,
                             (2 * ranks - 1) * size, backward.sent),
            Formula("Pairs of queries and keys, all ranks", "S (S + 1) / 2", f"{tokens} × {tokens + 1} / 2",
                    f"{tokens * (tokens + 1) // 2:,}", f"{sum(done):,}"),
        ],
        [
            "Tokens are distributed in zigzag: a piece from the front and its mirror image from the back, so that all "
            f"ranks have as much to do under a causal mask: {', '.join(f'{load:g}' for load in found.loads)} pairs.",
            "Any number of heads will do. In a run this is cp_mode: ring_attn.",
        ],
    )  # fmt: skip


@dataclass(frozen=True)
class FeedForward:
    """y = relu(x A) B for one token, and the gradient of x where that of y is all ones."""

    up: Matrix
    """A: [WIDTH, hidden]"""
    down: Matrix
    """B: [hidden, WIDTH]"""

    @classmethod
    def build_example(cls, hidden: int) -> FeedForward:
        """Return matrices of small whole numbers, some negative so that the relu has something to do."""
        up = [[(2 * row + column) % 4 - 1 for column in range(hidden)] for row in range(WIDTH)]
        down = [[(row + 2 * column) % 3 for column in range(WIDTH)] for row in range(hidden)]
        return cls(up, down)

    def split(self, ranks: int) -> list[FeedForward]:
        """Return each rank's shard: columns of A, and the rows of B that belong to them."""
        each = len(self.down) // ranks
        spans = [slice(rank * each, (rank + 1) * each) for rank in range(ranks)]
        return [FeedForward([row[span] for row in self.up], self.down[span]) for span in spans]

    def compute_hidden(self, x: Vector) -> Vector:
        """Return relu(x A)."""
        return [max(0, number) for number in _multiply(x, self.up)]

    def compute_output(self, x: Vector) -> Vector:
        """Return relu(x A) B."""
        return _multiply(self.compute_hidden(x), self.down)

    def compute_hidden_gradient(self, x: Vector, of_output: Vector) -> Vector:
        """Return the gradient of x A: zero where the relu gave zero."""
        back = _multiply(of_output, np.transpose(self.down))
        return [gradient if h > 0 else 0 for gradient, h in zip(back, self.compute_hidden(x), strict=True)]

    def compute_input_gradient(self, x: Vector, of_output: Vector) -> Vector:
        """Return the gradient of x."""
        return _multiply(self.compute_hidden_gradient(x, of_output), np.transpose(self.up))


def _multiply(vector: Vector, matrix: Matrix | np.ndarray) -> Vector:
    return np.matmul(vector, matrix).tolist()


def sum_vectors(vectors: Sequence[Vector]) -> Vector:
    """Return the sum of vectors: the result of an all-reduce on every rank."""
    return [sum(numbers) for numbers in zip(*vectors, strict=True)]


def build_tensor_parallel(ranks: int, elements: int) -> Story:
    """Return the way of one token through a sharded layer, and back; `elements` are the hidden channels."""
    story.check_divisible(elements, ranks, f"channels are cut evenly over {ranks} ranks")
    whole = FeedForward.build_example(elements)
    shards = whole.split(ranks)
    x, ones = list(range(1, WIDTH + 1)), [1] * WIDTH
    steps = _build_feed_forward_steps(shards, x, ones)
    size = NUMBER_BYTES * WIDTH
    y = sum_vectors([shard.compute_output(x) for shard in shards])
    x_gradient = sum_vectors([shard.compute_input_gradient(x, ones) for shard in shards])
    return Story(
        "tp",
        "Tensor parallelism: a feed-forward layer",
        "The matrices of a layer are cut, so that each rank holds and computes a part of them. The first is cut by "
        "columns and the second by rows: then one sum over the ranks is enough.",
        steps,
        [
            Formula("y", "relu(x A) B, on one rank", f"x = {_format_vector(x)}",
                    _format_vector(whole.compute_output(x)), _format_vector(y)),
            Formula("Gradient of x", "on one rank", f"gradient of y = {_format_vector(ones)}",
                    _format_vector(whole.compute_input_gradient(x, ones)), _format_vector(x_gradient)),
            Formula.of_bytes("Bytes that each rank sends for a token, forward and backward",
                             "2 × 2 (N − 1) / N × activation",
                             f"2 × 2 × {ranks - 1} / {ranks} × {story.format_byte_count(size)}",
                             2 * all_reduce_bytes(size, ranks), story.sum_sent(steps)),
        ],
        [
            "Attention is cut in the same way by heads: its q, k and v by columns, its output by rows. So a layer of a "
            "language model has two all-reduces forward and two backward.",
            "All-reduces are on the critical path of every layer: keep tp within a node.",
        ],
        [("c6", "the same on all ranks"), ("c2", "a part of a sum"), ("c1", "a rank's own channels")],
    )  # fmt: skip


def _build_feed_forward_steps(shards: list[FeedForward], x: Vector, ones: Vector) -> list[StoryStep]:
    parts = [shard.compute_output(x) for shard in shards]
    x_parts = [shard.compute_input_gradient(x, ones) for shard in shards]
    hidden = [_format_vector(shard.compute_hidden(x)) for shard in shards]
    hidden_gradient = [_format_vector(shard.compute_hidden_gradient(x, ones)) for shard in shards]
    partial, partial_x = [_format_vector(part) for part in parts], [_format_vector(part) for part in x_parts]
    nothing, same = [""] * len(shards), len(shards)
    xs, ys = [_format_vector(x)] * same, [_format_vector(sum_vectors(parts))] * same
    dys, dxs = [_format_vector(ones)] * same, [_format_vector(sum_vectors(x_parts))] * same
    forward = ("x", "A: columns", "relu(x A)", "B: rows", "y")
    backward = ("grad x", "A: columns", "grad x A", "B: rows", "grad y")
    columns = _place_columns(shards, [forward, backward], [*hidden, *partial, *hidden_gradient, *partial_x])
    summed = [all_reduce_bytes(NUMBER_BYTES * len(x), len(shards))] * len(shards)
    tones: tuple[Tone, ...] = ("c6", "c3", "c1", "c5", "c6")

    def step(
        title: str, description: str, names: Sequence[str], ends: Sequence[list[str]], fresh: int | None,
        sent: Sequence[float] = (),
    ) -> StoryStep:  # fmt: skip
        first, middle, last = ends
        rows = []
        for rank, shard in enumerate(shards):
            texts = [first[rank], _format_matrix(shard.up), middle[rank], _format_matrix(shard.down), last[rank]]
            boxes = []
            for number, (text, (begin, end)) in enumerate(zip(texts, columns, strict=True)):
                is_part = number == fresh and number in (0, 4) and not sent
                tone: Tone = "n" if not text else "c2" if is_part else tones[number]
                tooltip = f"{names[number]}: {text}" + (" (a part of the sum)" if is_part else "")
                boxes.append(DiagramBox(begin, end, text, tone, tooltip if text else "", number == fresh))
            beside = f"sends {story.format_byte_count(sent[rank])}" if sent else ""
            rows.append(DiagramRow(f"rank {rank}", boxes, beside))
        head = [DiagramBox(begin, end, name) for name, (begin, end) in zip(names, columns, strict=True)]
        return StoryStep(title, description, rows, head, sent)

    return [
        step("Cut", "Every rank holds some columns of A and the rows of B that belong to them; all have the same x, "
             "because every channel needs all of it.", forward, [xs, nothing, nothing], None),
        step("First matrix: columns", "Every rank computes its own channels of relu(x A), without a message: a column "
             "of A needs x alone, and relu looks at each channel by itself.", forward, [xs, hidden, nothing], 2),
        step("Second matrix: rows", "Every rank multiplies its channels with its rows of B: that is a part of every "
             "number of y, but not the whole of any.", forward, [xs, hidden, partial], 4),
        step("All-reduce", "The parts are summed over the ranks; now all have the whole y, as the next layer needs it.",
             forward, [xs, hidden, ys], 4, summed),
        step("Backward", "The gradient of y is the same on all ranks; each computes the gradients of its own channels, "
             "and from them a part of the gradient of x.", backward, [partial_x, hidden_gradient, dys], 0),
        step("All-reduce of the gradient", "The parts of the gradient of x are summed over the ranks, because x went "
             "into all channels; gradients of A and B are each rank's own.", backward, [dxs, hidden_gradient, dys], 0,
             summed),
    ]  # fmt: skip


def _place_columns(
    shards: list[FeedForward], names: list[Sequence[str]], texts: list[str]
) -> list[tuple[float, float]]:
    """Return where each of the five columns begins and ends, in letters."""
    vector = max(map(len, texts)) + 2
    up, down = (max(len(_format_matrix(matrix)) for matrix in matrices) for matrices in
                ([shard.up for shard in shards], [shard.down for shard in shards]))  # fmt: skip
    columns, at = [], 0.0
    for number, width in enumerate((vector, up, vector, down, vector)):
        width = max(width, *(len(some[number]) for some in names)) + 1
        columns.append((at, at + width))
        at += width
    return columns


def _format_vector(numbers: Vector) -> str:
    text = " ".join(map(str, numbers[:_MAX_COLUMNS]))
    return text + (" …" if len(numbers) > _MAX_COLUMNS else "")


def _format_matrix(matrix: Matrix) -> str:
    text = " / ".join(map(_format_vector, matrix[:_MAX_COLUMNS]))
    return text + (" / …" if len(matrix) > _MAX_COLUMNS else "")
