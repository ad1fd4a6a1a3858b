"""The stages of a model and the edges between them: encoders are branches that meet at the language model.

graph = StageGraph.branches({"vision": 2, "audio": 1}, language_model=2)
graph.predecessors(3)      # (1, 2): the first stage of the language model needs the last one of each encoder
graph.distance(0)          # 3: the number of stages behind it on the longest path to the sink

A *place* is a set of ranks that runs one list of actions. It may have several stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from cornstarch.errors import ConfigError

Backward = Literal["none", "weight", "input", "both"]
"""The gradients that the backward of a stage computes: of its weights, of its inputs, both or none."""


@dataclass(frozen=True)
class StageNode:
    """One stage: some consecutive layers of a module."""

    module: str  # for example "vision", "language_model", "model"
    index: int  # the index among the stages of its module
    place: int  # the place that runs it
    trains: bool = True  # whether it has trained parameters
    forward: float = 1.0  # the time of one microbatch, in any unit; the other two are in the same unit
    backward_input: float = 1.0
    """The time of the gradients of its inputs and of the activations between its layers."""
    backward_weight: float = 1.0  # the time of the gradients of its weights

    def __str__(self) -> str:
        return f"{self.module} {self.index}"


@dataclass(frozen=True)
class StageGraph:
    """Stages, by number, and the edges along which activations flow: an acyclic graph with one sink."""

    nodes: tuple[StageNode, ...]
    edges: tuple[tuple[int, int], ...] = ()  # (source stage, target stage)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "edges", tuple((source, target) for source, target in self.edges))
        if not self.nodes:
            raise ConfigError("There is no stage.")
        if len({*self.edges}) < len(self.edges):
            raise ConfigError("An edge is listed twice.")
        stages = range(len(self.nodes))
        for source, target in self.edges:
            if source not in stages or target not in stages or source == target:
                raise ConfigError(f"There is no edge from {source} to {target}: expected two of {len(stages)} stages.")
        places = {node.place for node in self.nodes}
        if places != {*range(len(places))}:
            raise ConfigError(f"Places are numbered from 0 without a gap; found {sorted(places)}.")
        for number, node in enumerate(self.nodes):
            for cost in ("forward", "backward_input", "backward_weight"):
                if not 0 <= getattr(node, cost) < float("inf"):
                    raise ConfigError(f"Stage {number} ({node}): {cost} = {getattr(node, cost)}; expected at least 0.")
        if len(self._order) < len(self.nodes):
            rest = [str(number) for number in stages if number not in {*self._order}]
            raise ConfigError(f"Stages {', '.join(rest)} wait for one another: the edges form a cycle.")
        if len(sinks := [s for s in stages if not self._after[s]]) > 1:
            names = ", ".join(f"{s} ({self.nodes[s]})" for s in sinks)
            raise ConfigError(f"Expected one stage at which all paths end; found {len(sinks)}: {names}.")

    @classmethod
    def chain(
        cls,
        stages: int,
        module: str = "model",
        virtual_stages: int = 1,
        trains: bool | Sequence[bool] = True,
        costs: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> StageGraph:
        """Return a chain of `stages × virtual_stages` stages.

        trains: for all stages, or for each.
        costs: forward, backward of inputs and backward of weights of every stage.
        """
        count = stages * virtual_stages
        trained = [trains] * count if isinstance(trains, bool) else list(trains)
        nodes = [StageNode(module, i, i % stages, trained[i], *costs) for i in range(count)]
        return cls(tuple(nodes), tuple(zip(range(count), range(1, count), strict=False)))

    @classmethod
    def branches(
        cls,
        encoders: Mapping[str, int],
        language_model: int,
        colocated: bool = False,
        trains: Mapping[str, bool] | None = None,
    ) -> StageGraph:
        """Return parallel encoders, by their numbers of stages, which meet at the first stage of a language model.

        colocated: whether the encoders share their places: stage i of each is on place i.
        trains: by module; modules that are not listed are trained.
        """
        modules = {**encoders, "language_model": language_model}
        nodes: list[StageNode] = []
        edges: list[tuple[int, int]] = []
        ends: list[int] = []
        width = max(encoders.values(), default=0) if colocated else sum(encoders.values())
        for module, stages in modules.items():
            is_last, first = module == "language_model", len(nodes)
            start = width if is_last else 0 if colocated else first
            trained = (trains or {}).get(module, True)
            nodes += [StageNode(module, i, start + i, trained) for i in range(stages)]
            edges += [(number, number + 1) for number in range(first, len(nodes) - 1)]
            if is_last:
                edges += [(end, first) for end in ends]
            ends.append(len(nodes) - 1)
        return cls(tuple(nodes), tuple(edges))

    def freeze(self) -> StageGraph:
        """Return the graph with nothing trained: its schedules have forwards only, as in evaluation."""
        return StageGraph(tuple(replace(node, trains=False) for node in self.nodes), self.edges)

    @cached_property
    def places(self) -> int:
        return max(node.place for node in self.nodes) + 1

    @cached_property
    def sink(self) -> int:
        """The stage at which all paths end, and where the loss is."""
        return next(s for s in range(len(self.nodes)) if not self._after[s])

    def predecessors(self, stage: int) -> tuple[int, ...]:
        return self._before[stage]

    def successors(self, stage: int) -> tuple[int, ...]:
        return self._after[stage]

    def distance(self, stage: int) -> int:
        """Return the number of stages behind a stage on the longest path to the sink, including the sink."""
        return self._distances[stage]

    def depth(self, stage: int) -> int:
        """Return the number of stages before a stage on the longest path to it."""
        return self._depths[stage]

    def at(self, place: int) -> tuple[int, ...]:
        return self._at[place]

    def wants_gradient(self, stage: int) -> bool:
        """Return whether a stage has a backward: something is trained in it or before it."""
        return self._wants[stage]

    def sends_gradient(self, source: int, target: int) -> bool:
        assert target in self._after[source]
        return self._wants[source]

    def backward(self, stage: int) -> Backward:
        """Return the gradients that the backward of a stage computes."""
        passes_on = any(self._wants[source] for source in self._before[stage])
        if self.nodes[stage].trains:
            return "both" if passes_on else "weight"
        return "input" if passes_on else "none"

    @cached_property
    def _before(self) -> tuple[tuple[int, ...], ...]:
        return _group(((target, source) for source, target in self.edges), len(self.nodes))

    @cached_property
    def _after(self) -> tuple[tuple[int, ...], ...]:
        return _group(self.edges, len(self.nodes))

    @cached_property
    def _at(self) -> tuple[tuple[int, ...], ...]:
        return _group(((node.place, number) for number, node in enumerate(self.nodes)), self.places)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """The stages in topological order; some are left out if there is a cycle."""
        missing = [len(before) for before in self._before]
        order = [stage for stage, many in enumerate(missing) if many == 0]
        for stage in order:  # grows while it is walked
            for target in self._after[stage]:
                missing[target] -= 1
                if missing[target] == 0:
                    order.append(target)
        return tuple(order)

    @cached_property
    def _distances(self) -> list[int]:
        return self._count_longest_paths(reversed(self._order), self._after)

    @cached_property
    def _depths(self) -> list[int]:
        return self._count_longest_paths(self._order, self._before)

    def _count_longest_paths(self, order: Iterable[int], neighbors: Sequence[Sequence[int]]) -> list[int]:
        found = [0] * len(self.nodes)
        for stage in order:
            found[stage] = max((found[other] + 1 for other in neighbors[stage]), default=0)
        return found

    @cached_property
    def _wants(self) -> tuple[bool, ...]:
        wants = [node.trains for node in self.nodes]
        for stage in self._order:
            wants[stage] = wants[stage] or any(wants[source] for source in self._before[stage])
        return tuple(wants)


def _group(pairs: Iterable[tuple[int, int]], size: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(size)]
    for key, value in pairs:
        found[key].append(value)
    return tuple(map(tuple, found))
