"""The runtime computes the same losses and gradients as one process, for every policy and graph."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from cornstarch.pipeline.p2p import Route
from cornstarch.pipeline.runtime import uses_weight_twice
from cornstarch.schedule.graph import StageGraph, StageNode
from tests.parity.pool import QUIET, Pool
from tests.pipeline import small_stages

FROZEN_FIRST = StageGraph.chain(3, trains=[False, True, True])
FROZEN_LAST = StageGraph.chain(3, trains=[True, False, False])
FROZEN_MIDDLE = StageGraph.chain(3, trains=[True, False, True])
GRAPHS = {
    "chain 2": StageGraph.chain(2),
    "chain 4": StageGraph.chain(4),
    "frozen first": FROZEN_FIRST,
    "frozen last": FROZEN_LAST,
    "frozen middle": FROZEN_MIDDLE,
    "two encoders": StageGraph.branches({"vision": 1, "audio": 1}, 2),
    "frozen encoder": StageGraph.branches({"vision": 2}, 2, trains={"vision": False}),
    "frozen language model": StageGraph.branches({"vision": 1, "audio": 1}, 2, trains={"language_model": False}),
    "colocated": StageGraph.branches({"vision": 1, "audio": 1}, 2, colocated=True),
}


@pytest.mark.parametrize("policy", ["naive", "gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_policy_computes_what_one_process_does(workers: Pool, name: str, policy: str) -> None:
    assert_equal_to_one_process(workers, GRAPHS[name], policy)


def test_interleaved_stages_compute_what_one_process_does(workers: Pool) -> None:
    assert_equal_to_one_process(workers, StageGraph.chain(2, virtual_stages=2), "interleaved")


def test_a_microbatch_without_images_leaves_the_encoder_idle_but_in_step(workers: Pool) -> None:
    assert_equal_to_one_process(workers, GRAPHS["two encoders"], "1f1b", text_only=True)


def test_every_other_microbatch_without_an_image_computes_what_one_process_does(workers: Pool) -> None:
    graph = StageGraph.branches({"vision": 1}, 2)
    assert_equal_to_one_process(workers, graph, "1f1b", count=4, text_only=True)


def assert_equal_to_one_process(
    workers: Pool, graph: StageGraph, policy: str, count: int = 6, ragged: bool = True, text_only: bool = False
) -> None:
    names = list(dict.fromkeys(node.module for node in graph.nodes))
    batches = small_stages.microbatches(count, names, ragged, text_only)
    losses, expected = small_stages.run_in_one_process(graph, batches)
    results = workers.run(graph.places, small_stages.run, graph, policy, count, ragged, text_only, 2)
    assert [found for found, _, _ in results if found] == [pytest.approx(losses, rel=1e-6)]
    together = {name: value for _, own, _ in results for name, value in own.items()}
    assert together.keys() == expected.keys()
    for name, value in expected.items():
        assert (together[name] is None) == (value is None), name
        if value is not None:
            np.testing.assert_allclose(together[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("policy", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize(
    ("places", "place", "where"),
    [
        (3, 1, "forward"),
        (4, 0, "forward"),
        (4, 2, "forward"),
        (3, 0, "backward"),
        (4, 1, "backward"),
        (3, 2, "loss"),
        (4, 3, "loss"),
    ],
)
def test_failure_stops_every_process_while_the_failed_process_stays_alive(
    workers: Pool, places: int, place: int, where: str, policy: str
) -> None:
    began = time.time()
    graph = StageGraph.chain(places)
    results = workers.run(places, small_stages.fail, graph, place, 2, where, policy, 8)
    expected = f"rank {place}, stage {place} (model {place}), microbatch 2: ValueError: a bad number"
    assert [message for message, _ in results] == [expected] * places
    failed = results[place][1]  # the first to raise
    assert max(ended for _, ended in results) - failed < QUIET["cpu"] / 2  # not by gloo's timeout
    assert failed >= began


@pytest.mark.parametrize(("policy", "virtual_stages"), [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)])
def test_sent_payloads_are_released_during_the_step(workers: Pool, policy: str, virtual_stages: int) -> None:
    graph, count = StageGraph.chain(2, virtual_stages=virtual_stages), 24
    for training, forward in workers.run(2, small_stages.measure_most_in_flight, graph, policy, count):
        assert 0 < training <= 6 * virtual_stages
        assert forward <= 6  # the last stage sends nothing


def test_routes_between_stages_of_different_sizes() -> None:
    """Every rank has exactly one source forward, and one for each cp rank backward."""
    one, tp2, cp2tp2 = np.array([[0]]), np.array([[1, 2]]), np.array([[3, 4], [5, 6]])
    wide = Route.between(one, tp2, is_same_module=False)
    assert wide.forward == ((0, 1), (0, 2))
    assert wide.backward == ((1, 0),)
    narrow = Route.between(tp2, one, is_same_module=False)
    assert narrow.forward == ((1, 0),)
    assert narrow.backward == ((0, 1), (0, 2))
    parts = Route.between(tp2, cp2tp2, is_same_module=False)
    assert sorted(parts.forward) == [(1, 3), (1, 4), (2, 5), (2, 6)]
    assert sorted(parts.backward) == [(3, 1), (4, 2), (5, 1), (6, 2)]
    assert Route.between(tp2, tp2 + 2, is_same_module=True).forward == ((1, 3), (2, 4))


def test_stages_of_one_place_compute_what_one_process_does(workers: Pool) -> None:
    nodes = tuple(StageNode("model", i, 0) for i in range(2))
    assert_equal_to_one_process(workers, StageGraph(nodes, ((0, 1),)), "1f1b")


def test_weight_gradients_are_deferred_unless_a_weight_is_used_twice() -> None:
    weight, received = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    once = received + weight @ received  # an input is used wherever there is a residual
    assert not uses_weight_twice([once], [received])
    assert uses_weight_twice([weight @ once.relu()], [received])


def test_failure_in_one_replica_stops_the_replica_that_waits_for_its_gradients(workers: Pool) -> None:
    results = workers.run(4, small_stages.fail_in_replica, 3, 1)
    expected = "rank 3, stage 1 (model 1), microbatch 1: ValueError: a bad number"
    assert [message for message, _ in results] == [expected] * 4
    assert max(ended for _, ended in results) - results[3][1] < QUIET["cpu"] / 2  # not by gloo's timeout
