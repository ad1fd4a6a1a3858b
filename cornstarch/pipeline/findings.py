"""What a survey of a model finds: plain data, from which the model is cut.

The layers of a model are counted from 0 to n - 1. What it computes falls into *segments*: segment k is everything
between the return of layer k - 1 and the return of layer k; segment n is what comes behind the last layer. *Boundary*
k stands between the segments k - 1 and k. A stage is a run of segments, from one boundary to the next.

One stage may be less than a segment: a first stage of embeddings alone, which ends when the first layer is called. Both
it and the second stage begin with segment 0 then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Unit:
    """A module beside the layers: embeddings, a norm, a head."""

    uses: frozenset[int]
    """The segments in which it is called or its parameters are read. Empty: it was not used at all."""
    weighs: bool
    """Whether it has parameters."""
    inside: bool = False
    """Whether layers call it."""


@dataclass(frozen=True)
class Survey:
    """How a model is made, as far as cutting it is concerned."""

    model_name: str
    """The class, with its module."""
    layers: tuple[str, ...]
    """The names of the layers, in the order in which they are called."""
    units: Mapping[str, Unit]
    """The modules beside the layers, in the order in which they are first called."""
    live: Mapping[str, int]
    """The last segment that reads what a layer or a unit returned, where that is not the one in which it was made."""
    written: frozenset[str] = frozenset()
    """Those whose results are changed in place by what follows."""
    barred: Mapping[int, str] = field(default_factory=dict)
    """The boundaries at which the model cannot be cut, and why."""

    @property
    def boundaries(self) -> list[int]:
        """The boundaries at which the model may be cut."""
        end = len(self.layers)
        follows = any(unit.weighs and end in unit.uses for unit in self.units.values())
        return [place for place in range(1, end + follows) if place not in self.barred]

    @property
    def modules(self) -> list[str]:
        """The names of everything that has parameters, in the order of the forward pass: what templates list."""
        by_segment: list[list[str]] = [[] for _ in range(len(self.layers) + 2)]
        for name, unit in self.units.items():
            if unit.weighs:
                by_segment[min(unit.uses, default=len(self.layers) + 1)].append(name)
        listed: list[str] = []
        for segment, names in enumerate(by_segment):
            listed += names
            listed += self.layers[segment : segment + 1]
        return listed

    def precedes_layers(self, name: str) -> bool:
        """Return whether a module runs before the first layer, and not inside it."""
        return name in self.units and 0 in self.units[name].uses and not self.units[name].inside

    def segment_of(self, name: str) -> int:
        """Return the segment to which a listed module belongs."""
        if name in self.units:
            return min(self.units[name].uses, default=len(self.layers))
        return self.layers.index(name)


__all__ = ["Survey", "Unit"]
