"""Samples before anything is decoded or tokenized, and the row formats that they are parsed from. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from cornstarch.errors import ConfigError, escape_controls

Role = Literal["system", "user", "assistant"]
MediaKind = Literal["image", "audio"]


@dataclass(frozen=True)
class Media:
    """An image or a sound that is not decoded yet."""

    kind: MediaKind
    source: Any
    """A path, the bytes of a file, or decoded data: a PIL image; an array, or {"array", "sampling_rate"}; precomputed
    features of a sound, [frames, features], as an array or a `.npy` file."""


Content = tuple[str | Media, ...]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation: text and media in reading order."""

    role: Role
    content: Content


@dataclass(frozen=True)
class Sample:
    """One row of a dataset: a conversation, or a document without roles."""

    id: str
    """Where the sample comes from: `train.json:17` is row (in JSONL: line) 17 of the file, counted from 1."""
    messages: tuple[Message, ...] = ()
    document: Content = ()
    """Text without roles, instead of messages; all of it is trained on."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The row itself, for tasks other than conversations (text, label, source, target, …); media are `Media`."""
    epoch: int = 0
    """The epoch in which the sample is read, for augmentation that changes every epoch."""

    @property
    def media(self) -> list[Media]:
        contents = [message.content for message in self.messages] + [self.document]
        return [part for content in contents for part in content if isinstance(part, Media)]


class SampleError(Exception):
    """The sample cannot be used; it is skipped and counted, and the message says why."""


class SampleTooLongError(SampleError):
    """The sample is valid, but has more tokens than the limit."""


@dataclass(frozen=True)
class BrokenSample:
    """A skipped sample."""

    id: str
    reason: str
    too_long: bool = False  # only the length is wrong; the sample does not count as broken

    @classmethod
    def of(cls, id: str, error: SampleError) -> BrokenSample:
        return cls(escape_controls(id), escape_controls(str(error)), isinstance(error, SampleTooLongError))

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}"


_LISTED = 5  # skipped samples in a message


class SkipCounter:
    """Counts skipped samples, and stops the run when more than the fraction `limit` of an epoch are broken.

    The fraction is checked from `at_least` samples on; samples that are only too long do not count as broken. `gather`
    returns the lists of all ranks, which must then count the same.
    """

    def __init__(
        self, limit: float, at_least: int = 20, gather: Callable[[list[str]], list[list[str]]] = lambda own: [own]
    ) -> None:
        self.limit, self.at_least, self._gather = limit, at_least, gather
        self.good = self.broken = self.too_long = 0
        self._first: list[BrokenSample] = []
        self.begin_epoch()

    def begin_epoch(self, passed: int = 0) -> None:
        """Reset the fraction; `passed` samples of the epoch were trained on before the run was resumed."""
        self._good, self._broken = passed, 0

    def add(self, good: int, skipped: Sequence[BrokenSample]) -> None:
        """Count samples; ConfigError above the limit."""
        broken = sum(not sample.too_long for sample in skipped)
        self.count(good, broken, len(skipped) - broken, skipped)

    def count(self, good: int, broken: int, too_long: int, skipped: Sequence[BrokenSample]) -> None:
        """Count the samples of all ranks, where `skipped` are those of this rank; ConfigError above the limit."""
        self.good, self._good = self.good + good, self._good + good
        self.broken, self._broken = self.broken + broken, self._broken + broken
        self.too_long += too_long
        self._first += list(skipped)[: _LISTED - len(self._first)]
        if self._good + self._broken >= self.at_least:
            self._check()

    def end_epoch(self) -> None:
        """Check the fraction, however few samples there were."""
        self._check()
        if not self._good:
            raise ConfigError(f"Not one of {self.broken + self.too_long} samples can be used. {self._list_first()}")
        self.begin_epoch()

    def _check(self) -> None:
        total = self._good + self._broken
        if self._broken > self.limit * total:
            raise ConfigError(
                f"{self._broken} of {total} samples are broken, more than `data.skip_limit` = {self.limit:g} allows. "
                f"{self._list_first()}\nRepair them (`cornstarch data check` lists all), or raise the limit."
            )

    def _list_first(self) -> str:
        # Ranks of one replica have the same list.
        lists = dict.fromkeys(map(tuple, self._gather([str(sample) for sample in self._first])))
        return "The first of them:" + "".join([f"\n  {sample}" for one in lists for sample in one][:_LISTED])


@contextmanager
def as_sample_errors() -> Iterator[None]:
    """Turn whatever a processor raises, for an odd image or a count that does not fit, into SampleError."""
    try:
        yield
    except Exception as error:
        named = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise SampleError(f"cannot be processed: {named}{error}") from error


