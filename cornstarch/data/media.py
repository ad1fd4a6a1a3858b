"""Decode images and sounds, or read their sizes from file headers. Any failure is a SampleError. No torch."""

from __future__ import annotations

import hashlib
import io
import math
import os
import stat
import threading
import wave
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps

from cornstarch.data.sample import Media, SampleError

# Pillow reads more, but by running other programs (EPS), or formats that are not pictures.
_FORMATS = {
    "JPEG": "Jpeg", "PNG": "Png", "WEBP": "WebP", "GIF": "Gif", "BMP": "Bmp", "TIFF": "Tiff", "PPM": "Ppm",
    "AVIF": "Avif", "JPEG2000": "Jpeg2K", "MPO": "Mpo",
}  # fmt: skip
"""The formats of pictures that are read, and the names of their plugins."""
MAX_SECONDS = 3600  # longer sounds are refused: a small compressed file can hold days of silence
RATES = (1_000, 768_000)  # samples per second; resampling from rates outside of them is slow, or takes much memory
MAX_CHANNELS = 8  # an array with more columns is not a wave: 7.1 surround has 8 channels, features have more
MAX_NUMBERS = 1 << 26  # more features of one sound are refused: an hour with 128 per frame has fewer
MAX_AUDIO_BYTES = 1 << 32  # larger files of sounds are refused unread
_IMAGE_BYTES = 1 << 26  # so are images of more bytes than this and _PIXEL_BYTES for each pixel of `max_pixels`
_PIXEL_BYTES = 16  # the most that a format has for one: four channels of 32 bits
# A few kilobytes can hold hours of silence. Sounds that people compress have at most 128 numbers per byte.
_PLAIN_NUMBERS, _EXPANSION = 1 << 24, 128
_ZERO_CROSSINGS = 32  # of the sinc, on either side: more is sharper and slower
_BLOCK = 1 << 22  # numbers in the windows that are filtered at once

_NPY = b"\x93NUMPY"
_WANTS_WAVES = (
    "The audio encoder's processor takes waves; features computed beforehand are for a PrecomputedFeatureExtractor"
)

_ORIENTATION = 0x0112  # the EXIF tag
_ROTATED = (5, 6, 7, 8)  # its values for pictures that are stored on their side

_limit_lock = threading.Lock()


