"""JSON, JSONL, WebDataset tars and Hugging Face datasets, with random access to rows. No torch."""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from cornstarch.data.json_index import read_separators
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


def open_json(path: Path) -> Rows:
    """Open a JSON list or JSONL; the first character says which."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    if b"\0" in head:
        begins = f"it begins with {head[:4]!r}, as UTF-16 and UTF-32 do"
        raise ConfigError(f"{path} is no UTF-8: {begins}. Convert it, for example with `iconv -f UTF-16 -t UTF-8`.")
    start = head.removeprefix(_BOM).lstrip()[:1]
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
        self._opened_as = self._state()

    def __getstate__(self) -> dict[str, Any]:
        """Drop the descriptor: it belongs to this process."""
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        if self._file is not None and os is not None:  # modules are gone when the interpreter ends
            os.close(self._file)

    def _state(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:  # reading it says why
            return None
        return status.st_size, status.st_mtime_ns

    def read(self, start: int, size: int) -> bytes:
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            piece = os.pread(self._file, size, start)
        except OSError as error:
            raise SampleError(f"{self.path} cannot be read: {error.strerror}") from error
        if len(piece) < size:
            raise SampleError(f"{self.path} has become shorter since it was opened")
        return piece

    def parse(self, start: int, end: int) -> Any:
        """Return the JSON value between two offsets."""
        try:
            return _parse_json(self.read(start, end - start))
        except SampleError as error:
            if self._state() == self._opened_as:
                raise
            said = f"{self.path} has changed since it was opened, and its rows are not where they were: a row {error}."
            raise ConfigError(f"{said} Start again, and leave files alone that a run reads.") from error


class JsonLines:
    """A JSONL file. Opening only searches for line ends: a million rows take a moment."""

    def __init__(self, path: Path) -> None:
        self._file = _RandomAccessFile(path)
        found, position = [np.empty(0, np.int64)], 0
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + position)
                position += len(chunk)
        ends = np.concatenate(found)
        if not len(ends) or ends[-1] != position - 1:
            ends = np.append(ends, position)  # the last line has no line break
        starts = np.concatenate([[0], ends[:-1] + 1])
        kept = np.flatnonzero(ends > starts)
        # Only lines of one or two characters are read to see whether they are blank.
        short = kept[ends[kept] - starts[kept] <= 2]
        blank = [n for n in short if not self._file.read(int(starts[n]), int(ends[n] - starts[n])).strip()]
        kept = np.setdiff1d(kept, np.array(blank, dtype=np.int64), assume_unique=True)
        self._starts, self._ends, self._lines = starts[kept], ends[kept], kept + 1

    def __len__(self) -> int:
        return len(self._starts)

    def name(self, index: int) -> str:
        return f"{self._file.path.name}:{self._lines[index]}"

    def __getitem__(self, index: int) -> Any:
        return self._file.parse(int(self._starts[index]), int(self._ends[index]))


def _parse_json(content: bytes) -> Any:
    try:
        value = json.loads(content.removeprefix(_BOM).decode())
        if b"\\ud" in content or b"\\uD" in content:  # halves of characters; no tokenizer takes one without the other
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError as error:
        raise SampleError("is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise SampleError(f"has half of a character, {error.object[error.start]!r}, without its other half") from error
    except ValueError as error:  # invalid UTF-8 is one, too
        raise SampleError(f"is no JSON: {error}") from error


class JsonList:
    """A JSON list. Opening only searches for the ends of its rows; each is read and parsed when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file = _RandomAccessFile(path)
        self._separators = read_separators(path)

    def __len__(self) -> int:
        return len(self._separators) - 1

    def name(self, index: int) -> str:
        return f"{self._file.path.name}:{index + 1}"

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self._file.parse(int(self._separators[index]) + 1, int(self._separators[index + 1]))


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


# ------------------------------------------------------------------------------------------------ Hugging Face

# The arguments of a source that is a dataset, beside `columns`; `open_table` refuses `streaming` with the reason.
ARGUMENTS = ("split", "name", "revision", "labels", "streaming")

