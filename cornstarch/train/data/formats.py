"""Where samples come from: files, tars, datasets, functions; what they are is seen from their first rows. No torch."""

from __future__ import annotations

import glob
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from cornstarch.errors import ConfigError
from cornstarch.train.config import SourceConfig
from cornstarch.train.data.files import Rows, Tars, expand_braces, open_json
from cornstarch.train.data.rows import describe_formats, detect, sample_of
from cornstarch.train.data.sample import Sample, SampleError
from cornstarch.train.data.tables import ARGUMENTS, as_rows, is_table, open_table

_LOOKED_AT = 20  # rows from which the format is told
_FUNCTION = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")


class SampleSource(Protocol):
    """Samples by number. Reading one may raise SampleError."""

    @property
    def description(self) -> str:
        """What was found."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def name(self, index: int) -> str:
        """Say where a sample stands, also if it cannot be read."""
        ...


class RowSource:
    """Rows of one format."""

    def __init__(self, rows: Rows, format: str, media: Path, origin: str, columns: Mapping[str, str]) -> None:
        self.format, self.media = format, media
        self._rows, self._columns = rows, dict(columns)
        self._origin = origin

    @property
    def description(self) -> str:
        """What was found."""
        return f"{self._origin}, {self.format}, {len(self):,} samples"

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        """Return file and row."""
        return self._rows.name(index)

    def __getitem__(self, index: int) -> Sample:
        return sample_of(_renamed(self._rows[index], self._columns), self.format, self.name(index), self.media)


class LimitedSource:
    """The first samples of a source."""

    def __init__(self, source: SampleSource, limit: int) -> None:
        self._source, self._length = source, min(limit, len(source))

    @property
    def description(self) -> str:
        """What was found, and how much of it is used."""
        return f"{self._source.description}, of which the first {self._length:,}"

    def __len__(self) -> int:
        return self._length

    def name(self, index: int) -> str:
        """Say where a sample stands."""
        return self._source.name(index)

    def __getitem__(self, index: int) -> Sample:
        return self._source[index]


class JoinedSources:
    """Several sources, one after the other, counted through."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self.sources = list(sources)
        self._starts = list(accumulate((len(source) for source in self.sources), initial=0))

    @property
    def lengths(self) -> list[int]:
        """Samples of each source."""
        return [len(source) for source in self.sources]

    @property
    def description(self) -> str:
        """What was found, a line for each source."""
        return "\n".join(source.description for source in self.sources)

    def __len__(self) -> int:
        return self._starts[-1]

    def _place(self, index: int) -> tuple[SampleSource, int]:
        number = bisect_right(self._starts, index) - 1
        return self.sources[number], index - self._starts[number]

    def name(self, index: int) -> str:
        """Say where a sample stands."""
        source, place = self._place(index)
        return source.name(place)

    def __getitem__(self, index: int) -> Sample:
        source, place = self._place(index)
        return source[place]


def open_sources(configs: Sequence[SourceConfig], given: Sequence[Any] | None = None) -> JoinedSources:
    """Open all sources; every one that cannot be opened is told, not only the first.

    `given` are the rows or samples of a source of the format `given`.
    """
    opened: list[SampleSource] = []
    problems: list[str] = []
    for config in configs:
        try:
            opened.append(open_source(config, given))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return JoinedSources(opened)


def open_source(config: SourceConfig, given: Sequence[Any] | None = None) -> SampleSource:
    """Open one source, and tell its format from its rows unless it is given."""
    kind = _kind(config)
    source: SampleSource
    if kind == "given":
        if given is None:
            raise ConfigError(f"{config.path}: its format is `given`, but no data was handed to the Trainer.")
        source = _given(config, given, "given in Python")
    elif kind == "callable":
        source = _given(config, _call(config), "function")
    else:
        source = _open_rows(config, kind)
    return source if config.limit is None else LimitedSource(source, config.limit)


def _open_rows(config: SourceConfig, kind: str) -> SampleSource:
    columns, folder = _columns(config, kind), Path(config.path).parent
    rows: Rows
    if kind == "table":
        rows = table = open_table(config.path, config.arguments)
        found, folder = table.found, table.folder
    elif kind == "tar":
        rows, found = _open_tars(config.path), "WebDataset tars"
    else:
        rows, found = open_json(_existing(config.path)), "JSON"
    named = config.format if config.format not in ("auto", "webdataset", "datasets") else None
    format = named or _detected(rows, columns, config.path)
    media = Path(config.media) if config.media is not None else folder
    return RowSource(rows, format, media, f"{config.path}: {found}", columns)


def _kind(config: SourceConfig) -> str:
    if config.format in ("callable", "given"):
        return config.format
    if config.format == "webdataset" or (config.format == "auto" and config.path.endswith(".tar")):
        return "tar"
    if config.format == "datasets" or is_table(config.path):
        return "table"
    is_function = _FUNCTION.match(config.path) is not None and not Path(config.path).exists()
    return "callable" if config.format == "auto" and is_function else "json"


