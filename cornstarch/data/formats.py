"""Data sources: files, tars, Hugging Face datasets, functions; `register_data_source` adds a format. No torch."""

from __future__ import annotations

import glob
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from cornstarch.config import SourceConfig
from cornstarch.config.user_code import import_named
from cornstarch.data import file_formats
from cornstarch.data.file_formats import ARGUMENTS, Rows
from cornstarch.data.sample import Sample, SampleError, describe_formats, detect_format, parse_row
from cornstarch.errors import ConfigError
from cornstarch.plan.data_options import REGISTERED

_INSPECTED_ROWS = 20  # for detecting the row format
_FUNCTION = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")


class DataSource(Protocol):
    """Samples by index. Reading one may raise SampleError."""

    @property
    def description(self) -> str:
        """Path, format and number of samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def name(self, index: int) -> str:
        """Return file and row of a sample, even if it cannot be read."""


class RowSource:
    def __init__(self, rows: Rows, format: str, media: Path, origin: str, columns: Mapping[str, str]) -> None:
        self.format, self.media = format, media
        self._rows, self._columns, self._origin = rows, dict(columns), origin

    @property
    def description(self) -> str:
        return f"{self._origin}, {self.format}, {len(self):,} samples"

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        return self._rows.name(index)

    def __getitem__(self, index: int) -> Sample:
        row = self._rows[index]
        if isinstance(row, Sample):  # from a Python function
            return row
        return parse_row(_rename_columns(row, self._columns), self.format, self.name(index), self.media)


class SourceView:
    """Some samples of a source, by their indices there."""

    def __init__(self, source: DataSource, indices: Sequence[int], note: str) -> None:
        self._source, self._indices = source, indices
        self.description = f"{source.description}, {note}"

    def __len__(self) -> int:
        return len(self._indices)

    def name(self, index: int) -> str:
        return self._source.name(self._indices[index])

    def __getitem__(self, index: int) -> Sample:
        return self._source[self._indices[index]]


class JoinedSources:
    """Several sources, one after the other, with one index over all."""

    def __init__(self, sources: Sequence[DataSource]) -> None:
        self.sources = list(sources)
        self._starts = list(accumulate(self.lengths, initial=0))

    @property
    def lengths(self) -> list[int]:
        return [len(source) for source in self.sources]

    @property
    def description(self) -> str:
        return "\n".join(source.description for source in self.sources)

    def __len__(self) -> int:
        return self._starts[-1]

    def _locate(self, index: int) -> tuple[DataSource, int]:
        number = bisect_right(self._starts, index) - 1
        return self.sources[number], index - self._starts[number]

    def name(self, index: int) -> str:
        source, place = self._locate(index)
        return source.name(place)

    def __getitem__(self, index: int) -> Sample:
        source, place = self._locate(index)
        return source[place]


OpenSource = Callable[[SourceConfig, Sequence[Any] | None], DataSource]
"""(config of the source, rows given in Python or None) -> source."""
Matches = Callable[[SourceConfig], bool]

_SOURCE_FORMATS: dict[str, tuple[OpenSource, Matches]] = {}
_FALLBACK = "json"


def register_data_source(format_name: str, open: OpenSource, matches: Matches = lambda config: False) -> None:
    """Add a format of data sources.

    Args:
        format_name: The value of `format` that selects it.
        open: Opens a source; `open_rows` builds one from rows of a known row format.
        matches: Recognizes sources of this format, mostly by `path`, where `format` does not name one. Formats are
            tried in the order of registration; JSON comes last.
    """
    if format_name in _SOURCE_FORMATS:
        raise ConfigError(f"A data source of the format {format_name!r} is registered already; use another name.")
    _SOURCE_FORMATS[format_name] = (open, matches)
    REGISTERED["data_format"].add(format_name)


def open_sources(configs: Sequence[SourceConfig], given: Sequence[Any] | None = None) -> JoinedSources:
    """Open all sources, and report every one that fails; `given` are the rows of a source of the format `given`."""
    opened: list[DataSource] = []
    problems: list[str] = []
    for config in configs:
        try:
            opened.append(open_source(config, given))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return JoinedSources(opened)


def open_source(config: SourceConfig, given: Sequence[Any] | None = None) -> DataSource:
    """Open one source; its row format is detected from the first rows unless `format` names one."""
    name: str = config.format
    if name not in _SOURCE_FORMATS:
        name = next((name for name, (_, matches) in _SOURCE_FORMATS.items() if matches(config)), _FALLBACK)
    open, _ = _SOURCE_FORMATS[name]
    source = open(config, given)
    if config.limit is None:
        return source
    count = min(config.limit, len(source))
    return SourceView(source, range(count), f"first {count:,} used")


def open_rows(
    config: SourceConfig, rows: Rows | list[Any], found: str, folder: Path | None = None, arguments: Sequence[str] = ()
) -> RowSource:
    """Return a source of rows that are in one of the row formats.

    Args:
        config: The config of the source.
        rows: Read by index; a list will do.
        found: What the source is, for its description.
        folder: The folder that media paths are relative to. Default: the folder of `path`.
        arguments: The names that `arguments` may have beside `columns`.
    """
    columns = _check_columns(config, arguments)
    rows = _PythonRows(rows, "row ") if isinstance(rows, list) else rows
    is_named = config.format != "auto" and config.format not in _SOURCE_FORMATS
    format = config.format if is_named else _detect_rows(rows, columns, config.path)
    media = Path(config.media) if config.media is not None else folder or Path(config.path).parent
    return RowSource(rows, format, media, f"{config.path}: {found}", columns)


def _check_columns(config: SourceConfig, arguments: Sequence[str]) -> Mapping[str, str]:
    columns = config.arguments.get("columns", {})
    unknown = sorted(set(config.arguments) - {"columns", *arguments})
    if unknown or not isinstance(columns, Mapping):
        named = [name for name in arguments if name != "streaming"]  # refused by `open_table`, with the reason
        beside = f" and {', '.join(named)}" if named else ""
        raise ConfigError(
            f"{config.path}: arguments has {unknown or columns!r}; for a {'dataset' if beside else 'file'} expected "
            f"only `columns: {{name of ours: name in the file}}`{beside}."
        )
    return columns


def _rename_columns(row: Any, columns: Mapping[str, str]) -> Any:
    if isinstance(row, tuple) and len(row) == 2:  # torch's datasets return pairs
        row = {"inputs": row[0], "labels": row[1]}
    if not columns or not isinstance(row, Mapping):
        return row
    missing = [column for column in columns.values() if column not in row]
    if missing:
        raise SampleError(f"has the fields {sorted(map(str, row))}, but `columns` names {missing}")
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return {**others, **{name: row[column] for name, column in columns.items()}}


def _detect_rows(rows: Rows, columns: Mapping[str, str], origin: str) -> str:
    problems: list[str] = []
    for index in range(min(len(rows), _INSPECTED_ROWS)):
        try:
            row = _rename_columns(rows[index], columns)
        except SampleError as error:
            problems.append(f"{rows.name(index)} {error}")
            continue
        format = detect_format(row)
        if format is not None:
            return format
        found = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        problems.append(f"{rows.name(index)} has {found}")
    raise ConfigError(
        f"{origin}: none of the first {len(problems)} rows fits a format: {'; '.join(problems[:3])}. Expected one of: "
        f"{describe_formats()}. Other names can be given with `arguments: {{columns: {{…}}}}`."
    )


def _check_file(path: str) -> Path:
    found = Path(path)
    if not found.exists():
        raise ConfigError(f"{path} does not exist (looked in {Path.cwd()}).")
    if not found.is_file():
        raise ConfigError(
            f"{path} is no file; expected a JSON list, JSONL, tars, `package.module:function`, or a folder "
            "of parquet files or written by `save_to_disk`."
        )
    return found


def _open_tars(config: SourceConfig, given: Sequence[Any] | None) -> DataSource:
    found: list[Path] = []
    for name in map(str, file_formats.expand_braces(config.path)):
        matches = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        if not matches:
            raise ConfigError(f"{name} matches no file (looked in {Path.cwd()}).")
        found += map(_check_file, matches)
    return open_rows(config, file_formats.TarRows(found), "WebDataset tars")


def _open_table(config: SourceConfig, given: Sequence[Any] | None) -> DataSource:
    _check_columns(config, ARGUMENTS)  # before a download that may take long
    table = file_formats.open_table(config.path, config.arguments)
    return open_rows(config, table, table.found, table.folder, ARGUMENTS)


class _PythonRows:
    """Rows, or samples, from a Python sequence."""

    def __init__(self, rows: Sequence[Any], prefix: str) -> None:
        self._rows, self._prefix = rows, prefix

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        return f"{self._prefix}{index + 1}"

    def __getitem__(self, index: int) -> Any:
        try:
            return self._rows[index]
        except Exception as error:  # the user's code may raise anything; only this sample is lost
            raise SampleError(f"{type(error).__name__}: {error}") from error


def _wrap_rows(config: SourceConfig, given: Sequence[Any] | None, origin: str) -> DataSource:
    if given is None:
        raise ConfigError(f"{config.path}: its format is `given`, but no data was handed to the Trainer.")
    rows: Rows = file_formats.wrap_dataset(given, config.path) or _PythonRows(given, f"{config.path}:")
    if not len(rows):
        raise ConfigError(f"{config.path} returned nothing; expected samples or rows.")
    try:
        first = rows[0]
    except SampleError:
        first = None
    # Rows of any fields are for the user's own model, which alone knows what they mean.
    format = "samples" if isinstance(first, Sample) else detect_format(_rename_columns(first, {})) or "rows"
    media = Path(config.media) if config.media is not None else Path()
    return RowSource(rows, format, media, f"{config.path}: {origin}", {})


def _open_callable(config: SourceConfig, given: Sequence[Any] | None) -> DataSource:
    if not _FUNCTION.match(config.path):
        raise ConfigError(f"{config.path!r} is no function; expected `package.module:function`.")
    function = import_named(config.path, config.path)
    if not callable(function):
        raise ConfigError(f"{config.path} is a {type(function).__name__}, expected a function.")
    try:
        found = function(**config.arguments)
    except Exception as error:
        raise ConfigError(f"{config.path} failed: {type(error).__name__}: {error}.") from error
    file_formats.wrap_dataset(found, config.path)  # refuses a stream, which `list` would read to its end
    if not (hasattr(found, "__len__") and hasattr(found, "__getitem__") and not isinstance(found, Mapping)):
        if not isinstance(found, Iterable) or isinstance(found, Mapping | str):
            raise ConfigError(f"{config.path} returned a {type(found).__name__}, expected samples or rows.")
        found = list(found)
    return _wrap_rows(config, found, "function")


register_data_source(
    "webdataset", _open_tars, matches=lambda config: config.format == "auto" and config.path.endswith(".tar")
)
register_data_source("datasets", _open_table, matches=lambda config: file_formats.is_table(config.path))
register_data_source(
    "callable",
    _open_callable,
    lambda config: config.format == "auto" and bool(_FUNCTION.match(config.path)) and not Path(config.path).exists(),
)
register_data_source("given", lambda config, given: _wrap_rows(config, given, "given in Python"))
# JSON is what is left when no format is named and none matches; it has no name of its own.
_SOURCE_FORMATS[_FALLBACK] = (
    lambda config, given: open_rows(config, file_formats.open_json(_check_file(config.path)), "JSON"),
    lambda config: False,
)