_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_TABLES = (".parquet", ".arrow", ".csv")  # JSON is read without the library unless `format: datasets` asks for it
_SAVED, _SAVED_SPLITS = ("state.json", "dataset_info.json"), "dataset_dict.json"
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


def is_table(path: str) -> bool:
    """Recognize a dataset by the suffix of its path or by the files in its folder."""
    if path.lower().endswith(_TABLES):
        return True
    folder = Path(path)
    return folder.is_dir() and (_is_saved(folder) or any(folder.glob("*.parquet")) or any(folder.glob("*/*.parquet")))


def _is_saved(folder: Path) -> bool:
    return (folder / _SAVED_SPLITS).is_file() or all((folder / name).is_file() for name in _SAVED)


class TableRows:
    """Rows of a `datasets.Dataset`, whose table stays on disk; media paths are relative to `folder`."""

    def __init__(self, table: Any, name: str, found: str, folder: Path, named_labels: bool = True) -> None:
        self.found, self.folder = found, folder
        self._name = name
        self._table = table.with_format("arrow")  # media stay bytes or paths: decoders need further packages
        kinds = {column: getattr(feature, "names", None) for column, feature in table.features.items()}
        self._labels = {column: names for column, names in kinds.items() if names} if named_labels else {}
        # Arrow returns arrays of several dimensions as nested lists.
        self._arrays = {column: f.dtype for column, f in table.features.items() if hasattr(f, "shape")}

    def __len__(self) -> int:
        return len(self._table)

    def name(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = self._table[index].to_pylist()[0]
        except Exception as error:  # Arrow may raise anything for a damaged file; only this row is lost
            raise SampleError(f"cannot be read: {type(error).__name__}: {error}") from error
        for column, names in self._labels.items():
            number = row[column]
            row[column] = names[number] if number is not None and 0 <= number < len(names) else None
        for column, dtype in self._arrays.items():
            row[column] = None if row[column] is None else np.asarray(row[column], dtype)
        return row


def wrap_dataset(given: Any, name: str) -> TableRows | None:
    """Return the rows of a dataset built in Python; None for other objects, and for datasets with a format set."""
    library = sys.modules.get("datasets")
    if library is None:
        return None
    if isinstance(given, library.IterableDataset | library.IterableDatasetDict):
        raise _streaming_error(name)
    if isinstance(given, library.Dataset) and given.format["type"] is None:
        return TableRows(given, name, "Hugging Face dataset", Path())
    return None


def open_table(path: str, arguments: Mapping[str, Any]) -> TableRows:
    """Open a dataset: a folder written by `save_to_disk`, files, a folder of files, or a name on the hub."""
    if arguments.get("streaming"):
        raise _streaming_error(path)
    labels = arguments.get("labels", "names")
    if labels not in ("names", "numbers"):
        raise ConfigError(f"{path}: arguments.labels = {labels!r}, expected names or numbers.")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{path} is a Hugging Face dataset, but the library cannot be imported: {error}.\n"
            "  Install it with `pip install datasets`."
        ) from error
    table, split, found, folder = _load(datasets, path, arguments)
    if not len(table):
        raise ConfigError(f"{path} is empty: the dataset has no rows.")
    name = Path(path).name + (f"[{split}]" if split is not None else "")
    in_words = f"Hugging Face dataset, {found}" + (f", split {split}" if split is not None else "")
    return TableRows(table, name, in_words, folder, labels == "names")


def _streaming_error(path: str) -> ConfigError:
    return ConfigError(
        f"{path}: a streaming dataset has no row numbers, and without them a run can be neither shuffled nor resumed "
        "exactly.\n  Leave `streaming` out: the table is kept on the disk and not in memory."
    )


