"""Schedule policies: a stage graph and a number of microbatches become the actions of every place.

naive        one microbatch at a time
gpipe        all forwards, then all backwards
1f1b         as many forwards as there are stages to the end, then one backward and one forward in turn
interleaved  1f1b with several stages per place, in groups of microbatches
zero_bubble  gradients of inputs first; those of weights fill the gaps
auto         1f1b, interleaved or zero_bubble: the fastest in simulation

A stage with nothing trained in it or before it has forwards only. A frozen stage behind a trained one computes the
gradients of its inputs: `I`. All others have `B`; under zero_bubble `I` and `W` instead, or `W` alone where no gradient
is sent back.

A new schedule is one file that calls `register_schedule`. Runtime and simulator both build theirs by `make_schedule`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Literal, get_args

from cornstarch.errors import ConfigError
from cornstarch.schedule.actions import Kind, Schedule
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.interleaved import build_interleaved
from cornstarch.schedule.list_scheduler import (
    PlaceActions,
    add_makespan,
    assign_to_places,
    build_stage_lines,
    get_warmup_depths,
)
from cornstarch.schedule.zero_bubble import build_zero_bubble

Policy = Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "auto"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

BuildSchedule = Callable[[StageGraph, int], Schedule]
"""Builds the schedule of a step from the stage graph and the number of microbatches."""

_schedules: dict[str, BuildSchedule] = {}


def register_schedule(name: str, build: BuildSchedule) -> None:
    """Register a schedule policy, which `make_schedule` then builds by name.

    Args:
        name: The name of the policy; a name that is taken is refused.
        build: Returns the `Schedule` of a graph and a number of microbatches: the computations of each place in order.
            Sends and receives follow from them. `Schedule.check` verifies that the actions are complete.
    """
    if name in _schedules:
        raise ConfigError(f"register_schedule({name!r}): there is a schedule of that name already.")
    _schedules[name] = build


def make_schedule(graph: StageGraph, microbatches: int, policy: str = "1f1b") -> Schedule:
    """Return the actions of every place in a step of `microbatches` microbatches."""
    if policy not in _schedules:
        raise ConfigError(f"schedule = {policy!r}: expected one of {', '.join(_schedules)}.")
    if type(microbatches) is not int or microbatches < 1:
        raise ConfigError(f"microbatches = {microbatches!r}: expected a whole number of at least 1.")
    with pause_garbage_collection():
        return _schedules[policy](graph, microbatches)


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
    """Return, by stage, the largest number of microbatches whose activations are kept at once.

    They are kept from the forward to the end of the backward; a stage without a backward keeps none.
    """
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


# ---------------------------------------------------------------------------------------------------- the policies


def _order_lines(graph: StageGraph, microbatches: int, warmup: list[int]) -> tuple[PlaceActions, float | None]:
    return assign_to_places(graph, build_stage_lines(graph, microbatches, warmup))


def _order_naive(graph: StageGraph, microbatches: int) -> tuple[PlaceActions, float | None]:
    return _order_lines(graph, microbatches, [1] * len(graph.nodes))


def _order_gpipe(graph: StageGraph, microbatches: int) -> tuple[PlaceActions, float | None]:
    return _order_lines(graph, microbatches, [microbatches] * len(graph.nodes))


def _order_1f1b(graph: StageGraph, microbatches: int) -> tuple[PlaceActions, float | None]:
    return _order_lines(graph, microbatches, get_warmup_depths(graph))


def _order_zero_bubble(graph: StageGraph, microbatches: int) -> tuple[PlaceActions, float | None]:
    return build_zero_bubble(graph, microbatches, _order_1f1b(graph, microbatches))


def _build_auto(graph: StageGraph, microbatches: int) -> Schedule:
    """Return the fastest schedule in simulation whose memory does not grow with the number of microbatches.

    Of equally fast ones the first is taken: it is the simplest.
    """
    found = {"1f1b": add_makespan(graph, _order_1f1b(graph, microbatches))}
    left_out = ""
    stages = [(node.module, node.place) for node in graph.nodes]
    if len({*stages}) < len(stages):  # there are virtual stages
        try:
            found["interleaved"] = add_makespan(graph, build_interleaved(graph, microbatches))
        except ConfigError as error:
            left_out = f"; not {str(error).splitlines()[0].removeprefix('schedule = ')}"
    found["zero_bubble"] = build_zero_bubble(graph, microbatches, found["1f1b"])
    best = min(found, key=lambda policy: found[policy][1])
    others = [f"{float(took):.6g} with {policy}" for policy, (_, took) in found.items() if policy != best]
    reason = f"{best} takes {float(found[best][1]):.6g} in simulation, against {' and '.join(others)}{left_out}"
    return Schedule(graph, microbatches, best, found[best][0], reason)


for _name, _order in {
    "naive": _order_naive,
    "gpipe": _order_gpipe,
    "1f1b": _order_1f1b,
    "interleaved": build_interleaved,
    "zero_bubble": _order_zero_bubble,
}.items():
    register_schedule(_name, lambda graph, m, name=_name, order=_order: Schedule(graph, m, name, order(graph, m)[0]))  # type: ignore[misc]
register_schedule("auto", _build_auto)
