"""Where samples come from: files, tars, functions; what they are is seen from their first rows. No torch."""

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


def open_sources(configs: Sequence[SourceConfig]) -> JoinedSources:
    """Open all sources; every one that cannot be opened is told, not only the first."""
    opened: list[SampleSource] = []
    problems: list[str] = []
    for config in configs:
        try:
            opened.append(open_source(config))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return JoinedSources(opened)


def open_source(config: SourceConfig) -> SampleSource:
    """Open one source, and tell its format from its rows unless it is given."""
    kind = _kind(config)
    source: SampleSource
    if kind == "callable":
        source = _open_function(config)
    else:
        columns = _columns(config)
        rows = _open_tars(config.path) if kind == "tar" else open_json(_existing(config.path))
        named = config.format if config.format not in ("auto", "webdataset") else None
        format = named or _detected(rows, columns, config.path)
        media = Path(config.media) if config.media is not None else Path(config.path).parent
        source = RowSource(rows, format, media, f"{config.path}: {_KINDS[kind]}", columns)
    return source if config.limit is None else LimitedSource(source, config.limit)


_KINDS = {"tar": "WebDataset tars", "json": "JSON"}


def _kind(config: SourceConfig) -> str:
    if config.format == "callable":
        return "callable"
    if config.format == "webdataset" or (config.format == "auto" and config.path.endswith(".tar")):
        return "tar"
    is_function = _FUNCTION.match(config.path) is not None and not Path(config.path).exists()
    return "callable" if config.format == "auto" and is_function else "json"


def _existing(path: str) -> Path:
    found = Path(path)
    if not found.exists():
        raise ConfigError(f"{path} does not exist (looked in {Path.cwd()}).")
    if not found.is_file():
        raise ConfigError(f"{path} is no file; expected a JSON list, JSONL, tars, or `package.module:function`.")
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


def _columns(config: SourceConfig) -> dict[str, str]:
    unknown = sorted(set(config.arguments) - {"columns"})
    columns = config.arguments.get("columns", {})
    if unknown or not isinstance(columns, Mapping):
        raise ConfigError(
            f"{config.path}: arguments has {unknown or columns!r}; for a file expected only "
            "`columns: {name of ours: name in the file}`."
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
        return sample_of(row, self.format, self.name(index), self.media)


def _open_function(config: SourceConfig) -> SampleSource:
    given = _call(config)
    rows = _GivenRows(given, config.path)
    if not len(rows):
        raise ConfigError(f"{config.path} returned nothing; expected samples or rows.")
    media = Path(config.media) if config.media is not None else Path()
    format = "samples" if isinstance(_first(rows), Sample) else _detected(rows, {}, config.path)
    return GivenSource(rows, format, media, f"{config.path}: function", {})


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
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping):
        return given
    if isinstance(given, Iterable) and not isinstance(given, Mapping | str):
        return list(given)
    raise ConfigError(f"{config.path} returned a {type(given).__name__}, expected samples or rows.")
