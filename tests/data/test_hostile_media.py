"""Small files must not take much memory or time, and large ones are not read."""

from __future__ import annotations

import io
import resource
import struct
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cornstarch.data.media import content_digest, image_size, load_audio, load_image, sound_length
from cornstarch.data.sample import Media, SampleError

soundfile = pytest.importorskip("soundfile")


def wav(rate: int, frames: int, channels: int = 1) -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(2 * channels * frames))
    return stream.getvalue()


@pytest.mark.parametrize("rate", [1, 999, 768_001, 2_147_483_629])
@pytest.mark.parametrize("has_soundfile", [True, False])
def test_odd_rates_are_refused_before_anything_is_resampled(
    rate: int, has_soundfile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_soundfile:
        monkeypatch.setattr("cornstarch.data.media._import_soundfile", lambda: None)
    content = bytearray(wav(8000, 3500))
    content[24:28] = struct.pack("<I", rate)
    begun = time.process_time()
    for read in (load_audio, sound_length):
        with pytest.raises(SampleError, match=f"has {rate} samples per second, expected 1000 to 768000"):
            read(Media("audio", bytes(content)), 16_000)
    assert time.process_time() - begun < 5  # 90 seconds before


def test_a_small_file_of_much_silence_is_refused() -> None:
    stream = io.BytesIO()
    soundfile.write(stream, np.zeros((44_100 * 100, 8), np.float32), 44_100, format="FLAC")
    content = stream.getvalue()
    assert len(content) < 150_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SampleError, match=r"says it holds 4410000 × 8 samples"):
        load_audio(Media("audio", content), 16_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


def test_compressed_speech_and_short_silence_are_read() -> None:
    stream = io.BytesIO()
    soundfile.write(stream, np.zeros(16_000 * 300, np.float32), 16_000, format="FLAC")  # five minutes
    assert len(load_audio(Media("audio", stream.getvalue()), 16_000)) == 16_000 * 300
    assert len(load_audio(Media("audio", wav(1_000, 1_000)), 16_000)) == 16_000


def test_a_huge_image_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.png"
    with path.open("wb") as file:
        file.truncate(40 << 30)
    found: list[Any] = [Media("image", str(path))]
    with pytest.raises(SampleError, match="sparse.png has 42949672960 bytes, more than"):
        load_image(found[0], 1_000_000)
    with pytest.raises(SampleError, match="no image that can be read"):
        image_size(found[0], 1_000_000)


def test_the_digest_of_a_file_does_not_hold_the_file(tmp_path: Path) -> None:
    path = tmp_path / "large.wav"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    digest = content_digest(Media("audio", str(path)))
    assert len(digest) == 64
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