Row = Mapping[str, Any]
Parsed = tuple[tuple[Message, ...], Content]  # messages, or a document

MEDIA_COLUMNS: dict[MediaKind, tuple[str, ...]] = {"image": ("image", "images"), "audio": ("audio", "audios")}
_VIDEO_COLUMNS = ("video", "videos")
_VIDEO = "has a video; models are trained on images and sounds: give frames of it as images"
_MEDIA_NAMES = frozenset(name for names in MEDIA_COLUMNS.values() for name in names)
_MARKS: dict[str, MediaKind] = {"<image>": "image", "<audio>": "audio"}
_MARK = re.compile("|".join(_MARKS))
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")
_ROLES: dict[str, Role] = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant",
}  # fmt: skip


def parse_row(row: Any, format: str, id: str, media_folder: Path) -> Sample:
    if not isinstance(row, Mapping):
        raise SampleError(f"is a {type(row).__name__}, expected an object with named fields")
    layout = _ROW_FORMATS[format]
    if not layout.fits(row):
        raise SampleError(f"has the fields {sorted(map(str, row))}, expected {format}: {layout.expected}")
    if format == "rows" and _MEDIA_NAMES.isdisjoint(row):  # fast path: plain numbers, thousands of rows per second
        return Sample(id, fields=dict(row))
    if format != "rows" and any(row.get(column) for column in _VIDEO_COLUMNS):
        raise SampleError(_VIDEO)
    fields = dict(row)
    media: dict[MediaKind, list[Media]] = {kind: [] for kind in MEDIA_COLUMNS}
    for kind, columns in MEDIA_COLUMNS.items():
        for column in columns:
            value = row.get(column)
            values = value if isinstance(value, list | tuple) else [value]
            found = [_read_media(kind, one, media_folder) for one in values if one is not None]
            media[kind] += found
            if value is not None:
                fields[column] = found if values is value else found[0]
    messages, document = layout.read(row, _MediaQueue(media, media_folder))
    return Sample(id, messages, document, fields)


def detect_format(row: Any) -> str | None:
    """Return the name of the first format that fits a row, or None."""
    if not isinstance(row, Mapping):
        return None
    return next((name for name in _DETECTED if _ROW_FORMATS[name].fits(row)), None)


def describe_formats() -> str:
    """List the detected formats with the fields that each expects."""
    return "; ".join(f"{name}: {_ROW_FORMATS[name].expected}" for name in _DETECTED)


def _read_media(kind: MediaKind, value: Any, folder: Path) -> Media:
    if isinstance(value, Media):
        return value
    if isinstance(value, Mapping) and "bytes" in value:  # the layout of files in Hugging Face datasets
        value = value["bytes"] if value["bytes"] is not None else value.get("path")
    if isinstance(value, str | os.PathLike):
        value = os.fspath(value)
        if _URL.match(value):
            raise SampleError(f"{kind} {value!r} is an address; download it and give a path")
        if os.path.normpath(value).split(os.sep)[0] == os.pardir:
            raise SampleError(
                f"{kind} {value!r} leaves the media folder {folder}; set `media` or give an absolute path"
            )
        if value and "\0" not in value:
            return Media(kind, value if os.path.isabs(value) else str(folder / value))
    if value is None or isinstance(value, int | float | str):
        raise SampleError(f"{kind} is {value!r}, expected a path")
    return Media(kind, value)


class _MediaQueue:
    """The media of a row, assigned in order to the marks in its texts."""

    def __init__(self, media: Mapping[MediaKind, list[Media]], folder: Path) -> None:
        self.given = {kind: len(items) for kind, items in media.items()}
        self.taken = dict.fromkeys(media, 0)
        self.folder = folder
        self._left = {kind: iter(items) for kind, items in media.items()}

    def next(self, kind: MediaKind) -> Media:
        """Return the next item; if none is left, a placeholder, so that `check` can report both numbers."""
        self.taken[kind] += 1
        return next(self._left[kind], Media(kind, None))

    def split_text(self, text: Any) -> Content:
        """Replace the marks in a text by media; a line break beside a mark becomes a part of its own."""
        if not isinstance(text, str):
            raise SampleError(f"a text is a {type(text).__name__} ({str(text)[:40]!r}), expected a string")
        found: list[str | Media] = []
        end = 0
        for mark in _MARK.finditer(text):
            found += _split_line_breaks(text[end : mark.start()], before=end > 0, after=True)
            found.append(self.next(_MARKS[mark.group()]))
            end = mark.end()
        found += _split_line_breaks(text[end:], before=end > 0, after=False)
        return tuple(part for part in found if part != "")

    def check(self) -> None:
        """Refuse a row whose texts have more or fewer marks than there are media."""
        for kind, given in self.given.items():
            if self.taken[kind] != given:
                raise SampleError(
                    f"the text has {self.taken[kind]} <{kind}> for {given} {kind}s; expected one for each"
                )