@contextmanager
def _open_media(media: Media, max_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open the file of an image or a sound; refuse a file of more than `max_bytes` bytes unread."""
    source = media.source
    if isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(bytes(source))
        return
    if not isinstance(source, str | os.PathLike):
        raise SampleError(f"{media.kind} is a {type(source).__name__}, expected a path, bytes or an image")
    path = os.fspath(source)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would block forever
            raise SampleError(f"{media.kind} {path} is no file")
        if max_bytes is not None and status.st_size > max_bytes:
            raise SampleError(f"{media.kind} {path} has {status.st_size} bytes, more than {max_bytes}")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise SampleError(f"{media.kind} {path} cannot be read: {error.strerror}") from error


def _read_media(media: Media, max_bytes: int | None = None) -> bytes:
    with _open_media(media, max_bytes) as file:
        content = file.read()
    if not content:
        raise SampleError(f"{_describe(media)} is an empty file")
    return content


def content_digest(media: Media) -> str:
    """Return the SHA-256 of the content: of the file, or of the given numbers."""
    source = media.source
    digest = hashlib.sha256(media.kind.encode())
    if isinstance(source, Image.Image):  # the digest of what `load_image` returns
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
        with _open_media(Media(media.kind, source)) as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _describe(media: Media) -> str:
    return f"{media.kind} {media.source}" if isinstance(media.source, str) else media.kind


# ------------------------------------------------------------------------------------------------ images


def load_image(media: Media, max_pixels: int) -> Image.Image:
    """Decode an image to RGB, rotated as its EXIF orientation says."""
    if isinstance(media.source, Image.Image):
        return _upright_rgb(media.source, media)
    if isinstance(media.source, np.ndarray):
        array = media.source
        if array.dtype != np.uint8 or array.ndim not in (2, 3):
            found = f"{array.dtype} {list(array.shape)}"
            raise SampleError(f"image is an array of {found}, expected uint8 [height, width, 3]")
        try:
            image = Image.fromarray(array)
        except (TypeError, ValueError) as error:
            raise SampleError(f"image is an array {list(array.shape)}, expected [height, width, 3]: {error}") from error
        return _upright_rgb(image, media)
    content = _read_media(media, _IMAGE_BYTES + _PIXEL_BYTES * max_pixels)
    with _lift_pillow_limit(), _refuse_unreadable(media, "image"):
        image = Image.open(io.BytesIO(content), formats=_image_formats())
    _check_pixels(image.size, media, max_pixels)
    with _lift_pillow_limit():
        return _upright_rgb(image, media, is_own=True)


def image_size(media: Media, max_pixels: int) -> tuple[int, int]:
    """Return width and height of an image, rotated as its EXIF orientation says, without decoding it."""
    source = media.source
    if isinstance(source, np.ndarray):
        if source.ndim not in (2, 3):
            raise SampleError(f"image is an array {list(source.shape)}, expected [height, width, 3]")
        return source.shape[1], source.shape[0]
    if isinstance(source, Image.Image):
        return _upright_size(source)
    with (
        _open_media(media) as file,
        _lift_pillow_limit(),
        _refuse_unreadable(media, "image"),
        Image.open(file, formats=_image_formats()) as image,
    ):
        size = _upright_size(image)
    _check_pixels(size, media, max_pixels)
    return size


@contextmanager
def _refuse_unreadable(media: Media, what: str) -> Iterator[None]:
    """Turn whatever a decoder raises for a damaged file into SampleError, and name the file."""
    try:
        yield
    except SampleError as error:
        raise SampleError(f"{_describe(media)} {error}") from error
    except Exception as error:
        raise SampleError(f"{_describe(media)} is no {what} that can be read: {error}") from error


def _check_pixels(size: tuple[int, int], media: Media, max_pixels: int) -> None:
    if size[0] * size[1] > max_pixels:
        raise SampleError(f"{_describe(media)} has {size[0]} × {size[1]} pixels, more than max_pixels = {max_pixels}")


def _upright_size(image: Image.Image) -> tuple[int, int]:
    if image.format == "PNG" and not {"exif", "Raw profile type exif"} & set(image.info):
        return image.size  # EXIF may come after the pixels, which would be decoded to reach it
    is_rotated = image.getexif().get(_ORIENTATION) in _ROTATED
    return (image.height, image.width) if is_rotated else (image.width, image.height)


def _upright_rgb(image: Image.Image, media: Media, is_own: bool = False) -> Image.Image:
    """Return an image as RGB, rotated; one that is not our own is copied first."""
    try:
        image.load()
        upright = image if is_own else image.copy()
        ImageOps.exif_transpose(upright, in_place=True)
        if upright.mode.startswith("I;16"):  # Pillow would turn everything white
            upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        return upright if upright.mode == "RGB" else upright.convert("RGB")  # which would copy an RGB image
    except Exception as error:
        raise SampleError(f"{_describe(media)} is damaged: {error}") from error


@cache
def _image_formats() -> tuple[str, ...]:
    for plugin in _FORMATS.values():  # `Image.init` would import forty more, in every worker
        with suppress(ImportError):  # a library that this Pillow was built without
            import_module(f"PIL.{plugin}ImagePlugin")
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@contextmanager
def _lift_pillow_limit() -> Iterator[None]:
    """Disable Pillow's process-wide limit: `max_pixels` replaces it."""
    with _limit_lock:
        limit = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


# ------------------------------------------------------------------------------------------------ sounds


def load_audio(media: Media, rate: int | None) -> np.ndarray:
    """Decode a sound to one channel of float32 at the given rate; None keeps its own."""
    given = _array_and_rate(media, rate)
    if given is not None:
        wave_form, found = _as_float(np.asarray(given[0])), given[1]
        if rate is not None and found != rate and not RATES[0] <= found <= RATES[1]:
            raise SampleError(f"audio has {found} samples per second, expected {RATES[0]} to {RATES[1]}")
    else:
        content = _read_media(media, MAX_AUDIO_BYTES)
        if content.startswith(_NPY):
            raise SampleError(f"{_describe(media)} is an array, no sound file. {_WANTS_WAVES}")
        with _refuse_unreadable(media, "sound"):
            soundfile = _import_soundfile()
            if soundfile is None:
                wave_form, found = _read_wave(content)
            else:
                with soundfile.SoundFile(io.BytesIO(content)) as file:
                    _check_length(file.frames, file.samplerate, file.channels, len(content))
                    wave_form, found = file.read(dtype="float32", always_2d=True), file.samplerate
    if wave_form.ndim == 2:
        wave_form = wave_form.mean(axis=1)
    if wave_form.ndim != 1:
        raise SampleError(
            f"{_describe(media)} is an array {list(wave_form.shape)}, expected [samples] or [samples, channels]"
        )
    if not len(wave_form):
        raise SampleError(f"{_describe(media)} has no samples: its length is zero")
    if not np.isfinite(wave_form).all():
        raise SampleError(f"{_describe(media)} has samples that are not finite")
    if rate is not None and found != rate:
        wave_form = resample(wave_form, found, rate)
    return np.ascontiguousarray(wave_form, dtype=np.float32)


def sound_length(media: Media, rate: int | None) -> int:
    """Return the number of samples of a sound at a rate (None: its own) without decoding it."""
    given = _array_and_rate(media, rate)
    if given is not None:
        frames, found = len(given[0]), given[1]
    else:
        with _open_media(media) as file, _refuse_unreadable(media, "sound"):
            soundfile = _import_soundfile()
            if soundfile is None:
                with wave.open(file) as plain:
                    frames, found = plain.getnframes(), plain.getframerate()
            else:
                with soundfile.SoundFile(file) as sound:
                    frames, found = sound.frames, sound.samplerate
    if not frames:
        raise SampleError(f"{_describe(media)} has no samples: its length is zero")
    with _refuse_unreadable(media, "sound"):
        _check_length(frames, found, is_file=given is None)
    return frames if rate is None or rate == found else -(-frames * rate // found)


def _array_and_rate(media: Media, rate: int | None) -> tuple[Any, int] | None:
    """Return the array and the rate of a sound that is not a file."""
    source = media.source
    if isinstance(source, Mapping):
        given = source.get("sampling_rate")
        if "array" not in source or not isinstance(given, int) or given <= 0:
            raise SampleError(f"audio has {sorted(source)}, expected `array` and `sampling_rate`")
        return source["array"], given
    return (source, rate or 1) if isinstance(source, np.ndarray | list) else None


def _as_float(array: np.ndarray) -> np.ndarray:
    if array.ndim == 2 and array.shape[1] > MAX_CHANNELS:
        raise SampleError(
            f"audio is an array {list(array.shape)}, expected a wave [samples] or [samples, channels], of which there "
            f"are at most {MAX_CHANNELS}. {_WANTS_WAVES}"
        )
    if array.dtype.kind == "i":
        return array.astype(np.float32) / float(2 ** (8 * array.dtype.itemsize - 1))
    if array.dtype.kind != "f":
        raise SampleError(f"audio is an array of {array.dtype}, expected numbers")
    return array.astype(np.float32)


def _import_soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: the library that it wraps is missing
        return None
    return soundfile


def _read_wave(content: bytes) -> tuple[np.ndarray, int]:
    """Read a WAV file of integers without soundfile."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            _check_length(file.getnframes(), rate, channels, len(content))
            raw = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise SampleError(f"is no plain WAV ({error}); other sounds need `pip install cornstarch[audio]`") from error
    usable = len(raw) // (width * channels) * width * channels
    pieces = np.frombuffer(raw[:usable], np.uint8).reshape(-1, width)
    if width == 1:  # the only unsigned width
        samples = (pieces[:, 0].astype(np.float32) - 128) / 128
    else:
        wide = np.zeros((len(pieces), 4), np.uint8)
        wide[:, 4 - width :] = pieces
        samples = (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)
    return samples.reshape(-1, channels), rate


def _check_length(frames: int, rate: int, channels: int = 1, size: int | None = None, is_file: bool = True) -> None:
    """Refuse a sound that would take much more memory or time than its `size` in bytes lets expect."""
    if is_file and not RATES[0] <= rate <= RATES[1]:
        raise SampleError(f"has {rate} samples per second, expected {RATES[0]} to {RATES[1]}")
    if frames > MAX_SECONDS * rate:
        raise SampleError(f"is {frames / rate:.0f} seconds long, more than {MAX_SECONDS}")
    if size is not None and frames * channels > max(_PLAIN_NUMBERS, _EXPANSION * size):
        raise SampleError(f"is a file of {size} bytes that says it holds {frames} × {channels} samples")


def resample(wave_form: np.ndarray, old: int, new: int) -> np.ndarray:
    """Resample a sound with a windowed sinc, which keeps the frequencies that both rates can represent."""
    common = math.gcd(old, new)
    up, down = new // common, old // common
    count = -(-len(wave_form) * up // down)
    cutoff = min(1.0, up / down)
    reach = math.ceil(_ZERO_CROSSINGS / cutoff)
    padded = np.concatenate([np.zeros(reach), wave_form.astype(np.float64), np.zeros(reach + 1)])
    steps = np.arange(-reach + 1, reach + 1)
    result = np.empty(count, np.float32)
    block = max(_BLOCK // (2 * reach), 1)
    for start in range(0, count, block):  # in blocks: all windows of a long sound would not fit into memory
        places = np.arange(start, min(start + block, count)) * down
        whole, phase = places // up, places % up
        phases, which = np.unique(phase, return_inverse=True)
        # A low-pass filter with a Hann window. Its weights add up to 1: a constant stays constant at every phase.
        distance = steps[None, :] - phases[:, None] / up
        window = np.where(np.abs(distance) < reach, np.cos(np.pi * distance / (2 * reach)) ** 2, 0.0)
        taps = cutoff * np.sinc(cutoff * distance) * window
        taps /= taps.sum(axis=1, keepdims=True)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)[whole + 1]
        result[start : start + block] = np.einsum("nk,nk->n", windows, taps[which])
    return result


# ------------------------------------------------------------------------------------------------ features


def load_features(media: Media, size: int) -> np.ndarray:
    """Return the precomputed features of a sound, from an array or a `.npy` file, as float32 [frames, size]."""
    features = _read_array(media)
    expected = f"expected features computed beforehand, [frames, {size}]"
    if features.dtype.kind != "f":
        raise SampleError(f"{_describe(media)} is an array of {features.dtype}; {expected} of floats")
    if features.ndim != 2 or features.shape[1] != size:
        wave = "a wave " if features.ndim == 1 or features.shape[-1] <= 2 else "an array "
        raise SampleError(f"{_describe(media)} is {wave}{list(features.shape)}; {expected}")
    if not len(features):
        raise SampleError(f"{_describe(media)} has no frames: its length is zero")
    if features.size > MAX_NUMBERS:
        raise SampleError(f"{_describe(media)} has {features.size} numbers, more than {MAX_NUMBERS}")
    with np.errstate(over="ignore"):  # numbers too large for float32 become infinite, and are refused below
        features = np.ascontiguousarray(features, dtype=np.float32)
    if not np.isfinite(features).all():
        raise SampleError(f"{_describe(media)} has features that are not finite")
    return features


def feature_frames(media: Media) -> int:
    """Return the number of frames of precomputed features without reading them."""
    if isinstance(media.source, np.ndarray):
        return len(media.source)
    with _open_media(media) as file, _refuse_unreadable(media, "array"):
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return int(read(file)[0][0])


def _read_array(media: Media) -> np.ndarray:
    source = media.source
    if isinstance(source, np.ndarray):
        return source
    if not isinstance(source, str | os.PathLike | bytes | bytearray | memoryview):
        kind = "a wave with its sampling rate" if isinstance(source, Mapping) else f"a {type(source).__name__}"
        raise SampleError(
            f"audio is {kind}, but the audio encoder's processor takes features computed beforehand: expected an array "
            "[frames, features], or a .npy file of one"
        )
    content = _read_media(media, max_bytes=8 * MAX_NUMBERS + 4096)
    if not content.startswith(_NPY):
        raise SampleError(
            f"{_describe(media)} is no .npy file, but the audio encoder's processor takes features computed beforehand "
            "(numpy.save), not sounds"
        )
    with _refuse_unreadable(media, "array"):
        # Refuse a header that claims more data than the file has: NumPy would allocate it first.
        stream = io.BytesIO(content)
        version = np.lib.format.read_magic(stream)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:  # later versions are for tables with named columns
            raise ValueError(f"version {version} of the format")
        shape, _, dtype = readers[version](stream)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        expected, found = math.prod(shape) * dtype.itemsize, len(content) - stream.tell()
        if expected != found:
            raise ValueError(f"{list(shape)} of {dtype} are {expected} bytes, it has {found}")
        return np.load(io.BytesIO(content), allow_pickle=False)
