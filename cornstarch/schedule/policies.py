"""Schedule policies: a stage graph and a number of microbatches become the actions of every place.

naive        one microbatch at a time
gpipe        all forwards, then all backwards
1f1b         as many forwards as there are stages to the end, then one backward and one forward in turn
interleaved  1f1b with several stages per place, in groups of microbatches
zero_bubble  gradients of inputs first; those of weights fill the gaps
auto         1f1b, interleaved or zero_bubble: the fastest in simulation

All but zero_bubble are lines of three phases: warm-up, steady state, cool-down (`list_scheduler.build_phases`).

A stage with nothing trained in it or before it has forwards only. A frozen stage behind a trained one computes the
gradients of its inputs: `I`. All others have `B`; under zero_bubble `I` and `W` instead, or `W` alone where no gradient
is sent back.

A new schedule is one file that calls `register_schedule`. Runtime and simulator both build theirs by `make_schedule`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Literal, get_args

from cornstarch.errors import ConfigError
from cornstarch.schedule import list_scheduler
from cornstarch.schedule.actions import Action, Kind, Schedule, get_backward_kinds, get_duration
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.list_scheduler import ActionLine, PlaceActions, PlaceOrder, add_makespan, assign_to_places

Policy = Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "auto"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

BuildSchedule = Callable[[StageGraph, int], Schedule]
"""Builds the schedule of a step from the stage graph and the number of microbatches."""

SCHEDULES: dict[str, BuildSchedule] = {}
"""Every schedule by its name, registered ones included."""


def register_schedule(name: str, build: BuildSchedule) -> None:
    """Register a schedule policy, which `make_schedule` then builds by name.

    Args:
        name: The name of the policy; a name that is taken is refused.
        build: Returns the `Schedule` of a graph and a number of microbatches: the computations of each place in order.
            Sends and receives follow from them. `Schedule.check` verifies that the actions are complete.
    """
    if name in SCHEDULES:
        raise ConfigError(f"register_schedule({name!r}): there is a schedule of that name already.")
    SCHEDULES[name] = build


def make_schedule(graph: StageGraph, microbatches: int, policy: str = "1f1b") -> Schedule:
    """Return the actions of every place in a step of `microbatches` microbatches."""
    if policy not in SCHEDULES:
        raise ConfigError(f"schedule = {policy!r}: expected one of {', '.join(SCHEDULES)}.")
    if type(microbatches) is not int or microbatches < 1:
        raise ConfigError(f"microbatches = {microbatches!r}: expected a whole number of at least 1.")
    with pause_garbage_collection():
        return SCHEDULES[policy](graph, microbatches)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Do not search 10^5 new actions for cycles, which they do not have: it would take a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def count_in_flight(schedule: Schedule) -> list[int]:
    """Return, by stage, the largest number of microbatches whose activations are kept at once."""
    # They are kept from the forward to the end of the backward; a stage without a backward keeps none.
    graph = schedule.graph
    backward = [graph.backward(stage) for stage in range(len(graph.nodes))]
    count, most = [0] * len(graph.nodes), [0] * len(graph.nodes)
    for action in chain(*schedule.actions):
        stage = action.stage
        if action.kind is Kind.F and backward[stage] != "none":
            count[stage] += 1
            most[stage] = max(most[stage], count[stage])
        elif action.kind in (Kind.B, Kind.W) or (action.kind is Kind.I and backward[stage] == "input"):
            count[stage] -= 1
    return most


def _replace_backwards(graph: StageGraph, actions: Sequence[Action], split: bool) -> ActionLine:
    """Replace each `B` by the actions that the backward of its stage needs: `B`, `I`, `W`, `I` and `W`, or none."""
    kinds = {stage: get_backward_kinds(graph, stage, split) for stage in {action.stage for action in actions}}
    found: ActionLine = []
    for action in actions:
        is_whole = action.kind is Kind.B
        found += [Action(kind, *action[1:]) for kind in kinds[action.stage]] if is_whole else [action]
    return found


# Each place of a module has several of its stages, which shortens the warm-up and the cool-down. The order is
# Megatron-LM's (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters").


def _order_interleaved(graph: StageGraph, microbatches: int) -> PlaceOrder:
    """Return the interleaved order for modules with several stages per place, and 1F1B for the others."""
    # Modules are processed from the end, because the warm-up of each depends on the warm-up of the modules behind it.
    modules: dict[str, list[int]] = {}
    for stage in sorted(range(len(graph.nodes)), key=graph.distance):
        modules.setdefault(graph.nodes[stage].module, []).append(stage)
    lines: list[ActionLine] = []
    leads = [0] * len(graph.nodes)  # by stage, how many forwards it is ahead of its backwards at most
    for module, stages in modules.items():
        stages.sort(key=lambda stage: graph.nodes[stage].index)
        behind = {target for stage in stages for target in graph.successors(stage)} - {*stages}
        lead = max((leads[target] for target in behind), default=0)
        for line in _build_interleaved_lines(graph, module, stages, microbatches, lead):
            ahead = dict.fromkeys(stages, 0)
            for action in line:
                ahead[action.stage] += 1 if action.kind is Kind.F else -1
                leads[action.stage] = max(leads[action.stage], ahead[action.stage])
            lines.append(_replace_backwards(graph, line, split=False))
    return assign_to_places(graph, lines)


def _build_interleaved_lines(
    graph: StageGraph, module: str, stages: list[int], microbatches: int, lead: int
) -> list[ActionLine]:
    """Return a line for each place of a module, which has a backward for every forward.

    Places process microbatches in groups of as many as there are places: a group through the first stage of each place,
    then through the second, and so on. When a place has sent a group's last microbatch, its first one is back.

    lead: how many forwards the stages behind the module are ahead of their backwards; its last stage is one more.
    """
    found = [graph.nodes[stage].place for stage in stages]
    places = [*dict.fromkeys(found)]
    if found != places * (len(found) // len(places)):
        raise ConfigError(
            f"schedule = interleaved: the stages of {module} are on the places {', '.join(map(str, found))}; "
            "expected all places in turn, again and again."
        )
    each = len(stages) // len(places)
    group = len(places) if each > 1 else 1
    if microbatches % group:
        below = microbatches // group * group
        fitting = " or ".join(str(count) for count in (below, below + group) if count)
        raise ConfigError(
            f"schedule = interleaved: {microbatches} microbatches do not divide by the {len(places)} places of "
            f"{module}, which hold {each} stages each.\nUse {fitting} microbatches, or another schedule."
        )
    order = [
        (chunk, first + offset)
        for first in range(0, microbatches, group)
        for chunk in range(each)
        for offset in range(group)
    ]
    # Before the backward of a microbatch, the last place has run the forward of the one that is `lead` after it.
    opening, closing = ([at for at, (c, _) in enumerate(order) if c == chunk] for chunk in (0, each - 1))
    warmup = 1 + max(closing[min(m + lead, microbatches - 1)] - at for m, at in enumerate(opening))
    step = 2 if each > 1 else 1  # a place that is one earlier gets its first gradient two actions later
    lines = []
    for number in range(len(places)):
        at = stages[number :: len(places)]
        forwards = [Action(Kind.F, at[chunk], m) for chunk, m in order]
        backwards = [[Action(Kind.B, at[-1 - chunk], m)] for chunk, m in order]
        lines.append(list_scheduler.build_phases(forwards, backwards, warmup + step * (len(places) - 1 - number)))
    return lines


# Backward is split, and the gradients of weights, for which nobody waits, fill the gaps. After Qi et al. 2023, "Zero
# Bubble Pipeline Parallelism"; for a chain of equal stages it is their ZB-H1. The orders are found by a list scheduler,
# so they exist for any graph and any costs.


def _order_zero_bubble(graph: StageGraph, microbatches: int, one_f_one_b: PlaceOrder) -> tuple[PlaceActions, float]:
    """Return the fastest of some orders in simulation with the graph's costs, and its makespan: at most 1F1B's."""
    # No stage has more microbatches in flight than the first stage of its module has with 1F1B. Of equally fast orders
    # the first is taken; an order that reaches the lower bound ends the search.
    best: PlaceActions = ()
    shortest = float("inf")
    bound = compute_lower_bound(graph, microbatches)
    for actions, duration in _order_zero_bubble_candidates(graph, microbatches, one_f_one_b):
        if duration < shortest:
            best, shortest = actions, duration
        if shortest <= bound:  # 1F1B cannot be faster, either
            return best, shortest
    one_f_one_b = add_makespan(graph, one_f_one_b)
    if shortest <= one_f_one_b[1]:
        return best, shortest
    # 1F1B itself, except that gradients of inputs are sent before those of weights are computed.
    return add_makespan(graph, (_split_backwards(graph, one_f_one_b[0]), None))


def _order_zero_bubble_candidates(
    graph: StageGraph, microbatches: int, one_f_one_b: PlaceOrder
) -> Iterator[tuple[PlaceActions, float]]:
    own, stages = list_scheduler.get_warmup_depths(graph), range(len(graph.nodes))
    first: dict[str, int] = {}  # by module, the microbatches in flight at its first stage with 1F1B
    for node, depth in zip(graph.nodes, own, strict=True):
        first[node.module] = max(first.get(node.module, 0), depth)
    limits = [first[node.module] for node in graph.nodes]
    if all(graph.backward(stage) != "both" for stage in stages):  # there is nothing to split
        actions, duration = add_makespan(graph, one_f_one_b)
        yield _split_backwards(graph, actions), duration
    elif graph.places == len(graph.nodes):
        # Gradients of weights as late as the memory allows: best for equal stages, one at each place.
        lags = [limit - depth for limit, depth in zip(limits, own, strict=True)]
        lines = list_scheduler.build_stage_lines(graph, microbatches, own, lags)
        yield add_makespan(graph, assign_to_places(graph, lines))
    # Whatever is ready, in a line of its own for each kind: better where costs differ, but a greedy choice may lose.
    works = [(kind, s) for s in stages for kind in (Kind.F, *get_backward_kinds(graph, s, split=True))]
    lines = [[Action(kind, stage, m) for m in range(microbatches)] for kind, stage in works]
    yield list_scheduler.merge_lines(graph, lines, limits)


def _split_backwards(graph: StageGraph, actions: PlaceActions) -> PlaceActions:
    return tuple(tuple(_replace_backwards(graph, mine, split=True)) for mine in actions)


def compute_lower_bound(graph: StageGraph, microbatches: int) -> float:
    """Return a makespan that no order can beat."""
    # A place does all its work after its first input can arrive. Apart from gradients of weights, the last actions of a
    # stage are gradients of inputs, after all its forwards; from there gradients travel back to the first weights.
    earliest: dict[int, float] = {}
    back: dict[int, float] = {}  # from the end of a stage's input gradients to the end of its and all earlier backwards
    kinds = [(Kind.F, *get_backward_kinds(graph, stage, split=True)) for stage in range(len(graph.nodes))]
    for stage in sorted(range(len(graph.nodes)), key=graph.depth):
        before = graph.predecessors(stage)
        earliest[stage] = max((earliest[source] + graph.nodes[source].forward for source in before), default=0)
        own = graph.nodes[stage].backward_weight if graph.backward(stage) == "both" else 0
        paths = [back[s] + get_duration(graph, kind, s) for s in before for kind in kinds[s][1:2]]
        back[stage] = max([own, *paths])
    bounds: list[float] = []
    for place in range(graph.places):
        stages = graph.at(place)
        work = sum(get_duration(graph, kind, stage) for stage in stages for kind in kinds[stage])
        bounds.append(min(earliest[stage] for stage in stages) + microbatches * work)
    for stage, own_kinds in enumerate(kinds):
        needed = sum(get_duration(graph, kind, stage) for kind in own_kinds[:2])
        bounds.append(earliest[stage] + microbatches * needed + back[stage])
    return max(bounds)


def _order_by_warmup(graph: StageGraph, microbatches: int, warmup: list[int]) -> PlaceOrder:
    return assign_to_places(graph, list_scheduler.build_stage_lines(graph, microbatches, warmup))


def _order_1f1b(graph: StageGraph, microbatches: int) -> PlaceOrder:
    return _order_by_warmup(graph, microbatches, list_scheduler.get_warmup_depths(graph))


def _build_auto(graph: StageGraph, microbatches: int) -> Schedule:
    """Return the fastest schedule in simulation whose memory does not grow with the number of microbatches."""
    # Of equally fast ones the first is taken: it is the simplest.
    found = {"1f1b": add_makespan(graph, _order_1f1b(graph, microbatches))}
    left_out = ""
    stages = [(node.module, node.place) for node in graph.nodes]
    if len({*stages}) < len(stages):  # there are virtual stages
        try:
            found["interleaved"] = add_makespan(graph, _order_interleaved(graph, microbatches))
        except ConfigError as error:
            left_out = f"; not {str(error).splitlines()[0].removeprefix('schedule = ')}"
    found["zero_bubble"] = _order_zero_bubble(graph, microbatches, found["1f1b"])
    best = min(found, key=lambda policy: found[policy][1])
    others = [f"{float(took):.6g} with {policy}" for policy, (_, took) in found.items() if policy != best]
    reason = f"{best} takes {float(found[best][1]):.6g} in simulation, against {' and '.join(others)}{left_out}"
    return Schedule(graph, microbatches, best, found[best][0], reason)


_ORDERS: dict[str, Callable[[StageGraph, int], PlaceOrder]] = {
    "naive": lambda graph, m: _order_by_warmup(graph, m, [1] * len(graph.nodes)),
    "gpipe": lambda graph, m: _order_by_warmup(graph, m, [m] * len(graph.nodes)),
    "1f1b": _order_1f1b,
    "interleaved": _order_interleaved,
    "zero_bubble": lambda graph, m: _order_zero_bubble(graph, m, _order_1f1b(graph, m)),
}
for _name, _order in _ORDERS.items():
    register_schedule(_name, lambda graph, m, name=_name, order=_order: Schedule(graph, m, name, order(graph, m)[0]))  # type: ignore[misc]
register_schedule("auto", _build_auto)
