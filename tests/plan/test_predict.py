"""Predictions against figures that are computed by hand, and against other parts of the planner."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from cornstarch.errors import ConfigError
from cornstarch.plan import DataPlan, Layout, ModulePlan, Plan
from cornstarch.plan.candidates import Candidate, SearchSpace
from cornstarch.plan.cluster import Link
from cornstarch.plan.cost import ModuleCost, RunCost
from cornstarch.plan.memory import textbook
from cornstarch.plan.pipeline_cost import CostModel, PipelineCost
from cornstarch.plan.predict import predict
from cornstarch.plan.rank_order import find_links
from cornstarch.plan.simulate import StepEnd
from tests.plan.memory_curve import memory_over_time
from tests.plan.runs import cluster, enumerate_candidates, layer, module, random_run

CHAIN = RunCost((module("model", 4),), batch=8, tokens=10, flops=1e12)
FAST = {"inside": 1e30, "between": 1e30}


def chain(stages: int, dp: int = 1, microbatches: int = 8, kind: Any = "ddp", schedule: Any = "1f1b") -> Candidate:
    """Return a candidate for a whole model."""
    plan = Plan({"model": ModulePlan(stages=stages)}, DataPlan(kind), schedule=schedule)
    return Candidate.of(plan, dp, microbatches)


def test_one_rank_equals_a_hand_computed_step() -> None:
    """4 layers × 3 passes × 8 samples; the first layer has no gradient of its input."""
    found = predict(chain(1), CHAIN, cluster(1, 1))
    assert found.step == pytest.approx(8 * (4 * 3 - 1))
    assert found.tokens_per_second == pytest.approx(80 / found.step)
    assert found.mfu == pytest.approx(8e12 / found.step / 1e12)
    assert found.breakdown.compute == pytest.approx(found.step)
    assert found.reasons == ()


def test_a_pipeline_of_equal_stages_has_the_well_known_bubble() -> None:
    """The encoder costs nothing but is trained, so that all four stages have all three passes of 1 s."""
    layers = module("language_model", 4)
    cost = RunCost((module("vision", 1, seconds=0.0), layers), batch=8)
    plan = Plan({"vision": ModulePlan(), "language_model": ModulePlan(stages=4)}, DataPlan(), "first_stage")
    found = predict(Candidate.of(plan, 1, 8), cost, cluster(1, 4, **FAST))
    assert found.step == pytest.approx((8 + 4 - 1) * 3)
    assert found.timeline.bubble == pytest.approx(3 / 11)


def test_gradient_reduction_overlaps_with_the_last_backward() -> None:
    """4 buckets: three quarters of a backward pass can hide them; the last bucket is always exposed."""
    assert StepEnd(reduction=4.0, buckets=4).get_exposed_seconds(backward=100.0) == 1.0
    assert StepEnd(reduction=40.0, buckets=4).get_exposed_seconds(backward=20.0) == 25.0
    assert StepEnd(reduction=0.0, buckets=0).get_exposed_seconds(backward=1.0) == 0.0
    assert StepEnd(reduction=4.0, buckets=4, earlier=2, overlaps=False).get_exposed_seconds(backward=100.0) == 12.0
    slow = cluster(1, 2, inside=100.0)  # 800 bytes over 2 ranks at 100 bytes/s: 8 s; backward takes 7 s
    found = predict(chain(1, dp=2, microbatches=4), CHAIN, slow)
    assert found.step == pytest.approx(4 * 11 + max(8 / 4, 8 - 7 * 3 / 4))
    assert found.breakdown.data == pytest.approx(2.75)


def test_cpu_cores_do_not_overlap_communication() -> None:
    """Processes of one machine exchange by its cores; between machines a network does it, while they compute."""
    inside, between = cluster(1, 2, inside=100.0), cluster(2, 1, between=100.0)
    for machines, overlaps in ((inside, False), (between, True)):
        cores = replace(machines, device=replace(machines.device, name="cpu"))
        found = predict(chain(1, dp=2, microbatches=4), CHAIN, cores)
        assert found.breakdown.data == pytest.approx(2.75 if overlaps else 8.0)
        # zero3: of a layer's 200 bytes half are sent; that takes 1 s, no longer than its shortest pass
        gathered = predict(chain(1, dp=2, microbatches=4, kind="zero3"), CHAIN, cores)
        layers = 4 * 4 * 2
        assert gathered.breakdown.gather == pytest.approx(0.0 if overlaps else layers * 1.0)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3"])
def test_states_equal_the_textbook(kind: str) -> None:
    cost = RunCost((module("model", 4, parameters=1000, parameter_bytes=2000),), batch=8, state_bytes=12)
    found = predict(chain(1, dp=4, microbatches=2, kind=kind), cost, cluster(1, 4))
    states = found.memory[0].states
    expected = textbook(4000, 4)[kind]
    if kind == "zero2":  # as it is run here: parameters are sharded, and gathered until the backward pass
        expected -= 2 * 4000 * 3 / 4
        assert states.gathered >= 2 * 4000
    assert states.persistent == expected


def test_hsdp_shards_within_a_node_and_reduces_between() -> None:
    """2 nodes of 4 ranks: 2 copies, each sharded over 4; gradients go through the node, then a quarter between."""
    cost = RunCost((module("model", 4, parameters=1000, parameter_bytes=2000),), batch=8, state_bytes=12)
    machines = cluster(2, 4, inside=1000.0, between=100.0)
    found = predict(chain(1, dp=8, microbatches=1, kind="hsdp"), cost, machines)
    assert found.memory[0].states.persistent == textbook(4000, 4)["zero3"]
    inside, between = 3 / 4 * 8000 / 1000, 2 * (2 - 1) / 2 * (8000 / 4) / 100
    gather = 3 / 4 * 2000 / 1000  # a layer's, which takes longer than its forward, and the first one's backward, of 1 s
    backward = gather + 3 * 2
    late = StepEnd(inside + between, 4).get_exposed_seconds(backward)
    assert found.step == pytest.approx(4 * gather + backward + late)
    everywhere = predict(chain(1, dp=8, microbatches=1, kind="zero3"), cost, machines)
    assert everywhere.memory[0].states.persistent == textbook(4000, 8)["zero3"]
    assert found.step < everywhere.step  # it gathers inside the nodes


def test_hsdp_copies_equal_those_of_the_layout() -> None:
    for nodes, per_node, tp, copies in ((2, 4, 1, 2), (2, 4, 2, 2), (4, 2, 1, 4)):
        plan = Plan({"model": ModulePlan(tp=tp)}, DataPlan("hsdp"))
        layout = Layout.of(plan, nodes * per_node, ranks_per_node=per_node)
        candidate = Candidate.of(plan, layout.dp, 1)
        assert candidate.copies(per_node) == layout.replicate == copies
        groups = layout.groups("shard", "model")
        crosses = any(len({layout.node(rank) for rank in group}) > 1 for group in groups.tolist())
        found = find_links(candidate.spans, layout.dp, cluster(nodes, per_node), copies).groups["model"]
        assert (found.data.bandwidth == 1e8) == crosses
        assert found.copies is not None and found.copies.bandwidth == 1e8
    given = Candidate.of(Plan({"model": ModulePlan()}, DataPlan("hsdp", 4)), 8, 1)
    assert given.copies(4) == 4 and given.plan.data.replicate == 4


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (chain(1, dp=8, microbatches=1, kind="hsdp"), "8 replicas of 1 ranks, on nodes of 1, are not"),
        (Candidate.of(Plan({"model": ModulePlan()}, DataPlan("hsdp", 3)), 8, 1), "divisor of 8"),
    ],
)
def test_impossible_hsdp_copies_are_refused(candidate: Candidate, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        predict(candidate, CHAIN, cluster(8, 1))


def test_stages_send_over_their_own_links() -> None:
    """4 stages on 2 nodes of 2: only the middle edge leaves a node. 10 bytes take 1 s between nodes, 10 ms inside."""
    machines = cluster(2, 2, inside=1000.0, between=10.0)
    found = predict(chain(4, microbatches=1), replace(CHAIN, batch=1), machines)
    assert found.step == pytest.approx(4 * 3 - 1 + 2 * (0.01 + 1 + 0.01))


def test_memory_over_time_peaks_at_the_peak() -> None:
    """With several microbatches the fullest moment is the peak; before the first backward there are no gradients."""
    candidate, machines = chain(2, dp=2, kind="zero3", microbatches=4), cluster(1, 4)
    found = predict(candidate, CHAIN, machines)
    curves = memory_over_time(found, PipelineCost(candidate, CostModel(CHAIN, machines)))
    for place, levels in zip(found.memory, curves, strict=True):
        assert max(level.bytes for level in levels) == place.peak
        assert levels[0].bytes < place.states.persistent + place.states.gathered + place.activations
        assert levels[-1].time <= found.step
    draw = random.Random(2)
    for _ in range(8):
        cost, machines = random_run(draw)
        for candidate in draw.sample(list(enumerate_candidates(cost, machines)), 5):
            one = predict(candidate, cost, machines)
            curves = memory_over_time(one, PipelineCost(candidate, CostModel(cost, machines)))
            for place, levels in zip(one.memory, curves, strict=True):
                assert max(level.bytes for level in levels) <= place.peak + 1, candidate.describe()


def test_stages_of_a_place_are_not_full_together() -> None:
    """Two places of two stages each: the simulated levels are the peak itself."""
    plan = Plan({"model": ModulePlan(stages=2, virtual_stages=2)}, schedule="interleaved")
    candidate, machines = Candidate.of(plan, 1, 8), cluster(1, 2)
    found = predict(candidate, CHAIN, machines)
    pipeline = PipelineCost(candidate, CostModel(CHAIN, machines))
    stages = len(pipeline.places[0])
    in_flight = {("model", n): many for n, many in enumerate(found.timeline.in_flight)}
    assert stages == 2 and found.memory[0].activations < pipeline.activations(0, in_flight)
    for place, levels in zip(found.memory, memory_over_time(found, pipeline), strict=True):
        assert max(level.bytes for level in levels) == place.peak


def test_stages_of_a_place_share_the_unit_that_is_gathered() -> None:
    """Shards that a pipeline keeps gathered: all of them, but one layer at a time for what is reduced."""
    memory = {}
    for virtual in (1, 2):
        plan = Plan(
            {"model": ModulePlan(stages=2, virtual_stages=virtual)},
            DataPlan("zero2"),
            schedule="interleaved" if virtual > 1 else "1f1b",
        )
        memory[virtual] = predict(Candidate.of(plan, 2, 4), CHAIN, cluster(1, 4)).memory[0].states
    assert memory[1].gathered == memory[2].gathered == 2 * 200 + 200 + 2 * 200
    half = predict(chain(2, dp=2, microbatches=4, kind="zero2"), replace(CHAIN, gathered_itemsize=2), cluster(1, 4))
    assert half.memory[0].states.gathered == 2 * 200 + 200 + 2 * 200 + 200  # of 100 numbers, reduced in float32


def test_everyone_waits_for_the_slowest_device() -> None:
    machines = cluster(1, 2)
    spread = replace(machines, device=replace(machines.device, spread=0.1))
    alike, found = (predict(chain(1, dp=2, microbatches=4), CHAIN, one) for one in (machines, spread))
    factor = spread.device.find_slowest(2)
    assert factor > 1.03 and found.step == pytest.approx(alike.step * factor)
    assert found.breakdown.slowest == pytest.approx(alike.step * (factor - 1))
    assert predict(chain(1), CHAIN, spread).breakdown.slowest == 0


def test_reducing_gradients_slows_backward_passes_down() -> None:
    machines = cluster(1, 2)
    slow = replace(machines, device=replace(machines.device, slowdown=0.5), inside=Link(200.0, 0.0))
    ends = PipelineCost(chain(1, dp=2, microbatches=4), CostModel(CHAIN, slow)).ends[0]
    assert ends.reduction == 800 / 200 and ends.gather == pytest.approx(0.5 * 4.0)  # a backward pass takes 7 s
    every = PipelineCost(chain(1, dp=2, microbatches=4, kind="zero3"), CostModel(CHAIN, slow)).ends[0]
    assert every.gather == pytest.approx(4 * 0.5 * 2.0)


def test_stages_keep_whole_gradients_until_the_last_microbatch() -> None:
    many, one = (
        predict(chain(2, dp=2, microbatches=m, kind="zero3"), CHAIN, cluster(1, 4)).memory[0].states for m in (4, 1)
    )
    assert many.gradients == 2 * one.gradients == 400


def test_peak_overlaps_gradients_and_activations() -> None:
    """Four layers of 200 bytes of gradients each, which work with 500 bytes; the head shares 100 with the first.

    Computed again, a layer keeps 10 of 40 bytes: backward, more comes than goes, and the first layer is the fullest
    moment. If each keeps 1,000 bytes, it is the last one.
    """
    plan = Plan({"model": ModulePlan(activation_checkpointing=True)})
    states = 4 * (200 + 8 * 100)
    layers = [layer(working_bytes=500) for _ in range(3)] + [layer(working_bytes=500, shared_bytes=100)]
    cost = RunCost((ModuleCost("model", tuple(layers)),), batch=2, samples=2)
    assert predict(Candidate.of(plan, 1, 1), cost, cluster(1, 1)).peak == states + (40 + 500) + 3 * 200 + 100
    many = replace(cost, samples=1)  # the gradients of the first microbatch are there when the second comes
    assert predict(Candidate.of(plan, 1, 2), many, cluster(1, 1)).peak == states + 4 * 200 + 4 * 10 + 30 + 500
    kept = ModuleCost("model", tuple(replace(one, activation_bytes=1000) for one in layers))
    found = predict(Candidate.of(Plan({"model": ModulePlan()}), 1, 1), replace(cost, modules=(kept,)), cluster(1, 1))
    assert found.peak == states + 4 * 1000 + 500


def test_activations_in_flight_follow_the_schedule() -> None:
    """Two layers of 40 bytes a stage: 1f1b keeps 2 microbatches at the first stage, gpipe all 8."""
    by = {schedule: predict(chain(2, schedule=schedule), CHAIN, cluster(1, 2)) for schedule in ("1f1b", "gpipe")}
    assert [place.activations for place in by["1f1b"].memory] == [2 * 80, 80]
    assert [place.activations for place in by["gpipe"].memory] == [8 * 80, 8 * 80]


def test_a_plan_that_does_not_fit_has_a_reason() -> None:
    found = predict(chain(1), CHAIN, cluster(1, 1, memory=1000))
    assert not found.fits
    assert found.reasons[0].startswith("does not fit: model 0 needs")


def test_links_cross_nodes_where_the_layout_does() -> None:
    for tp, dp, slow in ((2, 4, False), (4, 2, False), (8, 1, True)):
        plan = Plan({"model": ModulePlan(tp=tp)})
        found = find_links(Candidate.of(plan, dp, 1).spans, dp, cluster(2, 4))
        layout = Layout.of(plan, 8, ranks_per_node=4)
        crosses = any(len({layout.node(rank) for rank in group}) > 1 for group in layout.groups("tp", "model").tolist())
        expected = 4 * 1e8 if slow else 1e9  # all of a node's cards
        assert found.groups["model"].tp.rate == expected
        assert crosses == slow


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (chain(1, microbatches=3), "batch of 8"),
        (chain(2, dp=4, microbatches=2), "the cluster has 4"),
        (chain(5), "cannot be split into 5"),
        (Candidate.of(Plan({"vision": ModulePlan(), "language_model": ModulePlan()}), 1, 1), "costs are of model"),
    ],
)
def test_impossible_candidates_are_refused(candidate: Candidate, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        predict(candidate, CHAIN, cluster(1, 4))


def test_bounds_are_below_the_simulation() -> None:
    """No step is shorter than its bound, and the peak of plain schedules is exact."""
    draw = random.Random(1)
    space = SearchSpace(schedules=("1f1b", "gpipe", "interleaved", "zero_bubble"))
    looked_at = 0
    for _ in range(12):
        cost, machines = random_run(draw)
        costs = CostModel(cost, machines)
        every = list(enumerate_candidates(cost, machines, space))
        for candidate in draw.sample(every, min(25, len(every))):
            found, pipeline = predict(candidate, costs, machines), PipelineCost(candidate, costs)
            assert pipeline.least <= found.step * (1 + 1e-9), candidate.describe()
            assert pipeline.least_peak <= found.peak
            if candidate.schedule in ("1f1b", "gpipe"):
                assert pipeline.least_peak == found.peak, candidate.describe()
            looked_at += 1
    assert looked_at > 150


def test_layers_that_are_not_compiled_cost_what_eager_ones_do() -> None:
    """Two layers of 3 s each, eagerly of 6 s where zero_bubble takes backward passes apart; with cp they compile."""
    slower = replace(CHAIN, eager=tuple(module(one.name, len(one.layers), seconds=2.0) for one in CHAIN.modules))
    for schedule, factor in (("1f1b", 1), ("zero_bubble", 2)):
        found, usual = (predict(chain(2, schedule=schedule), cost, cluster(1, 2)) for cost in (slower, CHAIN))
        assert found.step == pytest.approx(factor * usual.step)
    alone = Candidate.of(Plan({"model": ModulePlan()}), 1, 8)
    assert predict(alone, slower, cluster(1, 1)).step == predict(alone, CHAIN, cluster(1, 1)).step
    halves = Candidate.of(Plan({"model": ModulePlan(cp=2)}), 1, 8)
    cut = [
        replace(cost, modules=tuple(replace(one, cp_sizes=(1, 2)) for one in cost.modules)) for cost in (slower, CHAIN)
    ]
    found, usual = (predict(halves, cost, cluster(1, 2)).breakdown.compute for cost in cut)
    assert found == pytest.approx(usual)


def test_a_pipeline_gathers_kept_parameters_once() -> None:
    slow = cluster(1, 4, inside=20.0)
    ends = {
        (kind, many): PipelineCost(chain(2, dp=2, microbatches=many, kind=kind), CostModel(CHAIN, slow)).ends[0]
        for kind in ("zero1", "zero2", "zero3")
        for many in (2, 4)
    }
    assert ends["zero2", 2].gather == ends["zero2", 4].gather == ends["zero1", 2].gather > 0
    assert ends["zero3", 2].gather == 0  # it gathers inside of the passes
    kept, freed = (
        predict(chain(2, dp=2, microbatches=4, kind=kind), CHAIN, slow).breakdown.gather for kind in ("zero2", "zero3")
    )
    assert kept == 0 < freed


def test_given_cuts_are_used() -> None:
    plan = Plan({"model": ModulePlan(stages=2)})
    found = predict(Candidate.of(plan, 1, 8, {"model": (0, 1)}), CHAIN, cluster(1, 2))
    assert found.starts == {"model": (0, 1)}
    assert found.step > predict(chain(2), CHAIN, cluster(1, 2)).step


def test_a_faster_device_memory_makes_the_optimizer_faster() -> None:
    machines = cluster(1, 1)
    slow = replace(machines, device=replace(machines.device, bandwidth=1e4))
    assert predict(chain(1), CHAIN, slow).breakdown.optimizer == pytest.approx((4 * 800 + 2 * 8 * 400) / 0.8e4)


def test_uneven_samples_make_steps_longer() -> None:
    machines = cluster(1, 4)
    even, uneven = (
        predict(chain(1, dp=4, microbatches=2), replace(CHAIN, straggler=known), machines)
        for known in ((), ((2, 1.1), (8, 1.3)))
    )
    late = uneven.step - even.step
    assert uneven.breakdown.uneven == pytest.approx(late) and even.breakdown.uneven == 0
    assert late == pytest.approx(0.2 * (even.step - even.breakdown.data - even.breakdown.optimizer))
    assert any("largest samples takes" in reason for reason in uneven.reasons)
