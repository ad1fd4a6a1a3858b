"""Times and bytes of what ranks exchange, against hand-computed figures and a ring that is played through."""

from __future__ import annotations

import pytest

from cornstarch.plan import communication as c
from cornstarch.plan.cluster import Link

LINK = Link(bandwidth=1000.0, latency=0.5)


def test_by_hand() -> None:
    # 4 ranks, 800 bytes: parts of 200; 3 rounds of 0.5 s + 0.2 s.
    assert c.all_gather(800, 4, LINK) == pytest.approx(3 * 0.7)
    assert c.reduce_scatter(800, 4, LINK) == pytest.approx(3 * 0.7)
    assert c.all_reduce(800, 4, LINK) == pytest.approx(6 * 0.7)
    assert c.all_to_all(800, 4, LINK) == pytest.approx(3 * 0.7)
    assert c.send(800, LINK) == pytest.approx(1.3)


def test_bytes_by_hand() -> None:
    assert c.all_gather_bytes(800, 4) == c.reduce_scatter_bytes(800, 4) == c.all_to_all_bytes(800, 4) == 600
    assert c.all_reduce_bytes(800, 4) == 1200
    assert c.send_bytes(800) == 800


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_bytes_are_those_of_a_ring(ranks: int) -> None:
    """Play a ring all-reduce with one number for each part, and count what the first rank sends."""
    data = [[10 * rank + part for part in range(ranks)] for rank in range(ranks)]
    expected = [sum(column) for column in zip(*data, strict=True)]
    sent = 0
    for adds in (True, False):
        for turn in range(ranks - 1):
            first = 0 if adds else 1
            parts = [(rank + first - turn) % ranks for rank in range(ranks)]
            messages = [data[rank][parts[rank]] for rank in range(ranks)]
            for rank in range(ranks):
                target = (rank + 1) % ranks
                data[target][parts[rank]] = messages[rank] + (data[target][parts[rank]] if adds else 0)
            sent += 1
    assert all(row == expected for row in data)
    assert c.all_reduce_bytes(ranks, ranks) == pytest.approx(sent)


def test_one_rank_exchanges_nothing() -> None:
    assert c.all_reduce(800, 1, LINK) == c.all_gather(800, 1, LINK) == c.all_to_all(800, 1, LINK) == 0


def test_a_link_measured_for_a_collective_counts_for_it_alone() -> None:
    link = Link(1000.0, 0.0, (("all_reduce", Link(500.0, 0.0)),))
    assert c.all_reduce(1000, 2, link) == pytest.approx(2.0)
    assert c.all_gather(1000, 2, link) == pytest.approx(0.5)
