"""The runtime does what one process does: losses and every gradient, for every policy and graph."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from cornstarch.pipeline.runtime import _uses_a_weight_twice
from cornstarch.pipeline.transfer import Route
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
    compare(workers, GRAPHS[name], policy)


def test_interleaved_stages_compute_what_one_process_does(workers: Pool) -> None:
    compare(workers, StageGraph.chain(2, virtual_stages=2), "interleaved")


def test_a_microbatch_without_images_leaves_the_encoder_idle_but_in_step(workers: Pool) -> None:
    compare(workers, GRAPHS["two encoders"], "1f1b", lonely=True)


def test_no_microbatch_has_an_image(workers: Pool) -> None:
    graph = StageGraph.branches({"vision": 1}, 2)
    compare(workers, graph, "1f1b", count=4, lonely=True)


def compare(
    workers: Pool, graph: StageGraph, policy: str, count: int = 6, ragged: bool = True, lonely: bool = False
) -> None:
    names = list(dict.fromkeys(node.module for node in graph.nodes))
    batches = small_stages.microbatches(count, names, ragged, lonely)
    losses, expected = small_stages.alone(graph, batches)
    results = workers.run(graph.places, small_stages.run, graph, policy, count, ragged, lonely, 2)
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
def test_a_failure_stops_every_process_although_the_one_that_failed_lives_on(
    workers: Pool, places: int, place: int, where: str, policy: str
) -> None:
    began = time.time()
    graph = StageGraph.chain(places)
    told = workers.run(places, small_stages.fail, graph, place, 2, where, policy, 8)
    expected = f"rank {place}, stage {place} (model {place}), microbatch 2: ValueError: a bad number"
    assert [words for words, _ in told] == [expected] * places
    failed = told[place][1]  # the first to know
    assert max(ended for _, ended in told) - failed < QUIET["cpu"] / 2  # not because gloo has waited long enough
    assert failed >= began


@pytest.mark.parametrize(("policy", "virtual_stages"), [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)])
def test_what_is_sent_is_not_held_until_the_end(workers: Pool, policy: str, virtual_stages: int) -> None:
    graph, count = StageGraph.chain(2, virtual_stages=virtual_stages), 24
    for training, forward in workers.run(2, small_stages.most_held, graph, policy, count):
        assert 0 < training <= 6 * virtual_stages
        assert forward <= 6  # the last stage sends nothing


def test_routes_between_sizes_that_differ() -> None:
    """Every process has exactly one source forward, and one of each part of the tokens backward."""
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


def test_a_graph_on_one_place_needs_no_messages(workers: Pool) -> None:
    nodes = tuple(StageNode("model", i, 0) for i in range(2))
    compare(workers, StageGraph(nodes, ((0, 1),)), "1f1b")


def test_only_weights_that_are_used_twice_are_not_left_for_later() -> None:
    weight, received = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    once = received + weight @ received  # an input is used wherever there is a residual
    assert not _uses_a_weight_twice([once], [received])
    assert _uses_a_weight_twice([weight @ once.relu()], [received])
