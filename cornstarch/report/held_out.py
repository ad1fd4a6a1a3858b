"""The page's sections on held-out data: the shuffled-media check, and samples with their media and answers."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from cornstarch.report.html import build_element, join_html
from cornstarch.report.number_format import format_bytes, format_count, format_number, format_percent
from cornstarch.report.run_record import EvaluationRecord, RunRecord

# The first measure that both evaluations have is compared.
_MEASURES = ("accuracy", "token_accuracy", "loss")
_BETTER = 0.02  # than chance: a smaller difference may be luck
_ITEMS = {"vision": "images", "audio": "sounds", "video": "videos"}

_MAX_SAMPLES = 60
_MAX_TEXT = 2000  # characters
_MAX_IMAGE = 400_000  # bytes of an image that is embedded unchanged; a larger one is scaled down
_MAX_SOUND = 3_000_000
_MAX_PIXELS = 50_000_000
_MAX_WIDTH = 640  # pixels of an image that is scaled down
_TINY = 64  # pixels; a smaller image is enlarged, with its pixels as squares
_ENLARGED = (208, 144)
_BROWSER_FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
_HEAT = ((13, 22, 45), (22, 78, 99), (15, 133, 124), (134, 187, 88), (253, 231, 120))  # dark is low


class MediaComparison(NamedTuple):
    """One source with its true items and with items shuffled between samples."""

    source: str
    measure: str
    true: float
    shuffled: float
    note: str = ""
    chance: float | None = None
    """The accuracy that a model that uses its items has by chance with shuffled ones."""

    @property
    def verdict(self) -> tuple[str, str]:
        """A CSS class and a sentence that say what the two numbers mean."""
        if not (math.isfinite(self.true) and math.isfinite(self.shuffled)):
            return "", "cannot be compared"
        worse = self.shuffled - self.true if self.measure == "loss" else self.true - self.shuffled
        # Only accuracy above chance can be lost: with two classes, half of the answers stay right.
        chance = self.chance or 0.0
        if self.chance is not None and self.true < chance + _BETTER:
            return "bad", "the answers are hardly better than guessing"
        fraction = worse / (self.true - chance) if self.true else 0.0
        if fraction >= 0.5:
            return "good", "the answers depend on them"
        if fraction >= 0.1:
            return "warn", "the answers depend on them in part"
        return "bad", "the answers hardly depend on them"


def compare_evaluations(true: EvaluationRecord | None, shuffled: EvaluationRecord) -> list[MediaComparison]:
    """Compare the sources that both evaluations have; all samples together if they have none in common."""
    if true is None:
        return []
    pairs = [(name, true.sources[name], those) for name, those in shuffled.sources.items() if name in true.sources]
    rows = [row for pair in pairs if (row := _compare_measures(*pair))]
    everything = _compare_measures("all", true.measures, shuffled.measures)
    return rows or ([everything] if everything else [])


def _compare_measures(source: str, true: Mapping[str, float], shuffled: Mapping[str, float]) -> MediaComparison | None:
    measure = next((name for name in _MEASURES if name in true and name in shuffled), None)
    if measure is None:
        return None
    everything, with_items = true.get("count"), shuffled.get("count")
    note = ""
    if everything is not None and with_items is not None and everything != with_items:
        note = f"{format_count(with_items)} of the {format_count(everything)} samples have items to shuffle."
    chance = shuffled.get("chance") if measure == "accuracy" else None
    return MediaComparison(source, measure, true[measure], shuffled[measure], note, chance)


def build_shuffled_view(run: RunRecord) -> dict[str, Any]:
    """Return the section's blocks, one for each modality, and whether there is any evaluation with shuffled items."""
    blocks = []
    for shuffled in run.shuffled:
        same_step = [one for one in run.metrics.evaluations if one.step == shuffled.step]
        rows = compare_evaluations(same_step[-1] if same_step else run.evaluation, shuffled)
        items = _ITEMS.get(shuffled.modality or "", f"{shuffled.modality or ''} items")
        if rows:
            title = f"{items[:1].upper()}{items[1:60]} shuffled"
            blocks.append({"title": title, "rows": [_build_comparison(row, items) for row in rows]})
    return {"any": bool(run.shuffled), "blocks": blocks}


def _build_comparison(row: MediaComparison, items: str) -> dict[str, Any]:
    is_loss = row.measure == "loss"
    show = format_number if is_loss else format_percent
    most = max((v for v in (row.true, row.shuffled) if math.isfinite(v)), default=1.0) if is_loss else 1.0
    css, verdict = row.verdict
    change = f"{row.shuffled - row.true:+.3g}" if is_loss else f"{(row.shuffled - row.true) * 100:+.1f} points"
    chance = f"Chance: {format_percent(row.chance)}" if row.chance is not None else ""
    return {
        "source": row.source[:60],
        "measure": row.measure.replace("_", " "),
        "bars": [
            {"name": name, "fraction": value / (most or 1.0), "colour": colour, "text": show(value), "note": None}
            for name, value, colour in ((f"true {items}", row.true, 1), ("shuffled", row.shuffled, 2))
        ],
        "notes": [note for note in (row.note, chance) if note],
        "css": css,
        "change": change.replace("-", "−"),
        "verdict": verdict,
    }


