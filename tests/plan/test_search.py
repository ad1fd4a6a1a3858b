"""The search against brute force, its limits, and the reasons of runners-up."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from cornstarch.plan.candidates import SearchSpace
from cornstarch.plan.cluster import Cluster
from cornstarch.plan.cost import LayerCost, ModuleCost, RunCost
from cornstarch.plan.layout import Layout, unexecutable
from cornstarch.plan.pipeline_cost import CostModel
from cornstarch.plan.predict import predict
from cornstarch.plan.search import TOLERANCE, search
from tests.plan.runs import add_experts, cluster, enumerate_candidates, layer, module, random_run

INSTANCES = 80
SMALL = SearchSpace(kinds=("ddp", "zero3", "hsdp"))


def test_search_equals_brute_force() -> None:
    """Every candidate through the same prediction, on random runs; several have no answer."""
    draw = random.Random(8)
    impossible, winners = 0, set()
    for number in range(INSTANCES):
        cost, machines = random_run(draw)
        costs = CostModel(cost, machines)
        every = (predict(candidate, costs, machines) for candidate in enumerate_candidates(cost, machines, SMALL))
        least = min((one.step for one in every if one.fits), default=None)
        found = search(cost, machines, SMALL, runners_up=0, polish=False)
        if least is None:
            assert found.best is None, number
            impossible += 1
            continue
        assert found.best is not None, number
        assert least * (1 - 1e-9) <= found.best.step <= least / (1 - TOLERANCE) * (1 + 1e-9), number
        assert found.best.fits
        winner = found.best.candidate
        winners |= {winner.ranks, winner.kind, winner.schedule, winner.modules[-1][1].tp, winner.microbatches > 1}
    assert {"shared", "first_stage", "own", "ddp", "zero3", 2, True} <= winners
    assert 0 < impossible < INSTANCES / 2


def test_search_equals_brute_force_where_sharded_kinds_compute_otherwise() -> None:
    """Weights gathered in half precision: other times and activations; and the slowest of unequal devices counts."""
    draw, winners = random.Random(12), set()
    for number in range(25):
        cost, machines = random_run(draw)
        faster, smaller = draw.choice([0.5, 0.8, 1.2]), draw.choice([0.4, 1.0])
        gathered = tuple(
            replace(one, layers=tuple(compute_otherwise(layer, faster, smaller) for layer in one.layers))
            for one in cost.modules
        )
        cost = replace(cost, gathered=gathered, gathered_itemsize=2)
        machines = replace(machines, device=replace(machines.device, spread=draw.choice([0.0, 0.1]), slowdown=0.2))
        costs = CostModel(cost, machines)
        every = (predict(candidate, costs, machines) for candidate in enumerate_candidates(cost, machines, SMALL))
        least = min((one.step for one in every if one.fits), default=None)
        best = search(cost, machines, SMALL, runners_up=0, polish=False).best
        assert (best is None) == (least is None), number
        if best is not None and least is not None:
            assert least * (1 - 1e-9) <= best.step <= least / (1 - TOLERANCE) * (1 + 1e-9), number
            winners.add(best.candidate.kind)
    assert {"ddp", "zero3"} <= winners


def test_search_equals_brute_force_with_experts_over_ranks() -> None:
    """Every number of ranks for experts, with every kind, schedule and memory limit; some win with ep."""
    draw, winners, fitting = random.Random(3), set(), 0
    space = SearchSpace(kinds=("ddp", "zero1", "zero3", "hsdp"), schedules=("1f1b", "interleaved", "zero_bubble"))
    for number in range(16):
        cost, machines = random_run(draw)
        cost = add_experts(cost, draw)
        costs = CostModel(cost, machines)
        every = (predict(candidate, costs, machines) for candidate in enumerate_candidates(cost, machines, space))
        least = min((one.step for one in every if one.fits), default=None)
        best = search(cost, machines, space, runners_up=0, polish=False).best
        assert (best is None) == (least is None), number
        if best is not None and least is not None:
            assert least * (1 - 1e-9) <= best.step <= least / (1 - TOLERANCE) * (1 + 1e-9), number
            fitting += 1
            winners |= {(best.candidate.kind, ep) for _, ep in best.candidate.expert_sizes}
    assert fitting > 8
    assert winners >= {("ddp", 2), ("zero3", 2)}, winners


def test_candidates_with_experts_over_ranks_are_executable() -> None:
    draw = random.Random(9)
    shared = 0
    for _ in range(15):
        cost, machines = random_run(draw)
        cost = add_experts(cost, draw)
        every = list(enumerate_candidates(cost, machines))
        for candidate in draw.sample(every, min(40, len(every))):
            assert unexecutable(candidate.plan) == []
            plan = replace(candidate.plan, data=replace(candidate.plan.data, replicate=None))
            if candidate.kind != "hsdp":
                assert Layout.of(plan, candidate.world, machines.per_node).dp == candidate.dp
            shared += bool(candidate.expert_sizes)
    assert shared > 50


def compute_otherwise(layer: LayerCost, faster: float, smaller: float) -> LayerCost:
    times = {name: getattr(layer, name) * faster for name in ("forward", "input_gradient", "weight_gradient")}
    kept = ("activation_bytes", "activation_bytes_recomputed", "whole_bytes")
    return replace(layer, **times, **{name: int(getattr(layer, name) * smaller) for name in kept})


SPACES = {
    "everything": SearchSpace(schedules=("1f1b", "gpipe", "interleaved", "zero_bubble"), virtual=(2, 3)),
    "no sharding of tokens and words": SearchSpace(tp_sequence=False, tp_vocabulary=False),
    "own ranks, and always recomputed": SearchSpace(
        ("own",), ("ddp", "zero1"), ("1f1b", "gpipe"), checkpointing=(True,)
    ),
    "at least two stages": SearchSpace(least_stages=2, kinds=("zero1", "zero2")),
}


def build_long_run(draw: random.Random) -> tuple[RunCost, Cluster]:
    """Return a run of more layers and microbatches than `random_run`, of one to three modules, on eight devices."""
    size = draw.choice([50, 400]) * 1000
    sizes = {"parameters": size, "parameter_bytes": 2 * size, "sums": 2, "output_bytes": draw.choice([10**4, 10**6])}
    modules = []
    for number in range(draw.choice([0, 1, 1, 2])):
        seconds, trained = draw.choice([5e-4, 2e-3]), draw.random() < 0.5
        vision = module(f"encoder{number}", draw.randint(1, 3), trained, seconds, tp_sizes=(1, 2), **sizes)
        modules.append(replace(vision, layers=(*vision.layers[:-1], replace(vision.layers[-1], trained=True))))
    activations = {"activation_bytes": draw.choice([1, 8]) * 10**5, "whole_bytes": 10**4}
    layers = [
        layer(f"lm.{n}", n > 1 or draw.random() < 0.7, draw.choice([1e-3, 2e-3]), **sizes, **activations)
        for n in range(draw.randint(4, 6))
    ]
    head = replace(layers[-1], tp_cuts="vocabulary", sums=0)
    name = "language_model" if modules else "model"
    modules.append(
        ModuleCost(name, (*layers, head), tp_sizes=(1, 2, 4), cp_sizes=(1, 2), tp_sequence=draw.random() < 0.5)
    )
    cost = RunCost(tuple(modules), batch=draw.choice([4, 6, 8]), tokens=100, flops=1e9, state_bytes=8)
    memory = int(draw.choice([2, 5, 12, 60]) * 1e6)
    return cost, cluster(*draw.choice([(1, 8), (2, 4), (2, 3)]), memory, *draw.choice([(1e10, 1e9), (1e9, 1e7)]), 1e-6)


@pytest.mark.parametrize("name", SPACES)
def test_search_equals_brute_force_in_every_space(name: str) -> None:
    """Several modules, places of encoders, kinds, schedules and memory limits, tight and loose."""
    draw, space = random.Random(name), SPACES[name]
    fitting = 0
    while fitting < (1 if name == "everything" else 2):
        cost, machines = build_long_run(draw)
        costs = CostModel(cost, machines)
        every = (predict(candidate, costs, machines) for candidate in enumerate_candidates(cost, machines, space))
        least = min((one.step for one in every if one.fits), default=None)
        best = search(cost, machines, space, runners_up=0, polish=False).best
        assert (best is None) == (least is None)
        if best is not None and least is not None:
            fitting += 1
            assert least * (1 - 1e-9) <= best.step <= least / (1 - TOLERANCE) * (1 + 1e-9)


def test_tokens_and_words_are_sharded_wherever_tp_is() -> None:
    head = layer("head", seconds=2.0, tp_cuts="vocabulary", sums=0)
    vision = module("vision", 2, tp_sizes=(1, 2))
    last = ModuleCost("language_model", (*module("lm", 4).layers, head), tp_sizes=(1, 2))
    cost = RunCost((replace(vision, tp_sequence=False), last), batch=1)
    best = search(cost, cluster(1, 4, inside=1e15), SearchSpace(most_stages=1), polish=False).best
    assert best is not None
    plans = dict(best.candidate.modules)
    assert plans["language_model"].tp == 2
    assert plans["language_model"].tp_sequence and plans["language_model"].tp_vocabulary
    assert not plans["vision"].tp_sequence and not plans["vision"].tp_vocabulary
    whole = search(cost, cluster(1, 4, inside=1e15), SearchSpace(most_stages=1, tp_vocabulary=False), polish=False).best
    assert whole is not None and whole.step > best.step


def test_zero1_is_a_candidate_with_tp_cp_and_stages() -> None:
    """It sends the bytes of ddp, and each rank updates a part: as fast, or faster, and smaller."""
    model = module("model", 4, tp_sizes=(2,), cp_sizes=(2,), parameters=10**6, parameter_bytes=2 * 10**6)
    cost, machines = RunCost((model,), batch=4, state_bytes=12), cluster(2, 8, 10**9, 1e10, 1e9)
    space = SearchSpace(kinds=("ddp", "zero1"), least_stages=2, microbatches=(2,), schedules=("1f1b",))
    found = {}
    for candidate in enumerate_candidates(cost, machines, space):
        if candidate.dp == 2 and not candidate.memory_key[1]:
            assert unexecutable(candidate.plan) == []
            found[candidate.kind] = predict(candidate, cost, machines)
    ddp, zero1 = found["ddp"], found["zero1"]
    assert zero1.memory[0].states.optimizer == ddp.memory[0].states.optimizer // 4
    assert zero1.memory[0].states.gradients == ddp.memory[0].states.gradients
    assert {one.modules[0][1].tp * one.modules[0][1].cp for one in (ddp.candidate, zero1.candidate)} == {4}
    reduction = [one.run.ends[0].reduction + one.run.ends[0].gather for one in (ddp, zero1)]
    assert reduction[0] == pytest.approx(reduction[1])


def test_every_candidate_is_executable() -> None:
    draw = random.Random(3)
    space = SearchSpace(schedules=("1f1b", "gpipe", "interleaved", "zero_bubble"))
    for _ in range(6):
        cost, machines = random_run(draw)
        every = list(enumerate_candidates(cost, machines, space))
        assert len(set(every)) == len(every)
        for candidate in draw.sample(every, min(40, len(every))):
            assert unexecutable(candidate.plan) == [], candidate.describe()
            assert candidate.world <= machines.devices


def test_a_faster_link_never_makes_the_best_step_slower() -> None:
    draw = random.Random(5)
    for _ in range(25):
        cost, machines = random_run(draw)
        slow = search(cost, machines, SMALL, runners_up=0, polish=False).best
        for which in ("inside", "between"):
            link = getattr(machines, which)
            faster = replace(machines, **{which: replace(link, bandwidth=4 * link.bandwidth, latency=0.0)})
            fast = search(cost, faster, SMALL, runners_up=0, polish=False).best
            assert (slow is None) == (fast is None)
            if slow is not None and fast is not None:
                assert fast.step <= slow.step * 1.01


def test_memory_is_a_hard_limit() -> None:
    """Less and less memory: plans that fit, ever slower, until none does."""
    cost = RunCost((module("model", 4, parameters=10**6, parameter_bytes=2 * 10**6, activation_bytes=10**6),), batch=8)
    steps = []
    for memory in (200e6, 40e6, 20e6, 14e6, 5e6):
        found = search(cost, cluster(1, 4, memory=int(memory)))
        if found.best is None:
            steps.append(float("inf"))
            continue
        assert found.best.peak <= found.best.limit == cluster(1, 4, memory=int(memory)).device.usable
        assert all(one.prediction.fits for one in found.runners_up)
        steps.append(found.best.step)
    assert steps == sorted(steps)
    assert steps[0] < steps[-1] == float("inf")


def test_impossible_requests_get_the_smallest_cluster() -> None:
    cost = RunCost((module("model", 8, parameters=10**6, parameter_bytes=2 * 10**6),), batch=64, state_bytes=12)
    found = search(cost, cluster(1, 2, memory=30 * 10**6))
    assert found.best is None
    assert found.smallest is not None
    assert found.smallest.devices > 2
    assert found.smallest.name in found.message
    assert search(cost, found.smallest).best is not None
    fewer = replace(found.smallest, nodes=found.smallest.nodes - 1)
    assert search(cost, fewer).best is None


def test_nearest_misses_are_reported_where_nothing_fits() -> None:
    """Every kind of data parallelism is reported with the bytes that it needs."""
    cost = RunCost((module("model", 8, parameters=10**6, parameter_bytes=2 * 10**6),), batch=64, state_bytes=12)
    found = search(cost, cluster(1, 2, memory=30 * 10**6))
    assert found.best is None and found.refused
    assert all(" GiB on a rank, and 0.0 are usable" in one for one in found.refused)
    for kind in ("ddp", "zero1", "zero3"):
        assert any(f"({kind})" in one for one in found.refused), kind
    layer = module("model", 1, parameters=10**9, parameter_bytes=2 * 10**9, tp_sizes=(1,))
    never = search(RunCost((layer,), batch=1), cluster(1, 1, memory=10**6))
    assert never.smallest is None
    assert "needs" in never.message


def test_hsdp_wins_where_gathering_between_nodes_is_slow() -> None:
    """States fit into a node but not on a rank, and between nodes everything is slow."""
    layers = module("model", 8, parameters=10**6, parameter_bytes=2 * 10**6, seconds=1e-2, tp_sizes=(1,))
    cost = RunCost((layers,), batch=8, state_bytes=12)
    machines = cluster(2, 4, memory=60 * 10**6, inside=1e10, between=2.5e7)
    found = search(cost, machines, SearchSpace(most_stages=1))
    assert found.best is not None
    assert found.best.candidate.kind == "hsdp"
    assert unexecutable(found.best.candidate.plan) == []
    without = search(cost, machines, SearchSpace(most_stages=1, kinds=("ddp", "zero1", "zero2", "zero3"))).best
    assert without is None or without.step > found.best.step


def test_the_reason_names_tp_that_crosses_nodes() -> None:
    model = module("model", 2, sums=2, output_bytes=10**8, tp_sizes=(1, 2, 4))
    cost = RunCost((model,), batch=1)  # one sample: replicas and microbatches do not help
    found = search(cost, cluster(2, 2, inside=1e12, between=1e8), SearchSpace(schedules=("1f1b",)), polish=False)
    assert found.best is not None
    assert found.best.candidate.modules[-1][1].tp == 2
    reasons = [one.reason for one in found.runners_up]
    assert any("tp = 4 of model crosses nodes: its all-reduce takes" in reason for reason in reasons), reasons


def test_runners_up_differ_in_kind_and_are_slower() -> None:
    frozen = module("vision", 4, trained=False, tp_sizes=(1, 2))
    cost = RunCost((frozen, module("language_model", 8, tp_sizes=(1, 2))), batch=16)
    found = search(cost, cluster(1, 8))
    assert found.best is not None
    assert len(found.runners_up) >= 2
    assert all(one.prediction.step >= found.best.step * (1 - 0.01) for one in found.runners_up)
    assert len({one.prediction.candidate.describe() for one in found.runners_up}) == len(found.runners_up)
    assert all(one.reason.startswith(("+", "as fast")) for one in found.runners_up)
    assert "s a step" in found.message


def test_polish_only_improves() -> None:
    draw = random.Random(9)
    for _ in range(10):
        cost, machines = random_run(draw)
        plain, finer = (search(cost, machines, SMALL, runners_up=0, polish=polish).best for polish in (False, True))
        if plain is not None and finer is not None:
            assert finer.step <= plain.step
            assert finer.fits
            assert unexecutable(finer.candidate.plan) == []


def test_a_batch_of_odd_size_leaves_devices_idle_rather_than_failing() -> None:
    found = search(RunCost((module("model", 1, tp_sizes=(1,)),), batch=3), cluster(1, 4))
    assert found.best is not None
    assert found.best.candidate.dp == 3


def test_a_thousand_devices_are_searched_quickly() -> None:
    """1,024 devices and 80 layers after an encoder; the limit allows for a slow and busy machine."""
    start = time.process_time()
    sizes = {"parameters": 10**6, "parameter_bytes": 2 * 10**6, "output_bytes": 10**6, "sums": 2}
    vision = module("vision", 24, trained=False, seconds=1e-3, **sizes)
    cost = RunCost((vision, module("language_model", 80, seconds=4e-3, cp_sizes=(1, 2, 4), **sizes)), batch=1024)
    found = search(cost, cluster(128, 8, memory=10**9, inside=4e11, between=5e10, latency=1e-5))
    assert found.best is not None
    assert time.process_time() - start < 30
