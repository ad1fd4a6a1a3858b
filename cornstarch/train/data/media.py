"""Images and sounds into memory, with everything that may be wrong with them told as SampleError. No torch."""

from __future__ import annotations

import hashlib
import io
import math
import os
import stat
import threading
import wave
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import numpy as np
from PIL import Image, ImageOps

from cornstarch.train.data.sample import Media, SampleError

# Pillow reads more than these, but by running other programs (EPS), or things that are no pictures.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "MPO")
MAX_SECONDS = 3600
"""A longer sound is refused: a small compressed file can hold days of silence."""
MAX_CHANNELS = 8
"""An array of more columns is not taken for a wave: 7.1 surround has so many, features have more."""
MAX_NUMBERS = 1 << 26
"""More features of one sound are refused: an hour of 128 per frame has fewer."""
_ZERO_CROSSINGS = 32  # of the sinc on either side: more is sharper and slower
_AT_ONCE = 1 << 22  # numbers in the windows that are filtered at once

_NPY = b"\x93NUMPY"
_WANTS_WAVES = (
    "The audio encoder's processor takes waves; features computed beforehand are for a PrecomputedFeatureExtractor"
)

_limit_lock = threading.Lock()


def file_bytes(media: Media, most: int | None = None) -> bytes:
    """Return what is in the file of a medium; a file of more than `most` bytes is refused unread."""
    if isinstance(media.source, bytes | bytearray | memoryview):
        return bytes(media.source)
    if not isinstance(media.source, str | os.PathLike):
        raise SampleError(f"{media.kind} is a {type(media.source).__name__}, expected a path, bytes or an image")
    path = os.fspath(media.source)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
            raise SampleError(f"{media.kind} {path} is no file")
        if most is not None and status.st_size > most:
            raise SampleError(f"{media.kind} {path} has {status.st_size} bytes, more than {most}")
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise SampleError(f"{media.kind} {path} cannot be read: {error.strerror}") from error


