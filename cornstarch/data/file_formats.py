"""JSON, JSONL and WebDataset tars with random access to rows. No torch."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cornstarch.data.sample import SampleError
from cornstarch.errors import ConfigError

_CHUNK = 1 << 24
_BOM = b"\xef\xbb\xbf"


class Rows(Protocol):
    """Rows by index. Reading one may raise SampleError."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def name(self, index: int) -> str:
        """Return file and number of a row."""
        ...


def open_json(path: Path) -> Rows:
    """Open a JSON list or JSONL; the first character says which."""
    try:
        with open(path, "rb") as file:
            start = file.read(4096).removeprefix(_BOM).lstrip()[:1]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    if not start:
        raise ConfigError(f"{path} is empty; expected a JSON list or one JSON object per line.")
    if start == b"[":
        return JsonList(path)
    if start == b"{":
        return JsonLines(path)
    raise ConfigError(
        f"{path} starts with {start!r}; expected a JSON list ('[') or one JSON object per line ('{{'), in UTF-8 and "
        "not compressed."
    )


class _RandomAccessFile:
    """A file read by offset (`pread`): forked workers that inherit the descriptor do not move each other's position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the descriptor: it belongs to this process."""
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes from `start`."""
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            piece = os.pread(self._file, size, start)
        except OSError as error:
            raise SampleError(f"{self.path} cannot be read: {error.strerror}") from error
        if len(piece) < size:
            raise SampleError(f"{self.path} has become shorter since it was opened")
        return piece


class JsonLines:
    """A JSONL file. Opening only searches for line ends: a million rows take a moment."""

    def __init__(self, path: Path) -> None:
        self._file = _RandomAccessFile(path)
        ends = _line_ends(path)
        starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        kept = np.flatnonzero(ends > starts)
        # Only lines of one or two characters are read to see whether they are blank.
        short = kept[ends[kept] - starts[kept] <= 2]
        blank = [n for n in short if not self._file.read(int(starts[n]), int(ends[n] - starts[n])).strip()]
        kept = np.setdiff1d(kept, np.array(blank, dtype=np.int64), assume_unique=True)
        self._starts, self._ends, self._lines = starts[kept], ends[kept], kept + 1

    def __len__(self) -> int:
        return len(self._starts)

    def name(self, index: int) -> str:
        """Return file and line."""
        return f"{self._file.path.name}:{self._lines[index]}"

    def __getitem__(self, index: int) -> Any:
        start, end = int(self._starts[index]), int(self._ends[index])
        return _parse_json(self._file.read(start, end - start).removeprefix(_BOM))


def _line_ends(path: Path) -> np.ndarray:
    found: list[np.ndarray] = []
    position = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + position)
            position += len(chunk)
    ends = np.concatenate(found) if found else np.empty(0, np.int64)
    if not len(ends) or ends[-1] != position - 1:
        ends = np.append(ends, position)  # the last line has no line break
    return ends.astype(np.int64)


def _parse_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except RecursionError as error:
        raise SampleError("is nested too deeply") from error
    except ValueError as error:  # invalid UTF-8 is one, too
        raise SampleError(f"is no JSON: {error}") from error


class JsonList:
    """A file with one JSON list, parsed once and kept as one block of bytes.

    Reference counts of Python objects would make every forked worker copy the list, page by page.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            rows = json.loads(path.read_bytes().removeprefix(_BOM))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno} is no JSON: {error.msg} (column {error.colno}).") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is no JSON: {error}.") from error
        if not rows:
            raise ConfigError(f"{path} is empty: it holds a list without rows.")
        pieces = [json.dumps(row).encode() for row in rows]
        self._ends = np.cumsum([len(piece) for piece in pieces])
        self._bytes = np.frombuffer(b"".join(pieces), np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def name(self, index: int) -> str:
        """Return file and row."""
        return f"{self._path.name}:{index + 1}"

    def __getitem__(self, index: int) -> Any:
        start = int(self._ends[index - 1]) if index else 0
        return json.loads(self._bytes[start : int(self._ends[index])].tobytes())


# ------------------------------------------------------------------------------------------------ tars

_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")
_SOUNDS = ("wav", "flac", "mp3", "ogg", "opus", "npy")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_FILES = 100_000


def expand_braces(pattern: str) -> list[Path]:
    """Expand ranges: `data/{000..009}.tar` is ten files."""
    pieces = _RANGE.split(pattern)
    texts, lows, highs = pieces[::3], pieces[1::3], pieces[2::3]
    bounds = [(int(low), int(high), len(low)) for low, high in zip(lows, highs, strict=True)]
    if prod(max(0, high - low + 1) for low, high, _ in bounds) > _MOST_FILES:
        raise ConfigError(f"{pattern} stands for more than {_MOST_FILES:,} files. Is a number too long?")
    ranges = [[f"{n:0{width}d}" for n in range(low, high + 1)] for low, high, width in bounds]
    names = [
        Path("".join(text + number for text, number in zip(texts, (*numbers, ""), strict=True)))
        for numbers in product(*ranges)
    ]
    if not names:
        raise ConfigError(f"{pattern} stands for no file: a range goes from the smaller to the larger number.")
    return names


class TarRows:
    """WebDataset tars: files whose names agree up to the first dot are one sample. Opening only reads headers."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [_RandomAccessFile(path) for path in paths]
        self._samples: list[tuple[int, str, tuple[tuple[str, int, int], ...]]] = []
        for number, path in enumerate(paths):
            self._samples += [(number, key, tuple(members)) for key, members in _read_members(path).items()]
        if not self._samples:
            raise ConfigError(f"{paths[0]} is empty: the tar holds no files.")

    def __len__(self) -> int:
        return len(self._samples)

    def name(self, index: int) -> str:
        """Return tar and key."""
        number, key, _ = self._samples[index]
        return f"{self._files[number].path.name}:{key}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, _, members = self._samples[index]
        row: dict[str, Any] = {}
        media: dict[str, list[bytes]] = {"image": [], "audio": []}
        for extension, start, size in members:
            content = self._files[number].read(start, size)
            kind = extension.rsplit(".", 1)[-1]
            if kind in _IMAGES or kind in _SOUNDS:
                media["image" if kind in _IMAGES else "audio"].append(content)
            elif kind == "json":
                value = _parse_json(content)
                if not isinstance(value, dict):
                    raise SampleError(f"its JSON is a {type(value).__name__}, expected an object")
                row.update(value)
            elif kind in ("txt", "cls"):
                try:
                    row["text" if kind == "txt" else "label"] = content.decode("utf-8").strip()
                except UnicodeDecodeError as error:
                    raise SampleError(f"its text is not UTF-8: {error}") from error
        for name, items in media.items():
            if items:  # the JSON still has the file names from before packing
                row.pop(f"{name}s", None)
                row[name] = items[0] if len(items) == 1 else items
        return row


def _read_members(path: Path) -> dict[str, list[tuple[str, int, int]]]:
    """Return (extension, offset, size) of the files of each sample."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                if member.isfile() and stem:
                    found.setdefault(f"{folder}/{stem}".lstrip("/"), []).append(
                        (extension.lower(), member.offset_data, member.size)
                    )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except tarfile.TarError as error:
        raise ConfigError(
            f"{path} is no plain tar, or is damaged: {error}. Compressed tars must be unpacked."
        ) from error
    return found
