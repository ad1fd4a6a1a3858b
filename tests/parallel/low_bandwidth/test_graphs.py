"""Graphs of neighbours keep the mean and bring all ranks together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cornstarch.parallel.low_bandwidth.weight_averaging import find_neighbours
from cornstarch.plan.data_options import GossipGraph

GRAPHS: list[GossipGraph] = ["ring", "torus", "exponential", "random_pairs"]


def averaging(graph: GossipGraph, ranks: int, step: int, seed: int = 0) -> Tensor:
    """Return the matrix that weights are multiplied by in a step."""
    matrix = torch.zeros(ranks, ranks, dtype=torch.float64)
    for rank in range(ranks):
        others = find_neighbours(graph, rank, ranks, step, seed)
        for other in (rank, *others):
            matrix[rank, other] = 1 / (len(others) + 1)
    return matrix


@given(st.sampled_from(GRAPHS), st.integers(1, 40), st.integers(1, 200), st.integers(0, 5))
def test_mixing_weights_preserve_the_mean(graph: GossipGraph, ranks: int, step: int, seed: int) -> None:
    matrix = averaging(graph, ranks, step, seed)
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix.sum(0), torch.ones(ranks, dtype=torch.float64))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7, 9, 16])
@pytest.mark.parametrize("graph", GRAPHS)
def test_repeated_averaging_reaches_consensus(graph: GossipGraph, ranks: int) -> None:
    weights = torch.eye(ranks, dtype=torch.float64)
    for step in range(1, 301):
        weights = averaging(graph, ranks, step) @ weights
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / ranks), atol=1e-3, rtol=0)


TABLE: list[tuple[GossipGraph, int, int, int, tuple[int, ...]]] = [
    ("ring", 0, 1, 1, ()),
    ("ring", 0, 2, 1, (1,)),
    ("ring", 0, 5, 1, (1, 4)),
    ("torus", 4, 9, 1, (1, 3, 5, 7)),
    ("torus", 0, 6, 1, (1, 2, 3)),  # two rows: up is down
    ("torus", 0, 7, 1, (1, 6)),  # a ring
    ("exponential", 0, 8, 1, (1, 7)),
    ("exponential", 0, 8, 2, (2, 6)),
    ("exponential", 0, 8, 3, (4,)),
    ("exponential", 0, 8, 4, (1, 7)),
]


@pytest.mark.parametrize(("graph", "rank", "ranks", "step", "expected"), TABLE)
def test_neighbours_of_each_graph(
    graph: GossipGraph, rank: int, ranks: int, step: int, expected: tuple[int, ...]
) -> None:
    assert find_neighbours(graph, rank, ranks, step) == expected


def test_random_pairs_change_from_step_to_step_and_with_the_seed() -> None:
    def partners(seed: int) -> list[tuple[int, ...]]:
        return [find_neighbours("random_pairs", 0, 9, step, seed) for step in range(1, 101)]

    assert set(partners(0)) == {(), *((other,) for other in range(1, 9))}  # of nine, one is alone
    assert partners(0) == partners(0) != partners(1)
