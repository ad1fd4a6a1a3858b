"""Plans of the nine models: how many stages, which layers each has, where it stands, and in which order it works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise, product

from nine_models import DEVICES, ENCODER_DEVICES, LANGUAGE_DEVICES, MICROBATCHES, Cost, Model
from virtual_devices import Job

from cornstarch.errors import ConfigError
from cornstarch.pipeline.balance import best_starts
from cornstarch.plan.simulate import Timeline, simulate
from cornstarch.schedule.graph import StageGraph, StageNode
from cornstarch.schedule.policies import make_schedule

LANGUAGE = "language_model"
USUAL = "1f1b"
VIRTUAL = (1, 2, 3, 4)  # parts of the language model at each of its places
REFINED = 3  # plans whose cuts are looked at more closely
# Stages of the language model in the published evaluation of colocated encoders, without regard to what is frozen.
PUBLISHED = {
    "VLM-S": 5,
    "VLM-M": 4,
    "VLM-L": 4,
    "ALM-S": 5,
    "ALM-M": 5,
    "ALM-L": 5,
    "VALM-S": 5,
    "VALM-M": 3,
    "VALM-L": 4,
}

Runs = tuple[tuple[Cost, ...], ...]
"""Layers, by stage."""


@dataclass(frozen=True)
class Part:
    """The stages of a module."""

    module: str
    runs: Runs
    trains: tuple[bool, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The stages of a model, and the order in which they work."""

    words: str
    parts: tuple[Part, ...]
    """Encoders, then the language model, if it is not all one chain."""
    devices: int
    policy: str = USUAL

    def graph(self, scale: float = 1.0) -> StageGraph:
        """Return the stages; scale: seconds of 10^12 operations."""
        nodes: list[StageNode] = []
        edges: list[tuple[int, int]] = []
        ends: list[int] = []
        for part in self.parts:
            first = len(nodes)
            for index, layers in enumerate(part.runs):
                forward, inputs, weights = (scale * sum(one) for one in zip(*layers, strict=True))
                place, trains = part.places[index], part.trains[index]
                nodes.append(StageNode(part.module, index, place, trains, forward, inputs, weights))
            edges += pairwise(range(first, len(nodes)))
            if part.module == LANGUAGE:
                edges += [(end, first) for end in ends]
            ends.append(len(nodes) - 1)
        return StageGraph(tuple(nodes), tuple(edges))

    def job(self, scale: float, steps: int) -> Job:
        """Return what virtual devices do."""
        layers = tuple(
            tuple((scale * a, scale * b, scale * c) for a, b, c in run) for part in self.parts for run in part.runs
        )
        return Job(self.graph(scale), layers, MICROBATCHES, self.policy, steps)

    @cached_property
    def timeline(self) -> Timeline:
        """A step, in 10^12 operations of a device."""
        return simulate(make_schedule(self.graph(), MICROBATCHES, self.policy))

    @property
    def simulated(self) -> float:
        """What a step takes."""
        return self.timeline.step

    @cached_property
    def merit(self) -> tuple[float, float]:
        """What is to be small: the time of a step, then how unevenly the work is spread."""
        return self.simulated, sum(busy**2 for busy in self.timeline.busy)

    @cached_property
    def least(self) -> float:
        """A time that a step takes at least: the work of the busiest place."""
        work = [0.0] * (1 + max(place for part in self.parts for place in part.places))
        for part in self.parts:
            for place, run in zip(part.places, part.runs, strict=True):
                work[place] += sum(map(sum, run))
        return MICROBATCHES * max(work)


# ---------------------------------------------------------------------------------------------------- cutting


def balanced(layers: Sequence[Cost], stages: int) -> Runs:
    """Return layers in runs that cost about the same."""
    starts = best_starts([sum(one) for one in layers], range(1, len(layers)), stages, "The model")
    return tuple(tuple(layers[a:b]) for a, b in pairwise([*starts, len(layers)]))


def even(layers: Sequence[Cost], stages: int) -> Runs:
    """Return layers in runs of as many, the first ones one more; what follows the layers goes with the last."""
    each, more = divmod(len(layers), stages)
    ends = [each * (index + 1) + min(index + 1, more) for index in range(stages)]
    return tuple(tuple(layers[a:b]) for a, b in pairwise([0, *ends]))


