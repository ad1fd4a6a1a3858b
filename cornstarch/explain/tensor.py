"""Tensor parallelism: a feed-forward layer of two matrices, cut over ranks and computed with small numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cornstarch.errors import ConfigError
from cornstarch.explain.story import NUMBER_BYTES, Box, Formula, Row, Step, Story, Tone, byte_count, same_or_range
from cornstarch.plan.communication import all_reduce_bytes

Vector = list[int]
Matrix = list[Vector]

WIDTH = 2
"""Numbers of a token."""

_MOST_SHOWN = 4  # columns of a matrix


@dataclass(frozen=True)
class Layer:
    """y = relu(x A) B for one token, and the gradient of x where that of y is all ones."""

    up: Matrix
    """A: [WIDTH, hidden]"""
    down: Matrix
    """B: [hidden, WIDTH]"""

    @classmethod
    def example(cls, hidden: int) -> Layer:
        """Return matrices of small whole numbers, some negative so that the relu has something to do."""
        up = [[(2 * row + column) % 4 - 1 for column in range(hidden)] for row in range(WIDTH)]
        down = [[(row + 2 * column) % 3 for column in range(WIDTH)] for row in range(hidden)]
        return cls(up, down)

    def cut(self, ranks: int) -> list[Layer]:
        """Return each rank's share: columns of A, and the rows of B that belong to them."""
        each = len(self.down) // ranks
        spans = [slice(rank * each, (rank + 1) * each) for rank in range(ranks)]
        return [Layer([row[span] for row in self.up], self.down[span]) for span in spans]

    def hidden(self, x: Vector) -> Vector:
        """Return relu(x A)."""
        return [max(0, number) for number in times(x, self.up)]

    def output(self, x: Vector) -> Vector:
        """Return relu(x A) B."""
        return times(self.hidden(x), self.down)

    def gradient_of_hidden(self, x: Vector, of_output: Vector) -> Vector:
        """Return the gradient of x A: nothing where the relu gave nothing."""
        back = times(of_output, transposed(self.down))
        return [gradient if h > 0 else 0 for gradient, h in zip(back, self.hidden(x), strict=True)]

    def gradient_of_input(self, x: Vector, of_output: Vector) -> Vector:
        """Return the gradient of x."""
        return times(self.gradient_of_hidden(x, of_output), transposed(self.up))


def times(vector: Vector, matrix: Matrix) -> Vector:
    """Return vector × matrix."""
    return [sum(v * row[column] for v, row in zip(vector, matrix, strict=True)) for column in range(len(matrix[0]))]


def transposed(matrix: Matrix) -> Matrix:
    """Return the matrix with rows and columns exchanged."""
    return [list(column) for column in zip(*matrix, strict=True)]


def added(vectors: Sequence[Vector]) -> Vector:
    """Return the sum of vectors: what an all-reduce leaves on every rank."""
    return [sum(numbers) for numbers in zip(*vectors, strict=True)]


