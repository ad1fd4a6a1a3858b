"""In which order samples come: the same on every machine and for every number of processes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from cornstarch.errors import ConfigError

_MIXING = 2**32 - 1  # stands where the number of a source stands, for the order of all sources together


class EpochOrder:
    """The order of a mixture of sources, epoch by epoch.

    Each source is an endless row of passes over it; every pass has all its samples once, in its own order. An epoch
    takes the next `weight` passes: at weight 1 every sample comes once per epoch, at 0.5 every other one and the others
    in the next epoch, at 2 each twice.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        if not lengths or len(lengths) != len(weights) or min(lengths) < 1 or min(weights) <= 0:
            raise ConfigError(
                f"Sources of {list(lengths)} samples with weights {list(weights)}: expected at least one source, and "
                "in each at least one sample and a weight above 0."
            )
        self.lengths = list(lengths)
        # As the decimal number that was written: 0.29 × 100 is 29 and not 28.999….
        self.weights = [Fraction(str(weight)) for weight in weights]
        self.seed, self.shuffle = seed, shuffle
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._last: tuple[int, np.ndarray] | None = None

    def count(self, epoch: int) -> int:
        """Return how many samples an epoch has."""
        return sum(
            end - start for start, end in map(self._range, range(len(self.lengths)), [epoch] * len(self.lengths))
        )

    def order(self, epoch: int) -> np.ndarray:
        """Return the numbers of an epoch's samples, counted through all sources."""
        if self._last is None or self._last[0] != epoch:
            self._last = (epoch, self._made(epoch))
        return self._last[1]

    def _made(self, epoch: int) -> np.ndarray:
        parts = [self._taken(source, epoch) + self._starts[source] for source in range(len(self.lengths))]
        if len(parts) == 1:
            return parts[0]
        joined = np.concatenate(parts)
        return joined[self._permutation(len(joined), _MIXING, epoch)] if self.shuffle else joined

    def _range(self, source: int, epoch: int) -> tuple[int, int]:
        """Return what an epoch takes of the endless row of passes over a source."""
        per_epoch = self.weights[source] * self.lengths[source]
        return int(per_epoch * epoch), int(per_epoch * (epoch + 1))

    def _taken(self, source: int, epoch: int) -> np.ndarray:
        start, end = self._range(source, epoch)
        length = self.lengths[source]
        taken = [np.empty(0, np.int64)]
        for number in range(start // length, -(-end // length)):
            first = number * length
            taken.append(self._pass(source, number)[max(start - first, 0) : end - first])
        return np.concatenate(taken)

    def _pass(self, source: int, number: int) -> np.ndarray:
        length = self.lengths[source]
        return self._permutation(length, source, number) if self.shuffle else np.arange(length)

    def _permutation(self, length: int, *key: int) -> np.ndarray:
        """Return a random order that depends on the seed and the key alone.

        It sorts raw random numbers, each with its place in the low bits: numpy promises these numbers never to change
        (not what it makes of them), no two are equal, and sorting is several times faster than `argsort`.
        """
        random = np.random.PCG64(np.random.SeedSequence([self.seed, *key]))
        bits = np.uint64(max(length - 1, 1).bit_length())
        keys = random.random_raw(length) << bits
        keys |= np.arange(length, dtype=np.uint64)
        keys.sort()
        keys &= (np.uint64(1) << bits) - np.uint64(1)
        return keys.astype(np.int64)
