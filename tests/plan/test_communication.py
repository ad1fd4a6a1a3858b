"""Times and bytes of what ranks exchange, against hand-computed figures and a ring that is played through."""

from __future__ import annotations

import random

import pytest

from cornstarch.errors import ConfigError
from cornstarch.plan import communication as c
from cornstarch.plan.communication import COLLECTIVES, Link, Timing, collective_seconds, fit_error, fit_link, fit_links

LINK = Link(bandwidth=1000.0, latency=0.5)


def test_seconds_equal_hand_computed_ones() -> None:
    # 4 ranks, 800 bytes: parts of 200; 3 rounds of 0.5 s + 0.2 s.
    assert c.all_gather(800, 4, LINK) == pytest.approx(3 * 0.7)
    assert c.reduce_scatter(800, 4, LINK) == pytest.approx(3 * 0.7)
    assert c.all_reduce(800, 4, LINK) == pytest.approx(6 * 0.7)
    assert c.all_to_all(800, 4, LINK) == pytest.approx(3 * 0.7)
    assert c.send(800, LINK) == pytest.approx(1.3)


def test_bytes_equal_hand_computed_ones() -> None:
    assert c.all_gather_bytes(800, 4) == c.reduce_scatter_bytes(800, 4) == c.all_to_all_bytes(800, 4) == 600
    assert c.all_reduce_bytes(800, 4) == 1200
    assert c.send_bytes(800) == 800


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_reduce_bytes_equal_a_simulated_ring(ranks: int) -> None:
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


def test_one_rank_sends_nothing() -> None:
    assert c.all_reduce(800, 1, LINK) == c.all_gather(800, 1, LINK) == c.all_to_all(800, 1, LINK) == 0


def test_a_link_measured_for_one_collective_applies_to_it_alone() -> None:
    link = Link(1000.0, 0.0, (("all_reduce", Link(500.0, 0.0)),))
    assert c.all_reduce(1000, 2, link) == pytest.approx(2.0)
    assert c.all_gather(1000, 2, link) == pytest.approx(0.5)


# ---------------------------------------------------------------------------------------------------- fitting


def timings(link: Link, noise: float = 0.0, kinds: tuple[str, ...] = COLLECTIVES) -> list[Timing]:
    rng = random.Random(3)
    sizes = [2.0**power for power in range(10, 28, 2)]
    return [
        Timing(kind, size, ranks, collective_seconds(kind, size, ranks, link) * (1 + rng.uniform(-noise, noise)))  # type: ignore[arg-type]
        for kind in kinds
        for ranks in (2, 4)
        for size in sizes
    ]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_fit_recovers_the_link_that_made_the_times(kind: str) -> None:
    link = Link(3e9, 40e-6)
    found = fit_link(timings(link, kinds=(kind,)))
    assert found.bandwidth == pytest.approx(3e9) and found.latency == pytest.approx(40e-6)
    assert fit_error(timings(link), found) < 1e-9


def test_fit_is_robust_to_noise() -> None:
    found = fit_link(timings(Link(3e9, 40e-6), noise=0.1))
    assert found.bandwidth == pytest.approx(3e9, rel=0.05) and found.latency == pytest.approx(40e-6, rel=0.05)


def test_fit_is_never_negative() -> None:
    falling = [Timing("send", 1e3, 2, 1e-3), Timing("send", 1e6, 2, 1e-4)]
    growing = [Timing("send", 1e3, 2, 1e-7), Timing("send", 1e6, 2, 1e-2)]
    for times in (falling, growing, falling[:1]):
        found = fit_link(times)
        assert found.latency == 0 and 0 < found.bandwidth < float("inf")


def test_fit_links_fits_each_collective() -> None:
    slow, quick = Link(1e9, 9e-5), Link(4e9, 1e-5)
    found = fit_links([*timings(slow, kinds=("all_reduce",)), *timings(quick, kinds=("send",))])
    assert found.of("all_reduce").bandwidth == pytest.approx(1e9)
    assert found.of("send").latency == pytest.approx(1e-5)
    assert found.of("all_gather") is found and 1e9 < found.bandwidth < 4e9


