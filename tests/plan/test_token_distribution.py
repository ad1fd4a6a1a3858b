"""Every token goes to one rank, work equals the mask, and loads are even."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks import cp_balance
from cornstarch.errors import ConfigError
from cornstarch.plan.token_distribution import (
    BLOCK,
    BlockWork,
    TokenDistribution,
    choose_block_size,
    compute_mask_work,
    distribute,
)
from tests.effort import counted

WAYS = ("uniform", "zigzag", "makespan_min", "auto")


@st.composite
def rows(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents and spans of a few rows, in any order, with holes."""
    tokens = draw(st.integers(1, 24))
    count = draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens)
    documents = np.array([draw(numbers) for _ in range(count)])
    spans = np.array([draw(numbers) for _ in range(count)]) - 1
    return documents, spans


def seen_by(documents: NDArray[np.int64], spans: NDArray[np.int64], window: int | None) -> NDArray[np.float64]:
    """Count pair by pair: [S], summed over rows."""
    counts = np.zeros(documents.shape[1])
    for row, (document, span) in enumerate(zip(documents, spans, strict=True)):
        positions = [sum(document[:place] == document[place]) for place in range(len(document))]
        for query, key in product(range(len(document)), repeat=2):
            if document[query] <= 0:
                counts[query] += query == key
                continue
            distance = positions[query] - positions[key]
            in_pattern = 0 <= distance < (window or len(document))
            same_span = span[query] == span[key] >= 0
            counts[query] += documents[row, query] == documents[row, key] and (in_pattern or same_span)
    return counts


@settings(deadline=None, max_examples=150)
@given(rows(), st.integers(1, 5), st.floats(0, 100))
def test_work_equals_the_visible_pairs(
    batch: tuple[NDArray[np.int64], NDArray[np.int64]], block: int, linear: float
) -> None:
    documents, spans = batch
    work = compute_mask_work(documents, spans, block=block, linear=linear)
    expected = seen_by(documents, spans, None) + linear * len(documents)
    assert work.tokens == documents.shape[1]
    np.testing.assert_allclose(
        work.blocks, [expected[start : start + block].sum() for start in range(0, len(expected), block)]
    )


def test_partial_tiles_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cornstarch.plan.token_distribution.BLOCK", 4)  # tiles of 4 x 4 pairs
    documents = np.array([[1] * 14 + [2] * 9 + [3] * 3 + [0] * 2])
    spans = np.full_like(documents, -1)
    spans[0, 5:11] = 0
    place = np.arange(28)
    same = (documents[0, :, None] == documents[0]) & (documents[0] > 0)
    both = (spans[0, :, None] == spans[0]) & (spans[0] >= 0)
    sees = (same & ((place[:, None] >= place) | both)) | np.eye(28, dtype=bool)
    tiles = sees.reshape(7, 4, 7, 4).transpose(0, 2, 1, 3).reshape(7, 7, 16)
    expected = (tiles.any(-1) & ~tiles.all(-1)).sum(1)
    plain, counted = (compute_mask_work(documents, spans, block=4, partial=one).blocks for one in (0.0, 1000.0))
    np.testing.assert_allclose(counted - plain, 1000.0 * expected)


@settings(deadline=None, max_examples=60)
@given(rows(), st.integers(1, 6))
def test_windows_limit_the_work(batch: tuple[NDArray[np.int64], NDArray[np.int64]], window: int) -> None:
    documents, _ = batch
    text = np.full_like(documents, -1)
    whole, windowed = (seen_by(documents, text, one) for one in (None, window))
    np.testing.assert_allclose(compute_mask_work(documents, block=1, windows=[window]).blocks, windowed)
    both = compute_mask_work(documents, text, block=1, windows=[window, None])
    np.testing.assert_allclose(both.blocks, (whole + windowed) / 2)


weights = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60)


