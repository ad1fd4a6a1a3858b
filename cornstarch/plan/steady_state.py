"""The time of a simulated step without the list of its actions, and without simulating every microbatch; no torch.

The recurrences are those of `cornstarch.plan.simulate` on the orders of `cornstarch.schedule.policies`: a computation
begins when its place is free and its input has arrived. In the steady state of 1F1B every round of a pipeline, one
backward and one forward at each stage, is the same function of the times of the round before; with interleaving, every
group of rounds is. The function only adds and takes maxima. If two consecutive spans of rounds took the same decision
at every maximum, and shifted every time by the same amounts, then so do all later spans, until a waiting time that
shrinks from span to span reaches zero. So whole spans are skipped up to that point (`_find_jump`), and the result is
that of a full simulation. It is equal with fractions; floats are compared with a relative tolerance of 1e-12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from cornstarch.plan.simulate import StepEnd, Timeline, last_backward, simulate
from cornstarch.schedule.actions import Kind
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.list_scheduler import get_warmup_depths
from cornstarch.schedule.policies import make_schedule

Transfers = Mapping[tuple[int, int], float]
_EXACT = 1e-12  # relative difference of floats that are equal
_LONGEST_SPAN = 64  # rounds of a span
_ROUNDS_BETWEEN_CHECKS = 4
_FORWARD_OR_DONE = (Kind.F, Kind.B, Kind.W)

Row = tuple[list[float], list[float]]
"""The times after a round, and what each operand of its maxima was ahead of the other."""


@dataclass(frozen=True, eq=False)
class PipelineRun:
    """One step of a pipeline: everything that a simulation needs, and its results, computed when they are needed."""

    graph: StageGraph
    microbatches: int
    policy: str
    transfers: Transfers
    """By edge of the graph, the time of a transfer."""
    ends: Sequence[StepEnd]
    """By place, the work after the passes."""

    @cached_property
    def timeline(self) -> Timeline:
        """When every action starts and ends: the full simulation."""
        schedule = make_schedule(self.graph, self.microbatches, self.policy)
        return simulate(schedule, self.transfers, self.ends)

    @cached_property
    def step(self) -> float:
        """The time of the step."""
        last = _find_last_ends(self.graph, self.microbatches, self.policy, self.transfers)
        if last is None:
            return self.timeline.step
        tails = [end.tail(last_backward(self.graph, place)) for place, end in enumerate(self.ends)]
        return max(end + tail for end, tail in zip(last, tails, strict=True))

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """By stage, the largest number of microbatches whose activations are saved at once."""
        graph, many = self.graph, self.microbatches
        if self.policy in ("1f1b", "gpipe", "naive"):  # also where lines of several stages share a place
            depths = _get_warmup(graph, many, self.policy)
            return tuple(min(many, depth) if graph.wants_gradient(s) else 0 for s, depth in enumerate(depths))
        return self.timeline.in_flight if (shape := _find_shape(graph, self.policy)) is None else self._count(shape)

    def list_passes(self, place: int) -> list[tuple[int, bool]]:
        """Return the stages of a place in the order of their passes, each with whether it is a forward.

        Rounds that repeat others are left out: the same activations are saved in them.
        """
        graph = self.graph
        shape = _find_shape(graph, self.policy)
        first = 0 if shape is None else shape.encoders
        if shape is None or not first <= place < first + shape.places:
            return [
                (event.stage, event.kind is Kind.F)
                for event in self.timeline.events[place]
                if event.kind in _FORWARD_OR_DONE or (event.kind is Kind.I and graph.backward(event.stage) == "input")
            ]
        order = list_chunk_passes(shape.places, shape.virtual, self.microbatches)[place - first]
        return [(first + chunk * shape.places + place - first, is_forward) for chunk, is_forward in order]

    def _count(self, shape: _Shape) -> tuple[int, ...]:
        found = count_chunks_in_flight(shape.places, shape.virtual, self.microbatches)
        depths = _find_encoder_depths(self.graph, shape, self.microbatches)
        found = (*(min(self.microbatches, depth) for depth in depths), *found)
        return tuple(many if self.graph.wants_gradient(stage) else 0 for stage, many in enumerate(found))


def _get_warmup(graph: StageGraph, microbatches: int, policy: str) -> list[int]:
    """Return the forwards before the first backward of each stage."""
    if policy == "1f1b":
        return get_warmup_depths(graph)
    return [microbatches if policy == "gpipe" else 1] * len(graph.nodes)


def _find_last_ends(graph: StageGraph, many: int, policy: str, transfers: Transfers) -> list[float] | None:
    """Return when the last action of each place ends; None: the order of its actions is known only by simulation."""
    if policy in ("1f1b", "gpipe", "naive") and graph.places == len(graph.nodes):
        lines = _StageLines(graph, range(len(graph.nodes)), _get_warmup(graph, many, policy), transfers)
        lines.run(many)
        return lines.list_ends(graph.places)
    if (shape := _find_shape(graph, policy)) is None or many % shape.places:
        return None
    return _Chunks(graph, shape, many, transfers).run()


class _StageLines:
    """Stages of a place each, every one with a single stage behind it: forwards of the warm-up, then 1F1B.

    In round n a stage computes the backward of microbatch n - warm-up, then the forward of microbatch n. Backwards are
    computed from the last stage to the first, forwards the other way, so that all inputs exist.
    """

    def __init__(self, graph: StageGraph, stages: Sequence[int], warmup: Sequence[int], transfers: Transfers) -> None:
        nodes = graph.nodes
        self.graph, self.warmup = graph, warmup
        self.forwards = [node.forward for node in nodes]
        self.backwards = [get_backward_time(graph, stage) for stage in range(len(nodes))]
        self.order = sorted(stages, key=graph.depth)
        self.sources = {
            stage: [(source, transfers.get((source, stage), 0)) for source in graph.predecessors(stage)]
            for stage in stages
        }
        self.targets = {stage: next(iter(graph.successors(stage)), None) for stage in stages}
        self.lags = {stage: transfers.get((stage, target), 0) for stage, target in self.targets.items()}  # type: ignore[arg-type]
        self.clock: list[float] = [0] * len(nodes)  # the end of the last action of each stage
        self.forward_end: list[float] = [0] * len(nodes)  # of its last forward, its last backward, and the one before
        self.latest: list[float] = [0] * len(nodes)
        self.before: list[float] = [0] * len(nodes)

    def run(self, many: int) -> None:
        """Compute all rounds."""
        self.recorded: list[Row] = []
        deepest, number = max(self.warmup), 0
        pays = many - deepest > 3 * _ROUNDS_BETWEEN_CHECKS
        while number < many + deepest:
            margins = self.advance(number, many)
            if pays and deepest <= number < many:
                self.recorded.append(([*self.forward_end, *self.latest], margins))
                if len(self.recorded) % _ROUNDS_BETWEEN_CHECKS == 0:
                    spans = range(1, min(_LONGEST_SPAN, len(self.recorded) // 2) + 1)
                    number += self._jump(_find_jump(self.recorded, spans, many - 1 - number))
            number += 1

    def _jump(self, found: tuple[int, list[float]] | None) -> int:
        """Shift all times, and return the number of rounds that were skipped."""
        if found is None:
            del self.recorded[: -2 * _LONGEST_SPAN]
            return 0
        rounds, shifts = found
        count = len(self.clock)
        self.forward_end = [a + b for a, b in zip(self.forward_end, shifts[:count], strict=True)]
        self.latest = [a + b for a, b in zip(self.latest, shifts[count:], strict=True)]
        self.clock = list(self.forward_end)
        self.recorded = []
        return rounds

    def advance(self, number: int, many: int, behind: Sequence[float] = ()) -> list[float]:
        """Compute a round; return the margins of its maxima.

        behind: The ends of the backwards, by microbatch, of a stage behind the last of these.
        """
        clock, latest, before, forward_end = self.clock, self.latest, self.before, self.forward_end
        margins: list[float] = []
        for stage in reversed(self.order):
            microbatch = number - self.warmup[stage]
            if microbatch < 0:
                continue
            before[stage] = latest[stage]
            if microbatch >= many or (time := self.backwards[stage]) is None:
                continue
            start, target = clock[stage], self.targets[stage]
            if target is not None:
                if target not in self.targets:
                    end = behind[microbatch]
                else:
                    end = (before if self.warmup[target] < self.warmup[stage] else latest)[target]
                arrival = end + self.lags[stage]
                margins.append(start - arrival)
                start = max(start, arrival)
            clock[stage] = latest[stage] = start + time
        if number < many:
            for stage in self.order:
                start = clock[stage]
                for source, lag in self.sources[stage]:
                    arrival = forward_end[source] + lag
                    margins.append(start - arrival)
                    start = max(start, arrival)
                clock[stage] = forward_end[stage] = start + self.forwards[stage]
        return margins

    def list_ends(self, places: int) -> list[float]:
        """Return the end of the last action of each place."""
        ends: list[float] = [0] * places
        for stage in self.order:
            ends[self.graph.nodes[stage].place] = self.clock[stage]
        return ends


def get_backward_time(graph: StageGraph, stage: int) -> float | None:
    """Return the time of a stage's whole backward; None if it has none."""
    node, kind = graph.nodes[stage], graph.backward(stage)
    if kind == "none":
        return None
    return node.backward_input if kind == "input" else node.backward_input + node.backward_weight