def _existing(path: str) -> Path:
    found = Path(path)
    if not found.exists():
        raise ConfigError(f"{path} does not exist (looked in {Path.cwd()}).")
    if not found.is_file():
        raise ConfigError(
            f"{path} is no file; expected a JSON list, JSONL, tars, `package.module:function`, or a folder "
            "of parquet files or written by `save_to_disk`."
        )
    return found


def _open_tars(pattern: str) -> Tars:
    paths = [path for name in expand_braces(pattern) for path in _globbed(str(name))]
    return Tars(paths)


def _globbed(name: str) -> list[Path]:
    if not glob.has_magic(name):
        return [_existing(name)]
    found = sorted(glob.glob(name))
    if not found:
        raise ConfigError(f"{name} matches no file (looked in {Path.cwd()}).")
    return [_existing(one) for one in found]


def _columns(config: SourceConfig, kind: str) -> dict[str, str]:
    known = {*ARGUMENTS, "streaming"} if kind == "table" else set()
    unknown = sorted(set(config.arguments) - {"columns"} - known)
    columns = config.arguments.get("columns", {})
    if unknown or not isinstance(columns, Mapping):
        beside = f" and {', '.join(ARGUMENTS)}" if kind == "table" else ""
        raise ConfigError(
            f"{config.path}: arguments has {unknown or columns!r}; for a {'dataset' if beside else 'file'} expected "
            f"only `columns: {{name of ours: name in the file}}`{beside}."
        )
    return dict(columns)


def _renamed(row: Any, columns: Mapping[str, str]) -> Any:
    if not columns or not isinstance(row, Mapping):
        return row
    missing = [column for column in columns.values() if column not in row]
    if missing:
        raise SampleError(f"has the fields {sorted(map(str, row))}, but `columns` names {missing}")
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return {**others, **{name: row[column] for name, column in columns.items()}}


def _detected(rows: Rows, columns: Mapping[str, str], origin: str) -> str:
    """Return the format that the first readable row fits."""
    problems: list[str] = []
    for index in range(min(len(rows), _LOOKED_AT)):
        try:
            row = _renamed(rows[index], columns)
        except SampleError as error:
            problems.append(f"{rows.name(index)} {error}")
            continue
        format = detect(row)
        if format is not None:
            return format
        found = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        problems.append(f"{rows.name(index)} has {found}")
    raise ConfigError(
        f"{origin}: none of the first {len(problems)} rows fits a format: {'; '.join(problems[:3])}. Expected one of: "
        f"{describe_formats()}. Other names can be given with `arguments: {{columns: {{…}}}}`."
    )


# ------------------------------------------------------------------------------------------------ functions


class _GivenRows:
    """Rows, or samples, that a function returned."""

    def __init__(self, rows: Sequence[Any], origin: str) -> None:
        self._rows, self._origin = rows, origin

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        """Return function and number."""
        return f"{self._origin}:{index + 1}"

    def __getitem__(self, index: int) -> Any:
        try:
            return self._rows[index]
        except Exception as error:  # the user's code: whatever it was, only this sample is lost
            raise SampleError(f"{type(error).__name__}: {error}") from error


class GivenSource(RowSource):
    """What a function returned: rows of one format, or samples."""

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        if isinstance(row, Sample):
            return row
        return sample_of(_named(row), self.format, self.name(index), self.media)


def _named(row: Any) -> Any:
    """Return a row with names; pairs are what torch's data sets are made of."""
    return {"inputs": row[0], "labels": row[1]} if isinstance(row, tuple) and len(row) == 2 else row


def _given(config: SourceConfig, given: Sequence[Any], origin: str) -> SampleSource:
    rows: Rows = as_rows(given, config.path) or _GivenRows(given, config.path)
    if not len(rows):
        raise ConfigError(f"{config.path} returned nothing; expected samples or rows.")
    media = Path(config.media) if config.media is not None else Path()
    first = _first(rows)
    # Rows of any fields are for the user's own model, which alone knows what they mean.
    format = "samples" if isinstance(first, Sample) else detect(_named(first)) or "rows"
    return GivenSource(rows, format, media, f"{config.path}: {origin}", {})


def _first(rows: Rows) -> Any:
    try:
        return rows[0]
    except SampleError:
        return None


def _call(config: SourceConfig) -> Sequence[Any]:
    module, _, name = config.path.partition(":")
    if not _FUNCTION.match(config.path):
        raise ConfigError(f"{config.path!r} is no function; expected `package.module:function`.")
    try:
        function = import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{config.path} cannot be imported: {error}.") from error
    if not callable(function):
        raise ConfigError(f"{config.path} is a {type(function).__name__}, expected a function.")
    try:
        given = partial(function, **config.arguments)()
    except Exception as error:
        raise ConfigError(f"{config.path} failed: {type(error).__name__}: {error}.") from error
    as_rows(given, config.path)  # refuses a stream, which would be read to its end here
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping):
        return given
    if isinstance(given, Iterable) and not isinstance(given, Mapping | str):
        return list(given)
    raise ConfigError(f"{config.path} returned a {type(given).__name__}, expected samples or rows.")
