"""How large images and sounds are, read from the headers of their files: nothing is decoded. No torch."""

from __future__ import annotations

import io
import os
import stat
import wave
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
from PIL import Image

from cornstarch.train.data.media import MAX_SECONDS, known_formats, no_limit_of_pillow, where
from cornstarch.train.data.sample import Media, SampleError

_ORIENTATION = 0x0112  # the EXIF tag of how a camera was held
_TURNED = (5, 6, 7, 8)  # its values for a picture that stands on its side


def image_size(media: Media, max_pixels: int) -> tuple[int, int]:
    """Return width and height of an image, turned as its camera says."""
    source = media.source
    if isinstance(source, np.ndarray):
        if source.ndim not in (2, 3):
            raise SampleError(f"image is an array {list(source.shape)}, expected [height, width, 3]")
        return source.shape[1], source.shape[0]
    if isinstance(source, Image.Image):
        return _upright(source)
    with _opened(media) as file, no_limit_of_pillow():
        try:
            with Image.open(file, formats=known_formats()) as image:
                size = _upright(image)
        except Exception as error:  # decoders raise whatever they meet in a damaged header
            raise SampleError(f"{where(media)} is no image that can be read: {error}") from error
    if size[0] * size[1] > max_pixels:
        raise SampleError(f"{where(media)} has {size[0]} × {size[1]} pixels, more than max_pixels = {max_pixels}")
    return size


def _upright(image: Image.Image) -> tuple[int, int]:
    if image.format == "PNG" and not {"exif", "Raw profile type exif"} & set(image.info):
        return image.size  # it may stand behind the pixels, which would be decoded to look
    turned = image.getexif().get(_ORIENTATION) in _TURNED
    return (image.height, image.width) if turned else (image.width, image.height)


def sound_length(media: Media, rate: int | None) -> int:
    """Return the samples of a sound at a rate; None is its own."""
    frames, found = _frames(media, rate)
    if not frames:
        raise SampleError(f"{where(media)} has no samples: its length is zero")
    if frames > MAX_SECONDS * found:
        raise SampleError(f"{where(media)} is {frames / found:.0f} seconds long, more than {MAX_SECONDS}")
    return frames if rate is None or rate == found else -(-frames * rate // found)


def _frames(media: Media, rate: int | None) -> tuple[int, int]:
    """Return the length of a sound, and its rate."""
    source = media.source
    if isinstance(source, Mapping):
        given = source.get("sampling_rate")
        if "array" not in source or not isinstance(given, int) or given <= 0:
            raise SampleError(f"audio has {sorted(source)}, expected `array` and `sampling_rate`")
        return len(source["array"]), given
    if isinstance(source, np.ndarray | list):
        return len(source), rate or 1
    with _opened(media) as file:
        try:
            return _sound_header(file)
        except Exception as error:
            raise SampleError(f"{where(media)} is no sound that can be read: {error}") from error


def _sound_header(file: BinaryIO) -> tuple[int, int]:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: the library that it wraps is missing
        with wave.open(file) as plain:
            return plain.getnframes(), plain.getframerate()
    with soundfile.SoundFile(file) as sound:
        return sound.frames, sound.samplerate


def feature_frames(media: Media) -> int:
    """Return the frames of features that were computed beforehand."""
    if isinstance(media.source, np.ndarray):
        return len(media.source)
    with _opened(media) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            return int(read(file)[0][0])
        except Exception as error:  # whatever numpy meets in a damaged file
            raise SampleError(f"{where(media)} is no array that can be read: {error}") from error


@contextmanager
def _opened(media: Media) -> Iterator[BinaryIO]:
    """Open what a medium comes from; its readers take what they need of it."""
    source = media.source
    if isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(bytes(source))
        return
    if not isinstance(source, str | os.PathLike):
        raise SampleError(f"{media.kind} is a {type(source).__name__}, expected a path, bytes or an image")
    path = os.fspath(source)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe would wait for ever
            raise SampleError(f"{media.kind} {path} is no file")
        file = open(path, "rb")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise SampleError(f"{media.kind} {path} cannot be read: {error.strerror}") from error
    with file:
        yield file


__all__ = ["feature_frames", "image_size", "sound_length"]
