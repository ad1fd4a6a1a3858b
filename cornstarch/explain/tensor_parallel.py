"""Tensor parallelism: a feed-forward layer of two matrices, sharded over ranks and computed with small numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cornstarch.errors import ConfigError
from cornstarch.explain.story import (
    NUMBER_BYTES,
    DiagramBox,
    DiagramRow,
    Formula,
    Story,
    StoryStep,
    Tone,
    format_byte_count,
    format_range,
    sum_sent,
)
from cornstarch.plan.communication import all_reduce_bytes

Vector = list[int]
Matrix = list[Vector]

WIDTH = 2
"""Numbers of a token."""

_MAX_COLUMNS = 4  # of a matrix that are drawn


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
        return [max(0, number) for number in multiply(x, self.up)]

    def compute_output(self, x: Vector) -> Vector:
        """Return relu(x A) B."""
        return multiply(self.compute_hidden(x), self.down)

    def compute_hidden_gradient(self, x: Vector, of_output: Vector) -> Vector:
        """Return the gradient of x A: zero where the relu gave zero."""
        back = multiply(of_output, transpose(self.down))
        return [gradient if h > 0 else 0 for gradient, h in zip(back, self.compute_hidden(x), strict=True)]

    def compute_input_gradient(self, x: Vector, of_output: Vector) -> Vector:
        """Return the gradient of x."""
        return multiply(self.compute_hidden_gradient(x, of_output), transpose(self.up))


def multiply(vector: Vector, matrix: Matrix) -> Vector:
    """Return vector × matrix."""
    return [sum(v * row[column] for v, row in zip(vector, matrix, strict=True)) for column in range(len(matrix[0]))]


def transpose(matrix: Matrix) -> Matrix:
    """Return the transposed matrix."""
    return [list(column) for column in zip(*matrix, strict=True)]


def sum_vectors(vectors: Sequence[Vector]) -> Vector:
    """Return the sum of vectors: the result of an all-reduce on every rank."""
    return [sum(numbers) for numbers in zip(*vectors, strict=True)]


def build_tensor_parallel(ranks: int, elements: int) -> Story:
    """Return the way of one token through a sharded layer, and back; `elements` are the hidden channels."""
    if elements % ranks or elements < ranks:
        near = max(1, elements // ranks) * ranks
        raise ConfigError(
            f"--elements {elements}: channels are cut evenly over {ranks} ranks. Use {near} or {near + ranks}."
        )
    whole = FeedForward.build_example(elements)
    shards = whole.split(ranks)
    x, ones = list(range(1, WIDTH + 1)), [1] * WIDTH
    steps = _build_steps(shards, x, ones)
    size = NUMBER_BYTES * WIDTH
    y = sum_vectors([shard.compute_output(x) for shard in shards])
    x_gradient = sum_vectors([shard.compute_input_gradient(x, ones) for shard in shards])
    return Story(
        "tp",
        "Tensor parallelism: a feed-forward layer",
        "The matrices of a layer are cut, so that each rank holds and computes a part of them. The first is cut by "
        "columns and the second by rows: then one sum over the ranks is enough.",
        tuple(steps),
        (
            Formula(
                "y",
                "relu(x A) B, on one rank",
                f"x = {_format_vector(x)}",
                _format_vector(whole.compute_output(x)),
                _format_vector(y),
            ),
            Formula(
                "Gradient of x",
                "on one rank",
                f"gradient of y = {_format_vector(ones)}",
                _format_vector(whole.compute_input_gradient(x, ones)),
                _format_vector(x_gradient),
            ),
            Formula(
                "Bytes that each rank sends for a token, forward and backward",
                "2 × 2 (N − 1) / N × activation",
                f"2 × 2 × {ranks - 1} / {ranks} × {format_byte_count(size)}",
                format_byte_count(2 * all_reduce_bytes(size, ranks)),
                format_range(sum_sent(steps)),
            ),
        ),
        (
            "Attention is cut in the same way by heads: its q, k and v by columns, its output by rows. So a layer of a "
            "language model has two all-reduces forward and two backward.",
            "All-reduces are on the critical path of every layer: keep tp within a node.",
        ),
        (("c6", "the same on all ranks"), ("c2", "a part of a sum"), ("c1", "a rank's own channels")),
    )


def _build_steps(shards: list[FeedForward], x: Vector, ones: Vector) -> list[StoryStep]:
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
    sent = (all_reduce_bytes(NUMBER_BYTES * len(x), len(shards)),) * len(shards)

    def step(
        title: str, description: str, names: Sequence[str], ends: Sequence[list[str]], fresh: int | None,
        sent: tuple[float, ...] = (),
    ) -> StoryStep:  # fmt: skip
        first, middle, last = ends
        rows = []
        for rank, shard in enumerate(shards):
            texts = [first[rank], _format_matrix(shard.up), middle[rank], _format_matrix(shard.down), last[rank]]
            boxes = _build_boxes(texts, names, columns, fresh, is_summed=bool(sent))
            rows.append(DiagramRow(f"rank {rank}", boxes, f"sends {format_byte_count(sent[rank])}" if sent else ""))
        head = tuple(DiagramBox(begin, end, name) for name, (begin, end) in zip(names, columns, strict=True))
        return StoryStep(title, description, tuple(rows), head, sent)

    return [
        step("Cut", "Every rank holds some columns of A and the rows of B that belong to them; all have the same x, "
             "because every channel needs all of it.", forward, [xs, nothing, nothing], None),
        step("First matrix: columns", "Every rank computes its own channels of relu(x A), without a message: a column "
             "of A needs x alone, and relu looks at each channel by itself.", forward, [xs, hidden, nothing], 2),
        step("Second matrix: rows", "Every rank multiplies its channels with its rows of B: that is a part of every "
             "number of y, but not the whole of any.", forward, [xs, hidden, partial], 4),
        step("All-reduce", "The parts are summed over the ranks; now all have the whole y, as the next layer needs it.",
             forward, [xs, hidden, ys], 4, sent),
        step("Backward", "The gradient of y is the same on all ranks; each computes the gradients of its own channels, "
             "and from them a part of the gradient of x.", backward, [partial_x, hidden_gradient, dys], 0),
        step("All-reduce of the gradient", "The parts of the gradient of x are summed over the ranks, because x went "
             "into all channels; gradients of A and B are each rank's own.", backward, [dxs, hidden_gradient, dys], 0,
             sent),
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


def _build_boxes(
    texts: Sequence[str], names: Sequence[str], columns: list[tuple[float, float]], fresh: int | None, is_summed: bool
) -> tuple[DiagramBox, ...]:
    tones: tuple[Tone, ...] = ("c6", "c3", "c1", "c5", "c6")
    boxes = []
    for number, (text, (begin, end)) in enumerate(zip(texts, columns, strict=True)):
        is_part = number == fresh and number in (0, 4) and not is_summed
        tone: Tone = "n" if not text else "c2" if is_part else tones[number]
        tooltip = f"{names[number]}: {text}" + (" (a part of the sum)" if is_part else "")
        boxes.append(DiagramBox(begin, end, text, tone, tooltip if text else "", number == fresh))
    return tuple(boxes)


def _format_vector(numbers: Vector) -> str:
    text = " ".join(map(str, numbers[:_MAX_COLUMNS]))
    return text + (" …" if len(numbers) > _MAX_COLUMNS else "")


def _format_matrix(matrix: Matrix) -> str:
    text = " / ".join(map(_format_vector, matrix[:_MAX_COLUMNS]))
    return text + (" / …" if len(matrix) > _MAX_COLUMNS else "")
