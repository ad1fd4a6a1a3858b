"""Costs scaled to a rank, passes with what they exchange, and cuts into stages."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import Device, Link
from cornstarch.plan.cost import LayerCost, ModuleCost, ModuleSharding, RunCost, compute_rank_cost, scale_layer
from cornstarch.plan.rank_order import GroupLinks
from cornstarch.plan.stage_graph import best_cut, best_parts
from tests.plan.runs import layer

DEVICE = Device("toy", 2**30)
FREE = GroupLinks(*[Link(1e30, 0.0)] * 3)


def scale(
    one: LayerCost, tp: int = 1, cp: int = 1, samples: float = 1.0, device: Device | None = None, **flags: bool
) -> LayerCost:
    """Return the cost of a layer on one of tp × cp ranks."""
    return scale_layer(one, ModuleSharding("model", tp, cp, samples, FREE, **flags), device)


def test_tp_shards_matrices_and_cp_tokens() -> None:
    one = layer(kv_bytes=80, whole_bytes=8)
    cut = scale(one, tp=2, cp=2, samples=4)
    assert (cut.forward, cut.input_gradient) == (1.0, 1.0)
    assert (cut.parameters, cut.parameter_bytes) == (50, 100)
    assert cut.activation_bytes == (8 + 32 / 2) * 2
    assert scale(one, tp=2, sequence=True).activation_bytes == 20
    assert (cut.output_bytes, cut.kv_bytes) == (20, 160)


def test_cp_distributes_whole_items() -> None:
    """3 tiles on 2 ranks: one has two of them; a single one is on one rank, and the other waits."""
    times = [scale(layer(items=items), cp=2).forward for items in (1, 2, 3, 4)]
    assert times == pytest.approx([1, 1 / 2, 2 / 3, 1 / 2])
    assert scale(layer(items=1), cp=2, samples=2).forward == 1.0  # a microbatch of two samples has two
    assert scale(layer(items=3)).forward == 1.0


def test_checkpointing_does_not_recompute_a_head() -> None:
    """A layer of 1 s with a head of 2 s: checkpointing computes the layer again, and not the head."""
    cost = RunCost((ModuleCost("model", (layer(seconds=3.0, again=1.0),)),))
    for tp in (1, 2):
        found = compute_rank_cost(cost, ModuleSharding("model", tp, 1, 1.0, FREE, checkpointing=True), DEVICE)
        assert found.again.tolist() == found.inputs.tolist() == [1 / tp]


def test_embeddings_are_sharded_only_with_tp_vocabulary() -> None:
    table = layer(tp_cuts="vocabulary")
    assert scale(table, tp=4).parameters == 100
    assert scale(table, tp=4).forward == 1.0
    assert scale(table, tp=4, vocabulary=True).parameters == 25


def test_every_rank_of_tp_has_norms_and_without_tp_vocabulary_the_embeddings() -> None:
    own = layer(parameters=1000, parameter_bytes=4000, whole_parameters=100, table_parameters=200)
    cut = scale(own, tp=4)
    assert (cut.parameters, cut.parameter_bytes, cut.num_trainable) == (300 + 700 // 4, 4 * 475, 475)
    cut = scale(own, tp=4, vocabulary=True)
    assert (cut.parameters, cut.parameter_bytes) == (100 + 900 // 4, 4 * 325)
    with pytest.raises(ConfigError, match="leaves more parameters whole"):
        replace(own, whole_parameters=801)


def test_no_pass_is_faster_than_reading_its_weights() -> None:
    slow = replace(DEVICE, bandwidth=100.0)  # 200 bytes take 2 s
    assert scale(layer(), device=slow).forward == 2.0
    assert scale(layer(), device=slow, samples=8).forward == 8.0


def test_frozen_layers_have_only_required_passes() -> None:
    """Frozen, trained, frozen: no backward; weights alone; gradients of inputs alone."""
    layers = (layer("a", False), layer("b", True), layer("c", False))
    cost = RunCost((ModuleCost("model", layers),))
    found = compute_rank_cost(cost, ModuleSharding("model", 1, 1, 1.0, FREE), DEVICE)
    assert found.forward.tolist() == [1, 1, 1]
    assert found.inputs.tolist() == [0, 0, 1]
    assert found.weights.tolist() == [0, 1, 0]
    assert found.kept.tolist() == [0, 40, 40]


def test_a_trained_encoder_adds_input_gradients_to_a_frozen_language_model() -> None:
    frozen = ModuleCost("language_model", (layer("l", False),))
    for trained, expected in ((True, 1.0), (False, 0.0)):
        cost = RunCost((ModuleCost("vision", (layer("v", trained),)), frozen))
        assert compute_rank_cost(cost, ModuleSharding("language_model", 1, 1, 1.0, FREE), DEVICE).inputs.tolist() == [
            expected
        ]


def test_tp_and_checkpointing_equal_hand_computed_times() -> None:
    """Sums of 1,000 bytes over 2 ranks at 1,000 bytes/s take 1 s each: 2 forward, 2 again, 2 backward."""
    one = layer(sums=2, output_bytes=1000)
    cost = RunCost((ModuleCost("vision", (layer("v"),)), ModuleCost("language_model", (one,))))
    links = GroupLinks(Link(1000.0, 0.0), Link(1e30, 0.0), Link(1e30, 0.0))
    found = compute_rank_cost(cost, ModuleSharding("language_model", 2, 1, 1.0, links, checkpointing=True), DEVICE)
    assert found.forward.tolist() == [0.5 + 2]
    assert found.inputs.tolist() == [0.5 + 2 + 0.5 + 2]
    assert found.weights.tolist() == [0.5]
    assert (found.tensor.tolist(), found.again.tolist()) == ([6.0], [0.5])
    assert (found.kept.tolist(), found.working.tolist()) == ([5.0], [15.0])


def test_zero3_waits_for_exposed_gathering() -> None:
    """200 bytes from 2 ranks at 50 bytes/s take 2 s; forward takes 1 s, backward 2 s."""
    cost = RunCost((ModuleCost("vision", (layer("v"),)), ModuleCost("language_model", (layer("l"),))))
    links = GroupLinks(Link(1e30, 0.0), Link(1e30, 0.0), Link(50.0, 0.0))
    found = compute_rank_cost(cost, ModuleSharding("language_model", 1, 1, 1.0, links, gathered_over=2), DEVICE)
    assert (found.forward.tolist(), found.gather.tolist()) == ([2.0], [1.0])
    assert found.total.tolist() == [4.0]


def test_zero2_gathers_only_for_the_forward_pass() -> None:
    """As above, but at 20 bytes/s: 5 s, which neither pass hides."""
    cost = RunCost((ModuleCost("vision", (layer("v"),)), ModuleCost("language_model", (layer("l"),))))
    links = GroupLinks(Link(1e30, 0.0), Link(1e30, 0.0), Link(20.0, 0.0))
    totals = []
    for again in (True, False):
        way = ModuleSharding("language_model", 1, 1, 1.0, links, gathered_over=2, gathered_again=again)
        totals += compute_rank_cost(cost, way, DEVICE).total.tolist()
    assert totals == [5.0 + 5.0, 5.0 + 2.0]


def test_hidden_gathering_slows_computing_down_and_is_copied() -> None:
    """400 bytes from 2 ranks at 400 bytes/s take 0.5 s; 100 parameters are gathered as 200 bytes, and copied twice.

    Copies run at 0.8 of 1,000 bytes/s; gradients of 400 bytes are copied from 200.
    """
    one = layer(parameter_bytes=400)
    gathered = ModuleCost("language_model", (replace(one, forward=2.0),))
    cost = RunCost(
        (ModuleCost("vision", (layer("v"),)), ModuleCost("language_model", (one,))),
        gathered=(ModuleCost("vision", (layer("v"),)), gathered),
        gathered_itemsize=2,
    )
    links = GroupLinks(Link(1e30, 0.0), Link(1e30, 0.0), Link(400.0, 0.0))
    device = Device("toy", 2**30, bandwidth=1000.0, slowdown=0.5)
    way = ModuleSharding("language_model", 1, 1, 1.0, links, gathered_over=2, gathered=True)
    found = compute_rank_cost(cost, way, device)
    moving = 200 / 2 / 400
    each = 0.5 * moving + 2 * 200 / 800
    assert found.forward.tolist() == [pytest.approx(2.0 + each)]
    assert found.total.tolist() == [pytest.approx(2.0 + 1.0 + 1.0 + 2 * each + (200 + 400) / 800)]
    assert found.gradients.tolist() == [400.0]
    plain = compute_rank_cost(cost, replace(way, gathered_over=1, gathered=False), device)
    assert plain.total.tolist() == [3.0]


def test_sums_of_tp_are_as_large_as_their_products() -> None:
    """Residuals of 1,000 bytes in float32, but sums of 500 in half precision."""
    cost = RunCost((ModuleCost("model", (layer(sums=2, output_bytes=1000, sum_bytes=500),)),))
    links = GroupLinks(Link(1000.0, 0.0), Link(1e30, 0.0), Link(1e30, 0.0))
    assert compute_rank_cost(cost, ModuleSharding("model", 2, 1, 2.0, links), DEVICE).tensor.tolist() == [2 * 1.0]


def test_best_cut_equals_brute_force() -> None:
    draw = random.Random(0)
    for _ in range(100):
        times = [draw.choice([0.5, 1, 2, 5]) for _ in range(draw.randint(2, 9))]
        stages, before = draw.randint(1, len(times)), draw.choice([0.0, 0.0, 3.0])

        def slowest(starts: tuple[int, ...], times: list[float] = times, before: float = before) -> float:
            ends = (*starts[1:], len(times))
            sums = [sum(times[a:b]) for a, b in zip(starts, ends, strict=True)]
            return max(sums[0] + before, *sums[1:], 0.0)

        every = [(0, *rest) for rest in combinations(range(1, len(times)), stages - 1)]
        found = best_cut(times, stages, before)
        assert len(found) == stages
        assert slowest(found) == pytest.approx(min(map(slowest, every)))


def test_best_cut_puts_more_frozen_layers_into_a_stage() -> None:
    """Six frozen layers of 1 s, two trained ones of 3 s: the first stage has all frozen ones."""
    assert best_cut([1, 1, 1, 1, 1, 1, 3, 3], 2) == (0, 6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: layer(forward=-1.0),
        lambda: layer(activation_bytes_recomputed=41),
        lambda: ModuleCost("model", ()),
        lambda: RunCost(()),
        lambda: RunCost((ModuleCost("model", (layer(),)),), batch=0),
        lambda: RunCost((ModuleCost("vision", (layer(),), ("audio",)), ModuleCost("language_model", (layer(),)))),
    ],
)
def test_impossible_costs_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_adapters_train_part_of_the_parameters() -> None:
    one = layer(trained_parameters=10)
    assert (one.num_trainable, layer(trained=False).num_trainable, layer().num_trainable) == (10, 0, 100)
    assert scale(one, tp=2).num_trainable == 5
    assert isinstance(one, LayerCost)


def test_best_parts_balances_places() -> None:
    """Encoders of 6 s before 18 layers of 1 s, on 3 places of 2 parts: 8 s each, and not 9 s for the first."""
    times, before = [1.0] * 18, 6.0
    starts = best_parts(times, 3, 2, before)
    sizes = [b - a for a, b in zip(starts, (*starts[1:], 18), strict=True)]
    places = [sum(sizes[place::3]) for place in range(3)]
    assert [places[0] + before, *places[1:]] == [8, 8, 8]
    assert best_parts(times, 3, 1, before) == best_cut(times, 3, before)
    assert best_parts([1.0] * 6, 3, 2, 0.0) == (0, 1, 2, 3, 4, 5)
    assert len(best_parts([1.0] * 6, 3, 2, 100.0)) == 6  # the first place has a layer for each part, whatever it costs


def test_best_parts_are_no_worse_than_the_best_cut() -> None:
    draw = random.Random(4)
    for _ in range(50):
        stages, virtual = draw.choice([(2, 2), (3, 2), (2, 3)])
        times = [draw.choice([1.0, 2.0, 3.0]) for _ in range(stages * virtual + draw.randint(0, 8))]
        before = draw.choice([0.0, 2.0, 6.0])
        found = best_parts(times, stages, virtual, before)
        assert len(found) == stages * virtual and all(a < b for a, b in zip(found, found[1:], strict=False))
        plain = best_cut(times, stages * virtual, before)
        assert _busiest(times, found, stages, before) <= _busiest(times, plain, stages, before) + 1e-9


def _busiest(times: list[float], starts: tuple[int, ...], stages: int, before: float) -> float:
    parts = [sum(times[a:b]) for a, b in zip(starts, (*starts[1:], len(times)), strict=True)]
    return max(sum(parts[place::stages]) + before * (place == 0) for place in range(stages))