def test_fit_refuses_impossible_times() -> None:
    with pytest.raises(ConfigError, match="at least 2 processes"):
        fit_link([])
    for broken in (Timing("send", 10, 2, 0.0), Timing("all_reduce", 10, 1, 1.0), Timing("send", 0, 2, 1.0)):
        with pytest.raises(ConfigError, match="cannot be fitted"):
            fit_link([broken])


def test_collective_seconds_equal_the_functions() -> None:
    link = Link(3e9, 40e-6)
    assert collective_seconds("all_reduce", 1e6, 8, link) == c.all_reduce(1e6, 8, link)
    assert collective_seconds("send", 1e6, 2, link) == c.send(1e6, link)


def simulate_rings(nodes: int, members: int, size: float, inside: Link, between: Link) -> float:
    """Return the seconds of an all-gather over as many rings as a node has members, by the bytes of every port.

    Ring number c leaves each node from its member c. Each ring moves an equal part of the data.
    """
    near: dict[tuple[int, int], float] = {}
    far: dict[tuple[int, int], float] = {}
    for ring in range(members):
        order = [(node, (ring + 1 + step) % members) for node in range(nodes) for step in range(members)]
        assert order[members - 1] == (0, ring)
        for sender, receiver in zip(order, [*order[1:], order[0]], strict=True):
            port = near if sender[0] == receiver[0] else far
            # Every rank passes on all parts but one.
            port[sender] = port.get(sender, 0.0) + size / members * (nodes * members - 1) / (nodes * members)
    return max([one / inside.rate for one in near.values()] + [one / between.rate for one in far.values()])


@pytest.mark.parametrize(("near", "far"), [(450e9, 50e9), (64e9, 50e9), (100e9, 100e9), (10e9, 50e9)])
def test_groups_over_nodes_equal_simulated_rings(near: float, far: float) -> None:
    inside, between = Link(near, 0.0, reached=0.8), Link(far, 0.0)
    for nodes in (2, 3, 5):
        for members in (1, 2, 4, 8):
            link = c.join_links(inside, between, nodes, members)
            simulated = simulate_rings(nodes, members, 1e9, inside, between)
            assert c.all_gather(1e9, nodes * members, link) == pytest.approx(simulated), (nodes, members)


def test_one_ring_sends_everything_through_every_rank() -> None:
    """gloo on 3 nodes of 2: the first of each node sends to the second, which sends through the card of both."""
    assert c.join_links(Link(10.0, 0.0), Link(4.0, 0.0), 3, 2, one_ring=True).rate == 8.0
    assert c.join_links(Link(10.0, 0.0), Link(6.0, 0.0), 3, 2, one_ring=True).rate == 10.0


def test_latency_of_groups_over_nodes_is_that_of_their_hops() -> None:
    """A part of an all-gather makes 11 of the 12 hops of a ring over 3 nodes of 4; on average it leaves out any."""
    link = c.join_links(Link(1e30, 1.0), Link(1e30, 10.0), nodes=3, members=4)
    hops = [10.0 if hop % 4 == 3 else 1.0 for hop in range(12)]
    paths = [sum(hops) - hops[left_out] for left_out in range(12)]
    assert c.all_gather(1.0, 12, link) == pytest.approx(sum(paths) / 12)


def test_groups_over_nodes_send_single_messages_over_one_card() -> None:
    each = (("all_gather", Link(40e9, 0.0)), ("send", Link(30e9, 0.0)))
    between = Link(50e9, 0.0, each)  # type: ignore[arg-type]
    link = c.join_links(Link(450e9, 0.0), between, nodes=2, members=8)
    assert link.of("send").rate == 30e9
    # Of what a rank sends, 8 of 15 parts leave the node.
    assert link.of("all_to_all").rate == pytest.approx(50e9 * 15 / 8)
    slow = c.join_links(Link(60e9, 0.0), between, nodes=2, members=8)  # 7 of 15 parts stay in it
    assert slow.of("all_to_all").rate == pytest.approx(50e9 * 15 / 8)
    assert c.join_links(Link(20e9, 0.0), between, 2, 8).of("all_to_all").rate == pytest.approx(20e9 * 15 / 7)
    assert link.of("all_gather").rate == 8 * 40e9 and link.of("all_reduce").rate == 8 * 50e9


def test_links_reach_a_fraction_of_their_bandwidth() -> None:
    assert c.send(8e9, Link(10e9, 1.0, reached=0.8)) == 2.0