@cache
def cut(model: Model, module: str, stages: int) -> Runs:
    """Return the layers of each stage of a module, cut by what they cost."""
    return balanced(model.pieces(module), stages)


def own(module: str, runs: Runs, place: int) -> Part:
    """Return an encoder whose projector, at its end, is trained, on places of its own."""
    stages = len(runs)
    return Part(
        module, runs, tuple(index == stages - 1 for index in range(stages)), tuple(range(place, place + stages))
    )


def language(runs: Runs, place: int, count: int, inside: bool = False) -> Part:
    """Return a frozen language model on so many places, each of which has several runs if there are more.

    inside: its first stage has the projectors.
    """
    trains = tuple(inside and index == 0 for index in range(len(runs)))
    return Part(LANGUAGE, runs, trains, tuple(place + index % count for index in range(len(runs))))


def named(runs: Runs, count: int) -> str:
    """Return how many places a language model has, and how many of its parts are at each, if several."""
    return str(count) if len(runs) == count else f"{count} × {len(runs) // count}"


def sizes() -> Iterator[tuple[int, int]]:
    """Yield stages of the language model and of encoders that use all devices."""
    for count in range(1, DEVICES // LANGUAGE_DEVICES):
        yield count, (DEVICES - count * LANGUAGE_DEVICES) // ENCODER_DEVICES


# ---------------------------------------------------------------------------------------------------- our plans


def apart(model: Model, stages: Mapping[str, int], count: int, virtual: int = 1) -> Plan:
    """Return a plan with encoders on stages of their own: so many of each."""
    parts, place = [], 0
    for name, size in stages.items():
        parts.append(own(name, cut(model, name, size), place))
        place += size
    runs = cut(model, LANGUAGE, count * virtual)
    words = " + ".join(f"{name} {size}" for name, size in stages.items())
    devices = place * ENCODER_DEVICES + count * LANGUAGE_DEVICES
    return Plan(f"{words} → {named(runs, count)}", (*parts, language(runs, place, count)), devices)


def together(model: Model, size: int, count: int, virtual: int = 1) -> Plan:
    """Return a plan with all encoders on the same stages, but each at its own pace."""
    parts = [own(name, cut(model, name, size), 0) for name in model.encoders]
    runs = cut(model, LANGUAGE, count * virtual)
    devices = size * ENCODER_DEVICES + count * LANGUAGE_DEVICES
    return Plan(f"together {size} → {named(runs, count)}", (*parts, language(runs, size, count)), devices)


def inside(model: Model, virtual: int = 1) -> Plan:
    """Return a plan with the encoders in the language model's first stage, which has the fewer layers."""
    count = DEVICES // LANGUAGE_DEVICES
    runs = balanced([encoders_inside(model), *model.pieces(LANGUAGE)], count * virtual)
    return Plan(f"inside the first of {named(runs, count)}", (language(runs, 0, count, inside=True),), DEVICES)


def encoders_inside(model: Model) -> Cost:
    """Return what all encoders cost on the devices of a stage of the language model, whose cp shares the tiles."""
    cp = LANGUAGE_DEVICES // ENCODER_DEVICES
    total = [0.0, 0.0, 0.0]
    for name, encoder in model.encoders.items():
        share = -(-encoder.tiles // cp) / encoder.tiles
        total = [a + share * sum(b) for a, b in zip(total, zip(*model.pieces(name), strict=True), strict=True)]
    return total[0], total[1], total[2]


def apart_plans(model: Model, virtual: Sequence[int]) -> list[Plan]:
    """Return the plans that have every encoder on stages of its own."""
    return [
        apart(model, dict(zip(model.encoders, split, strict=True)), count, each)
        for count, size in sizes()
        for split in product(range(1, size + 1), repeat=len(model.encoders))
        if sum(split) == size
        for each in virtual
    ]


def all_plans(model: Model, virtual: Sequence[int]) -> list[Plan]:
    """Return the plans with encoders anywhere."""
    several = len(model.encoders) > 1
    shared = [together(model, size, count, each) for count, size in sizes() for each in virtual] if several else []
    return [*apart_plans(model, virtual), *shared, *(inside(model, each) for each in virtual)]


def fastest(plans: Sequence[Plan], policies: Sequence[str]) -> Plan:
    """Return the fastest plan in simulation, in the best order, with the cut of its language model refined."""
    tried: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: plan.least):
        if len(tried) >= REFINED and plan.least >= sorted(one.simulated for one in tried)[REFINED - 1]:
            break  # no other can be among the best
        tried += _ordered(plan, policies)
    best = sorted(tried, key=lambda plan: plan.merit)[:REFINED]
    return min(map(refined, best), key=lambda plan: plan.merit)


def _ordered(plan: Plan, policies: Sequence[str]) -> list[Plan]:
    """Return a plan in the orders that it can be carried out in."""
    found = []
    for policy in policies:
        one = replace(plan, policy=policy)
        try:
            _ = one.timeline
        except ConfigError:  # microbatches that do not divide by its places
            continue
        found.append(one)
    return found


def refined(plan: Plan) -> Plan:
    """Return a plan after moving single layers of the language model as long as that helps."""
    while True:
        better = min(_neighbours(plan), key=lambda one: one.merit, default=plan)
        if better.merit >= plan.merit:
            return plan
        plan = better


def _neighbours(plan: Plan) -> Iterator[Plan]:
    """Yield plans in which one layer of the language model is in the stage before, or behind."""
    *encoders, last = plan.parts
    for index in range(1, len(last.runs)):
        before, behind = last.runs[index - 1 : index + 1]
        for one, other in (((*before, behind[0]), behind[1:]), (before[:-1], (before[-1], *behind))):
            if one and other:
                runs = (*last.runs[: index - 1], one, other, *last.runs[index + 1 :])
                yield replace(plan, parts=(*encoders, replace(last, runs=runs)))


# ---------------------------------------------------------------------------------------------------- the others


def colocated(model: Model, size: int, count: int, frozen_aware: bool = True) -> Plan:
    """Return a chain of stages: all encoders, one after the other, then the language model, each cut evenly.

    frozen_aware: whether costs are what they are, or what they would be if everything were trained.
    """
    pieces = [even(model.pieces(name, frozen_aware), size) for name in model.encoders]
    encoders = tuple(tuple(layer for run in runs for layer in run) for runs in zip(*pieces, strict=True))
    shared = own("encoders", encoders, 0)
    last = language(even(model.pieces(LANGUAGE, frozen_aware), count), size, count)
    if not frozen_aware:
        shared, last = (replace(part, trains=(True,) * len(part.runs)) for part in (shared, last))
    return Plan(f"{size} → {count}", (shared, last), size * ENCODER_DEVICES + count * LANGUAGE_DEVICES)


def blind(model: Model) -> Plan:
    """Return the chain that would be the fastest if everything were trained."""
    count, size = min(sizes(), key=lambda two: colocated(model, two[1], two[0], frozen_aware=False).simulated)
    return colocated(model, size, count)


def published(model: Model) -> Plan:
    """Return the chain whose language model has as many stages as in the published evaluation."""
    count = PUBLISHED[model.name]
    return colocated(model, (DEVICES - count * LANGUAGE_DEVICES) // ENCODER_DEVICES, count)


def replicated(model: Model, whole: bool = False) -> Plan:
    """Return a plan with all encoders in every stage of a language model that is cut evenly.

    whole: every device runs all of each encoder, as in the published evaluation. Else those of a stage share the work.
    """
    count = DEVICES // LANGUAGE_DEVICES
    if whole:
        pieces = [one for name in model.encoders for one in model.pieces(name, devices=1)]
        forward, inputs, weights = (sum(one) for one in zip(*pieces, strict=True))
    else:
        forward, inputs, weights = encoders_inside(model)
    # What the later stages make of the encoders' tokens is the same, and nothing is trained there.
    encoders = [(forward, inputs, weights), *[(forward, 0.0, 0.0)] * (count - 1)]
    runs = even(model.pieces(LANGUAGE), count)
    with_encoders = tuple((first, *run) for first, run in zip(encoders, runs, strict=True))
    return Plan(f"in each of {count}", (language(with_encoders, 0, count, inside=True),), DEVICES)


def ideal(model: Model) -> float:
    """Return the time of a step if all devices were always busy, and nothing were computed twice."""
    work = LANGUAGE_DEVICES * sum(map(sum, model.pieces(LANGUAGE)))
    work += sum(ENCODER_DEVICES * sum(map(sum, model.pieces(name))) for name in model.encoders)
    return MICROBATCHES * work / DEVICES
