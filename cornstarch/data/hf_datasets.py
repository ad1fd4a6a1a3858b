"""Hugging Face datasets: folders written by `save_to_disk`, files of tables, names on the hub. No torch.

The library does not decode images and sounds, because its decoders need further packages: rows have bytes or paths.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cornstarch.data.sample import SampleError
from cornstarch.errors import ConfigError

ARGUMENTS = ("split", "name", "revision", "labels")
"""The arguments of a source that is a dataset, beside `columns`."""

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
    """Rows of a `datasets.Dataset`; the table stays on disk.

    Args:
        table: The dataset.
        name: The prefix of row names.
        found: The description of the dataset.
        folder: The folder that media paths are relative to.
        named_labels: Return the names of labels instead of their numbers.
    """

    def __init__(self, table: Any, name: str, found: str, folder: Path, named_labels: bool = True) -> None:
        self.found, self.folder = found, folder
        self._name = name
        self._table = table.with_format("arrow")
        kinds = {column: getattr(feature, "names", None) for column, feature in table.features.items()}
        self._labels = {column: names for column, names in kinds.items() if names} if named_labels else {}
        # Arrow returns arrays of several dimensions as nested lists.
        self._arrays = {column: f.dtype for column, f in table.features.items() if hasattr(f, "shape")}

    def __len__(self) -> int:
        return len(self._table)

    def name(self, index: int) -> str:
        """Return dataset and row."""
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
    split, labels = arguments.get("split"), arguments.get("labels", "names")
    if labels not in ("names", "numbers"):
        raise ConfigError(f"{path}: arguments.labels = {labels!r}, expected names or numbers.")
    table, split, found, folder = _load(_import_datasets(path), path, split, arguments)
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


def _import_datasets(path: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{path} is a Hugging Face dataset, but the library cannot be imported: {error}.\n"
            "  Install it with `pip install datasets`."
        ) from error
    return datasets


LoadedTable = tuple[Any, str | None, str, Path]
"""The table, its split if it has any, its description, and the folder of its media."""


def _load(library: ModuleType, path: str, split: str | None, arguments: Mapping[str, Any]) -> LoadedTable:
    place = Path(path)
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
        return _load_files(library, path)
    if place.is_dir():
        _check_arguments(path, arguments, ("split", "name"), "a folder of files")
        with _report_failure(path):
            loaded = library.load_dataset(path, arguments.get("name"), split=split)
        return *_select_split(library, path, loaded, split), "a folder of files", place
    if not _HUB_NAME.match(path) or path.lower().endswith(tuple(_BUILDERS)):
        raise ConfigError(f"{path} does not exist (looked in {Path.cwd()}).")
    return _load_from_hub(library, path, split, arguments), split, "from the hub", Path()


def _check_arguments(path: str, arguments: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    unknown = [name for name in ("split", "name", "revision") if arguments.get(name) is not None and name not in known]
    if unknown:
        raise ConfigError(f"{path} is {what}: arguments has {', '.join(unknown)}, expected {known or 'none'} of them.")


def _load_files(library: ModuleType, path: str) -> LoadedTable:
    files = sorted(glob.glob(path)) if glob.has_magic(path) else [path]
    if not files:
        raise ConfigError(f"{path} matches no file (looked in {Path.cwd()}).")
    suffixes = sorted({Path(file).suffix.lower() for file in files})
    if len({_BUILDERS.get(suffix) for suffix in suffixes}) != 1 or suffixes[0] not in _BUILDERS:
        raise ConfigError(f"{path}: its files end in {', '.join(suffixes)}; expected one of {', '.join(_BUILDERS)}.")
    builder = _BUILDERS[suffixes[0]]
    with _report_failure(path):
        table = library.load_dataset(builder, data_files=files)["train"]
    return table, None, f"{len(files)} {builder} file{'s' if len(files) > 1 else ''}", Path(files[0]).parent


def _load_from_hub(library: ModuleType, path: str, split: str | None, arguments: Mapping[str, Any]) -> Any:
    if split is None:
        raise ConfigError(
            f"{path} is no file or folder here (looked in {Path.cwd()}). If it is a dataset of the Hugging Face hub, "
            "say which split: `arguments: {split: train}`."
        )
    name, revision = arguments.get("name"), arguments.get("revision")
    try:
        with _report_failure(path, (ConnectionError, FileNotFoundError)):
            return library.load_dataset(path, name, split=split, revision=revision)
    except (ConnectionError, FileNotFoundError) as error:  # no network, or no such dataset
        raise ConfigError(
            f"{path} is no file or folder here (looked in {Path.cwd()}), and the Hugging Face hub does not give it: "
            f"{_first_line(error)}.\n  Without a network: store it where there is one, with "
            "`load_dataset(…).save_to_disk(folder)`, and give the folder."
        ) from error


def _select_split(library: ModuleType, path: str, loaded: Any, split: str | None) -> tuple[Any, str | None]:
    """Return the table of a split and its name; a dataset with a single split needs no name."""
    if isinstance(loaded, library.DatasetDict):
        names = list(loaded)
        if split is None and len(names) == 1:
            split = names[0]
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
