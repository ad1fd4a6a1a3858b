"""Schedules of drawn graphs: every action once, nothing before what it needs, no deadlock, memory bounded."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornstarch.errors import ConfigError
from cornstarch.plan.simulate import simulate
from cornstarch.schedule import (
    POLICIES,
    Action,
    Kind,
    Schedule,
    StageGraph,
    StageNode,
    count_in_flight,
    make_schedule,
    register_schedule,
)
from cornstarch.schedule.actions import DeadlockError, compute_times, makespan
from cornstarch.schedule.policies import compute_lower_bound
from tests.effort import counted
from tests.schedule.graphs import POLICIES_OF_ANY_GRAPH, graphs, run_as_processes, whole

COMPUTE = {
    "none": (["F"],),
    "input": (["F", "I"],),
    "weight": (["F", "B"], ["F", "W"]),
    "both": (["F", "B"], ["F", "I", "W"]),
}


def took(schedule: Schedule) -> float:
    return makespan(compute_times(schedule.graph, schedule.actions))


def equal_chain(stages: int, virtual_stages: int = 1) -> StageGraph:
    """Return a chain whose places all have the same work, whatever the number of virtual stages."""
    cost = Fraction(1, virtual_stages)
    return StageGraph.chain(stages, virtual_stages=virtual_stages, costs=(cost, cost, cost))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ any graph


@given(graphs(), st.integers(1, 9), st.sampled_from(POLICIES_OF_ANY_GRAPH))
def test_every_action_occurs_once_in_an_executable_order(graph: StageGraph, many: int, policy: str) -> None:
    schedule = make_schedule(graph, many, policy)
    schedule.check()
    done = run_as_processes(schedule.with_transfers())
    assert Counter(done) == Counter(action for mine in schedule.actions for action in mine)
    assert set(Counter(done).values()) == {1}
    for stage in range(len(graph.nodes)):
        for microbatch in range(many):
            kinds = [action.kind.value for action in done if action[1:3] == (stage, microbatch)]
            assert kinds in COMPUTE[graph.backward(stage)]
            assert policy == "zero_bubble" or policy == "auto" or "W" not in kinds
        for kind in Kind:  # microbatches keep their order, so gradients are added up in the same one
            order = [action.microbatch for action in done if (action.kind, action.stage) == (kind, stage)]
            assert order in ([], [*range(many)])


@given(graphs(), st.integers(1, 9), st.sampled_from(POLICIES_OF_ANY_GRAPH))
def test_transfers_are_next_to_their_computations(graph: StageGraph, many: int, policy: str) -> None:
    schedule = make_schedule(graph, many, policy).with_transfers()
    schedule.check()
    sent: Counter[tuple[object, ...]] = Counter()
    for place, mine in enumerate(schedule.actions):
        before: list[Action] = []  # receives that no computation has followed yet
        last: Action | None = None
        for action in mine:
            if action.other is None:
                assert all(one[1:3] == action[1:3] for one in before)
                before, last = [], action
                continue
            assert graph.nodes[action.stage].place == place != graph.nodes[action.other].place
            edge = (action.stage, action.other)
            forward = edge if action.kind in (Kind.SEND_F, Kind.RECV_B) else edge[::-1]
            assert forward in graph.edges
            sent[forward, action.kind, action.microbatch] += 1
            if action.kind.startswith("RECV"):
                before.append(action)
            else:
                assert last is not None and last[1:3] == action[1:3] and not before
                assert last.kind in ((Kind.F,) if action.kind is Kind.SEND_F else (Kind.B, Kind.I))
        assert not before
    crossing = [edge for edge in graph.edges if graph.nodes[edge[0]].place != graph.nodes[edge[1]].place]
    expected = Counter(
        (edge, kind, m)
        for edge in crossing
        for kind in (Kind.SEND_F, Kind.RECV_F, *((Kind.SEND_B, Kind.RECV_B) if graph.sends_gradient(*edge) else ()))
        for m in range(many)
    )
    assert sent == expected


@given(graphs(), st.integers(1, 9))
def test_microbatches_in_flight_are_bounded(graph: StageGraph, many: int) -> None:
    stages = range(len(graph.nodes))
    depth = [min(many, graph.distance(stage) + 1) if graph.wants_gradient(stage) else 0 for stage in stages]
    assert count_in_flight(make_schedule(graph, many, "1f1b")) == depth
    policies = ("naive", "gpipe", "zero_bubble")
    in_flight = {policy: count_in_flight(make_schedule(graph, many, policy)) for policy in policies}
    assert in_flight["naive"] == [int(graph.wants_gradient(stage)) for stage in stages]
    assert in_flight["gpipe"] == [many * graph.wants_gradient(stage) for stage in stages]
    for stage in stages:  # no more than the fullest stage of its module has with 1f1b
        own = [graph.distance(s) + 1 for s in stages if graph.nodes[s].module == graph.nodes[stage].module]
        assert in_flight["zero_bubble"][stage] <= max(own) * graph.wants_gradient(stage)


@given(graphs(), st.integers(1, 9))
def test_zero_bubble_is_never_slower_than_1f1b(graph: StageGraph, many: int) -> None:
    assert took(make_schedule(graph, many, "zero_bubble")) <= took(make_schedule(graph, many, "1f1b"))


@given(graphs(), st.integers(1, 9), st.sampled_from(POLICIES_OF_ANY_GRAPH))
def test_no_schedule_beats_the_bound_at_which_zero_bubble_stops(graph: StageGraph, many: int, policy: str) -> None:
    assert took(make_schedule(graph, many, policy)) >= compute_lower_bound(graph, many)


@given(st.integers(1, 12), st.integers(1, 24))
def test_zero_bubble_of_equal_stages_reaches_the_bound_where_microbatches_are_few(stages: int, many: int) -> None:
    """With one stage for each microbatch or more, the way there and back is what takes longest."""
    graph = StageGraph.chain(stages + many)
    assert took(make_schedule(graph, many, "zero_bubble")) == compute_lower_bound(graph, many)


@given(graphs(), st.integers(1, 9))
def test_auto_is_the_fastest_and_says_why(graph: StageGraph, many: int) -> None:
    chosen = make_schedule(graph, many, "auto")
    for policy in ("1f1b", "zero_bubble"):
        other = make_schedule(graph, many, policy)
        assert took(chosen) <= took(other)
        assert chosen.name != policy or chosen.actions == other.actions
    assert chosen.reason.startswith(f"{chosen.name} takes ") and "against" in chosen.reason


@given(graphs(), st.integers(1, 9), st.sampled_from(POLICIES_OF_ANY_GRAPH))
def test_frozen_graph_has_forwards_only(graph: StageGraph, many: int, policy: str) -> None:
    schedule = make_schedule(graph.freeze(), many, policy)
    assert {action.kind for mine in schedule.actions for action in mine} == {Kind.F}
    assert count_in_flight(schedule) == [0] * len(graph.nodes)


@given(graphs().map(whole), st.integers(1, 6), st.sampled_from(POLICIES_OF_ANY_GRAPH), st.integers(0, 3))
def test_times_are_those_of_the_slowest_path(graph: StageGraph, many: int, policy: str, transfer: int) -> None:
    """Each action begins when its place is free and all it needs is there; computed once more, action by action."""
    schedule = make_schedule(graph, many, policy)
    spans = compute_times(graph, schedule.actions, transfer)
    ends = {
        a: end for mine, own in zip(schedule.actions, spans, strict=True) for a, (_, end) in zip(mine, own, strict=True)
    }
    for place, (mine, own) in enumerate(zip(schedule.actions, spans, strict=True)):
        free = 0.0
        for action, (start, end) in zip(mine, own, strict=True):
            needed = [free]
            for other, ended in ends.items():
                if other.microbatch == action.microbatch and _comes_before(graph, other, action):
                    far = graph.nodes[other.stage].place != place
                    needed.append(ended + transfer * far)
            assert start == max(needed) and end >= start
            free = end


def _comes_before(graph: StageGraph, first: Action, then: Action) -> bool:
    if then.kind is Kind.F:
        return first.kind is Kind.F and first.stage in graph.predecessors(then.stage)
    if first.stage == then.stage:
        return first.kind is Kind.F or (first.kind is Kind.I and then.kind is Kind.W)
    is_gradient = first.kind in (Kind.B, Kind.I) and first.stage in graph.successors(then.stage)
    return is_gradient and not (then.kind is Kind.W and graph.backward(then.stage) == "both")


# ------------------------------------------------------------------------------------------------ equal stages


@given(st.integers(1, 12), st.integers(1, 24), st.sampled_from(["gpipe", "1f1b"]))
def test_equal_stages_take_what_the_formula_says(stages: int, many: int, policy: str) -> None:
    schedule = make_schedule(equal_chain(stages), many, policy)
    assert took(schedule) == 3 * (many + stages - 1)


@given(st.integers(1, 12), st.integers(1, 24))
def test_zero_bubble_of_equal_stages_is_zb_h1(stages: int, many: int) -> None:
    faster = took(make_schedule(equal_chain(stages), many, "zero_bubble"))
    assert (faster < 3 * (many + stages - 1)) == (stages > 1)
    if many >= stages:  # ZB-H1: a third of the bubble of 1F1B, in the same memory
        assert faster == 3 * many + stages - 1


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 5))
def test_interleaving_makes_the_bubble_smaller(places: int, each: int, groups: int) -> None:
    many = places * groups
    schedule = make_schedule(equal_chain(places, each), many, "interleaved")
    schedule.check()
    run_as_processes(schedule.with_transfers())
    assert took(schedule) == 3 * (many + Fraction(places - 1, each))  # Narayanan et al., section 2.2
    assert took(schedule) < took(make_schedule(equal_chain(places), many, "1f1b"))
    ahead = count_in_flight(schedule)
    assert max(ahead) <= min(many, places * each)


@given(st.integers(1, 6), st.integers(1, 12))
def test_interleaving_one_stage_per_place_is_1f1b(places: int, many: int) -> None:
    graph = equal_chain(places)
    assert make_schedule(graph, many, "interleaved").actions == make_schedule(graph, many, "1f1b").actions


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2), st.booleans()), max_size=3),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.booleans()),
    st.booleans(),
    st.integers(1, 3),
)
def test_interleaving_behind_encoders(encoders: list, language_model: tuple, colocated: bool, groups: int) -> None:
    """Encoders with and without virtual stages, frozen or not, on their own places or the same."""
    nodes, edges, ends, start = [], [], [], 0
    modules = {f"encoder_{i}": sizes for i, sizes in enumerate(encoders)} | {"language_model": language_model}
    for name, (places, each, trains) in modules.items():
        first = len(nodes)
        if name == "language_model" and colocated:
            start = max((sizes[0] for sizes in encoders), default=0)
        chain = StageGraph.chain(places, name, each, trains)
        nodes += [replace(node, place=start + node.place) for node in chain.nodes]
        edges += [(number, number + 1) for number in range(first, len(nodes) - 1)]
        edges += [(end, first) for end in ends] if name == "language_model" else []
        ends.append(len(nodes) - 1)
        start += 0 if colocated else places
    graph = StageGraph(tuple(nodes), tuple(edges))
    many = 6 * groups  # divides by 1, 2 and 3 places
    schedule = make_schedule(graph, many, "interleaved")
    schedule.check()
    run_as_processes(schedule.with_transfers())
    assert all(count <= many for count in count_in_flight(schedule))


def test_microbatches_that_do_not_divide_are_refused_by_interleaved() -> None:
    graph = StageGraph.chain(4, "language_model", virtual_stages=2)
    for many, fitting in ((6, "4 or 8"), (3, "4"), (1, "4")):
        with pytest.raises(ConfigError) as caught:
            make_schedule(graph, many, "interleaved")
        assert str(caught.value) == (
            f"schedule = interleaved: {many} microbatches do not divide by the 4 places of language_model, which hold "
            f"2 stages each.\nUse {fitting} microbatches, or another schedule."
        )
    assert "; not interleaved: 6 microbatches do not divide" in make_schedule(graph, 6, "auto").reason
    assert make_schedule(graph, 8, "auto").name == "zero_bubble"


def test_interleaved_needs_places_in_turn() -> None:
    nodes = [replace(node, place=place) for node, place in zip(StageGraph.chain(4).nodes, (0, 1, 1, 0), strict=True)]
    with pytest.raises(ConfigError, match="stages of model are on the places 0, 1, 1, 0"):
        make_schedule(StageGraph(tuple(nodes), StageGraph.chain(4).edges), 4, "interleaved")


def test_auto_takes_the_simplest_of_equally_fast_schedules() -> None:
    assert make_schedule(StageGraph.chain(1), 4, "auto").name == "1f1b"
    graph = StageGraph.chain(3, trains=[False, False, True])
    chosen = make_schedule(graph, 4, "auto")
    assert (chosen.name, chosen.reason) == ("1f1b", "1f1b takes 14 in simulation, against 14 with zero_bubble")


def test_registered_schedule_is_built_by_name_and_simulated() -> None:
    def build_reversed(graph: StageGraph, microbatches: int) -> Schedule:
        """All forwards, then all backwards from the last microbatch to the first."""
        order = [*range(microbatches)]
        actions = tuple(
            (*(Action(F, s, m) for m in order), *(Action(B, s, m) for m in reversed(order)))
            for s in range(len(graph.nodes))
        )
        return Schedule(graph, microbatches, "reversed", actions)

    register_schedule("reversed", build_reversed)
    schedule = make_schedule(equal_chain(3), 4, "reversed")
    schedule.check()
    run_as_processes(schedule.with_transfers())
    assert simulate(schedule).step == took(make_schedule(equal_chain(3), 4, "gpipe"))
    with pytest.raises(ConfigError, match="there is a schedule of that name already"):
        register_schedule("reversed", build_reversed)


# ------------------------------------------------------------------------------------------------ mistakes


def test_unknown_policy_and_wrong_number_of_microbatches_are_refused() -> None:
    graph = StageGraph.chain(2)
    with pytest.raises(
        ConfigError, match="schedule = 'dualpipe': expected one of naive, gpipe, 1f1b, interleaved, zero"
    ):
        make_schedule(graph, 4, "dualpipe")
    for many in (0, -1, True, 2.0):
        with pytest.raises(ConfigError, match="microbatches = "):
            make_schedule(graph, many)  # type: ignore[arg-type]


F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
FIRST = [(F, 0, 0), (F, 0, 1), (B, 0, 0), (B, 0, 1)]
SECOND = [(F, 1, 0), (B, 1, 0), (F, 1, 1), (B, 1, 1)]
BROKEN = [
    ([FIRST], "There are 2 places, but 1 lists of actions."),
    ([FIRST, SECOND[:-1]], "B1@1 is missing."),
    ([FIRST[1:], SECOND], "F0@0 is missing."),
    ([FIRST, [*SECOND, (B, 1, 1)]], "B1@1 is listed 2 times."),
    ([[*FIRST, (F, 1, 0)], SECOND[1:]], "F0@1 belongs to place 1, but is listed at place 0."),
    ([FIRST, [*SECOND, (F, 1, 2)]], "F2@1: there is no such stage or microbatch."),
    ([FIRST, [*SECOND, (W, 1, 1)]], "W1@1 is superfluous: the backward of its stage computes both"),
    ([[(B, 0, 0), *FIRST[:2], FIRST[3]], SECOND], "Places wait for ever: place 0 at B0@0 for F0@0 and I0@1"),
    ([[FIRST[0], FIRST[2], FIRST[1], FIRST[3]], [SECOND[0], SECOND[2], SECOND[1], SECOND[3]]], "Places wait for ever"),
]


@pytest.mark.parametrize(("lists", "message"), BROKEN)
def test_broken_schedule_is_refused_with_the_reason(lists: list[list[tuple[Kind, int, int]]], message: str) -> None:
    schedule = Schedule(StageGraph.chain(2), 2, "mine", tuple(tuple(Action(*a) for a in mine) for mine in lists))
    with pytest.raises(ValueError) as caught:
        schedule.check()
    assert message in str(caught.value)


def test_broken_transfers_are_refused_with_the_reason() -> None:
    right = make_schedule(StageGraph.chain(2), 2).with_transfers()
    right.check()
    first, second = right.actions
    for lists, message in (
        ((first[:1] + first[2:], second), "Place 0: found F1@0; expected SEND_F0@0>1."),
        ((first, second[1:]), "Place 1: found F0@1; expected RECV_F0@1<0."),
        (((*first, Action(Kind.SEND_F, 0, 1, 1)), second), "Place 0: found SEND_F1@0>1; expected nothing."),
    ):
        with pytest.raises(ValueError) as caught:
            replace(right, actions=lists).check()
        assert message in str(caught.value)


def test_deadlock_names_the_waiting_places_and_results() -> None:
    graph = StageGraph.chain(2)
    lists = ((Action(F, 0, 0), Action(B, 0, 0)), (Action(Kind.RECV_F, 1, 0, 0), Action(F, 1, 0)))
    with pytest.raises(DeadlockError, match=r"place 0 at B0@0 for I0@1; place 1 at RECV_F0@1<0 for SEND_F0@0"):
        compute_times(graph, lists)


def test_schedule_is_printable() -> None:
    schedule = make_schedule(StageGraph.chain(2), 2)
    assert str(schedule) == "place 0: F0@0 F1@0 B0@0 B1@0\nplace 1: F0@1 B0@1 F1@1 B1@1"
    assert "RECV_F0@1<0 F0@1 B0@1 SEND_B0@1>0" in str(schedule.with_transfers())
    assert schedule.with_transfers().with_transfers() == schedule.with_transfers()


# ------------------------------------------------------------------------------------------------ large


def large_graphs() -> dict[str, StageGraph]:
    """Return 64 stages: equal, different, some frozen, encoders on places of their own or shared, interleaved."""
    chance = random.Random(0)

    def uneven(graph: StageGraph, trains: Callable[[StageNode], bool] = lambda node: True) -> StageGraph:
        nodes = (StageNode(*astuple(n)[:3], trains(n), *(chance.random() for _ in range(3))) for n in graph.nodes)
        return StageGraph(tuple(nodes), graph.edges)

    branches = StageGraph.branches({"vision": 16, "audio": 16}, 32)
    return {
        "equal": StageGraph.chain(64),
        "uneven": uneven(StageGraph.chain(64)),
        "frozen": uneven(branches, lambda node: (node.module, node.index) == ("vision", 15)),
        "branches": uneven(branches),
        "colocated": uneven(StageGraph.branches({"vision": 16, "audio": 16}, 32, colocated=True)),
        "interleaved": uneven(StageGraph.chain(16, virtual_stages=4)),
    }


@pytest.mark.parametrize("name", large_graphs())
@pytest.mark.parametrize("policy", POLICIES)
def test_effort_is_linear_in_the_number_of_actions(policy: str, name: str) -> None:
    """64 × 512; measured: about a second, or up to 160 turns of a loop for each action."""
    graph = large_graphs()[name]
    schedule, turns = counted(lambda: make_schedule(graph, 512, policy))
    actions = sum(map(len, schedule.actions))
    assert turns < 1500 * actions  # it does not grow with the microbatches for each of them
    assert actions >= sum(1 + graph.wants_gradient(s) for s in range(64)) * 512
    assert gc.isenabled()
