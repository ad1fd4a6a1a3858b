"""Layouts by enumeration: every place written down one after the other, every group found by looking at all ranks."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import strategies as st

from cornstarch.plan import DataPlan, Layout, ModulePlan, Place, Plan

# Coordinates that the ranks of a group have in common.
COMMON = {
    "tp": ("stage", "dp", "cp"),
    "cp": ("stage", "dp", "tp"),
    "pp": ("dp", "cp", "tp"),
    "dp": ("stage", "cp", "tp"),
    "data": ("stage", "tp"),
}


def places(layout: Layout) -> list[Place]:
    """Return the place of every rank, in the order that `placement` describes in words."""
    found = []
    together = layout.placement.together
    for first in range(0, layout.dp, together):
        for span in layout.placement.spans:
            for dp in range(first, min(first + together, layout.dp)):
                for stage in range(span.stages):
                    for cp in range(span.cp):
                        own = tuple(m for m in span.modules if stage < stages_of(layout.plan, m))
                        found += [Place(own, stage, dp, cp, tp) for tp in range(span.tp)]
    return found


def stages_of(plan: Plan, module: str) -> int:
    """Return in how many stages a module is, as the plan says in words."""
    return 1 if plan.ranks == "first_stage" and module != "language_model" else plan.modules[module].stages


def groups(layout: Layout, axis: str, module: str) -> set[tuple[int, ...]]:
    """Return the groups of a module along an axis, by comparing the places of all ranks."""
    found = defaultdict(list)
    for rank, place in enumerate(places(layout)):
        if module in place.modules:
            found[tuple(getattr(place, name) for name in COMMON[axis])].append((place, rank))
    return {tuple(rank for _, rank in sorted(members, key=_slow_to_fast)) for members in found.values()}


def _slow_to_fast(member: tuple[Place, int]) -> tuple[int, ...]:
    place, _ = member
    return place.stage, place.dp, place.cp, place.tp


def nodes_beyond_need(layout: Layout, axis: str) -> int:
    """Return on how many nodes more than needed the groups lie: tp groups, or stages (cp), or modules (pp)."""
    common = {"tp": ("stage", "dp", "cp"), "cp": ("stage", "dp"), "pp": ("dp",)}[axis]
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    first = {module for module in layout.plan.modules if layout.plan.ranks == "first_stage"} - {"language_model"}
    for rank, place in enumerate(places(layout)):
        found[tuple(m for m in place.modules if m not in first), *(getattr(place, name) for name in common)].append(
            rank
        )
    return sum(
        len({rank // layout.ranks_per_node for rank in ranks}) - -(-len(ranks) // layout.ranks_per_node)
        for ranks in found.values()
    )


@st.composite
def plans(draw: st.DrawFn, sizes: tuple[int, ...] = (1, 2, 3, 4, 6)) -> Plan:
    """Draw a plan of one to four modules; modules on the same ranks have the same sizes."""
    size = st.sampled_from(sizes)
    module = st.builds(ModulePlan, tp=size, cp=size, stages=st.integers(1, 3))
    encoders = draw(st.lists(module, max_size=3))
    language_model = draw(module)
    if draw(st.booleans()):  # two encoders with equal sizes are two encoders
        encoders = [*encoders, *encoders[-1:]][:3]
    modules = {f"encoder_{index}": plan for index, plan in enumerate(encoders)}
    ranks = draw(st.sampled_from(["auto", "auto", "alike", "colocated", "first_stage"]))
    if ranks == "alike":  # all on the same ranks
        language_model = ModulePlan(tp=language_model.tp, cp=language_model.cp)
        modules = dict.fromkeys(modules, language_model)
    if ranks == "colocated" and modules:
        modules = dict.fromkeys(modules, encoders[0])
    if ranks == "first_stage":
        modules = dict.fromkeys(modules, ModulePlan(tp=language_model.tp, cp=language_model.cp))
    kind = draw(st.sampled_from(["ddp", "zero1", "fsdp2", "hsdp"]))
    replicate = draw(st.integers(1, 3)) if kind == "hsdp" else None
    data = DataPlan(kind, replicate)  # type: ignore[arg-type]
    ranks = "auto" if ranks == "alike" else ranks
    return Plan({**modules, "language_model": language_model}, data, ranks)  # type: ignore[arg-type]


@st.composite
def layouts(draw: st.DrawFn, sizes: tuple[int, ...] = (1, 2, 3, 4, 6)) -> Layout:
    """Draw a layout of at most some hundred ranks."""
    plan = draw(plans(sizes))
    replicas = draw(st.integers(1, 5)) * (plan.data.replicate or 1)
    ranks_per_node = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 72]))
    return Layout.of(plan, replicas * plan.replica, ranks_per_node)
