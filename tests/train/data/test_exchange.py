"""Samples with one another's media."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cornstarch.train.data.exchange import ExchangedMedia
from cornstarch.train.data.sample import Media, MediaKind, Message, Sample, SampleError


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


def sources(exchanged: ExchangedMedia, kind: MediaKind) -> dict[str, list[tuple[int, int]]]:
    return {
        one.id: [m.source for m in one.media if m.kind == kind]
        for one in map(exchanged.__getitem__, range(len(exchanged)))
    }


@pytest.mark.parametrize("count", [2, 3, 10, 101])
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_each_gets_the_media_of_another(count: int, seed: int) -> None:
    exchanged = ExchangedMedia(Samples([sample(n) for n in range(count)]), "image", seed)
    found = sources(exchanged, "image")
    givers = [number for ((number, _),) in found.values()]
    assert sorted(givers) == list(range(count))  # everyone's once
    assert all(giver != number for number, giver in enumerate(givers))


def test_only_what_is_exchanged_changes() -> None:
    source = Samples([sample(n, images=1, sounds=2) for n in range(6)])
    exchanged = ExchangedMedia(source, "audio", 0)
    for index in range(6):
        before, after = source[index], exchanged[index]
        assert (after.id, after.fields) == (before.id, before.fields)
        assert after.messages[1] == before.messages[1]
        (giver,) = {media.source[0] for media in after.media if media.kind == "audio"}
        asked = after.messages[0].content
        assert asked[:3] == before.messages[0].content[:3]
        assert asked[3:] == (Media("audio", (giver, 0)), Media("audio", (giver, 1)))  # in order
    assert exchanged.name(2) == source.name(2) and exchanged.description == "samples, audios exchanged"


def test_the_same_seed_exchanges_in_the_same_way() -> None:
    source = Samples([sample(n) for n in range(50)])
    first, again, other = (sources(ExchangedMedia(source, "image", seed), "image") for seed in (3, 3, 4))
    assert first == again != other


def test_media_are_exchanged_between_samples_with_equally_many() -> None:
    counts = [1, 2, 0, 1, 2, 1, 3, 0]
    exchanged = ExchangedMedia(Samples([sample(n, images=k) for n, k in enumerate(counts)]), "image", 0)
    found = sources(exchanged, "image")
    assert sorted(found) == ["s0", "s1", "s3", "s4", "s5"]  # nobody to exchange with: three images, and none
    for name, media in found.items():
        number = int(name[1:])
        (giver,) = {one for one, _ in media}
        assert giver != number and counts[giver] == counts[number] == len(media)
        assert [place for _, place in media] == list(range(counts[number]))


def test_documents_and_broken_rows() -> None:
    documents: list[Sample | None] = [Sample(f"d{n}", document=("see ", Media("image", (n, 0)))) for n in range(3)]
    exchanged = ExchangedMedia(Samples([None, *documents, None]), "image", 0)
    assert len(exchanged) == 3
    for index in range(3):
        text, media = exchanged[index].document
        assert text == "see " and isinstance(media, Media) and media.source[0] != index
    assert exchanged.name(0) == "sample 1"


def test_chance_is_how_often_the_other_sample_has_the_same_answer() -> None:
    def answered(number: int, answer: str) -> Sample:
        asked = Message("user", (Media("image", (number, 0)), "what is it"))
        return Sample(f"s{number}", (asked, Message("assistant", (answer,))))

    exchanged = ExchangedMedia(Samples([answered(n, "ab"[n % 2]) for n in range(200)]), "image", 0)
    same = [exchanged[index].media[0].source[0] % 2 == index % 2 for index in range(200)]
    assert exchanged.chance == sum(same) / 200 and 0.4 < exchanged.chance < 0.6
    assert ExchangedMedia(Samples([sample(n) for n in range(9)]), "image", 0).chance == 0
    assert ExchangedMedia(Samples([answered(n, "a") for n in range(9)]), "image", 0).chance == 1
    documents = [Sample(f"d{n}", document=("see ", Media("image", (n, 0)))) for n in range(3)]
    assert ExchangedMedia(Samples(documents), "image", 0).chance is None


def test_nothing_to_exchange() -> None:
    assert len(ExchangedMedia(Samples([sample(0, images=0), sample(1)]), "image", 0)) == 0
    assert len(ExchangedMedia(Samples([]), "audio", 0)) == 0
