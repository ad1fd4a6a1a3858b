"""What the layers of a model keep for the backward pass, and what is left of it where some are computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stored:
    """Memory that is kept for the backward pass as long as someone needs it, who is known by number."""

    size: int
    savers: frozenset[int]
    """The layers that save it unless they are computed again; `OUTSIDE`: what is around layers saves it, too."""
    readers: frozenset[int]
    """The layers of which it is an input: they keep it if they are computed again."""


OUTSIDE = -1


@dataclass(frozen=True)
class LayerActivations:
    """What the layers of a model keep, in the order in which they are computed."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    """Layers of the same kind are alike."""
    work: tuple[float, ...]
    """Floating-point operations of each layer's forward pass."""
    stored: tuple[Stored, ...]

    def __add__(self, other: LayerActivations) -> LayerActivations:
        """Return both, one computed after the other."""
        first = len(self.names)

        def moved(layers: frozenset[int]) -> frozenset[int]:
            return frozenset(OUTSIDE if layer == OUTSIDE else layer + first for layer in layers)

        later = (Stored(one.size, moved(one.savers), moved(one.readers)) for one in other.stored)
        return LayerActivations(
            self.names + other.names, self.kinds + other.kinds, self.work + other.work, (*self.stored, *later)
        )

    def scaled(self, shares: Mapping[int, float]) -> LayerActivations:
        """Return the same where layers keep another share of what they alone save.

        Args:
            shares: By layer; 1 if it is left out.
        """

        def share(one: Stored) -> float:
            owner = next(iter(one.savers), OUTSIDE) if len(one.savers) == 1 and not one.readers else OUTSIDE
            return shares.get(owner, 1.0)

        stored = (Stored(round(one.size * share(one)), one.savers, one.readers) for one in self.stored)
        return replace(self, stored=tuple(stored))

    def own(self, layer: int) -> int:
        """Return the bytes that a layer alone saves."""
        return sum(one.size for one in self.stored if one.savers == {layer} and not one.readers)

    def kept(self, again: frozenset[int] = frozenset()) -> int:
        """Return the bytes that are kept when the forward pass ends, where some layers are computed again."""
        return sum(one.size for one in self.stored if one.savers - again or one.readers & again)

    def most(self, again: frozenset[int] = frozenset()) -> int:
        """Return the most bytes at one time: a layer that is computed again has all of its own for a moment."""
        found = self.kept(again)
        for layer in again:
            # Layers behind it are done with by then.
            found = max(
                found,
                sum(
                    one.size
                    for one in self.stored
                    if layer in one.savers
                    or any(saver < layer for saver in one.savers - again)
                    or any(reader <= layer for reader in one.readers & again)
                ),
            )
        return found

    def keeping(self) -> list[int]:
        """Return the layers that keep more than their inputs."""
        return [layer for layer in range(len(self.names)) if self.gain(layer) > 0]

    def gain(self, layer: int) -> int:
        """Return the bytes that are no longer kept if this layer alone is computed again."""
        alone = frozenset([layer])
        return sum(
            one.size * (bool(one.savers) - bool(one.savers - alone or one.readers & alone))
            for one in self.stored
            if layer in one.savers or layer in one.readers
        )


__all__ = ["OUTSIDE", "LayerActivations", "Stored"]
