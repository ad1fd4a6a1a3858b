"""The time of a step without every microbatch against the full simulation: equal, in fractions."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from cornstarch.plan import steady_state
from cornstarch.plan.simulate import StepEnd, last_backward, simulate
from cornstarch.plan.steady_state import PipelineRun, count_chunks_in_flight
from cornstarch.schedule.graph import StageGraph, StageNode
from cornstarch.schedule.policies import count_in_flight, make_schedule

LINES = ("1f1b", "gpipe", "naive")


def build_graph(draw: random.Random, virtual: int = 1) -> StageGraph:
    """Return a language model of some stages behind up to two encoders, each on places of its own; partly frozen."""
    nodes: list[StageNode] = []
    edges: list[tuple[int, int]] = []
    ends: list[int] = []
    place = 0
    kinds = [Fraction(draw.randint(1, 12), draw.choice([1, 3, 7])) for _ in range(3)]
    is_even = draw.random() < 0.4
    for name in [*(f"encoder{number}" for number in range(draw.choice([0, 0, 1, 2]))), "language_model"]:
        is_last = name == "language_model"
        stages = draw.randint(2 if virtual > 1 else 1, 5) if is_last else draw.randint(1, 2)
        parts, first = stages * virtual if is_last else stages, len(nodes)
        trains = draw.random() < 0.6
        for index in range(parts):
            times = kinds if is_even and is_last else [draw.choice(kinds) for _ in range(3)]
            trained = trains or (is_last and draw.random() < 0.5) or (index == parts - 1 and draw.random() < 0.5)
            nodes.append(StageNode(name, index, place + index % stages, trained, *times))  # type: ignore[arg-type]
        edges += [(number, number + 1) for number in range(first, len(nodes) - 1)]
        edges += [(end, first) for end in ends if is_last]
        ends.append(len(nodes) - 1)
        place += stages
    return StageGraph(tuple(nodes), tuple(edges))


def build_run(draw: random.Random, policy: str, most: int) -> PipelineRun:
    graph = build_graph(draw, draw.choice([2, 3]) if policy == "interleaved" else 1)
    lag = draw.choice([0, 1, 9])
    transfers = {edge: Fraction(draw.randint(0, lag), 4) for edge in graph.edges}
    transfers = {(a, b): t for (a, b), t in transfers.items() if graph.nodes[a].place != graph.nodes[b].place}
    ends = [StepEnd(optimizer=Fraction(draw.randint(0, 5))) for _ in range(graph.places)]  # type: ignore[arg-type]
    places = len({node.place for node in graph.nodes if node.module == "language_model"})
    many = draw.randint(1, most)
    return PipelineRun(graph, many * places if policy == "interleaved" else many, policy, transfers, ends)


@pytest.mark.parametrize("policy", [*LINES, "interleaved"])
def test_equals_the_full_simulation_exactly(policy: str) -> None:
    draw = random.Random(policy)
    for number in range(60):
        run = build_run(draw, policy, 60 if policy in LINES else 12)
        full = simulate(make_schedule(run.graph, run.microbatches, policy), run.transfers, run.ends)
        found = steady_state._find_last_ends(run.graph, run.microbatches, policy, run.transfers)
        assert found is not None and isinstance(found[-1], Fraction), number
        assert found == [own[-1].end for own in full.events], number
        assert run.step == full.step, number
        assert run.in_flight == full.in_flight, number


def count_rounds(run: PipelineRun, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """Return the end of the last action, and the rounds that were computed."""
    counted = 0
    for kind, name in ((steady_state._StageLines, "advance"), (steady_state._Chunks, "_advance")):
        plain = getattr(kind, name)

        def count(self: object, *given: object, plain: object = plain) -> object:
            nonlocal counted
            counted += 1
            return plain(self, *given)  # type: ignore[operator]

        monkeypatch.setattr(kind, name, count)
    ends = steady_state._find_last_ends(run.graph, run.microbatches, run.policy, run.transfers)
    assert ends is not None
    return max(ends), counted


@pytest.mark.parametrize(("policy", "virtual", "many"), [("1f1b", 1, 2000), ("interleaved", 2, 800)])
@pytest.mark.parametrize("slow", [0, 1, 3])
def test_rounds_are_skipped_and_the_time_stays_exact(
    policy: str, virtual: int, many: int, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stage is slower by a thousandth: it takes hundreds of rounds until the others wait for it."""
    times = [Fraction(1001 if number == slow else 1000, 1000) for number in range(4 * virtual)]
    nodes = [StageNode("model", i, i % 4, True, one, one, one) for i, one in enumerate(times)]  # type: ignore[arg-type]
    graph = StageGraph(tuple(nodes), tuple(zip(range(len(nodes) - 1), range(1, len(nodes)), strict=True)))
    transfers = {edge: Fraction(1, 7) for edge in graph.edges}
    run = PipelineRun(graph, many, policy, transfers, [StepEnd()] * 4)
    full = simulate(make_schedule(graph, many, policy), transfers)
    end, rounds = count_rounds(run, monkeypatch)
    assert isinstance(end, Fraction) and end == full.step
    assert rounds < many * virtual / 5


def test_floats_are_equal_up_to_rounding() -> None:
    draw = random.Random(1)
    for _ in range(20):
        exact = build_run(draw, "1f1b", 400)
        nodes = [
            replace(
                node,
                forward=float(node.forward),
                backward_input=float(node.backward_input),
                backward_weight=float(node.backward_weight),
            )
            for node in exact.graph.nodes
        ]
        transfers = {edge: float(time) for edge, time in exact.transfers.items()}
        graph = StageGraph(tuple(nodes), exact.graph.edges)
        run = PipelineRun(graph, exact.microbatches, "1f1b", transfers, exact.ends)
        assert run.step == pytest.approx(float(exact.step), rel=1e-11)


@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_in_flight_of_chunks_does_not_grow_with_microbatches(virtual: int) -> None:
    for places in (2, 3, 5):
        graph = StageGraph.chain(places, virtual_stages=virtual)
        for groups in (1, 2, 3, 6, 9):
            many = groups * places
            expected = count_in_flight(make_schedule(graph, many, "interleaved"))
            assert list(count_chunks_in_flight(places, virtual, many)) == expected


def test_places_with_several_lines_are_simulated() -> None:
    graph = StageGraph.branches({"vision": 2, "audio": 2}, language_model=3, colocated=True)
    run = PipelineRun(graph, 9, "1f1b", {}, [StepEnd(optimizer=2.0)] * graph.places)
    assert steady_state._find_last_ends(graph, 9, "1f1b", {}) is None
    assert run.step == simulate(make_schedule(graph, 9), 0, run.ends).step
    assert run.in_flight == run.timeline.in_flight
    assert last_backward(graph, 0) == 4.0
