"""Sizes of images and sounds from their headers: what decoding finds, without decoding."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cornstarch.train.data.headers import feature_frames, image_size, sound_length
from cornstarch.train.data.media import load_audio, load_image
from cornstarch.train.data.sample import Media, SampleError
from tests.models.local_processors import image
from tests.train.data.small_data import huge_png, png, tone, wav

PIXELS = 10_000


def turned(orientation: int) -> bytes:
    """A JPEG of 30 × 20 pixels whose camera was held in some way."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    image(30, 20).save(stream, "JPEG", exif=exif)
    return stream.getvalue()


@pytest.mark.parametrize("source", [
    png(30, 20), png(7, 90, format="BMP"), png(20, 20, format="WEBP"), png(5, 6, format="TIFF"), image(9, 8),
    np.zeros((11, 12, 3), np.uint8), np.zeros((11, 12), np.uint8), *(turned(number) for number in range(1, 9)),
])  # fmt: skip
def test_an_image_is_as_large_as_decoded(source: object) -> None:
    media = Media("image", source)
    assert image_size(media, PIXELS) == load_image(media, PIXELS).size


def test_nothing_is_decoded(tmp_path: Path) -> None:
    """What stands behind the headers is missing, and is not missed."""
    (tmp_path / "cut.png").write_bytes(png(60, 40)[:60])
    media = Media("image", str(tmp_path / "cut.png"))
    assert image_size(media, PIXELS) == (60, 40)
    with pytest.raises(SampleError, match="damaged"):
        load_image(media, PIXELS)


@pytest.mark.parametrize("rate", [None, 16000, 8000, 44100, 11025])
@pytest.mark.parametrize("source", [wav(tone(0.1)), wav(np.zeros((700, 2)), channels=2, rate=22050), tone(0.05)])
def test_a_sound_is_as_long_as_decoded(source: object, rate: int | None) -> None:
    media = Media("audio", source)
    assert sound_length(media, rate) == len(load_audio(media, rate))


def test_a_sound_with_its_rate() -> None:
    media = Media("audio", {"array": tone(0.1), "sampling_rate": 16000})
    assert sound_length(media, 8000) == len(load_audio(media, 8000)) == 800


def test_features(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.zeros((17, 4), np.float32))
    assert feature_frames(Media("audio", str(tmp_path / "f.npy"))) == 17
    assert feature_frames(Media("audio", np.zeros((3, 4)))) == 3
    with pytest.raises(SampleError, match="no array"):
        feature_frames(Media("audio", b"something else"))


@pytest.mark.parametrize(
    ("media", "told"),
    [
        (Media("image", "missing.png"), "image missing.png cannot be read"),
        (Media("image", "/"), "is no file"),
        (Media("image", b"no image at all"), "no image that can be read"),
        (Media("image", huge_png(1000, 1000)), "1000 × 1000 pixels, more than max_pixels = 10000"),
        (Media("image", 5), "expected a path"),
        (Media("image", np.zeros(3)), "expected \\[height, width, 3\\]"),
        (Media("audio", "missing.wav"), "audio missing.wav cannot be read"),
        (Media("audio", b"no sound"), "no sound that can be read"),
        (Media("audio", wav(np.zeros(0))), "length is zero"),
        (Media("audio", {"array": [0.0]}), "expected `array` and `sampling_rate`"),
        (Media("audio", np.zeros(3601 * 10)), "more than 3600"),
    ],
)
def test_what_is_wrong_is_told(media: Media, told: str) -> None:
    with pytest.raises(SampleError, match=told):
        image_size(media, PIXELS) if media.kind == "image" else sound_length(media, 10)
