"""Gossip is its formula, keeps the mean, and need not wait for a slow neighbour."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cornstarch.plan.data_options import GossipGraph
from tests.parallel.low_bandwidth.test_graphs import GRAPHS, averaging
from tests.parallel.low_bandwidth.updates import Replicas, delayed, resume, slow_one, train_run
from tests.parity.pool import Pool

STEPS = 5


@pytest.mark.parametrize(("ranks", "overlap"), [(1, True), (2, True), (3, True), (4, True), (4, False)])
@pytest.mark.parametrize("graph", GRAPHS)
def test_gossip_averages_neighbours_and_applies_the_gradient(
    workers: Pool, graph: GossipGraph, ranks: int, overlap: bool
) -> None:
    found = workers.run(ranks, train_run, {"kind": "gossip", "gossip": {"graph": graph, "overlap": overlap}}, STEPS)
    replicas = Replicas(ranks)
    for step in range(1, STEPS + 1):
        before = torch.stack(replicas.weights)
        changes = torch.stack(replicas.learn(step)) - before
        after = averaging(graph, ranks, step) @ before + changes
        replicas.put(list(after))
        for rank in range(ranks):
            torch.testing.assert_close(found[rank]["history"][step - 1], after[rank], rtol=1e-10, atol=1e-12)
    mean = torch.stack(replicas.weights).mean(0)
    for rank, one in enumerate(found):
        torch.testing.assert_close(one["mean"], mean, rtol=1e-10, atol=1e-12)
        assert torch.equal(one["after"], one["history"][-1])
        distance = (replicas.weights[rank] - mean).norm().item()
        assert one["figures"]["consensus_distance"] == pytest.approx(distance, rel=1e-6, abs=1e-9)


def test_skipped_step_changes_nothing(workers: Pool) -> None:
    plan = {"kind": "gossip", "gossip": {"graph": "exponential"}}
    whole = workers.run(3, train_run, plan, STEPS)
    for rank, one in enumerate(workers.run(3, train_run, plan, STEPS, torch.float64, 3)):
        assert torch.equal(one["after"], whole[rank]["after"])
        assert one["figures"] == whole[rank]["figures"]


@pytest.mark.parametrize("graph", ["exponential", "random_pairs"])
def test_resumed_run_is_bit_equal(workers: Pool, graph: str) -> None:
    for whole, after, sent, sent_after in workers.run(3, resume, {"kind": "gossip", "gossip": {"graph": graph}}, 3, 7):
        assert torch.equal(whole, after)
        assert sent == sent_after > 0


@pytest.mark.parametrize("graph", GRAPHS)
def test_mean_is_preserved_without_waiting(workers: Pool, graph: str) -> None:
    plan = {"kind": "gossip", "gossip": {"graph": graph, "wait": False}}
    found = workers.run(4, delayed, plan, 20, 1, 0.004, 3, 0, 10)
    start = found[0]["seen"][0]
    expected = start + sum(sum(one["changes"]) for one in found) / 4
    for one in found:
        torch.testing.assert_close(one["mean"], expected, rtol=1e-10, atol=1e-12)
    apart = torch.stack([one["end"] for one in found])
    spread = (apart - apart.mean(0)).norm()
    alone = torch.stack([start + sum(one["changes"]) for one in found])
    assert spread < (alone - alone.mean(0)).norm()  # they did average


@pytest.mark.parametrize("graph", ["ring", "random_pairs"])
def test_a_slow_neighbour_slows_nobody(workers: Pool, graph: str) -> None:
    plan: dict[str, Any] = {"kind": "gossip", "gossip": {"graph": graph, "wait": False}}
    counted = workers.run(3, slow_one, plan, 20, 5)[0]  # rank 0 makes 20 steps before rank 1 makes one
    assert counted[:20] == [0.0] * 20