def _load(library: ModuleType, path: str, arguments: Mapping[str, Any]) -> tuple[Any, str | None, str, Path]:
    """Return the table, its split if it has any, its description, and the folder of its media."""
    place, split = Path(path), arguments.get("split")
    if place.is_dir() and _is_saved(place):
        _check_arguments(path, arguments, ("split",), "a folder written by save_to_disk")
        if not any(place.rglob("*.arrow")):
            raise ConfigError(
                f"{path} has no .arrow files: the dataset that was saved there is empty, or they are gone."
            )
        with _report_failure(path):
            loaded = library.load_from_disk(path)
        return *_select_split(library, path, loaded, split), "saved by save_to_disk", place
    if glob.has_magic(path) or place.is_file():
        _check_arguments(path, arguments, (), "files, which are one table")
        files = sorted(glob.glob(path)) if glob.has_magic(path) else [path]
        if not files:
            raise ConfigError(f"{path} matches no file (looked in {Path.cwd()}).")
        suffixes = sorted({Path(file).suffix.lower() for file in files})
        builder, *others = {_BUILDERS.get(suffix) for suffix in suffixes}
        if others or builder is None:
            raise ConfigError(
                f"{path}: its files end in {', '.join(suffixes)}; expected one of {', '.join(_BUILDERS)}."
            )
        with _report_failure(path):
            table = library.load_dataset(builder, data_files=files)["train"]
        return table, None, f"{len(files)} {builder} file{'s' if len(files) > 1 else ''}", Path(files[0]).parent
    if place.is_dir():
        _check_arguments(path, arguments, ("split", "name"), "a folder of files")
        with _report_failure(path):
            loaded = library.load_dataset(path, arguments.get("name"), split=split)
        return *_select_split(library, path, loaded, split), "a folder of files", place
    if not _HUB_NAME.match(path) or path.lower().endswith(tuple(_BUILDERS)):
        raise ConfigError(f"{path} does not exist (looked in {Path.cwd()}).")
    if split is None:
        raise ConfigError(
            f"{path} is no file or folder here (looked in {Path.cwd()}). If it is a dataset of the Hugging Face hub, "
            "say which split: `arguments: {split: train}`."
        )
    try:
        with _report_failure(path, (ConnectionError, FileNotFoundError)):
            table = library.load_dataset(path, arguments.get("name"), split=split, revision=arguments.get("revision"))
    except (ConnectionError, FileNotFoundError) as error:  # no network, or no such dataset
        raise ConfigError(
            f"{path} is no file or folder here (looked in {Path.cwd()}), and the Hugging Face hub does not give it: "
            f"{_first_line(error)}.\n  Without a network: store it where there is one, with "
            "`load_dataset(…).save_to_disk(folder)`, and give the folder."
        ) from error
    return table, split, "from the hub", Path()


def _check_arguments(path: str, arguments: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    unknown = [name for name in ("split", "name", "revision") if arguments.get(name) is not None and name not in known]
    if unknown:
        raise ConfigError(f"{path} is {what}: arguments has {', '.join(unknown)}, expected {known or 'none'} of them.")


def _select_split(library: ModuleType, path: str, loaded: Any, split: str | None) -> tuple[Any, str | None]:
    """Return the table of a split and its name; a dataset with a single split needs no name."""
    if isinstance(loaded, library.DatasetDict):
        names = list(loaded)
        split = names[0] if split is None and len(names) == 1 else split
        if split not in names:
            raise ConfigError(
                f"{path} has the splits {', '.join(names)}; arguments.split = {split or 'null'}. Say which: "
                f"`arguments: {{split: {names[0] if names else '…'}}}`."
            )
        return loaded[split], split
    if split is not None and loaded.split is not None and str(loaded.split) != split:
        raise ConfigError(f"{path} is the split {loaded.split} alone; arguments.split = {split}. Leave `split` out.")
    return loaded, split


@contextmanager
def _report_failure(path: str, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn any exception of the library into ConfigError, except those in `but`."""
    try:
        yield
    except but:
        raise
    except Exception as error:
        root = error.__cause__ or error  # "An error occurred while generating the dataset" says nothing
        raise ConfigError(
            f"{path} cannot be opened as a Hugging Face dataset: {type(root).__name__}: {_first_line(root)}."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")
