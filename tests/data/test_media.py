"""Decoding of images, sounds and features, sizes read from headers alone, and every kind of damage."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cornstarch.data import media as room
from cornstarch.data.media import (
    feature_frames,
    image_size,
    load_audio,
    load_features,
    load_image,
    resample,
    sound_length,
)
from cornstarch.data.sample import Media, SampleError
from tests.data.small_data import huge_png, png, tone, wav
from tests.models.local_processors import image

LIMIT = 10_000


def stored(path: Path, content: bytes) -> Media:
    path.write_bytes(content)
    return Media("audio" if path.suffix == ".wav" else "image", str(path))


# ------------------------------------------------------------------------------------------------ images


def test_a_file_bytes_and_a_picture_are_the_same(tmp_path: Path) -> None:
    expected = np.asarray(image(20, 30))
    sources = [png(20, 30), stored(tmp_path / "a.png", png(20, 30)).source, image(20, 30), expected]
    for source in sources:
        assert np.array_equal(np.asarray(load_image(Media("image", source), LIMIT)), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    """As the EXIF standard says: where row 0 and column 0 of the file are in the upright picture."""
    pixels = np.asarray(image(6, 4))
    turned = {
        1: pixels, 2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1], 5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1), 7: pixels[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(pixels),
    }  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", exif=exif)
    assert np.array_equal(np.asarray(load_image(Media("image", stream.getvalue()), LIMIT)), turned[orientation])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK", "LA", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    if mode == "I;16":
        picture = Image.fromarray(np.full((4, 6), 0x8000, np.uint16))
    else:
        picture = Image.new("RGB", (6, 4), (128, 128, 128)).convert(mode)
    stream = io.BytesIO()
    picture.save(stream, "TIFF" if mode == "CMYK" else "PNG")
    found = load_image(Media("image", stream.getvalue()), LIMIT)
    assert found.mode == "RGB" and found.size == (6, 4)
    if mode not in ("1", "P"):  # which make a pattern of it
        assert np.abs(np.asarray(found).astype(int) - 128).max() <= 2


IMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty file"),
    "text": (b"this is no picture", "no image"),
    "truncated JPEG": (png(60, 60, format="JPEG")[:-200], "damaged"),
    "corrupt JPEG": (png(60, 60, format="JPEG")[:200] + bytes(2000), "damaged"),
    "a JPEG's first bytes": (png(60, 60, format="JPEG")[:30], "no image|damaged"),
    "truncated PNG": (png(60, 60)[:-3000], "damaged"),
    "corrupt PNG": (png(60, 60)[:100] + b"\0" * 200 + png(60, 60)[300:], "damaged"),
    "decompression bomb": (huge_png(60_000, 60_000), "60000 × 60000 pixels, more than max_pixels = 10000"),
    "one pixel too many": (png(73, 137), "73 × 137 pixels"),
    "EPS, which would run a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n%%EndComments\n", "no image"),
}


@pytest.mark.parametrize("where", ["file", "memory"])
@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.filterwarnings("error")
def test_broken_image_raises_sample_error(tmp_path: Path, name: str, where: str) -> None:
    content, message = IMAGES[name]
    given = stored(tmp_path / "x.png", content) if where == "file" else Media("image", content)
    with pytest.raises(SampleError, match=message) as caught:
        load_image(given, LIMIT)
    assert ("x.png" in str(caught.value)) == (where == "file")


@pytest.mark.filterwarnings("error")
def test_the_limit_may_be_above_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert load_image(Media("image", png(40, 40)), LIMIT).size == (40, 40)
    assert Image.MAX_IMAGE_PIXELS == 10


def test_files_that_are_not_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases = {"missing.png": "No such file", "pipe": "is no file", "": "is no file"}
    for name, message in cases.items():
        with pytest.raises(SampleError, match=message):
            load_image(Media("image", str(tmp_path / name)), LIMIT)


@pytest.mark.parametrize("array", [np.zeros((4, 4)), np.zeros((4, 4, 7), np.uint8), np.zeros(4, np.uint8)])
def test_arrays_that_are_no_pictures(array: np.ndarray) -> None:
    with pytest.raises(SampleError, match="expected"):
        load_image(Media("image", array), LIMIT)


@pytest.mark.filterwarnings("ignore")  # Pillow's own remarks
def test_random_damage_never_raises_anything_else() -> None:
    generator = np.random.default_rng(0)
    for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        content = np.frombuffer(png(24, 24, format=format), np.uint8)
        for _ in range(60):
            damaged = content[: generator.integers(1, len(content) + 1)].copy()
            places = generator.integers(0, len(damaged), 3)
            damaged[places] = generator.integers(0, 256, 3)
            with contextlib.suppress(SampleError):
                load_image(Media("image", damaged.tobytes()), LIMIT)


# ------------------------------------------------------------------------------------------------ sounds


@pytest.fixture(params=["soundfile", "wave"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read WAV with soundfile, and as if it were not installed."""
    if request.param == "soundfile":
        pytest.importorskip("soundfile")
    else:
        real = builtins.__import__

        def without(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == "soundfile":
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
    return str(request.param)


@pytest.mark.parametrize(("width", "error"), [(1, 1e-2), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
def test_wav_of_every_width(reader: str, width: int, error: float) -> None:
    expected = tone()
    found = load_audio(Media("audio", wav(expected, width=width)), 16000)
    assert found.dtype == np.float32 and np.abs(found - expected).max() < error


def test_channels_are_averaged(reader: str) -> None:
    both = np.stack([tone(), np.zeros_like(tone())], axis=1)
    found = load_audio(Media("audio", wav(both, channels=2)), None)
    assert np.abs(found - tone() / 2).max() < 1e-4


@pytest.mark.parametrize(("old", "new"), [(44100, 16000), (8000, 16000), (48000, 16000), (22050, 24000), (16000, 7919)])
def test_resampling_keeps_a_tone(old: int, new: int) -> None:
    found = resample(tone(0.5, old), old, new)
    expected = tone(0.5, new)
    assert abs(len(found) - len(expected)) <= 1
    least = min(len(found), len(expected))
    inner = slice(new // 50, least - new // 50)
    assert np.abs(found[:least] - expected[:least])[inner].max() < 1e-4


def test_resampling_removes_what_the_new_rate_cannot_hold() -> None:
    found = resample(tone(0.5, 48000, pitch=12_000), 48000, 16000)
    assert np.abs(found[200:-200]).max() < 1e-2


def test_resampling_agrees_with_scipy() -> None:
    signal = pytest.importorskip("scipy.signal")
    noise = np.convolve(np.random.default_rng(0).standard_normal(4000), np.hanning(40), "same") / 20
    found, expected = resample(noise, 3, 2), signal.resample_poly(noise, 2, 3)
    assert np.abs(found - expected)[100:-100].max() < 5e-3 * np.abs(expected).max()


def test_a_wav_at_another_rate(reader: str) -> None:
    found = load_audio(Media("audio", wav(tone(0.5, 44100), rate=44100)), 16000)
    assert np.abs(found - tone(0.5))[400:-400].max() < 2e-4


def test_sounds_in_memory() -> None:
    samples = tone().astype(np.float32)
    for source in (samples, {"array": samples, "sampling_rate": 16000}, list(map(float, samples))):
        assert np.array_equal(load_audio(Media("audio", source), 16000), samples)
    whole = load_audio(Media("audio", (samples * 2**15).astype(np.int16)), 16000)
    assert np.abs(whole - samples).max() < 1e-4
    assert len(load_audio(Media("audio", {"array": samples, "sampling_rate": 8000}), 16000)) == 2 * len(samples)


SOUNDS: dict[str, tuple[Any, str]] = {
    "empty file": (b"", "empty file"),
    "no samples": (wav(np.zeros(0)), "length is zero"),
    "text": (b"this is no sound at all, really", "no sound that can be read|no plain WAV"),
    "cut header": (wav(tone())[:20], "no sound that can be read|no plain WAV"),
    "not finite": (np.array([0.0, np.nan], np.float32), "not finite"),
    "no numbers": (np.array(["a"]), "expected numbers"),
    "no rate": ({"array": tone()}, "sampling_rate"),
    "three dimensions": (np.zeros((2, 2, 2)), "expected"),
    "empty array": (np.zeros(0), "length is zero"),
}


@pytest.mark.parametrize("name", SOUNDS)
def test_broken_sound_raises_sample_error(reader: str, name: str) -> None:
    content, message = SOUNDS[name]
    with pytest.raises(SampleError, match=message):
        load_audio(Media("audio", content), 16000)


def test_a_sound_of_days_is_not_decoded(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_SECONDS", 1)
    with pytest.raises(SampleError, match="2 seconds long, more than 1"):
        load_audio(Media("audio", wav(tone(2.0))), 16000)


def test_missing_sounds(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="No such file"):
        load_audio(Media("audio", str(tmp_path / "x.wav")), 16000)


# ------------------------------------------------------------------------------------------------ headers


PIXELS = 10_000


def build_rotated_jpeg(orientation: int) -> bytes:
    """A JPEG of 30 × 20 pixels whose camera was held in some way."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    image(30, 20).save(stream, "JPEG", exif=exif)
    return stream.getvalue()


@pytest.mark.parametrize("source", [
    png(30, 20), png(7, 90, format="BMP"), png(20, 20, format="WEBP"), png(5, 6, format="TIFF"), image(9, 8),
    np.zeros((11, 12, 3), np.uint8), np.zeros((11, 12), np.uint8),
    *(build_rotated_jpeg(number) for number in range(1, 9)),
])  # fmt: skip
def test_an_image_is_as_large_as_decoded(source: object) -> None:
    media = Media("image", source)
    assert image_size(media, PIXELS) == load_image(media, PIXELS).size


def test_image_size_reads_the_header_alone(tmp_path: Path) -> None:
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


def test_feature_frames_are_read_from_the_header(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.zeros((17, 4), np.float32))
    assert feature_frames(Media("audio", str(tmp_path / "f.npy"))) == 17
    assert feature_frames(Media("audio", np.zeros((3, 4)))) == 3
    with pytest.raises(SampleError, match="no array"):
        feature_frames(Media("audio", b"something else"))


@pytest.mark.parametrize(
    ("media", "message"),
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
def test_broken_header_raises_sample_error(media: Media, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        image_size(media, PIXELS) if media.kind == "image" else sound_length(media, 10)


# ------------------------------------------------------------------------------------------------ features


SIZE = 12
FEATURES = np.random.default_rng(0).standard_normal((20, SIZE))


def npy(array: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", ">f4"])
def test_an_array_a_file_and_its_bytes_are_the_same(kind: str, tmp_path: Path) -> None:
    array = FEATURES.astype(kind)
    (tmp_path / "a.npy").write_bytes(npy(array))
    for source in (array, str(tmp_path / "a.npy"), npy(array), npy(np.asfortranarray(array))):
        found = load_features(Media("audio", source), SIZE)
        assert found.dtype == np.float32 and found.flags.c_contiguous
        assert np.array_equal(found, array.astype(np.float32))


class Dangerous:
    """Would write a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def header(shape: str) -> bytes:
    """A file of a few bytes that says it has very many numbers."""
    described = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(described).to_bytes(2, "little") + described


BROKEN: dict[str, tuple[Any, str]] = {
    "a wave": (tone(), r"a wave \[800\]; expected features computed beforehand, \[frames, 12\]"),
    "two channels": (np.stack([tone(), tone()], 1), r"a wave \[800, 2\]; expected features"),
    "a wave with its rate": ({"array": tone(), "sampling_rate": 16000}, "a wave with its sampling rate"),
    "a WAV file": (wav(tone()), "no .npy file"),
    "other features": (FEATURES[:, :5], r"\[20, 5\]; expected .*\[frames, 12\]"),
    "three dimensions": (FEATURES[None], r"\[1, 20, 12\]"),
    "no frames": (FEATURES[:0], "length is zero"),
    "whole numbers": (np.ones((3, SIZE), int), "array of int64; expected .* of floats"),
    "complex numbers": (FEATURES.astype(complex), "array of complex128"),
    "not a number": (np.where(FEATURES > 1, np.nan, FEATURES), "not finite"),
    "infinite": (npy(np.where(FEATURES > 1, np.inf, FEATURES)), "not finite"),
    "too large for float32": (FEATURES * 1e300, "not finite"),
    "an empty file": (b"", "empty file"),
    "the start of a file": (npy(FEATURES)[:200], "no array that can be read"),
    "only the first bytes": (npy(FEATURES)[:9], "no array that can be read"),
    "more than there is": (npy(FEATURES) + b"more", "no array that can be read"),
    "a huge array": (header("(1000000000000, 12)"), "96000000000000 bytes, it has 0"),
    "a negative size": (header("(-1, 12)"), "no array that can be read"),
    "a hostile header": (header("(__import__('os').getcwd(), 12)"), "no array that can be read"),
    "named columns": (npy(np.zeros(3, [("a", "f8")])), "expected features"),
    "an archive": (b"PK\x03\x04" + bytes(50), "no .npy file"),
    "nothing": (None, "a NoneType"),
    "a missing file": ("missing.npy", "cannot be read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_invalid_features_raise_sample_error(name: str) -> None:
    source, message = BROKEN[name]
    with pytest.raises(SampleError, match=message):
        load_features(Media("audio", source), SIZE)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    trap = np.array([[Dangerous(tmp_path / "trap")]], dtype=object)
    for content in (npy(trap, allow_pickle=True), pickle.dumps(Dangerous(tmp_path / "trap"))):
        with pytest.raises(SampleError, match="Python objects|no .npy file"):
            load_features(Media("audio", content), SIZE)
    assert not (tmp_path / "trap").exists()


def test_too_large_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_NUMBERS", 100)
    with pytest.raises(SampleError, match="240 numbers, more than 100"):
        load_features(Media("audio", FEATURES), SIZE)
    large = np.zeros((1000, SIZE))
    np.save(tmp_path / "large.npy", large)
    with pytest.raises(SampleError, match=r"large.npy has 96128 bytes, more than"):
        load_features(Media("audio", str(tmp_path / "large.npy")), SIZE)


def test_features_are_no_wave(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", FEATURES)
    for source in (FEATURES, str(tmp_path / "a.npy"), npy(FEATURES), {"array": FEATURES, "sampling_rate": 8000}):
        with pytest.raises(SampleError, match="PrecomputedFeatureExtractor"):
            load_audio(Media("audio", source), 16000)
    surround = np.tile(tone()[:, None], (1, room.MAX_CHANNELS))
    assert np.allclose(load_audio(Media("audio", surround), None), tone(), atol=1e-6)
