"""Layouts against enumeration: who holds what, which ranks form a group, what crosses a node, which worlds fit."""

from __future__ import annotations

import pickle
from collections import Counter
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornstarch.errors import ConfigError
from cornstarch.plan import AXES, DataPlan, Layout, ModulePlan, Place, Plan
from cornstarch.plan.layout import check_executable
from cornstarch.plan.rank_order import Placement, Span, crossings, place_spans
from tests.plan import brute_force

EXAMPLE = Plan(
    {
        "vision": ModulePlan(tp=2),
        "audio": ModulePlan(),
        "language_model": ModulePlan(tp=4, cp=2, stages=3),
    },
    DataPlan("fsdp2"),
)


def as_set(groups: Any) -> set[tuple[int, ...]]:
    return {tuple(group) for group in groups.tolist()}


# ------------------------------------------------------------------------------------------------ the example


def test_the_example_takes_27_ranks() -> None:
    layout = Layout.of(EXAMPLE, 27)
    assert layout.dp == 1 and layout.nodes == 4
    held = Counter((place.modules[0], place.stage) for place in map(layout.place, range(27)))
    assert held == {
        ("vision", 0): 2, ("audio", 0): 1,
        ("language_model", 0): 8, ("language_model", 1): 8, ("language_model", 2): 8,
    }  # fmt: skip
    assert layout.warnings == ()


def test_54_ranks_are_two_replicas() -> None:
    layout = Layout.of(EXAMPLE, 54)
    assert layout.dp == 2 and layout.warnings == ()
    assert layout.place(40) == Place(("language_model",), stage=2, dp=1, cp=0, tp=0)
    assert layout.rank("language_model", stage=2, dp=1) == 40 and layout.node(40) == 5
    assert layout.mesh("language_model").shape == (3, 2, 2, 4)
    assert layout.groups("tp", "vision").tolist() == [[48, 49], [50, 51]]
    assert layout.groups("dp", "audio").tolist() == [[52, 53]]
    assert layout.groups("pp", "language_model").tolist()[0] == [0, 8, 16]
    assert layout.groups("data", "language_model").shape == (12, 4)
    assert layout.data_shape("language_model") == (1, 4) and layout.data_shape("audio") == (1, 2)


FITTING = [
    # plan, world, what is said
    (EXAMPLE, 40, "40 ranks do not divide evenly: a replica takes 27 (vision 2 + audio 1 + language_model 3 stages × "
                  "cp 2 × tp 4 = 24).\nSizes that work are multiples of 27: 27 or 54."),
    (EXAMPLE, 26, "26 ranks are too few: a replica takes 27"),
    (EXAMPLE, 1, "1 rank is too few: a replica takes 27"),
    (EXAMPLE, 1, "multiples of 27: 27 or 54."),
    (EXAMPLE, 28, "multiples of 27: 27 or 54."),
    (EXAMPLE, 100_000, "100,000 ranks do not divide evenly"),
    (EXAMPLE, 100_000, ": 99981 or 100008."),
    (Plan({"model": ModulePlan(tp=3)}), 8, "8 ranks do not divide evenly: a replica takes 3.\nSizes that work are "
                                           "multiples of 3: 6 or 9."),
    (Plan({"model": ModulePlan(tp=2, cp=2)}), 6, "a replica takes 4 (cp 2 × tp 2 = 4)."),
    (Plan({"vision": ModulePlan(tp=2), "language_model": ModulePlan(tp=2)}), 3, "a replica takes 2."),
    (Plan(data=DataPlan("hsdp", 4)), 6, "a replica takes 1 and the plan wants 4 copies (hsdp).\nSizes that work are "
                                        "multiples of 4: 4 or 8."),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "world", "said"), FITTING)
