"""Simulated steps: the formulas of the literature hold exactly, and the text shows the simulation."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornstarch.plan.simulate import Interval, StepEnd, as_text, simulate
from cornstarch.schedule import Kind, StageGraph, make_schedule
from tests.effort import counted
from tests.plan.memory_curve import MemoryLevel, memory_levels
from tests.schedule.graphs import POLICIES_OF_ANY_GRAPH, graphs, whole

ROOT = Path(__file__).resolve().parents[2]
costs = st.tuples(*[st.integers(1, 9).map(float)] * 3)


@given(st.integers(1, 12), st.integers(1, 24), costs, st.sampled_from(["gpipe", "1f1b"]))
def test_the_bubble_of_equal_stages_equals_the_formula(
    stages: int, many: int, cost: tuple[float, float, float], policy: str
) -> None:
    timeline = simulate(make_schedule(StageGraph.chain(stages, costs=cost), many, policy))
    assert timeline.bubble == (stages - 1) / (many + stages - 1)
    assert timeline.bubbles == ((stages - 1) / (many + stages - 1),) * stages
    assert timeline.step == (many + stages - 1) * sum(cost)
    assert timeline.busy == (many * sum(cost),) * stages


def test_fractions_stay_exact() -> None:
    third = Fraction(1, 3)
    graph = StageGraph.chain(3, costs=(third, third, third))  # type: ignore[arg-type]
    assert simulate(make_schedule(graph, 4)).bubble == Fraction(1, 3)


@given(graphs().map(whole), st.integers(1, 6), st.sampled_from(POLICIES_OF_ANY_GRAPH), st.integers(0, 500))
def test_events_equal_the_schedule(graph: StageGraph, many: int, policy: str, transfer: int) -> None:
    schedule = make_schedule(graph, many, policy)
    timeline = simulate(schedule, transfer)
    for place, (own, actions) in enumerate(zip(timeline.events, schedule.actions, strict=True)):
        assert [(e.kind, e.stage, e.microbatch) for e in own] == [action[:3] for action in actions]
        assert all(event.place == place for event in own)
        assert all(first.end <= then.start for first, then in zip(own, own[1:], strict=False))
    assert timeline.step == max((own[-1].end for own in timeline.events if own), default=0)
    assert all(0 <= bubble <= 1 for bubble in timeline.bubbles)
    # With transfers written out, and with slower ones, it is the same and no faster.
    assert simulate(schedule.with_transfers(), transfer) == timeline.__class__(
        schedule.with_transfers(), timeline.events, timeline.step
    )
    assert simulate(schedule).step <= timeline.step


def test_transfers_overlap_with_computations() -> None:
    schedule = make_schedule(StageGraph.chain(2), 1, "gpipe")
    assert simulate(schedule).step == 6 and simulate(schedule, transfer=0.5).step == 7
    frozen = make_schedule(StageGraph.chain(2).freeze(), 8, "gpipe")
    assert simulate(frozen, transfer=3).step == 9 + 3  # all but the first are on their way while others are computed


def test_every_edge_has_its_own_transfer() -> None:
    """Two encoders of 1 s and a frozen language model of two stages: the slow edge alone delays what needs it."""
    graph = StageGraph.branches({"a": 1, "b": 1}, 2).freeze()
    schedule = make_schedule(graph, 1, "gpipe")
    slow = simulate(schedule, {(0, 2): 5.0, (1, 2): 1.0})  # (2, 3) is not named: it takes no time
    assert [own[0].start for own in slow.events] == [0, 0, 6, 7]
    assert simulate(schedule, {(1, 2): 1.0}).step == 4
    trained = make_schedule(StageGraph.chain(2), 1, "gpipe")
    assert simulate(trained, {(0, 1): 0.5}) == simulate(trained, 0.5)  # the gradient takes the same edge back


@given(graphs().map(whole), st.integers(1, 4), st.sampled_from(POLICIES_OF_ANY_GRAPH), st.integers(0, 50))
def test_equal_edges_are_one_transfer(graph: StageGraph, many: int, policy: str, transfer: int) -> None:
    schedule = make_schedule(graph, many, policy)
    assert simulate(schedule, dict.fromkeys(graph.edges, transfer)) == simulate(schedule, transfer)


def test_gradient_reduction_overlaps_with_the_last_backward() -> None:
    """Two stages of 2 layers, 1 s for each pass; the backward of the last microbatch takes 2 s."""
    schedule = make_schedule(StageGraph.chain(2), 2)
    alone = simulate(schedule)
    end = StepEnd(reduction=4.0, buckets=2, optimizer=0.5, gather=0.25)
    timeline = simulate(schedule, ends=[end, StepEnd()])
    first = alone.events[0][-1].end
    assert timeline.events == alone.events
    # The first bucket is ready after 1 s of 2: 1 s of 4 is hidden.
    assert timeline.other_work[0] == (
        Interval("sums", first - 1, first + 3),
        Interval("optimizer", first + 3, first + 3.5),
        Interval("gather", first + 3.5, first + 3.75),
    )
    assert timeline.other_work[1] == () and alone.other_work == ((), ())
    assert timeline.step == first + 3.75
    assert timeline.busy[0] == alone.busy[0] + 0.5


def test_memory_levels_of_1f1b() -> None:
    """1f1b on two stages: the first saves two microbatches, the second one; each pass uses 1 byte more."""
    timeline = simulate(make_schedule(StageGraph.chain(2), 2))
    first, second = memory_levels(timeline, kept=[10, 20], working=[1, 1])
    assert first[:3] == (MemoryLevel(0, 11), MemoryLevel(1, 21), MemoryLevel(2, 20))
    assert first[-1] == MemoryLevel(timeline.step, 0) and second[-1].bytes == 0
    assert max(level.bytes for level in second) == 21
    frozen = simulate(make_schedule(StageGraph.chain(2).freeze(), 2, "gpipe"))
    assert {level.bytes for own in memory_levels(frozen, [10, 20]) for level in own} == {0}  # nothing waits


@given(graphs().map(whole), st.integers(1, 5), st.sampled_from(POLICIES_OF_ANY_GRAPH))
def test_the_fullest_moment_of_a_stage_is_its_microbatches_in_flight(graph: StageGraph, many: int, policy: str) -> None:
    timeline = simulate(make_schedule(graph, many, policy))
    for stage, node in enumerate(graph.nodes):
        kept = [float(other == stage) for other in range(len(graph.nodes))]
        found = memory_levels(timeline, kept)[node.place]
        assert [level.time for level in found] == sorted({level.time for level in found})
        assert found[-1].bytes == 0
        lasting = [event for event in timeline.events[node.place] if event.end > event.start]
        if len(lasting) == len(timeline.events[node.place]):  # else two moments are one
            assert max(level.bytes for level in found) == timeline.in_flight[stage]


@pytest.mark.parametrize(("policy", "passes"), [("1f1b", 3), ("gpipe", 3), ("zero_bubble", 2)])
def test_a_thousand_places_and_64_microbatches_are_quick(policy: str, passes: int) -> None:
    """1,024 × 64: schedule, transfers by edge and sums; measured: up to 70 turns of a loop for each pass."""
    graph = StageGraph.chain(1024)
    transfers = {edge: 0.01 for edge in graph.edges}
    ends = [StepEnd(1.0, 4, 0.5)] * 1024
    timeline, turns = counted(lambda: simulate(make_schedule(graph, 64, policy), transfers, ends))
    assert timeline.step > (1024 + 63) * passes
    assert turns < 800 * 1024 * 64 * 3  # one for each other place, too, would be 1,024 times as many
    levels = memory_levels(timeline, [1.0] * 1024)
    assert max(level.bytes for level in levels[0]) == 64


PICTURES = [
    (StageGraph.chain(2), 2, "gpipe", "model 0  F0 F1 .  .  .  B0--- B1---\nmodel 1  .  F0 F1 B0--- B1--- .  ."),
    (StageGraph.chain(2), 2, "zero_bubble", "model 0  F0 F1 .  W0--- W1---\nmodel 1  .  F0 I0 F1 I1 W0 W1"),
    (StageGraph.chain(2, trains=[False, True]), 2, "1f1b",
     "model 0  F0 F1 .  .  .  .  .\nmodel 1  .  F0 B0--- F1 B1---"),
    (StageGraph.branches({"a": 1, "b": 1}, 1, colocated=True).freeze(), 1, "1f1b",
     "a 0 + b 0         F0@0 F0@1 .\nlanguage_model 0  .    .    F0"),
]  # fmt: skip


@pytest.mark.parametrize(("graph", "many", "policy", "picture"), PICTURES)
def test_text_of_a_timeline(graph: StageGraph, many: int, policy: str, picture: str) -> None:
    assert as_text(simulate(make_schedule(graph, many, policy))) == picture


def test_wide_timelines_are_not_drawn() -> None:
    timeline = simulate(make_schedule(StageGraph.chain(8), 512))
    assert as_text(timeline) == "1,557 columns would be too many to draw; the step takes 1557."
    assert as_text(timeline, unit=100).count("\n") == 7


@given(graphs(equal=True), st.integers(1, 4), st.sampled_from(POLICIES_OF_ANY_GRAPH))
def test_every_action_is_drawn(graph: StageGraph, many: int, policy: str) -> None:
    timeline = simulate(make_schedule(graph, many, policy))
    drawn = as_text(timeline)
    for event in (event for own in timeline.events for event in own):
        assert f"{event.kind}{event.microbatch}" in drawn
    assert drawn.count("F") == sum(event.kind is Kind.F for own in timeline.events for event in own)


def test_simulate_imports_no_torch() -> None:
    code = (
        "import sys, cornstarch.plan.simulate, cornstarch.schedule\n"
        "print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.strip() == "[]", ran.stderr