def content_digest(media: Media) -> str:
    """Return the SHA-256 of what a medium is: of its file, or of the numbers that it was given as."""
    source = media.source
    digest = hashlib.sha256(media.kind.encode())
    if isinstance(source, Image.Image):  # what counts is what `load_image` makes of it
        source = np.asarray(_upright_rgb(source, media))
    if isinstance(source, Mapping):
        digest.update(f"rate {source.get('sampling_rate')!r}".encode())
        source = source.get("array")
    if isinstance(source, np.ndarray | list):
        array = np.ascontiguousarray(source)
        digest.update(f"array {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    else:
        digest.update(b"file")
        digest.update(file_bytes(Media(media.kind, source)))
    return digest.hexdigest()


def where(media: Media) -> str:
    """Return how a message names a medium."""
    return f"{media.kind} {media.source}" if isinstance(media.source, str) else media.kind


# ------------------------------------------------------------------------------------------------ images


def load_image(media: Media, max_pixels: int) -> Image.Image:
    """Return an image in RGB, turned as its camera says."""
    if isinstance(media.source, Image.Image):
        return _upright_rgb(media.source, media)
    if isinstance(media.source, np.ndarray):
        return _upright_rgb(_from_array(media.source), media)
    content = file_bytes(media)
    if not content:
        raise SampleError(f"{where(media)} is an empty file")
    with no_limit_of_pillow():
        try:
            image = Image.open(io.BytesIO(content), formats=known_formats())
        except Exception as error:  # decoders raise whatever they meet in a damaged header
            raise SampleError(f"{where(media)} is no image that can be read: {error}") from error
        if image.width * image.height > max_pixels:
            raise SampleError(
                f"{where(media)} has {image.width} × {image.height} pixels, more than max_pixels = {max_pixels}"
            )
        return _upright_rgb(image, media)


def _upright_rgb(image: Image.Image, media: Media) -> Image.Image:
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16"):  # Pillow would make all of it white
            upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        return upright.convert("RGB")
    except Exception as error:
        raise SampleError(f"{where(media)} is damaged: {error}") from error


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise SampleError(f"image is an array of {array.dtype} {list(array.shape)}, expected uint8 [height, width, 3]")
    try:
        return Image.fromarray(array)
    except (TypeError, ValueError) as error:
        raise SampleError(f"image is an array {list(array.shape)}, expected [height, width, 3]: {error}") from error


@cache
def known_formats() -> tuple[str, ...]:
    """Return the formats of images that are read, as Pillow names them."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@contextmanager
def no_limit_of_pillow() -> Iterator[None]:
    """Our own limit, set by the user, stands in for Pillow's, which is one for the whole process."""
    with _limit_lock:
        limit = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


# ------------------------------------------------------------------------------------------------ sounds


def load_audio(media: Media, rate: int | None) -> np.ndarray:
    """Return a sound as one channel of float32 at the given rate; None keeps its own."""
    wave_form, found = _decoded(media, rate)
    if wave_form.ndim == 2:
        wave_form = wave_form.mean(axis=1)
    if wave_form.ndim != 1:
        raise SampleError(
            f"{where(media)} is an array {list(wave_form.shape)}, expected [samples] or [samples, channels]"
        )
    if not len(wave_form):
        raise SampleError(f"{where(media)} has no samples: its length is zero")
    if not np.isfinite(wave_form).all():
        raise SampleError(f"{where(media)} has samples that are not finite")
    if rate is not None and found != rate:
        wave_form = resample(wave_form, found, rate)
    return np.ascontiguousarray(wave_form, dtype=np.float32)


def _decoded(media: Media, rate: int | None) -> tuple[np.ndarray, int]:
    source = media.source
    if isinstance(source, Mapping):
        given = source.get("sampling_rate")
        if "array" not in source or not isinstance(given, int) or given <= 0:
            raise SampleError(f"audio has {sorted(source)}, expected `array` and `sampling_rate`")
        return _as_float(_wave(np.asarray(source["array"]))), given
    if isinstance(source, np.ndarray | list):
        return _as_float(_wave(np.asarray(source))), rate or 1
    content = file_bytes(media)
    if not content:
        raise SampleError(f"{where(media)} is an empty file")
    if content.startswith(_NPY):
        raise SampleError(f"{where(media)} is an array, no sound file. {_WANTS_WAVES}")
    try:
        return _read_sound(content)
    except SampleError as error:
        raise SampleError(f"{where(media)} {error}") from error
    except Exception as error:
        raise SampleError(f"{where(media)} is no sound that can be read: {error}") from error


def _wave(array: np.ndarray) -> np.ndarray:
    if array.ndim == 2 and array.shape[1] > MAX_CHANNELS:
        raise SampleError(
            f"audio is an array {list(array.shape)}, expected a wave [samples] or [samples, channels], of which there "
            f"are at most {MAX_CHANNELS}. {_WANTS_WAVES}"
        )
    return array


def _as_float(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "i":
        return array.astype(np.float32) / float(2 ** (8 * array.dtype.itemsize - 1))
    if array.dtype.kind != "f":
        raise SampleError(f"audio is an array of {array.dtype}, expected numbers")
    return array.astype(np.float32)


def _read_sound(content: bytes) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: the library that it wraps is missing
        return _read_wave(content)
    with soundfile.SoundFile(io.BytesIO(content)) as file:
        _check_length(file.frames, file.samplerate)
        return file.read(dtype="float32", always_2d=True), file.samplerate


def _read_wave(content: bytes) -> tuple[np.ndarray, int]:
    """Read a WAV file of whole numbers without soundfile."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            _check_length(file.getnframes(), rate)
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise SampleError(f"is no plain WAV ({error}); other sounds need `pip install cornstarch[audio]`") from error
    usable = len(raw) // (width * channels) * width * channels
    pieces = np.frombuffer(raw[:usable], np.uint8).reshape(-1, width)
    if width == 1:  # the only width without a sign
        samples = (pieces[:, 0].astype(np.float32) - 128) / 128
    else:
        wide = np.zeros((len(pieces), 4), np.uint8)
        wide[:, 4 - width :] = pieces
        samples = (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)
    return samples.reshape(-1, channels), rate


def _check_length(frames: int, rate: int) -> None:
    if frames > MAX_SECONDS * rate:
        raise SampleError(f"is {frames / rate:.0f} seconds long, more than {MAX_SECONDS}")


def resample(wave_form: np.ndarray, old: int, new: int) -> np.ndarray:
    """Return a sound at another rate, through a windowed sinc that keeps what both rates can hold."""
    common = math.gcd(old, new)
    up, down = new // common, old // common
    count = -(-len(wave_form) * up // down)
    cutoff = min(1.0, up / down)
    reach = math.ceil(_ZERO_CROSSINGS / cutoff)
    padded = np.concatenate([np.zeros(reach), wave_form.astype(np.float64), np.zeros(reach + 1)])
    steps = np.arange(-reach + 1, reach + 1)
    result = np.empty(count, np.float32)
    block = max(_AT_ONCE // (2 * reach), 1)
    for start in range(0, count, block):  # in blocks: all windows of a long sound would not fit into memory
        places = np.arange(start, min(start + block, count)) * down
        whole, phase = places // up, places % up
        phases, which = np.unique(phase, return_inverse=True)
        taps = _taps(steps[None, :] - phases[:, None] / up, cutoff, reach)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)[whole + 1]
        result[start : start + block] = np.einsum("nk,nk->n", windows, taps[which])
    return result


def _taps(distance: np.ndarray, cutoff: float, reach: int) -> np.ndarray:
    """Return a low-pass filter's weights for samples at a distance, with a Hann window."""
    window = np.where(np.abs(distance) < reach, np.cos(np.pi * distance / (2 * reach)) ** 2, 0.0)
    taps = cutoff * np.sinc(cutoff * distance) * window
    return taps / taps.sum(axis=1, keepdims=True)  # a constant stays what it is, whatever the phase


# ------------------------------------------------------------------------------------------------ features


def load_features(media: Media, size: int) -> np.ndarray:
    """Return the features of a sound, computed beforehand, as float32 [frames, size].

    They come as an array, or as a `.npy` file of one; nothing in such a file is ever run.
    """
    features = _array(media)
    expected = f"expected features computed beforehand, [frames, {size}]"
    if features.dtype.kind != "f":
        raise SampleError(f"{where(media)} is an array of {features.dtype}; {expected} of floats")
    if features.ndim != 2 or features.shape[1] != size:
        wave = "a wave " if features.ndim == 1 or features.shape[-1] <= 2 else "an array "
        raise SampleError(f"{where(media)} is {wave}{list(features.shape)}; {expected}")
    if not len(features):
        raise SampleError(f"{where(media)} has no frames: its length is zero")
    if features.size > MAX_NUMBERS:
        raise SampleError(f"{where(media)} has {features.size} numbers, more than {MAX_NUMBERS}")
    with np.errstate(over="ignore"):  # what is too large for float32 is told below
        features = np.ascontiguousarray(features, dtype=np.float32)
    if not np.isfinite(features).all():
        raise SampleError(f"{where(media)} has features that are not finite")
    return features


def _array(media: Media) -> np.ndarray:
    source = media.source
    if isinstance(source, np.ndarray):
        return source
    if not isinstance(source, str | os.PathLike | bytes | bytearray | memoryview):
        kind = "a wave with its sampling rate" if isinstance(source, Mapping) else f"a {type(source).__name__}"
        raise SampleError(
            f"audio is {kind}, but the audio encoder's processor takes features computed beforehand: expected an array "
            "[frames, features], or a .npy file of one"
        )
    content = file_bytes(media, most=8 * MAX_NUMBERS + 4096)
    if not content:
        raise SampleError(f"{where(media)} is an empty file")
    if not content.startswith(_NPY):
        raise SampleError(
            f"{where(media)} is no .npy file, but the audio encoder's processor takes features computed beforehand "
            "(numpy.save), not sounds"
        )
    try:
        _check_header(content)
        return np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # whatever numpy meets in a damaged file
        raise SampleError(f"{where(media)} is no array that can be read: {error}") from error


def _check_header(content: bytes) -> None:
    """Refuse a header that asks for more than the file has; numpy would make room for it first."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:  # later ones are for tables with named columns
        raise ValueError(f"version {version} of the format")
    shape, _, dtype = readers[version](stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    there = len(content) - stream.tell()
    if math.prod(shape) * dtype.itemsize != there:
        raise ValueError(f"{list(shape)} of {dtype} are {math.prod(shape) * dtype.itemsize} bytes, it has {there}")