def tensor_story(ranks: int, elements: int) -> Story:
    """Return the way of one token through a layer that is cut, and back.

    elements: the hidden channels.
    """
    if elements % ranks or elements < ranks:
        near = max(1, elements // ranks) * ranks
        raise ConfigError(
            f"--elements {elements}: channels are cut evenly over {ranks} ranks. Use {near} or {near + ranks}."
        )
    whole = Layer.example(elements)
    shares = whole.cut(ranks)
    x, ones = list(range(1, WIDTH + 1)), [1] * WIDTH
    steps = _steps(shares, x, ones)
    size = NUMBER_BYTES * WIDTH
    y, of_x = (
        added([share.output(x) for share in shares]),
        added([share.gradient_of_input(x, ones) for share in shares]),
    )
    counted = tuple(sum(step.sent[rank] for step in steps if step.sent) for rank in range(ranks))
    values = f"2 × 2 × {ranks - 1} / {ranks} × {byte_count(size)}"
    return Story(
        "tp",
        "Tensor parallelism: a feed-forward layer",
        "The matrices of a layer are cut, so that each rank holds and computes a part of them. The first is cut by "
        "columns and the second by rows: then one sum over the ranks is enough.",
        tuple(steps),
        (
            Formula("y", "relu(x A) B, on one rank", f"x = {_vector(x)}", _vector(whole.output(x)), _vector(y)),
            Formula(
                "Gradient of x",
                "on one rank",
                f"gradient of y = {_vector(ones)}",
                _vector(whole.gradient_of_input(x, ones)),
                _vector(of_x),
            ),
            Formula(
                "Bytes that each rank sends for a token, forward and backward",
                "2 × 2 (N − 1) / N × activation",
                values,
                byte_count(2 * all_reduce_bytes(size, ranks)),
                same_or_range(counted),
            ),
        ),
        (
            "Attention is cut in the same way by heads: its q, k and v by columns, its output by rows. A layer of a "
            "language model so has two all-reduces forward and two backward.",
            "All-reduces stand in the way of every layer, and nothing is computed meanwhile: keep tp within a node.",
        ),
        (("c6", "the same on all ranks"), ("c2", "a part of a sum"), ("c1", "a rank's own channels")),
    )


def _steps(shares: list[Layer], x: Vector, ones: Vector) -> list[Step]:
    ranks = range(len(shares))
    hidden = [_vector(share.hidden(x)) for share in shares]
    parts = [share.output(x) for share in shares]
    of_hidden = [_vector(share.gradient_of_hidden(x, ones)) for share in shares]
    of_x = [share.gradient_of_input(x, ones) for share in shares]
    sent = (all_reduce_bytes(NUMBER_BYTES * len(x), len(shares)),) * len(shares)
    nothing = [""] * len(shares)
    forth = ("x", "A: columns", "relu(x A)", "B: rows", "y")
    back = ("grad x", "A: columns", "grad x A", "B: rows", "grad y")
    wide = _widths(shares, [forth, back], [hidden, [_vector(p) for p in parts], of_hidden, [_vector(p) for p in of_x]])

    def step(
        title: str,
        says: str,
        names: Sequence[str],
        ends: list[list[str]],
        fresh: int | None,
        sent: tuple[float, ...] = (),
    ) -> Step:
        first, middle, last = ends
        rows = []
        for rank in ranks:
            share = shares[rank]
            texts = [first[rank], _matrix(share.up), middle[rank], _matrix(share.down), last[rank]]
            summed = bool(sent) and fresh is not None
            beside = f"sends {byte_count(sent[rank])}" if sent else ""
            rows.append(Row(f"rank {rank}", _boxes(texts, names, wide, fresh, summed), beside))
        head = tuple(Box(begin, end, name) for name, (begin, end) in zip(names, wide, strict=True))
        return Step(title, says, tuple(rows), head, sent)

    xs, ys = [_vector(x)] * len(shares), [_vector(added(parts))] * len(shares)
    dys, dxs = [_vector(ones)] * len(shares), [_vector(added(of_x))] * len(shares)
    partial, partial_x = [_vector(part) for part in parts], [_vector(part) for part in of_x]
    return [
        step("Cut", "Every rank holds some columns of A and the rows of B that belong to them; all have the same x, "
             "because every channel needs all of it.", forth, [xs, nothing, nothing], None),
        step("First matrix: columns", "Every rank computes its own channels of relu(x A), without a message: a column "
             "of A needs x alone, and relu looks at each channel by itself.", forth, [xs, hidden, nothing], 2),
        step("Second matrix: rows", "Every rank multiplies its channels with its rows of B: that is a part of every "
             "number of y, but not the whole of any.", forth, [xs, hidden, partial], 4),
        step("All-reduce", "The parts are summed over the ranks; now all have the whole y, as the next layer needs it.",
             forth, [xs, hidden, ys], 4, sent),
        step("Backward", "The gradient of y is the same on all ranks; each computes the gradients of its own channels, "
             "and from them a part of the gradient of x.", back, [partial_x, of_hidden, dys], 0),
        step("All-reduce of the gradient", "The parts of the gradient of x are summed over the ranks, because x went "
             "into all channels; gradients of A and B are each rank's own.", back, [dxs, of_hidden, dys], 0, sent),
    ]  # fmt: skip


def _widths(shares: list[Layer], names: list[Sequence[str]], texts: list[list[str]]) -> list[tuple[float, float]]:
    """Return where each of the five columns begins and ends, in letters."""
    ends = max(len(text) for some in texts for text in some) + 2
    matrices = [max(len(_matrix(share.up)) for share in shares), max(len(_matrix(share.down)) for share in shares)]
    least = [ends, matrices[0], ends, matrices[1], ends]
    columns, at = [], 0.0
    for number, width in enumerate(least):
        width = max(width, *(len(some[number]) for some in names)) + 1
        columns.append((at, at + width))
        at += width
    return columns


def _boxes(
    texts: Sequence[str], names: Sequence[str], wide: list[tuple[float, float]], fresh: int | None, summed: bool
) -> tuple[Box, ...]:
    tones: tuple[Tone, ...] = ("c6", "c3", "c1", "c5", "c6")
    boxes = []
    for number, (text, (begin, end)) in enumerate(zip(texts, wide, strict=True)):
        is_part = number == fresh and number in (0, 4) and not summed
        tone: Tone = "n" if not text else "c2" if is_part else tones[number]
        said = f"{names[number]}: {text}" + (" (a part of the sum)" if is_part else "")
        boxes.append(Box(begin, end, text, tone, said if text else "", number == fresh))
    return tuple(boxes)


def _vector(numbers: Vector) -> str:
    shown = " ".join(map(str, numbers[:_MOST_SHOWN]))
    return shown + (" …" if len(numbers) > _MOST_SHOWN else "")


def _matrix(matrix: Matrix) -> str:
    shown = " / ".join(map(_vector, matrix[:_MOST_SHOWN]))
    return shown + (" / …" if len(matrix) > _MOST_SHOWN else "")
