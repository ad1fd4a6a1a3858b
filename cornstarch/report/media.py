"""The images, sounds and features of samples, embedded so that the page needs no other file."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from cornstarch.report import figures
from cornstarch.report.markup import Markup, element, join

if TYPE_CHECKING:
    import numpy
    from PIL import Image

_MOST_BYTES = 400_000  # of an image as it is; a larger one is embedded smaller
_MOST_SOUND = 3_000_000
_MOST_PIXELS = 50_000_000
_WIDEST = 640  # pixels, of an image that is embedded smaller
_TINY = 64  # pixels; below, an image is shown enlarged, with its pixels as squares
_ENLARGED = (208, 144)
_KEPT = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
_HEAT = ((13, 22, 45), (22, 78, 99), (15, 133, 124), (134, 187, 88), (253, 231, 120))  # dark is low


class _UnusableError(Exception):
    """A file cannot be embedded; the message says why."""


def medium(folder: Path, kind: str, name: str, number: int) -> Markup:
    """Return a sample's file as an element; in its place what is wrong with it, if something is."""
    try:
        path = _inside(folder, name)
        if path.suffix.lower() == ".npy":
            return _features(path, kind, number)
        if path.suffix.lower() in (".wav", ".wave"):
            return _sound(path, kind, number)
        return _image(path, kind, number)
    except _UnusableError as error:
        return element("p", f"{kind}: {name[:200]} {error}", class_="note warning")
    except Exception as error:  # a damaged file can break its decoder in any way; the rest of the page is good
        reason = f"could not be read ({type(error).__name__}: {str(error)[:200]})"
        return element("p", f"{kind}: {name[:200]} {reason}", class_="note warning")


def _inside(folder: Path, name: str) -> Path:
    root = folder.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise _UnusableError("does not lie in the run's folder: not shown")
    if not path.is_file():
        raise _UnusableError("is missing")
    return path


def _sound(path: Path, kind: str, number: int) -> Markup:
    size = path.stat().st_size
    if size > _MOST_SOUND:
        raise _UnusableError(f"is too large to embed ({figures.size(size)}, at most {figures.size(_MOST_SOUND)})")
    return element(
        "audio", controls=True, preload="metadata", src=_uri("audio/wav", path.read_bytes()),
        aria_label=f"{kind} of sample {number}",
    )  # fmt: skip


def _image(path: Path, kind: str, number: int) -> Markup:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked right below
        image = Image.open(path)
    width, height = image.size
    if width * height > _MOST_PIXELS:
        raise _UnusableError(f"is too large to show ({width} × {height} pixels)")
    if image.format in _KEPT and path.stat().st_size <= _MOST_BYTES:
        image.load()  # a torn file is told here, not by a broken picture
        uri = _uri(_KEPT[image.format], path.read_bytes())
    else:
        uri = _smaller(image)
    return _picture(uri, width, height, f"{kind} of sample {number}")


def _smaller(image: Image.Image) -> str:
    image = image.convert("RGB")
    image.thumbnail((_WIDEST, _WIDEST))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return _uri("image/jpeg", file.getvalue())


def _picture(uri: str, width: int, height: int, description: str) -> Markup:
    if max(width, height) >= _TINY:
        return element("img", src=uri, alt=description, width=width, height=height)
    times = max(1, min(_ENLARGED[0] // width, _ENLARGED[1] // height))
    return element("img", src=uri, alt=description, width=width * times, height=height * times, class_="tiny")


def _features(path: Path, kind: str, number: int) -> Markup:
    import numpy

    array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    if not array.size or array.dtype.kind not in "fiub":
        raise _UnusableError(f"holds {array.dtype} values of shape {array.shape}, which cannot be drawn")
    table = array.reshape(-1, array.shape[-1] if array.ndim > 1 else array.size)
    if array.ndim > 2:
        table = array.reshape(-1, *array.shape[-2:])[0]
    table = numpy.asarray(table[:: -(-table.shape[0] // _WIDEST), :: -(-table.shape[1] // _WIDEST)], dtype=float)
    if table.shape[0] > table.shape[1]:
        table = table.T  # the longer side lies down
    uri, low, high = _heat_map(table)
    described = f"{kind} features, {' × '.join(map(str, array.shape))}, {figures.plain(low)} to {figures.plain(high)}"
    height, width = table.shape
    return join(
        _picture(uri, width, height, f"{kind} of sample {number}, as a heat map"),
        element("span", described, class_="caption"),
    )


def _heat_map(table: numpy.ndarray) -> tuple[str, float, float]:
    import numpy
    from PIL import Image

    known = numpy.isfinite(table)
    low, high = (float(table[known].min()), float(table[known].max())) if known.any() else (0.0, 0.0)
    share = numpy.where(known, (table - low) / ((high - low) or 1.0), 0.0)
    stops = numpy.linspace(0, 1, len(_HEAT))
    channels = [numpy.interp(share, stops, [colour[channel] for colour in _HEAT]) for channel in range(3)]
    pixels = numpy.stack(channels, axis=-1).round().astype(numpy.uint8)
    pixels[~known] = (255, 0, 110)  # a colour that the scale has not
    file = io.BytesIO()
    Image.fromarray(pixels[::-1]).save(file, "PNG")  # low indices, such as low frequencies, at the bottom
    return _uri("image/png", file.getvalue()), low, high


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