def test_a_world_that_does_not_fit(plan: Plan, world: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout.of(plan, world)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("world", "ranks_per_node", "said"),
    [
        (0, 8, "world = 0"),
        (-27, 8, "world = -27"),
        (True, 8, "world = true"),
        (27.0, 8, "world = 27.0"),
        (10_000_001, 8, "world = 10000001: expected a whole number from 1 to 10,000,000"),
        (27, 0, "ranks_per_node = 0"),
    ],
)
def test_numbers_of_ranks_that_are_none(world: Any, ranks_per_node: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Layout.of(EXAMPLE, world, ranks_per_node)


# ------------------------------------------------------------------------------------------------ against enumeration


@given(brute_force.layouts())
def test_each_rank_has_one_place_and_each_place_one_rank(layout: Layout) -> None:
    expected = brute_force.places(layout)
    assert len(expected) == layout.world == len(set(expected))
    assert [layout.place(rank) for rank in range(layout.world)] == expected
    for rank, place in enumerate(expected):
        for module in place.modules:
            assert layout.rank(module, place.stage, place.dp, place.cp, place.tp) == rank
            assert layout.mesh(module)[place.stage, place.dp, place.cp, place.tp] == rank


@given(brute_force.layouts())
def test_every_place_of_the_plan_is_held(layout: Layout) -> None:
    held = Counter((module, *place[1:]) for place in map(layout.place, range(layout.world)) for module in place.modules)
    assert set(held.values()) == {1}
    sizes = {n: m.stages * layout.dp * m.cp * m.tp for n, m in layout.plan.modules.items()}
    assert Counter(module for module, *_ in held) == sizes
    assert {module: len(layout.ranks(module)) for module in sizes} == sizes
    places = [*map(layout.place, range(layout.world))]
    assert all(place.modules == tuple(layout.plan.modules) for place in places) == layout.plan.shared


@settings(max_examples=60)
@given(brute_force.layouts())
def test_groups(layout: Layout) -> None:
    for module, plan in layout.plan.modules.items():
        copies, shards = layout.data_shape(module)
        lengths = {
            "tp": plan.tp, "cp": plan.cp, "pp": plan.stages, "dp": layout.dp, "data": layout.dp * plan.cp,
            "replicate": copies, "shard": shards,
        }  # fmt: skip
        ranks = layout.ranks(module)
        assert copies * shards == layout.dp * plan.cp
        for axis in AXES:
            groups = layout.groups(axis, module)
            assert layout.mesh(module).shape == (plan.stages, layout.dp, plan.cp, plan.tp)
            assert groups.dtype == np.int64 and groups.shape == (len(ranks) // lengths[axis], lengths[axis])
            assert np.array_equal(np.sort(groups, axis=None), ranks)  # they partition the module's ranks
            if axis in brute_force.COMMON:
                assert as_set(groups) == brute_force.groups(layout, axis, module)
            for rank in ranks[:: max(1, len(ranks) // 7)].tolist():
                own = [group for group in groups.tolist() if rank in group]
                assert [layout.group(axis, module, rank).tolist()] == own


@given(brute_force.layouts())
def test_copies_and_shards_divide_the_data_groups(layout: Layout) -> None:
    for module in layout.plan.modules:
        copies, shards = layout.data_shape(module)
        kind = layout.plan.kind(module)
        assert (shards == 1) if kind == "ddp" else (copies == (layout.plan.data.replicate or 1))
        for data in layout.groups("data", module).tolist():
            members = set(data)
            shard_groups = [g for g in as_set(layout.groups("shard", module)) if members & {*g}]
            replicate_groups = [g for g in as_set(layout.groups("replicate", module)) if members & {*g}]
            assert len(shard_groups) == copies and len(replicate_groups) == shards
            # Each copy has one rank of every set of equal shards: the two cut each other in one rank.
            assert all(len({*a} & {*b}) == 1 for a in shard_groups for b in replicate_groups)


@given(brute_force.plans(), st.integers(1, 200))
def test_the_number_of_replicas_is_inferred(plan: Plan, world: int) -> None:
    *encoders, own = [prod((m.stages, m.cp, m.tp)) for m in plan.modules.values()]
    one_set = plan.shared or plan.ranks == "first_stage"
    replica = own if one_set else own + (encoders[0] if plan.ranks == "colocated" else sum(encoders))
    copies = plan.data.replicate or 1
    fitting = [dp for dp in range(1, world + 1) if dp * replica == world and dp % copies == 0]
    if fitting:
        assert [Layout.of(plan, world).dp] == fitting
        return
    with pytest.raises(ConfigError) as caught:
        Layout.of(plan, world)
    named = [int(word.strip(".")) for word in str(caught.value).rsplit(": ", 1)[1].split(" or ")]
    for size in named:  # what is proposed works, and is nearest
        assert Layout.of(plan, size).world == size
        assert abs(size - world) < replica * copies or world < replica * copies
    assert min(named) < world < max(named) or world < min(named)


# ------------------------------------------------------------------------------------------------ placement


@settings(max_examples=200)
@given(brute_force.layouts())
def test_no_simple_order_crosses_nodes_less(layout: Layout) -> None:
    """The order is at least as good as modules in the plan's order, replica by replica, which is how others do it."""
    chosen = tuple(brute_force.nodes_beyond_need(layout, axis) for axis in ("tp", "cp", "pp"))
    assert chosen == crossings(layout.placement, layout.ranks_per_node)[:3]
    in_order = sorted(layout.placement.spans, key=lambda span: list(layout.plan.modules).index(span.modules[0]))
    before, spans = 0, []
    for span in in_order:
        spans.append(Span(span.modules, span.stages, span.cp, span.tp, before, span.first))
        before += span.ranks
    for together in (1, layout.dp):
        simple = crossings(Placement(tuple(spans), layout.dp, together), layout.ranks_per_node)
        assert crossings(layout.placement, layout.ranks_per_node) <= simple


@given(brute_force.layouts(sizes=(1, 2, 4, 8)), st.sampled_from([1, 2, 4, 8, 16]))
def test_powers_of_two_never_cross(layout: Layout, ranks_per_node: int) -> None:
    layout = Layout.of(layout.plan, layout.world, ranks_per_node)
    assert crossings(layout.placement, ranks_per_node)[:2] == (0, 0)
    for span in layout.placement.spans:
        if span.tp <= ranks_per_node:
            nodes = layout.groups("tp", span.modules[-1]) // ranks_per_node
            assert (nodes == nodes[:, :1]).all()


@given(brute_force.layouts())
def test_warnings_are_told_where_groups_cross(layout: Layout) -> None:
    for span in layout.placement.spans:
        name = " and ".join(span.modules)
        said = [warning for warning in layout.warnings if warning.startswith(f"{name}: ")]
        nodes = layout.groups("tp", span.modules[-1]) // layout.ranks_per_node
        stages = layout.mesh(span.modules[-1]).reshape(-1, span.stage_ranks) if span.stages == 1 else None
        crosses = bool((nodes != nodes[:, :1]).any())
        assert crosses == any("tensor-parallel groups" in warning for warning in said)
        if stages is not None and not crosses:
            torn = (stages // layout.ranks_per_node).min(1) != (stages // layout.ranks_per_node).max(1)
            assert bool(torn.any()) == any("context-parallel groups" in warning for warning in said)
        assert len(said) <= 1


WARNINGS = [
    # sizes (stages, cp, tp), replicas, ranks per node, what is said
    ((1, 1, 16), 2, 8, "model: all tensor-parallel groups (tp 16) lie on up to 2 nodes: a node has 8 ranks. "
                       "Use tp of at most 8."),
    ((1, 1, 3), 8, 8, "model: 2 of 8 tensor-parallel groups (tp 3) lie on up to 2 nodes: nodes of 8 ranks are not "
                      "filled evenly. Use sizes that divide one another and the ranks of a node."),
    ((1, 4, 4), 1, 8, "model: all context-parallel groups (cp 4 × tp 4 = 16) lie on up to 2 nodes: a node has 8 ranks. "
                      "Use cp × tp of at most 8."),
    ((3, 1, 2), 2, 8, "model: 1 of 2 pipelines (3 stages × cp 1 × tp 2 = 6) lie on up to 2 nodes: nodes of 8 ranks are "
                      "not filled evenly."),
    ((4, 2, 4), 1, 8, None),  # a pipeline that no node could hold
    ((1, 1, 8), 4, 8, None),
    ((1, 1, 3), 2, 8, None),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "replicas", "ranks_per_node", "said"), WARNINGS)
def test_warnings(sizes: tuple[int, int, int], replicas: int, ranks_per_node: int, said: str | None) -> None:
    stages, cp, tp = sizes
    plan = Plan({"model": ModulePlan(tp=tp, cp=cp, stages=stages)})
    layout = Layout.of(plan, replicas * stages * cp * tp, ranks_per_node)
    assert len(layout.warnings) == (said is not None)
    assert said is None or said in layout.warnings[0]


def test_the_plans_order_is_kept_where_nothing_is_lost() -> None:
    layout = Layout.of(EXAMPLE, 54, ranks_per_node=54)
    assert [span.modules[0] for span in layout.placement.spans] == ["vision", "audio", "language_model"]
    assert layout.placement.together == 1 and layout.place(27) == Place(("vision",), 0, 1, 0, 0)


def test_replicas_stand_together_only_as_far_as_needed() -> None:
    layout = Layout.of(EXAMPLE, 27 * 2000)
    assert layout.placement.together == 8 and layout.warnings == ()
    nodes = np.stack([layout.mesh(name)[0, :, 0, 0] for name in EXAMPLE.modules]) // 8
    assert (nodes.max(0) - nodes.min(0)).max() < 27


def test_placing_is_the_same_under_other_names() -> None:
    renamed = Plan(dict(zip(("ears", "eyes", "language_model"), EXAMPLE.modules.values(), strict=True)), EXAMPLE.data)
    ours, theirs = Layout.of(EXAMPLE, 270), Layout.of(renamed, 270)
    for name, other in zip(EXAMPLE.modules, renamed.modules, strict=True):
        assert np.array_equal(ours.mesh(name), theirs.mesh(other))


@given(brute_force.layouts(), st.integers(1, 20))
def test_nodes_change_ranks_but_no_group_sizes(layout: Layout, ranks_per_node: int) -> None:
    other = Layout.of(layout.plan, layout.world, ranks_per_node)
    assert set(brute_force.places(other)) == set(brute_force.places(layout))
    for module in layout.plan.modules:
        for axis in AXES:
            assert other.groups(axis, module).shape == layout.groups(axis, module).shape


@given(brute_force.layouts())
def test_tp_is_innermost_and_stages_follow_one_another(layout: Layout) -> None:
    for module, plan in layout.plan.modules.items():
        mesh = layout.mesh(module)
        assert (np.diff(mesh, axis=3) == 1).all()
        assert (np.diff(mesh, axis=2) == plan.tp).all()
        assert (np.diff(mesh, axis=0) == plan.tp * plan.cp).all()
        assert (np.diff(mesh, axis=1) > 0).all()


def test_two_encoders_alike_are_two_encoders() -> None:
    same = ModulePlan(tp=2)
    layout = Layout.of(Plan({"left": same, "right": same, "language_model": ModulePlan(tp=4)}), 16)
    assert not {*layout.ranks("left")} & {*layout.ranks("right")}
    assert len(layout.ranks("left")) == len(layout.ranks("right")) == 4


@pytest.mark.parametrize(
    ("kind", "cp", "replicas", "expected"),
    [("fsdp2", 2, 1, True), ("zero2", 1, 2, True), ("fsdp1", 1, 1, False), ("ddp", 2, 2, False)],
)
def test_fsdp_exchanges_in_passes_over_context_parallel_ranks_too(
    kind: Any, cp: int, replicas: int, expected: bool
) -> None:
    plan = Plan({"vision": ModulePlan(cp=cp), "language_model": ModulePlan()}, DataPlan(kind))
    assert Layout.of(plan, replicas * plan.replica).exchanges_in_passes == expected


def test_encoders_on_the_same_ranks() -> None:
    modules = {"vision": ModulePlan(tp=2), "audio": ModulePlan(), "language_model": ModulePlan(tp=2, stages=2)}
    layout = Layout.of(Plan(modules, ranks="colocated"), 12)
    assert layout.place(0) == Place(("vision", "audio"), 0, 0, 0, 0)
    assert layout.mesh("vision").tolist() == layout.mesh("audio").tolist() == [[[[0, 1]], [[6, 7]]]]
    assert layout.ranks("language_model").tolist() == [2, 3, 4, 5, 8, 9, 10, 11]
    with pytest.raises(
        ConfigError, match=r"a replica takes 6 \(vision and audio 2 \+ language_model 2 stages × tp 2 = 4"
    ):
        Layout.of(layout.plan, 8)


def test_encoders_in_the_first_stage() -> None:
    modules = {"vision": ModulePlan(tp=2), "audio": ModulePlan(), "language_model": ModulePlan(tp=2, stages=3)}
    layout = Layout.of(Plan(modules, ranks="first_stage"), 12)
    assert [layout.place(rank).modules for rank in (0, 1, 2, 5)] == [tuple(modules)] * 2 + [("language_model",)] * 2
    assert layout.mesh("audio").tolist() == [[[[0, 1]], [[6, 7]]]] and layout.mesh("language_model").shape == (
        3,
        2,
        1,
        2,
    )
    assert layout.groups("dp", "vision").tolist() == [[0, 6], [1, 7]]
    with pytest.raises(ConfigError, match="Rank 2 holds language_model, no part of vision"):
        layout.group("tp", "vision", 2)
    with pytest.raises(ConfigError, match="stage of vision = 1: expected 0."):
        layout.rank("vision", stage=1)


def test_a_hundred_thousand_ranks() -> None:
    layout = Layout.of(EXAMPLE, 27 * 3704)
    groups = {(module, axis): layout.groups(axis, module) for module in layout.plan.modules for axis in AXES}
    assert sum(array.size for (_, axis), array in groups.items() if axis == "tp") == layout.world == 100_008
    for rank in (0, 1, 54_321, 100_007):
        place = layout.place(rank)
        assert layout.rank(place.modules[0], place.stage, place.dp, place.cp, place.tp) == rank
        for axis in AXES:
            assert rank in layout.group(axis, place.modules[0], rank)


# ------------------------------------------------------------------------------------------------ hsdp and resharding

COPIES = [
    # (stages, cp, tp), world, ranks per node, replicate in the plan, copies and shards
    ((1, 1, 1), 4, 8, 2, (2, 2)),
    ((1, 1, 1), 16, 8, None, (2, 8)),
    ((1, 1, 1), 4, 8, None, (1, 4)),
    ((1, 1, 1), 12, 8, None, (3, 4)),
    ((1, 1, 1), 1, 8, None, (1, 1)),
    ((1, 1, 2), 32, 8, None, (4, 4)),
    ((1, 2, 1), 32, 8, None, (4, 8)),
    ((1, 2, 1), 32, 8, 2, (2, 16)),
    ((1, 2, 4), 8, 8, None, (1, 2)),
]


@pytest.mark.parametrize(("sizes", "world", "ranks_per_node", "replicate", "expected"), COPIES)
def test_copies_of_hsdp(sizes: Any, world: int, ranks_per_node: int, replicate: int | None, expected: Any) -> None:
    stages, cp, tp = sizes
    plan = Plan({"model": ModulePlan(tp=tp, cp=cp, stages=stages)}, DataPlan("hsdp", replicate))
    layout = Layout.of(plan, world, ranks_per_node)
    assert layout.data_shape("model") == expected and layout.replicate == expected[0]
    if replicate is None:  # a copy lies in a node
        nodes = layout.groups("shard", "model") // ranks_per_node
        assert (nodes == nodes[:, :1]).all()


def test_other_kinds_have_no_copies_to_count() -> None:
    assert Layout.of(Plan(data=DataPlan("fsdp2")), 8).replicate is None
    assert Layout.of(Plan(), 8).data_shape("model") == (8, 1)


def test_hsdp_that_fits_no_node_asks_for_the_number_of_copies() -> None:
    plan = Plan({"model": ModulePlan(tp=8)}, DataPlan("hsdp"))
    with pytest.raises(ConfigError, match=r"data.kind = hsdp: 4 replicas of 8 ranks .* data.replicate, a divisor of 4"):
        Layout.of(plan, 32, 8)
    assert Layout.of(Plan(plan.modules, DataPlan("hsdp", 2)), 32, 8).data_shape("model") == (2, 2)


def test_resharding_fits_the_shards() -> None:
    plan = Plan(data=DataPlan("fsdp2", reshard_after_forward=4))
    assert Layout.of(plan, 8).data_shape("model") == (1, 8)
    for world, advice in ((6, "Use 2, 3, true or false."), (4, "Use 2, true or false."), (5, "Use true or false.")):
        with pytest.raises(ConfigError) as caught:
            Layout.of(plan, world)
        assert f"model is sharded over {world} ranks" in str(caught.value) and advice in str(caught.value)


# ------------------------------------------------------------------------------------------------ the rest


EXECUTABLE = [
    (Plan(), []),
    (Plan({"vision": ModulePlan(), "language_model": ModulePlan()}, DataPlan("hsdp", 2)), []),
    (Plan({"model": ModulePlan(tp=2, cp=2)}), []),
    (Plan({"model": ModulePlan(tp=2)}, DataPlan("zero1")), []),
    (Plan({"model": ModulePlan(tp=2)}, DataPlan("fsdp1")), ["modules.model.tp = 2: data.kind = fsdp1 knows whole"]),
    (Plan({"a": ModulePlan(), "language_model": ModulePlan(tp=2)}, ranks="shared"), []),
    (Plan({"a": ModulePlan(tp=2), "language_model": ModulePlan(tp=4)}, ranks="shared"),
     ["modules.a.tp = 2: beside a module with tp 4 on the same ranks"]),
    (Plan({"model": ModulePlan(stages=2)}), []),
    (Plan({"model": ModulePlan(stages=2)}, DataPlan("fsdp1")), ["data.kind = fsdp1: it cannot shard the stages"]),
    (Plan({"model": ModulePlan(stages=2)}, DataPlan("fsdp2"), schedule="zero_bubble"),
     ["schedule = zero_bubble: fsdp2 gathers"]),
    (Plan({"model": ModulePlan(stages=2)}, DataPlan("zero2"), schedule="auto"),
     ["schedule = auto: zero2 gathers parameters for a whole backward pass, which zero_bubble takes apart"]),
    (Plan({"model": ModulePlan(stages=2, activation_checkpointing=True)}), []),
    (Plan({"model": ModulePlan(activation_checkpointing=True)}, schedule="zero_bubble"), []),
    (Plan({"model": ModulePlan(stages=2, activation_checkpointing=True)}, schedule="zero_bubble"),
     ["schedule = zero_bubble: model would compute activations again"]),
    (Plan({"model": ModulePlan(stages=2, virtual_stages=2)}, DataPlan("fsdp2")), []),
    (Plan({"model": ModulePlan()}, ranks="own"), []),
    (Plan({"a": ModulePlan(), "language_model": ModulePlan()}, ranks="first_stage"), []),
    (Plan({"a": ModulePlan(), "language_model": ModulePlan(stages=2)}, ranks="first_stage"), []),
    (Plan({"a": ModulePlan(), "language_model": ModulePlan(tp=2, stages=2)}, ranks="first_stage"),
     ["modules.a: tp 1 and cp 1 beside a module with tp 2 and cp 1 on the same ranks"]),
    (Plan({"a": ModulePlan(), "language_model": ModulePlan()}, ranks="colocated"), []),
    (Plan({"a": ModulePlan(), "b": ModulePlan(cp=2), "language_model": ModulePlan()}, ranks="colocated"),
     ["modules.a: tp 1 and cp 1 beside a module with tp 1 and cp 2 on the same ranks"]),
    (Plan({"model": ModulePlan(zero=1)}, DataPlan("zero1")), []),
    (Plan({"model": ModulePlan(zero=1)}), ["modules.model.zero = 1: zero1 for one module"]),
    (Plan({"a": ModulePlan(), "language_model": ModulePlan()}, ranks="own"), []),
    (EXAMPLE, []),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "reasons"), EXECUTABLE)
def test_what_cannot_be_run_yet_is_told(plan: Plan, reasons: list[str]) -> None:
    said = Layout.of(plan, plan.replica * 2).unexecutable()
    assert len(said) == len(reasons)
    assert all(line.startswith(reason) for line, reason in zip(said, reasons, strict=True))
    if not reasons:
        check_executable(plan)
        return
    with pytest.raises(ConfigError) as caught:
        check_executable(plan)
    assert str(caught.value).splitlines() == ["parallel: this plan cannot be run yet.", *(f"  {line}" for line in said)]


LOOKUPS = [
    (lambda layout: layout.place(54), "rank = 54: expected 0 to 53."),
    (lambda layout: layout.place(-1), "rank = -1"),
    (lambda layout: layout.node(54), "rank = 54"),
    (lambda layout: layout.rank("audio", stage=1), "stage of audio = 1: expected 0."),
    (lambda layout: layout.rank("vision", tp=2), "tp of vision = 2: expected 0 to 1."),
    (lambda layout: layout.mesh("visoin"), "did you mean 'vision'?"),
    (lambda layout: layout.mesh("x"), "expected one of language_model, vision, audio."),
    (lambda layout: layout.groups("sp", "vision"), "There is no axis 'sp'; expected one of tp, cp, pp"),
    (lambda layout: layout.group("sp", "vision", 48), "There is no axis 'sp'"),
    (lambda layout: layout.group("tp", "vision", 0), "Rank 0 holds language_model, no part of vision."),
]


@pytest.mark.parametrize(("look", "said"), LOOKUPS)
def test_what_there_is_not(look: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        look(Layout.of(EXAMPLE, 54))
    assert said in str(caught.value)


def test_a_layout_is_data() -> None:
    layout = Layout.of(EXAMPLE, 54)
    assert layout.warnings == ()  # which is kept
    assert pickle.loads(pickle.dumps(layout)) == layout == Layout.of(EXAMPLE, 54) != Layout.of(EXAMPLE, 27)


def test_a_span_alone_is_placed_in_order() -> None:
    placement = place_spans([Span(("model",), 1, 1, 1)], dp=5, ranks_per_node=2)
    assert placement.starts(placement.spans[0]).tolist() == [0, 1, 2, 3, 4]
