"""One row of a file, a plain dictionary, into a sample. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from cornstarch.train.data.sample import Content, Media, MediaKind, Message, Role, Sample, SampleError

Row = Mapping[str, Any]

# By kind: the names under which a row may hold its media.
MEDIA_COLUMNS: dict[MediaKind, tuple[str, ...]] = {"image": ("image", "images"), "audio": ("audio", "audios")}
_VIDEO_COLUMNS = ("video", "videos")
_MEDIA_NAMES = frozenset(name for names in MEDIA_COLUMNS.values() for name in names)
MARKS: dict[str, MediaKind] = {"<image>": "image", "<audio>": "audio"}
_VIDEO_MARK = "<video>"
_MARK = re.compile("|".join(MARKS))
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")
_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}


def sample_of(row: Any, format: str, id: str, media_folder: Path) -> Sample:
    """Read one row in the given format."""
    if not isinstance(row, Mapping):
        raise SampleError(f"is a {type(row).__name__}, expected an object with named fields")
    if not _LAYOUTS[format].fits(row):
        raise SampleError(f"has the fields {sorted(map(str, row))}, expected {format}: {_LAYOUTS[format].expected}")
    if format == "rows" and _MEDIA_NAMES.isdisjoint(row):  # nothing to read: ready numbers, by the thousand per second
        return Sample(id, fields=dict(row))
    if format != "rows" and any(row.get(column) for column in _VIDEO_COLUMNS):
        raise _video()
    media = {kind: list(_media_of(row, kind, media_folder)) for kind in MEDIA_COLUMNS}
    messages, document = _LAYOUTS[format].read(row, _Supply(media, media_folder))
    return Sample(id, messages, document, _fields(row, media))


def detect(row: Any) -> str | None:
    """Return the name of the format that a row fits, or None."""
    if not isinstance(row, Mapping):
        return None
    return next((name for name in GUESSED if _LAYOUTS[name].fits(row)), None)


def describe_formats() -> str:
    """Say what a row may look like."""
    return "; ".join(f"{name}: {_LAYOUTS[name].expected}" for name in GUESSED)


# ------------------------------------------------------------------------------------------------ media


def _media_of(row: Row, kind: MediaKind, folder: Path) -> Iterator[Media]:
    for column in MEDIA_COLUMNS[kind]:
        value = row.get(column)
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None:
                yield as_media(kind, one, folder)


def as_media(kind: MediaKind, value: Any, folder: Path) -> Media:
    """Return a medium with its path resolved against the folder."""
    if isinstance(value, Media):
        return value
    if isinstance(value, Mapping) and "bytes" in value:  # as Hugging Face datasets hold files
        value = value["bytes"] if value["bytes"] is not None else value.get("path")
    if isinstance(value, str | os.PathLike):
        return Media(kind, _resolved(os.fspath(value), kind, folder))
    if value is None or isinstance(value, int | float):
        raise SampleError(f"{kind} is {value!r}, expected a path")
    return Media(kind, value)


def _resolved(path: str, kind: MediaKind, folder: Path) -> str:
    if not path or "\0" in path:
        raise SampleError(f"{kind} is {path!r}, expected a path")
    if _URL.match(path):
        raise SampleError(f"{kind} {path!r} is an address; download it and give a path")
    if os.path.isabs(path):
        return path
    if os.path.normpath(path).split(os.sep)[0] == os.pardir:
        raise SampleError(f"{kind} {path!r} leaves the media folder {folder}; set `media` or give an absolute path")
    return str(folder / path)


class _Supply:
    """A row's media, handed out in order to the marks in its texts."""

    def __init__(self, media: Mapping[MediaKind, list[Media]], folder: Path) -> None:
        self.given = {kind: len(items) for kind, items in media.items()}
        self.asked = dict.fromkeys(media, 0)
        self.folder = folder
        self._left = {kind: iter(items) for kind, items in media.items()}

    def next(self, kind: MediaKind) -> Media:
        """Return the next medium; a missing one is told by `check`, with both numbers."""
        self.asked[kind] += 1
        return next(self._left[kind], Media(kind, None))

    def parts(self, text: Any) -> Content:
        """Return a text with its marks replaced by media; a line break beside a mark is a part of its own."""
        if not isinstance(text, str):
            raise SampleError(f"a text is a {type(text).__name__} ({str(text)[:40]!r}), expected a string")
        found: list[str | Media] = []
        end = 0
        for mark in _MARK.finditer(text):
            found += [*_apart(text[end : mark.start()], before=end > 0, after=True), self.next(MARKS[mark.group()])]
            end = mark.end()
        found += _apart(text[end:], before=end > 0, after=False)
        return tuple(part for part in found if part != "")

    def check(self) -> None:
        """Refuse a row whose texts have more or fewer marks than there are media."""
        for kind, given in self.given.items():
            if self.asked[kind] != given:
                raise SampleError(
                    f"the text has {self.asked[kind]} <{kind}> for {given} {kind}s; expected one for each"
                )