def _split_line_breaks(text: str, before: bool, after: bool) -> list[str]:
    """Split off the line breaks that separate a text from the marks before and after it."""
    first = ["\n"] if before and text.startswith("\n") else []
    last = ["\n"] if after and text[len(first) :].endswith("\n") else []
    return [*first, text[len(first) : len(text) - len(last)], *last]


def _read_turns(row: Row, media: _MediaQueue, column: str, role: str, content: str) -> Parsed:
    turns = row[column]
    if not turns:
        raise SampleError(f"`{column}` is empty")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or role not in turn or content not in turn:
            found = sorted(map(str, turn)) if isinstance(turn, Mapping) else type(turn).__name__
            raise SampleError(f"a turn of `{column}` has {found}, expected `{role}` and `{content}`")
        if turn[role] not in _ROLES:
            raise SampleError(f"a turn of `{column}` has the role {turn[role]!r}, expected one of {list(_ROLES)}")
        if isinstance(turn[content], str) and "<video>" in turn[content]:
            raise SampleError(_VIDEO)
        messages.append(Message(_ROLES[turn[role]], _read_content(turn[content], media)))
    media.check()
    return tuple(messages), ()


def _read_content(content: Any, media: _MediaQueue) -> Content:
    if not isinstance(content, list | tuple):
        return media.split_text(content)
    parts: list[str | Media] = []
    for part in content:
        kind: Any = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            parts += media.split_text(part.get("text"))
        elif kind == "video":
            raise SampleError(_VIDEO)
        elif kind in get_args(MediaKind):
            inline = part.get(kind, part.get("path"))
            parts.append(media.next(kind) if inline is None else _read_media(kind, inline, media.folder))
        else:
            raise SampleError(f"a part of a message is {str(part)[:60]!r}, expected type text, image or audio")
    return tuple(parts)


def _read_text(row: Row, media: _MediaQueue) -> Parsed:
    document = media.split_text(row["text"])
    media.check()
    if not document:
        raise SampleError("`text` is empty")
    return (), document


def _read_pair(row: Row, media: _MediaQueue) -> Parsed:
    question, answer = next(pair for pair in _PAIRS if set(pair) <= set(row))
    asked = media.split_text(row[question]) if question in ("source", "text") else ()
    for kind, given in media.given.items():
        if not media.taken[kind]:  # media without marks come first
            asked = (*(media.next(kind) for _ in range(given)), *asked)
    media.check()
    if not asked:
        raise SampleError(f"`{question}` is empty")
    if row[answer] is None or row[answer] == "":
        raise SampleError(f"`{answer}` is empty")
    return (Message("user", asked), Message("assistant", (str(row[answer]),))), ()


_PAIRS = [
    ("source", "target"), ("text", "label"), ("image", "label"), ("audio", "label"), ("image", "text"),
    ("audio", "text"),
]  # fmt: skip


@dataclass(frozen=True)
class _RowFormat:
    expected: str
    fits: Callable[[Row], bool]
    read: Callable[[Row, _MediaQueue], Parsed]


# In the order of detection.
_ROW_FORMATS: dict[str, _RowFormat] = {
    "llava": _RowFormat(
        "`conversations` with `from` and `value`",
        lambda row: isinstance(row.get("conversations"), list),
        lambda row, media: _read_turns(row, media, "conversations", "from", "value"),
    ),
    "sharegpt": _RowFormat(
        "`messages` with `role` and `content`",
        lambda row: isinstance(row.get("messages"), list),
        lambda row, media: _read_turns(row, media, "messages", "role", "content"),
    ),
    "pairs": _RowFormat(
        " or ".join(f"`{a}` and `{b}`" for a, b in _PAIRS),
        lambda row: any(set(pair) <= set(row) for pair in _PAIRS),
        _read_pair,
    ),
    "text": _RowFormat("`text`", lambda row: isinstance(row.get("text"), str), _read_text),
    # Any fields, for a model built by a Python function. Never detected: every row would fit.
    "rows": _RowFormat("any fields", lambda row: True, lambda row, media: ((), ())),
}
_DETECTED = tuple(name for name in _ROW_FORMATS if name != "rows")