def build_samples_view(run: RunRecord) -> dict[str, Any]:
    """Return the section's samples, and by which verdicts they can be filtered."""
    answers = run.answers
    judged = [answer.right for answer in answers if answer.right is not None]
    lead = f"{sum(judged):,} of these {len(judged):,} answers are right." if judged else ""
    if len(answers) > _MAX_SAMPLES:
        lead += f" The first {_MAX_SAMPLES} of {len(answers):,} are shown."
    shown = []
    for number, answer in enumerate(answers[:_MAX_SAMPLES], 1):
        verdict, sign = {True: ("right", "✓"), False: ("wrong", "✗"), None: ("", "")}[answer.right]
        pieces = [
            build_element("span", shorten_text(value))
            if kind == "text"
            else embed_media(run.folder, kind[:40], value, number)
            for kind, value in answer.question
        ]
        shown.append(
            {
                "verdict": verdict,
                "sign": sign,
                "title": answer.source[:60] or f"sample {number}",
                "id": answer.id[:120],
                "pieces": pieces,
                "truth": shorten_text(answer.truth),
                "answer": shorten_text(answer.answer),
            }
        )
    choices = ("all", "right", "wrong") if True in judged and False in judged else ()
    return {"lead": lead, "choices": choices, "answers": shown}


def shorten_text(text: str) -> str:
    """Return a text, or its beginning and the number of characters left out."""
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]} … ({len(text) - _MAX_TEXT:,} more characters)"


class _UnusableError(Exception):
    """A file cannot be embedded; the message says why."""


def embed_media(folder: Path, kind: str, name: str, number: int) -> Markup:
    """Return a sample's file as an element with the content inside, or a sentence that says why it cannot be shown."""
    try:
        root = folder.resolve()
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise _UnusableError("does not lie in the run's folder: not shown")
        if not path.is_file():
            raise _UnusableError("is missing")
        embed = {".npy": _embed_features, ".wav": _embed_sound, ".wave": _embed_sound}.get(path.suffix.lower())
        return (embed or _embed_image)(path, kind, number)
    except _UnusableError as error:
        reason = str(error)
    except Exception as error:  # a damaged file can break its decoder in any way; the rest of the page is good
        reason = f"could not be read ({type(error).__name__}: {str(error)[:200]})"
    return build_element("p", f"{kind}: {name[:200]} {reason}", class_="note warning")


def _embed_sound(path: Path, kind: str, number: int) -> Markup:
    size = path.stat().st_size
    if size > _MAX_SOUND:
        raise _UnusableError(f"is too large to embed ({format_bytes(size)}, at most {format_bytes(_MAX_SOUND)})")
    return build_element(
        "audio", controls=True, preload="metadata", src=_encode_uri("audio/wav", path.read_bytes()),
        aria_label=f"{kind} of sample {number}",
    )  # fmt: skip


def _embed_image(path: Path, kind: str, number: int) -> Markup:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is checked right below
        image = Image.open(path)
    width, height = image.size
    if width * height > _MAX_PIXELS:
        raise _UnusableError(f"is too large to show ({width} × {height} pixels)")
    if image.format in _BROWSER_FORMATS and path.stat().st_size <= _MAX_IMAGE:
        image.load()  # a truncated file fails here, not as a broken picture in the browser
        uri = _encode_uri(_BROWSER_FORMATS[image.format], path.read_bytes())
    else:
        smaller = image.convert("RGB")
        smaller.thumbnail((_MAX_WIDTH, _MAX_WIDTH))
        file = io.BytesIO()
        smaller.save(file, "JPEG", quality=85)
        uri = _encode_uri("image/jpeg", file.getvalue())
    return _build_image(uri, width, height, f"{kind} of sample {number}")


def _build_image(uri: str, width: int, height: int, description: str) -> Markup:
    if max(width, height) >= _TINY:
        return build_element("img", src=uri, alt=description, width=width, height=height)
    times = max(1, min(_ENLARGED[0] // width, _ENLARGED[1] // height))
    return build_element("img", src=uri, alt=description, width=width * times, height=height * times, class_="tiny")


def _embed_features(path: Path, kind: str, number: int) -> Markup:
    import numpy
    from PIL import Image

    array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    if not array.size or array.dtype.kind not in "fiub":
        raise _UnusableError(f"holds {array.dtype} values of shape {array.shape}, which cannot be drawn")
    table = array.reshape(-1, array.shape[-1] if array.ndim > 1 else array.size)
    if array.ndim > 2:
        table = array.reshape(-1, *array.shape[-2:])[0]
    rows, columns = (-(-side // _MAX_WIDTH) for side in table.shape)
    table = numpy.asarray(table[::rows, ::columns], dtype=float)
    if table.shape[0] > table.shape[1]:
        table = table.T  # the longer side lies down
    known = numpy.isfinite(table)
    low, high = (float(table[known].min()), float(table[known].max())) if known.any() else (0.0, 0.0)
    heat = numpy.where(known, (table - low) / ((high - low) or 1.0), 0.0)
    stops = numpy.linspace(0, 1, len(_HEAT))
    channels = [numpy.interp(heat, stops, [colour[channel] for colour in _HEAT]) for channel in range(3)]
    pixels = numpy.stack(channels, axis=-1).round().astype(numpy.uint8)
    pixels[~known] = (255, 0, 110)  # a colour outside the scale
    file = io.BytesIO()
    Image.fromarray(pixels[::-1]).save(file, "PNG")  # low indices, such as low frequencies, at the bottom
    uri = _encode_uri("image/png", file.getvalue())
    shape = " × ".join(map(str, array.shape))
    caption = f"{kind} features, {shape}, {format_number(low)} to {format_number(high)}"
    height, width = table.shape
    return join_html(
        _build_image(uri, width, height, f"{kind} of sample {number}, as a heat map"),
        build_element("span", caption, class_="caption"),
    )


def _encode_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