def _fields(row: Row, media: Mapping[MediaKind, list[Media]]) -> dict[str, Any]:
    """Return the row with its media as `Media`: one as it is, several as a list."""
    fields = dict(row)
    for kind, columns in MEDIA_COLUMNS.items():
        items = iter(media[kind])
        for column in columns:
            value = row.get(column)
            if isinstance(value, list | tuple):
                fields[column] = [next(items) for one in value if one is not None]
            elif value is not None:
                fields[column] = next(items)
    return fields


def _video() -> SampleError:
    return SampleError("has a video; models are trained on images and sounds: give frames of it as images")


def _apart(text: str, before: bool, after: bool) -> list[str]:
    """Return a text and the line breaks that set it apart from marks before and after it, if there are marks."""
    first = ["\n"] if before and text.startswith("\n") else []
    last = ["\n"] if after and text[len(first) :].endswith("\n") else []
    return [*first, text[len(first) : len(text) - len(last)], *last]


# ------------------------------------------------------------------------------------------------ formats


def _read_turns(row: Row, supply: _Supply, column: str, role: str, content: str) -> tuple[Message, ...]:
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
        if isinstance(turn[content], str) and _VIDEO_MARK in turn[content]:
            raise _video()
        messages.append(Message(_ROLES[turn[role]], _read_content(turn[content], supply)))
    supply.check()
    return tuple(messages)


def _read_content(content: Any, supply: _Supply) -> Content:
    """Read a text with marks, or a list of parts with types."""
    if not isinstance(content, list | tuple):
        return supply.parts(content)
    parts: list[str | Media] = []
    for part in content:
        kind: Any = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            parts += supply.parts(part.get("text"))
        elif kind == "video":
            raise _video()
        elif kind in get_args(MediaKind):
            inline = part.get(kind, part.get("path"))
            parts.append(supply.next(kind) if inline is None else as_media(kind, inline, supply.folder))
        else:
            raise SampleError(f"a part of a message is {str(part)[:60]!r}, expected type text, image or audio")
    return tuple(parts)


def _read_llava(row: Row, supply: _Supply) -> tuple[tuple[Message, ...], Content]:
    return _read_turns(row, supply, "conversations", "from", "value"), ()


def _read_sharegpt(row: Row, supply: _Supply) -> tuple[tuple[Message, ...], Content]:
    return _read_turns(row, supply, "messages", "role", "content"), ()


def _read_text(row: Row, supply: _Supply) -> tuple[tuple[Message, ...], Content]:
    document = supply.parts(row["text"])
    supply.check()
    if not document:
        raise SampleError("`text` is empty")
    return (), document


def _read_pair(row: Row, supply: _Supply) -> tuple[tuple[Message, ...], Content]:
    question, answer = _pair(row)
    asked = supply.parts(row[question]) if question in ("source", "text") else ()
    for kind, given in supply.given.items():
        if not supply.asked[kind]:  # a medium that no text places comes first
            asked = (*(supply.next(kind) for _ in range(given)), *asked)
    supply.check()
    if not asked:
        raise SampleError(f"`{question}` is empty")
    if row[answer] is None or row[answer] == "":
        raise SampleError(f"`{answer}` is empty")
    return (Message("user", asked), Message("assistant", (str(row[answer]),))), ()


def _pair(row: Row) -> tuple[str, str]:
    return next(pair for pair in _PAIRS if set(pair) <= set(row))


_PAIRS = [
    ("source", "target"),
    ("text", "label"),
    ("image", "label"),
    ("audio", "label"),
    ("image", "text"),
    ("audio", "text"),
]


@dataclass(frozen=True)
class _Layout:
    """One format of rows."""

    expected: str
    fits: Callable[[Row], bool]
    read: Callable[[Row, _Supply], tuple[tuple[Message, ...], Content]]


# In the order in which they are tried.
_LAYOUTS: dict[str, _Layout] = {
    "llava": _Layout(
        "`conversations` with `from` and `value`", lambda row: isinstance(row.get("conversations"), list), _read_llava
    ),
    "sharegpt": _Layout(
        "`messages` with `role` and `content`", lambda row: isinstance(row.get("messages"), list), _read_sharegpt
    ),
    "pairs": _Layout(
        " or ".join(f"`{a}` and `{b}`" for a, b in _PAIRS),
        lambda row: any(set(pair) <= set(row) for pair in _PAIRS),
        _read_pair,
    ),
    "text": _Layout("`text`", lambda row: isinstance(row.get("text"), str), _read_text),
    # Whatever fields there are, for a model made by a Python function; never guessed.
    "rows": _Layout("any fields", lambda row: True, lambda row, supply: ((), ())),
}
GUESSED = tuple(name for name in _LAYOUTS if name != "rows")
