"""Stage graphs: who needs whom, who has a backward, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from cornstarch.errors import ConfigError
from cornstarch.schedule import StageGraph, StageNode
from tests.schedule.graphs import graphs

MODEL = StageGraph.branches({"vision": 2, "audio": 1}, language_model=2)


def test_branches_meet_at_the_language_model() -> None:
    assert [str(node) for node in MODEL.nodes] == [
        "vision 0", "vision 1", "audio 0", "language_model 0", "language_model 1",
    ]  # fmt: skip
    assert MODEL.predecessors(3) == (1, 2) and MODEL.successors(2) == (3,) and MODEL.sink == 4
    assert [MODEL.distance(stage) for stage in range(5)] == [3, 2, 2, 1, 0]
    assert [MODEL.depth(stage) for stage in range(5)] == [0, 1, 0, 2, 3]
    assert MODEL.places == 5 and MODEL.at(3) == (3,)
    together = StageGraph.branches({"vision": 2, "audio": 1}, language_model=2, colocated=True)
    assert together.places == 4 and [together.at(place) for place in range(4)] == [(0, 2), (1,), (3,), (4,)]


def test_virtual_stages_are_assigned_to_places_in_turn() -> None:
    graph = StageGraph.chain(2, virtual_stages=3)
    assert [node.place for node in graph.nodes] == [0, 1, 0, 1, 0, 1]
    assert graph.edges == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))


BACKWARD = [
    # what trains, in a chain; what each backward computes
    ([True, True, True], ["weight", "both", "both"]),
    ([False, True, True], ["none", "weight", "both"]),
    ([True, False, False], ["weight", "input", "input"]),
    ([False, True, False], ["none", "weight", "input"]),
    ([False, False, True], ["none", "none", "weight"]),
    ([False, False, False], ["none", "none", "none"]),
]


@pytest.mark.parametrize(("trains", "expected"), BACKWARD)
def test_frozen_stages_compute_only_the_gradients_that_others_need(trains: list[bool], expected: list[str]) -> None:
    graph = StageGraph.chain(3, trains=trains)
    assert [graph.backward(stage) for stage in range(3)] == expected
    assert [graph.wants_gradient(stage) for stage in range(3)] == [word != "none" for word in expected]
    assert [graph.sends_gradient(s, s + 1) for s in range(2)] == [word in ("input", "both") for word in expected[1:]]


def test_one_trained_encoder_is_enough_for_a_frozen_language_model() -> None:
    graph = StageGraph.branches(
        {"vision": 2, "audio": 1}, 2, trains={"vision": False, "audio": True, "language_model": False}
    )
    assert [graph.backward(stage) for stage in range(5)] == ["none", "none", "weight", "input", "input"]
    assert not graph.sends_gradient(1, 3) and graph.sends_gradient(2, 3)


@given(graphs())
def test_gradients_reach_every_trained_stage(graph: StageGraph) -> None:
    for stage, node in enumerate(graph.nodes):
        before = {stage}  # all stages that lead here, found by walking
        while (more := before | {s for s, t in graph.edges if t in before}) != before:
            before = more
        assert graph.wants_gradient(stage) == any(graph.nodes[s].trains for s in before)
        assert node.trains <= graph.wants_gradient(stage) <= all(map(graph.wants_gradient, graph.successors(stage)))
    assert not any(map(graph.freeze().wants_gradient, range(len(graph.nodes))))


A, B, C = (StageNode("a", index, index) for index in range(3))
WRONG = [
    ((), (), "There is no stage."),
    ((A, B), ((0, 1), (0, 1)), "An edge is listed twice."),
    ((A, B), ((0, 2),), "There is no edge from 0 to 2: expected two of 2 stages."),
    ((A, B), ((0, 0), (0, 1)), "There is no edge from 0 to 0"),
    ((A, B), (), "Expected one stage at which all paths end; found 2: 0 (a 0), 1 (a 1)."),
    ((A, B, C), ((0, 1), (1, 0), (1, 2)), "Stages 0, 1, 2 wait for one another: the edges form a cycle."),
    ((A, StageNode("a", 1, 2)), ((0, 1),), "Places are numbered from 0 without a gap; found [0, 2]."),
    ((StageNode("a", 0, 0, forward=-1.0),), (), "Stage 0 (a 0): forward = -1.0; expected at least 0."),
    ((StageNode("a", 0, 0, backward_weight=float("nan")),), (), "backward_weight = nan"),
]


@pytest.mark.parametrize(("nodes", "edges", "message"), WRONG)
def test_invalid_graph_is_refused(nodes: Any, edges: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StageGraph(nodes, edges)
    assert message in str(caught.value)
