"""From plans to stages: the stages of each place, their edges, and the ranks of a place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from cornstarch.errors import ConfigError
from cornstarch.plan import Layout, ModulePlan, Plan
from cornstarch.plan.stage_graph import place_of, places_of, stage_graph
from cornstarch.schedule import StageGraph, make_schedule
from tests.plan import brute_force

LLM = ModulePlan(tp=2, stages=2)
GRAPHS = [
    # modules, ranks, (stage, place) of each node, edges
    ({"model": ModulePlan(stages=3)}, "auto", ["model 0@0", "model 1@1", "model 2@2"], [(0, 1), (1, 2)]),
    ({"model": ModulePlan()}, "auto", ["model 0@0"], []),
    ({"language_model": ModulePlan(stages=2, virtual_stages=2)}, "own",
     ["language_model 0@0", "language_model 1@1", "language_model 2@0", "language_model 3@1"],
     [(0, 1), (1, 2), (2, 3)]),
    ({"vision": ModulePlan(stages=2), "audio": ModulePlan(), "language_model": LLM}, "auto",
     ["vision 0@0", "vision 1@1", "audio 0@2", "language_model 0@3", "language_model 1@4"],
     [(0, 1), (3, 4), (1, 3), (2, 3)]),
    ({"vision": ModulePlan(stages=2), "audio": ModulePlan(stages=2), "language_model": LLM}, "colocated",
     ["vision 0@0", "vision 1@1", "audio 0@0", "audio 1@1", "language_model 0@2", "language_model 1@3"],
     [(0, 1), (2, 3), (4, 5), (1, 4), (3, 4)]),
    ({"vision": ModulePlan(), "language_model": LLM}, "first_stage", ["language_model 0@0", "language_model 1@1"],
     [(0, 1)]),
    ({"vision": ModulePlan(), "language_model": ModulePlan()}, "shared", ["language_model 0@0"], []),
]  # fmt: skip


@pytest.mark.parametrize(("modules", "ranks", "nodes", "edges"), GRAPHS)
def test_stage_graph_of_a_plan(modules: Any, ranks: Any, nodes: list[str], edges: list[tuple[int, int]]) -> None:
    plan = Plan(modules, ranks=ranks)
    graph = stage_graph(plan)
    assert [f"{node}@{node.place}" for node in graph.nodes] == nodes
    assert sorted(graph.edges) == sorted(edges)
    assert stage_graph(Layout.of(plan, plan.replica * 2)) == graph
    make_schedule(graph, 4, "zero_bubble").check()


@given(brute_force.layouts())
def test_places_are_the_ranks_of_a_replica(layout: Layout) -> None:
    graph = stage_graph(layout)
    for dp in range(layout.dp):
        places = places_of(layout, dp)
        assert len(places) == graph.places
        ranks = [rank for place in places for rank in place.flatten().tolist()]
        assert sorted(ranks) == [rank for rank in range(layout.world) if layout.place(rank).dp == dp]
        for number, place in enumerate(places):
            assert {place_of(layout, rank) for rank in place.flatten().tolist()} == {number}
            for stage in graph.at(number):
                node = graph.nodes[stage]
                index = node.index % layout.plan.modules[node.module].stages
                assert (layout.mesh(node.module)[index, dp] == place).all()


def test_stage_graph_has_trainability_and_costs() -> None:
    modules = {"vision": ModulePlan(), "language_model": ModulePlan(stages=2)}
    trains = {"vision": [False], "language_model": [True, False]}
    costs = {"vision": [(3.0, 4.0, 5.0)], "language_model": [(1.0, 2.0, 0.5), (1.0, 1.0, 0.0)]}
    own_ranks = stage_graph(Plan(modules, ranks="own"), trains, costs)
    assert [node.trains for node in own_ranks.nodes] == [False, True, False]
    assert [own_ranks.backward(stage) for stage in range(3)] == ["none", "weight", "input"]
    assert [(n.forward, n.backward_input, n.backward_weight) for n in own_ranks.nodes] == [
        *costs["vision"], *costs["language_model"],
    ]  # fmt: skip
    # Inside the first stage an encoder is part of it.
    inside = stage_graph(Plan(modules, ranks="first_stage"), {**trains, "vision": [True]}, costs)
    first, second = inside.nodes
    assert (first.forward, first.backward_input, first.backward_weight) == (4.0, 6.0, 5.5)
    assert first.trains and (second.forward, second.trains) == (1.0, False)
    frozen = {"vision": [False], "language_model": [False, True]}
    assert stage_graph(Plan(modules, ranks="first_stage"), frozen).backward(0) == "none"


def test_impossible_stages_are_refused() -> None:
    plan = Plan({"vision": ModulePlan(), "language_model": ModulePlan(stages=2, virtual_stages=2)})
    with pytest.raises(ConfigError, match=r"trains\['language_model'\] has 2 entries; the module has 4 stages."):
        stage_graph(plan, {"language_model": [True, True]})
    with pytest.raises(ConfigError, match="costs: the plan has no module 'audio'; it has vision, language_model."):
        stage_graph(plan, costs={"audio": [(1.0, 1.0, 1.0)]})
    with pytest.raises(ConfigError, match="dp = 1: expected 0 to 0."):
        places_of(Layout.of(plan, 3), 1)


def test_virtual_stages_equal_those_of_a_chain() -> None:
    plan = Plan({"model": ModulePlan(stages=2, virtual_stages=3)}, schedule="interleaved")
    assert stage_graph(plan) == StageGraph.chain(2, virtual_stages=3)
    make_schedule(stage_graph(plan), 4, plan.schedule).check()
