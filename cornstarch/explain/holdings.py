"""Who holds which part of a model at which moment, under each kind of data parallelism, in bytes.

Bytes are those of `cornstarch.plan.memory`. The model is as many equal layers as there are ranks, in float32, trained
by Adam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from cornstarch.explain.story import NUMBER_BYTES, Box, Row, Step, Tone, byte_count
from cornstarch.plan.dealing import deal_out
from cornstarch.plan.memory import Memory, ModelSize, ParameterSize, StateSize, memory_of
from cornstarch.plan.plan import DataPlan

_ADAM = {(NUMBER_BYTES, False): StateSize(per_element=8)}  # two averages in float32
_GROUPS = ("parameters", "gradients", "optimizer states")
_GAP = 0.4  # between groups, in boxes

Part = Literal["", "whole", "slice", "gathered", "own"]
"""Of a layer on a rank: nothing, all of it for good, its slice, all of it for a moment, or gradients that are not
summed over the ranks yet."""

_TONES: dict[Part, Tone] = {"": "n", "whole": "c6", "slice": "c1", "gathered": "c2", "own": "c4"}
_SAID: dict[Part, str] = {
    "": "not here",
    "whole": "whole",
    "slice": "this rank's slice",
    "gathered": "whole for a moment",
    "own": "from this rank's samples only",
}

LEGEND: dict[Tone, str] = {_TONES[part]: said for part, said in _SAID.items() if part}
"""What the colours of parts mean."""

Parts = tuple[Part, ...]
"""By layer."""


@dataclass(frozen=True)
class Sharing:
    """A kind of data parallelism over some ranks."""

    plan: DataPlan
    parameters: int
    ranks: int

    @cached_property
    def layers(self) -> tuple[ParameterSize, ...]:
        """One parameter for each rank, as even as can be."""
        bounds = [self.parameters * layer // self.ranks for layer in range(self.ranks + 1)]
        sizes = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
        return tuple(ParameterSize((size,), NUMBER_BYTES, True, unit) for unit, size in enumerate(sizes))

    @property
    def size(self) -> ModelSize:
        """The model."""
        return ModelSize(self.layers, states=_ADAM)

    @cached_property
    def owners(self) -> list[int]:
        """ZeRO-1: whose each layer is."""
        return deal_out([layer.numel for layer in self.layers], self.ranks)

    def memory(self, rank: int) -> Memory:
        """Return what a rank holds after a backward pass."""
        return memory_of(self.size, self.plan, self.ranks, rank)

    def _piece(self, layer: int, rank: int, part: Part) -> Memory:
        """Return the bytes of a part of one layer."""
        one = ModelSize((self.layers[layer],), states=_ADAM)
        if part == "":
            return Memory(0, 0, 0)
        if part == "slice":
            return memory_of(one, DataPlan("zero3"), self.ranks, rank)
        return memory_of(one, DataPlan("ddp"), ranks=1)

    def held(self, rank: int, moment: Moment) -> int:
        """Return a rank's bytes at a moment: what it has whole for a moment stands beside its slice."""
        total = 0
        for layer in range(self.ranks):
            parameters = moment.parameters[rank][layer]
            total += self._piece(layer, rank, parameters).parameters
            total += self._piece(layer, rank, "slice").parameters if parameters == "gathered" else 0
            total += self._piece(layer, rank, moment.gradients[rank][layer]).gradients
            total += self._piece(layer, rank, moment.states[rank][layer]).optimizer
        return total


@dataclass(frozen=True)
class Moment:
    """What every rank holds of every layer: by rank, by layer."""

    parameters: tuple[Parts, ...]
    gradients: tuple[Parts, ...]
    states: tuple[Parts, ...]


def _alike(part: Part, ranks: int) -> tuple[Parts, ...]:
    """Return the same part of every layer on every rank."""
    return tuple(tuple(part for _ in range(ranks)) for _ in range(ranks))


def resting(sharing: Sharing) -> Moment:
    """Return what ranks hold between two steps, without gradients."""
    everything = _alike("whole", sharing.ranks)
    slices = _alike("slice", sharing.ranks)
    kind = sharing.plan.kind
    nothing = _alike("", sharing.ranks)
    if kind == "ddp":
        return Moment(everything, nothing, everything)
    if kind == "zero1":
        owned: tuple[Parts, ...] = tuple(
            tuple("whole" if owner == rank else "" for owner in sharing.owners) for rank in range(sharing.ranks)
        )
        return Moment(everything, nothing, owned)
    return Moment(slices, nothing, slices)


def with_parts(moment: Moment, parameters: Part = "", gradients: Part = "", layer: int | None = None) -> Moment:
    """Return a moment with other parts: of one layer, or of all."""

    def changed(parts: tuple[Parts, ...], part: Part) -> tuple[Parts, ...]:
        return tuple(tuple(part if layer in (None, at) else old for at, old in enumerate(own)) for own in parts)

    if parameters:
        moment = replace(moment, parameters=changed(moment.parameters, parameters))
    return replace(moment, gradients=changed(moment.gradients, gradients)) if gradients else moment


def moment_step(sharing: Sharing, title: str, says: str, moment: Moment, sent: float = 0.0) -> Step:
    """Return a step that leads to a moment.

    sent: by each rank, in bytes.
    """
    ranks = sharing.ranks
    shown = dict(zip(_GROUPS, (moment.parameters, moment.gradients, moment.states), strict=True))
    starts = [group * (ranks + _GAP) for group in range(len(_GROUPS))]
    rows = []
    for rank in range(ranks):
        boxes = [
            _box(sharing, name, layer, part, starts[group] + layer)
            for group, (name, parts) in enumerate(shown.items())
            for layer, part in enumerate(parts[rank])
        ]
        rows.append(Row(f"rank {rank}", tuple(boxes), f"holds {byte_count(sharing.held(rank, moment))}"))
    head = tuple(Box(starts[group], starts[group] + ranks, name) for group, name in enumerate(_GROUPS))
    return Step(title, says, tuple(rows), head, (sent,) * ranks if sent else ())


def _box(sharing: Sharing, group: str, layer: int, part: Part, start: float) -> Box:
    text = {"": "", "own": "own", "slice": f"1/{sharing.ranks}"}.get(part, "all")
    return Box(start, start + 1, text, _TONES[part], f"{group} of layer {layer}: {_SAID[part]}")


def marked(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps with what each has brought marked: whatever was not there, or only in part, or not summed."""
    yield steps[0]
    for before, step in pairwise(steps):
        rows = []
        for old, row in zip(before.rows, step.rows, strict=True):
            boxes = [
                replace(box, fresh=box.tone not in ("n", was.tone) and was.tone != _TONES["gathered"])
                for was, box in zip(old.boxes, row.boxes, strict=True)
            ]
            rows.append(replace(row, boxes=tuple(boxes)))
        yield replace(step, rows=tuple(rows))
