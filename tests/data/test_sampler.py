"""The order of samples over epochs and sources, and samples with each other's media."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornstarch.data.sample import Media, MediaKind, Message, Sample, SampleError
from cornstarch.data.sampler import EpochOrder, ShuffledMedia
from cornstarch.errors import ConfigError

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4)
weight = st.sampled_from([0.1, 0.25, 0.29, 0.5, 0.75, 1, 1.5, 2, 3.3])


@settings(max_examples=60, deadline=None)
@given(lengths=sizes, seed=st.integers(0, 2**31), epoch=st.integers(0, 5), shuffle=st.booleans())
def test_at_weight_one_every_sample_comes_once_per_epoch(
    lengths: list[int], seed: int, epoch: int, shuffle: bool
) -> None:
    order = EpochOrder(lengths, [1.0] * len(lengths), seed, shuffle)
    found = order.order(epoch)
    assert sorted(found.tolist()) == list(range(sum(lengths))) and order.count(epoch) == len(found)
    if not shuffle:
        assert found.tolist() == sorted(found.tolist())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=sizes, seed=st.integers(0, 9), shuffle=st.booleans())
def test_weights_rotate_over_epochs(data: st.DataObject, lengths: list[int], seed: int, shuffle: bool) -> None:
    """After any number of epochs no sample is ahead of another of its source by more than one."""
    weights = [data.draw(weight) for _ in lengths]
    order = EpochOrder(lengths, weights, seed, shuffle)
    together = lcm(*(Fraction(str(w)).denominator for w in weights))
    seen: Counter[int] = Counter()
    for epoch in range(min(together, 40)):
        found = order.order(epoch)
        assert len(found) == order.count(epoch)
        seen.update(found.tolist())
        start = 0
        for length, fraction in zip(lengths, weights, strict=True):
            counts = [seen[start + i] for i in range(length)]
            assert max(counts) - min(counts) <= 1
            assert sum(counts) == int(Fraction(str(fraction)) * length * (epoch + 1))
            start += length
    if together <= 40:
        start = 0
        for length, fraction in zip(lengths, weights, strict=True):
            assert {seen[start + i] for i in range(length)} == {int(Fraction(str(fraction)) * together)}
            start += length


def test_epochs_seeds_and_sources_differ() -> None:
    orders = [EpochOrder([50], [1], seed, True).order(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    twin = EpochOrder([50, 50], [1, 1], 0, True).order(0)
    first, second = [n for n in twin if n < 50], [n - 50 for n in twin if n >= 50]
    assert first != second


def test_an_epoch_does_not_depend_on_those_before_it() -> None:
    """Also in another process, with hash seeds of its own."""
    one = EpochOrder([30, 20], [1.5, 1], 7, True)
    expected = [one.order(epoch).tolist() for epoch in range(4)]
    assert EpochOrder([30, 20], [1.5, 1], 7, True).order(3).tolist() == expected[3]
    code = (
        "from cornstarch.data.sampler import EpochOrder;"
        "print(EpochOrder([30, 20], [1.5, 1], 7, True).order(3).tolist())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert ran.stdout.strip() == str(expected[3]), ran.stderr


def test_the_order_never_changes() -> None:
    """A run is resumed with a later version too."""
    assert EpochOrder([8], [1], 0, True).order(0).tolist() == FIRST
    assert EpochOrder([4, 3], [1, 2], 5, True).order(2).tolist() == MIXED


FIRST = [0, 3, 1, 5, 2, 4, 7, 6]
MIXED = [6, 1, 6, 4, 3, 0, 2, 5, 4, 5]


def test_every_place_is_as_likely() -> None:
    """Chi-square over where sample 0 comes in 4,000 orders of 8: 7 degrees of freedom, 24.3 at 0.1 %."""
    order = EpochOrder([8], [1], 3, True)
    places = Counter(order.order(epoch).tolist().index(0) for epoch in range(4000))
    assert sum((places[i] - 500) ** 2 / 500 for i in range(8)) < 24.3


def test_order_of_ten_million_samples_is_fast() -> None:
    found = EpochOrder([10_000_000], [1], 0, True).order(0)
    assert found.dtype == np.int64 and found.nbytes == 80_000_000
    assert np.bincount(found, minlength=10_000_000).max() == 1


@pytest.mark.parametrize(("lengths", "weights"), [([], []), ([1], [1, 1]), ([0], [1]), ([3], [0]), ([3], [-1.0])])
def test_invalid_lengths_or_weights_are_refused(lengths: list[int], weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="expected at least one source"):
        EpochOrder(lengths, weights, 0, True)


# ------------------------------------------------------------------------------------------------ shuffled media


class Samples:
    """Samples in memory; a None cannot be read."""

    description = "samples"

    def __init__(self, samples: Sequence[Sample | None]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def name(self, index: int) -> str:
        return f"sample {index}"

    def __getitem__(self, index: int) -> Sample:
        sample = self._samples[index]
        if sample is None:
            raise SampleError("is broken")
        return sample


def sample(number: int, images: int = 1, sounds: int = 0) -> Sample:
    """Make a conversation whose media say whose they are."""
    media = [Media("image", (number, place)) for place in range(images)]
    media += [Media("audio", (number, place)) for place in range(sounds)]
    first, rest = tuple(media[:1]), tuple(media[1:])
    asked = Message("user", (f"question {number} ", *first, " and ", *rest))
    return Sample(f"s{number}", (asked, Message("assistant", (f"answer {number}",))), fields={"n": number})


def sources(exchanged: ShuffledMedia, kind: MediaKind) -> dict[str, list[tuple[int, int]]]:
    return {
        one.id: [m.source for m in one.media if m.kind == kind]
        for one in map(exchanged.__getitem__, range(len(exchanged)))
    }


@pytest.mark.parametrize("count", [2, 3, 10, 101])
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_each_sample_gets_the_media_of_another(count: int, seed: int) -> None:
    exchanged = ShuffledMedia(Samples([sample(n) for n in range(count)]), "image", seed)
    found = sources(exchanged, "image")
    givers = [number for ((number, _),) in found.values()]
    assert sorted(givers) == list(range(count))  # everyone's once
    assert all(giver != number for number, giver in enumerate(givers))


def test_only_media_of_the_kind_change() -> None:
    source = Samples([sample(n, images=1, sounds=2) for n in range(6)])
    exchanged = ShuffledMedia(source, "audio", 0)
    for index in range(6):
        before, after = source[index], exchanged[index]
        assert (after.id, after.fields) == (before.id, before.fields)
        assert after.messages[1] == before.messages[1]
        (giver,) = {media.source[0] for media in after.media if media.kind == "audio"}
        asked = after.messages[0].content
        assert asked[:3] == before.messages[0].content[:3]
        assert asked[3:] == (Media("audio", (giver, 0)), Media("audio", (giver, 1)))  # in order
    assert exchanged.name(2) == source.name(2) and exchanged.description == "samples, audios exchanged"


def test_assignment_depends_on_the_seed_alone() -> None:
    source = Samples([sample(n) for n in range(50)])
    first, again, other = (sources(ShuffledMedia(source, "image", seed), "image") for seed in (3, 3, 4))
    assert first == again != other


def test_samples_with_equally_many_media_swap() -> None:
    counts = [1, 2, 0, 1, 2, 1, 3, 0]
    exchanged = ShuffledMedia(Samples([sample(n, images=k) for n, k in enumerate(counts)]), "image", 0)
    found = sources(exchanged, "image")
    assert sorted(found) == ["s0", "s1", "s3", "s4", "s5"]  # nobody to exchange with: three images, and none
    for name, media in found.items():
        number = int(name[1:])
        (giver,) = {one for one, _ in media}
        assert giver != number and counts[giver] == counts[number] == len(media)
        assert [place for _, place in media] == list(range(counts[number]))


def test_documents_and_broken_rows() -> None:
    documents: list[Sample | None] = [Sample(f"d{n}", document=("see ", Media("image", (n, 0)))) for n in range(3)]
    exchanged = ShuffledMedia(Samples([None, *documents, None]), "image", 0)
    assert len(exchanged) == 3
    for index in range(3):
        text, media = exchanged[index].document
        assert text == "see " and isinstance(media, Media) and media.source[0] != index
    assert exchanged.name(0) == "sample 1"


def test_chance_is_how_often_the_other_sample_has_the_same_answer() -> None:
    def answered(number: int, answer: str) -> Sample:
        asked = Message("user", (Media("image", (number, 0)), "what is it"))
        return Sample(f"s{number}", (asked, Message("assistant", (answer,))))

    exchanged = ShuffledMedia(Samples([answered(n, "ab"[n % 2]) for n in range(200)]), "image", 0)
    same = [exchanged[index].media[0].source[0] % 2 == index % 2 for index in range(200)]
    assert exchanged.chance == sum(same) / 200 and 0.4 < exchanged.chance < 0.6
    assert ShuffledMedia(Samples([sample(n) for n in range(9)]), "image", 0).chance == 0
    assert ShuffledMedia(Samples([answered(n, "a") for n in range(9)]), "image", 0).chance == 1
    documents = [Sample(f"d{n}", document=("see ", Media("image", (n, 0)))) for n in range(3)]
    assert ShuffledMedia(Samples(documents), "image", 0).chance is None


def test_source_without_swappable_media_is_empty() -> None:
    assert len(ShuffledMedia(Samples([sample(0, images=0), sample(1)]), "image", 0)) == 0
    assert len(ShuffledMedia(Samples([]), "audio", 0)) == 0