def _find_jump(rows: Sequence[Row], spans: Sequence[int], left: int) -> tuple[int, list[float]] | None:
    """Return how many rounds can be skipped, and by how much their end shifts every time; None: none yet.

    left: The number of rounds of the steady state that are still to come.
    """
    times, now = rows[-1][0], len(rows) - 1
    largest = max(times)
    noise = _EXACT * largest if isinstance(largest, float) else 0
    for span in spans:
        if 2 * span > now or span > left:
            break
        middle, first = rows[now - span][0], rows[now - 2 * span][0]
        if any(abs(c - 2 * b + a) > noise for a, b, c in zip(first, middle, times, strict=True)):
            continue
        many: float = left // span
        for back in range(span):
            for earlier, later in zip(rows[now - span - back][1], rows[now - back][1], strict=True):
                shrinking = earlier - later
                if abs(shrinking) <= noise:
                    continue
                if abs(later) <= noise or (earlier > noise and later < -noise) or (earlier < -noise and later > noise):
                    many = 0  # another decision, or the last one like this
                elif (later > 0) == (shrinking > 0):
                    many = min(many, later // shrinking)
        if many >= 1:
            return int(many) * span, [int(many) * (c - b) for b, c in zip(middle, times, strict=True)]
    return None


@dataclass(frozen=True)
class _Shape:
    """A last module with several stages on each of its places, behind encoders with a stage on each of theirs."""

    encoders: int
    """The number of their stages."""
    places: int
    virtual: int

    @property
    def group(self) -> int:
        """Rounds after which the same stages come again."""
        return self.places * self.virtual

    @property
    def warmup(self) -> int:
        """Forwards before the first backward of the last place, if there are enough."""
        return 1 + (self.virtual - 1) * self.places


def _find_shape(graph: StageGraph, policy: str) -> _Shape | None:
    """Return the shape of an interleaved pipeline whose order needs no simulation; None: it is another."""
    last = graph.nodes[-1]
    own = [node for node in graph.nodes if node.module == last.module]
    places = len({node.place for node in own})
    encoders = len(graph.nodes) - len(own)
    virtual = len(own) // places
    is_apart = graph.places == encoders + places
    return _Shape(encoders, places, virtual) if policy == "interleaved" and virtual > 1 and is_apart else None


@lru_cache(maxsize=4096)
def list_chunk_passes(places: int, virtual: int, many: int) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Return, by place of an interleaved module, its chunks in the order of their passes: (chunk, whether forward)."""
    shape = _Shape(0, places, virtual)
    # More groups repeat the same: after the warm-up, every group has as many forwards as backwards of each stage.
    rounds = min(many, places * (-(-(shape.warmup + 2 * places) // shape.group) + 2)) * virtual
    found = []
    for place in range(places):
        warmup, passes = shape.warmup + 2 * (places - 1 - place), list[tuple[int, bool]]()
        for number in range(rounds):
            if number >= warmup:
                passes.append((virtual - 1 - (number - warmup) // places % virtual, False))
            passes.append((number // places % virtual, True))
        found.append(tuple(passes))
    return tuple(found)


@lru_cache(maxsize=4096)
def count_chunks_in_flight(places: int, virtual: int, many: int) -> tuple[int, ...]:
    """Return the microbatches in flight at each stage of an interleaved module, stage by stage."""
    found = [0] * (places * virtual)
    for place, passes in enumerate(list_chunk_passes(places, virtual, many)):
        counts = [0] * virtual
        for chunk, is_forward in passes:
            counts[chunk] += 1 if is_forward else -1
            found[chunk * places + place] = max(found[chunk * places + place], counts[chunk])
    return tuple(found)


@lru_cache(maxsize=4096)
def count_chunks_after_warmup(places: int, virtual: int, many: int) -> tuple[int, ...]:
    """Return the microbatches in flight at each stage of an interleaved module when the warm-up of its place ends.

    They are there at the same time; the largest numbers of several stages need not be.
    """
    shape = _Shape(0, places, virtual)
    found = [0] * shape.group
    for place in range(places):
        for number in range(min(shape.warmup + 2 * (places - 1 - place), many * virtual)):
            found[number // places % virtual * places + place] += 1
    return tuple(found)


def _find_encoder_depths(graph: StageGraph, shape: _Shape, many: int) -> list[int]:
    """Return the forwards before the first backward of each encoder stage, which are numbered first."""
    lead = count_chunks_in_flight(shape.places, shape.virtual, many)[0]
    own = graph.distance(shape.encoders)
    return [min(lead, many - 1) + graph.distance(stage) - own for stage in range(shape.encoders)]


class _Chunks:
    """An interleaved module: in round n, place p computes its forward number n - p, and the backward `warmup` earlier.

    So an input from another place was computed in the round before. Numbers count the microbatches of a group through
    the first stage of a place, then through its second one; backwards go the other way.
    """

    def __init__(self, graph: StageGraph, shape: _Shape, many: int, transfers: Transfers) -> None:
        self.shape, self.many = shape, many
        places, virtual, first = shape.places, shape.virtual, shape.encoders
        self.warmup = [shape.warmup + 2 * (places - 1 - place) for place in range(places)]
        stages = [[first + chunk * places + place for chunk in range(virtual)] for place in range(places)]
        self.forwards = [[graph.nodes[stage].forward for stage in own] for own in stages]
        self.backwards = [[get_backward_time(graph, stage) for stage in own] for own in stages]
        self.into = [[0 if s == first else transfers.get((s - 1, s), 0) for s in own] for own in stages]
        self.out = [[transfers.get((s, s + 1), 0) for s in own] for own in stages]
        self.first_place = graph.nodes[first].place
        self.places = graph.places
        self.encoders: _StageLines | None = None
        if first:
            depths = [*_find_encoder_depths(graph, shape, many), *[0] * (len(graph.nodes) - first)]
            self.encoders = _StageLines(graph, range(first), depths, transfers)
            self.joins = [(source, transfers.get((source, first), 0)) for source in graph.predecessors(first)]
        self.behind: list[float] = []  # the ends of the first stage's backwards
        self.clock: list[float] = [0] * places
        self.forward_end: list[float] = [0] * places
        self.latest: list[float] = [0] * places

    def run(self) -> list[float]:
        """Compute all rounds; return the end of the last action of each place."""
        group, total = self.shape.group, self.many * self.shape.virtual
        steady = max(warmup + place for place, warmup in enumerate(self.warmup))
        recorded: list[Row] = []
        pays, number = self.encoders is None and total - steady > 4 * group, 0
        while number < total + steady:
            margins = self._advance(number, total)
            if pays and steady <= number < total:
                recorded.append(([*self.forward_end, *self.latest], margins))
                if len(recorded) > 2 * group and len(recorded) % group == 1:
                    spans = range(group, len(recorded) // 2 + 1, group)
                    if (found := _find_jump(recorded, spans, total - 1 - number)) is not None:
                        number += found[0]
                        self.forward_end = [a + b for a, b in zip(self.forward_end, found[1], strict=False)]
                        shifts = found[1][len(self.latest) :]
                        self.latest = [a + b for a, b in zip(self.latest, shifts, strict=True)]
                        self.clock, recorded = list(self.forward_end), []
            number += 1
        ends = [0.0] * self.places
        if self.encoders is not None:
            for step in range(self.many, self.many + max(self.encoders.warmup)):
                self.encoders.advance(step, self.many, self.behind)
            ends = self.encoders.list_ends(self.places)
        ends[self.first_place : self.first_place + self.shape.places] = self.clock
        return ends

    def _advance(self, number: int, total: int) -> list[float]:
        places, virtual = self.shape.places, self.shape.virtual
        clock, forward_end, latest = self.clock, self.forward_end, self.latest
        margins: list[float] = []
        first, last = latest[0], forward_end[-1]  # of the round before
        for place in range(places):  # a place is later than the next one: its gradients are of the round before
            at = number - place - self.warmup[place]
            if 0 <= at < total:
                chunk = virtual - 1 - at // places % virtual
                if (time := self.backwards[place][chunk]) is not None:
                    start = clock[place]
                    if place < places - 1 or chunk < virtual - 1:
                        end = latest[place + 1] if place < places - 1 else first
                        arrival = end + self.out[place][chunk]
                        margins.append(start - arrival)
                        start = max(start, arrival)
                    clock[place] = latest[place] = start + time
                    if self.encoders is not None and place == chunk == 0:
                        self.behind.append(clock[place])
        for place in reversed(range(places)):
            at = number - place
            if 0 <= at < total:
                chunk, start = at // places % virtual, clock[place]
                if place or chunk:
                    arrivals = [(forward_end[place - 1] if place else last) + self.into[place][chunk]]
                else:
                    arrivals = self._encode(at // self.shape.group * places + at % places)
                for arrival in arrivals:
                    margins.append(start - arrival)
                    start = max(start, arrival)
                clock[place] = forward_end[place] = start + self.forwards[place][chunk]
        return margins

    def _encode(self, microbatch: int) -> list[float]:
        """Compute a round of the encoders; return when their outputs arrive."""
        if self.encoders is None:
            return []
        self.encoders.advance(microbatch, self.many, self.behind)
        return [self.encoders.forward_end[source] + lag for source, lag in self.joins]
