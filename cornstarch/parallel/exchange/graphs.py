"""Who averages with whom: graphs over the ranks of a group, the same on every rank; no torch.

In each step both ends of an edge have equally many neighbours. So a rank gives itself and each of its neighbours the
same weight, 1 / (neighbours + 1), and the mean over all ranks stays as it is.
"""

from __future__ import annotations

from math import isqrt
from random import Random

from cornstarch.plan.exchange import Graph


def neighbours(graph: Graph, rank: int, ranks: int, step: int, seed: int = 0) -> tuple[int, ...]:
    """Return the ranks that one of `ranks` ranks exchanges weights with in a step, in order; itself not among them.

    Args:
        graph: ring: the two beside it; torus: the four around it, in the squarest grid; exponential: those 1, 2, 4, …
            to either side, one distance after the other; random_pairs: one, drawn anew in each step. Of an odd number
            one is left alone.
        rank: Who asks.
        ranks: How many there are.
        step: Counted from 1.
        seed: Of random pairs.
    """
    match graph:
        case "ring":
            found = {rank - 1, rank + 1}
        case "torus":
            found = _around(rank, ranks)
        case "exponential":
            hops = max(1, (ranks - 1).bit_length())
            hop = 1 << (step - 1) % hops
            found = {rank - hop, rank + hop}
        case "random_pairs":
            found = _partner(rank, ranks, step, seed)
    return tuple(sorted({one % ranks for one in found} - {rank}))


def _around(rank: int, ranks: int) -> set[int]:
    rows = next(rows for rows in range(isqrt(ranks), 0, -1) if ranks % rows == 0)
    columns = ranks // rows
    row, column = divmod(rank, columns)
    beside = {row * columns + (column + move) % columns for move in (-1, 1)}
    return beside | {(row + move) % rows * columns + column for move in (-1, 1)}


def _partner(rank: int, ranks: int, step: int, seed: int) -> set[int]:
    order = list(range(ranks))
    Random(f"{seed} {step}").shuffle(order)  # a text is hashed alike in every process
    place = order.index(rank) ^ 1
    return {order[place]} if place < ranks else set()


__all__ = ["neighbours"]