@settings(deadline=None, max_examples=200)
@given(weights, st.integers(1, 8), st.integers(1, 9), st.sampled_from(WAYS), st.data())
def test_every_token_goes_to_one_rank(
    costs: list[float], ranks: int, block: int, how: str, data: st.DataObject
) -> None:
    ranks = min(ranks, len(costs))
    tokens = (len(costs) - 1) * block + data.draw(st.integers(1, block))
    found = distribute(BlockWork(np.array(costs), block, tokens), ranks, how)
    pieces = [found.tokens(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(pieces).tolist()) == list(range(tokens))
    assert all(len(piece) and (np.diff(piece) > 0).all() for piece in pieces)
    assert found.loads.sum() == pytest.approx(sum(costs))
    assert found.reason and found.how != "auto"


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=60), st.integers(1, 8))
def test_makespan_min_is_close_to_the_optimum(costs: list[float], ranks: int) -> None:
    ranks = min(ranks, len(costs))
    work = BlockWork(np.array(costs), 1, len(costs))
    most = distribute(work, ranks, "makespan_min").loads.max()
    # No distribution is below the mean, below the heaviest block, or below the two lightest of ranks + 1 heaviest.
    heaviest = sorted(costs, reverse=True)
    pair = heaviest[ranks - 1] + heaviest[ranks] if len(costs) > ranks else 0.0
    least = max(sum(costs) / ranks, heaviest[0], pair)
    assert most <= 4 / 3 * least * (1 + 1e-9) or most <= distribute(work, ranks, "uniform").loads.max()


@pytest.mark.parametrize("ranks", cp_balance.RANKS)
@pytest.mark.parametrize("tokens", cp_balance.LENGTHS)
def test_multimodal_rows_are_even_within_five_percent(tokens: int, ranks: int) -> None:
    for linear in cp_balance.LINEAR.values():
        found = cp_balance.worst(tokens, ranks, linear, seeds=1)
        assert found["makespan_min"][0] <= 1.05
        assert found["makespan_min"][1] <= 1.05  # memory too
        assert found["makespan_min"][0] <= min(found["uniform"][0], found["zigzag"][0])


def test_distribute_takes_milliseconds() -> None:
    row = cp_balance.row(65536, 0.5, True, 0)

    def find() -> None:
        for _ in range(20):
            distribute(compute_mask_work(row.documents, row.spans, linear=1.0), 16, "makespan_min")

    find()
    assert counted(find)[1] < 20 * 300_000  # measured: some 15,000 turns of a loop, or a millisecond


def causal(tokens: int, ranks: int, **options: float) -> BlockWork:
    return compute_mask_work(
        np.ones((1, tokens), dtype=np.int64), block=choose_block_size(tokens, ranks), linear=options.get("linear", 0)
    )


def test_auto_takes_the_simplest_even_method_and_says_why() -> None:
    mostly_linear = distribute(causal(4096, 4, linear=1e6), 4)
    assert (mostly_linear.how, mostly_linear.reason) == ("uniform", "largest over mean work: uniform 1.00")
    text = distribute(causal(4096, 4), 4)
    assert (text.how, text.reason) == ("zigzag", "largest over mean work: uniform 1.75, zigzag 1.00")
    image = np.full((1, 4096), -1)
    image[0, :1024] = 0
    found = distribute(compute_mask_work(np.ones_like(image), image), 4)
    assert found.how == "makespan_min"
    assert found.reason.startswith("largest over mean work: uniform 1.") and "makespan_min 1.0" in found.reason


def test_zigzag_and_uniform_pieces() -> None:
    work = BlockWork(np.ones(8), 2, 15)

    def pieces(how: str) -> list[list[int]]:
        found: TokenDistribution = distribute(work, 2, how)
        return [found.tokens(rank).tolist() for rank in range(2)]

    assert pieces("uniform") == [list(range(8)), list(range(8, 15))]
    assert pieces("zigzag") == [[0, 1, 2, 3, 12, 13, 14], [4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize(("tokens", "ranks", "expected"), [(131072, 16, BLOCK), (8192, 16, 64), (37, 3, 1), (2, 4, 1)])
def test_blocks_shrink_with_the_row(tokens: int, ranks: int, expected: int) -> None:
    assert choose_block_size(tokens, ranks) == expected


def test_impossible_distributions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 tokens in blocks of 1 are 3 blocks.*over 4 ranks.*fewer ranks"):
        distribute(BlockWork(np.ones(3), 1, 3), 4)
    with pytest.raises(ConfigError, match="distribution = 'striped': expected one of uniform, zigzag"):
        distribute(BlockWork(np.ones(3), 1, 3), 2, "striped")
