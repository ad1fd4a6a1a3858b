"""The order of samples, the same on every machine and for every world size; and shuffled media. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from cornstarch.data.formats import DataSource, SourceView
from cornstarch.data.sample import Content, Media, MediaKind, Sample, SampleError
from cornstarch.errors import ConfigError

_MIXTURE = 2**32 - 1  # in the place of a source's number: the key of the order of all sources together


class EpochOrder:
    """The order of a mixture of sources, epoch by epoch.

    Each source is an endless sequence of passes; every pass has all samples once, in its own order. An epoch takes the
    next `weight` passes: with weight 1 every sample comes once per epoch, with 0.5 every other one and the others in
    the next epoch, with 2 each twice.
    """

    def __init__(self, lengths: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        if not lengths or len(lengths) != len(weights) or min(lengths) < 1 or min(weights) <= 0:
            raise ConfigError(
                f"Sources of {list(lengths)} samples with weights {list(weights)}: expected at least one source, and "
                "in each at least one sample and a weight above 0."
            )
        self.lengths = list(lengths)
        # The decimal number as it was written: 0.29 × 100 is 29 and not 28.999….
        self.weights = [Fraction(str(weight)) for weight in weights]
        self.seed, self.shuffle = seed, shuffle
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._last: tuple[int, np.ndarray] | None = None

    def count(self, epoch: int) -> int:
        ranges = [self._range(source, epoch) for source in range(len(self.lengths))]
        return sum(end - start for start, end in ranges)

    def order(self, epoch: int) -> np.ndarray:
        """Return the indices of an epoch's samples, counted through all sources."""
        if self._last is None or self._last[0] != epoch:
            parts = [np.empty(0, np.int64)]
            for source, length in enumerate(self.lengths):
                start, end = self._range(source, epoch)
                for number in range(start // length, -(-end // length)):
                    one_pass = self._permute(length, source, number) if self.shuffle else np.arange(length)
                    taken = one_pass[max(start - number * length, 0) : end - number * length]
                    parts.append(taken + self._starts[source])
            order = np.concatenate(parts)
            if len(self.lengths) > 1 and self.shuffle:
                order = order[self._permute(len(order), _MIXTURE, epoch)]
            self._last = (epoch, order)
        return self._last[1]

    def _range(self, source: int, epoch: int) -> tuple[int, int]:
        """Return the range of an epoch in the endless sequence of passes over a source."""
        per_epoch = self.weights[source] * self.lengths[source]
        return int(per_epoch * epoch), int(per_epoch * (epoch + 1))

    def _permute(self, length: int, *key: int) -> np.ndarray:
        """Return a random order that depends on the seed and the key alone."""
        # Raw random numbers, each with its place in the low bits, are sorted: NumPy guarantees that they never change
        # (unlike `permutation`), no two are equal, and sorting is several times faster than `argsort`.
        random = np.random.PCG64(np.random.SeedSequence([self.seed, *key]))
        bits = np.uint64(max(length - 1, 1).bit_length())
        keys = random.random_raw(length) << bits
        keys |= np.arange(length, dtype=np.uint64)
        keys.sort()
        keys &= (np.uint64(1) << bits) - np.uint64(1)
        return keys.astype(np.int64)


class ShuffledMedia(SourceView):
    """A source whose samples have each other's images or sounds: a model that looks at them gets worse.

    Only samples with media of the kind are left. Samples with equally many media swap them, and none keeps its own;
    all else stays. The assignment depends on the seed alone.
    """

    def __init__(self, source: DataSource, kind: MediaKind, seed: int) -> None:
        self._source, self._kind = source, kind
        self._answers: dict[int, int] = {}
        self._givers = dict(sorted(self._assign(seed)))
        super().__init__(source, list(self._givers), f"{kind}s exchanged")

    def _assign(self, seed: int) -> Iterator[tuple[int, int]]:
        """Yield (sample, the sample that its media come from)."""
        by_count: dict[int, list[int]] = {}
        for index in range(len(self._source)):
            try:
                sample = self._source[index]
            except SampleError:
                continue
            if count := len(self._media(sample)):
                answers = [message.content for message in sample.messages if message.role == "assistant"]
                self._answers[index] = hash(tuple(part for one in answers for part in one if isinstance(part, str)))
                by_count.setdefault(count, []).append(index)
        for count, members in sorted(by_count.items()):
            if len(members) > 1:
                order = np.random.default_rng([seed, count]).permutation(members).tolist()
                yield from zip(order, [*order[1:], order[0]], strict=True)

    def _media(self, sample: Sample) -> list[Media]:
        return [media for media in sample.media if media.kind == self._kind]

    @property
    def chance(self) -> float | None:
        """The fraction of samples whose new media come with the same answers, so that a model stays right."""
        if not self._givers or hash(()) in self._answers.values():
            return None
        same = sum(self._answers[index] == self._answers[giver] for index, giver in self._givers.items())
        return same / len(self._givers)

    def __getitem__(self, index: int) -> Sample:
        own = self._indices[index]
        sample, given = self._source[own], iter(self._media(self._source[self._givers[own]]))

        def swap(content: Content) -> Content:
            return tuple(
                next(given) if isinstance(part, Media) and part.kind == self._kind else part for part in content
            )

        messages = tuple(replace(message, content=swap(message.content)) for message in sample.messages)
        return replace(sample, messages=messages, document=swap(sample.document))
