"""Samples with one another's images or sounds: a model that looks gets worse on them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cornstarch.train.data.formats import SampleSource
from cornstarch.train.data.sample import Content, Media, MediaKind, Sample, SampleError


def _answers(sample: Sample) -> Iterator[str]:
    for message in sample.messages:
        if message.role == "assistant":
            yield from (part for part in message.content if isinstance(part, str))


class ExchangedMedia:
    """Those samples of a source that have media of a kind, each with the media of another one.

    Media are exchanged between samples that have equally many; nothing else of a sample changes, and none keeps its
    own. Which sample gets whose depends on the seed alone.
    """

    def __init__(self, source: SampleSource, kind: MediaKind, seed: int) -> None:
        self._source, self._kind = source, kind
        self._answers: dict[int, int] = {}
        self._givers = dict(sorted(self._exchanges(seed)))
        self._numbers = list(self._givers)

    def _exchanges(self, seed: int) -> Iterator[tuple[int, int]]:
        """Yield (sample, whose media it gets)."""
        alike: dict[int, list[int]] = {}
        for index in range(len(self._source)):
            try:
                sample = self._source[index]
            except SampleError:
                continue
            if count := len(self._own(sample)):
                self._answers[index] = hash(tuple(_answers(sample)))
                alike.setdefault(count, []).append(index)
        for count, members in sorted(alike.items()):
            if len(members) > 1:
                order = np.random.default_rng([seed, count]).permutation(members).tolist()
                yield from zip(order, [*order[1:], order[0]], strict=True)

    def _own(self, sample: Sample) -> list[Media]:
        return [media for media in sample.media if media.kind == self._kind]

    @property
    def chance(self) -> float | None:
        """The share of samples that got media of a sample with the same answers: a model that looks stays right there.

        None where samples have no answers.
        """
        if not self._givers or hash(()) in self._answers.values():
            return None
        same = sum(self._answers[number] == self._answers[giver] for number, giver in self._givers.items())
        return same / len(self._givers)

    @property
    def description(self) -> str:
        """What it is."""
        return f"{self._source.description}, {self._kind}s exchanged"

    def __len__(self) -> int:
        return len(self._numbers)

    def name(self, index: int) -> str:
        """Say where a sample stands."""
        return self._source.name(self._numbers[index])

    def __getitem__(self, index: int) -> Sample:
        number = self._numbers[index]
        sample, given = self._source[number], iter(self._own(self._source[self._givers[number]]))

        def exchanged(content: Content) -> Content:
            return tuple(
                next(given) if isinstance(part, Media) and part.kind == self._kind else part for part in content
            )

        messages = tuple(replace(message, content=exchanged(message.content)) for message in sample.messages)
        return replace(sample, messages=messages, document=exchanged(sample.document))
