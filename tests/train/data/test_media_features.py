"""Sound features from arrays and files; what is broken is told with its reason, and nothing in a file is run."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cornstarch.train.data import media as room
from cornstarch.train.data.media import load_audio, load_features
from cornstarch.train.data.sample import Media, SampleError
from tests.train.data.small_data import tone, wav

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
def test_what_is_no_features_says_why(name: str) -> None:
    source, message = BROKEN[name]
    with pytest.raises(SampleError, match=message):
        load_features(Media("audio", source), SIZE)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    trap = np.array([[Dangerous(tmp_path / "trap")]], dtype=object)
    for content in (npy(trap, allow_pickle=True), pickle.dumps(Dangerous(tmp_path / "trap"))):
        with pytest.raises(SampleError, match="Python objects|no .npy file"):
            load_features(Media("audio", content), SIZE)
    assert not (tmp_path / "trap").exists()


def test_too_much_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
