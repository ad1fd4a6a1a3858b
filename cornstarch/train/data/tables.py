"""Hugging Face datasets: folders that they saved, tables in files, names on the hub. No torch.

Images and sounds are not decoded by the library, whose decoders need other libraries: a row has their bytes or paths.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cornstarch.errors import ConfigError
from cornstarch.train.data.sample import SampleError

ARGUMENTS = ("split", "name", "revision", "labels")
"""What a source may say about a dataset, beside `columns`."""

_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_TABLES = (".parquet", ".arrow", ".csv")  # JSON is read without the library, unless it is asked for
_SAVED, _SAVED_SPLITS = ("state.json", "dataset_info.json"), "dataset_dict.json"
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


def is_table(path: str) -> bool:
    """Say whether a path is that of a dataset, as far as its name and its folder tell."""
    if path.lower().endswith(_TABLES):
        return True
    folder = Path(path)
    return folder.is_dir() and (_is_saved(folder) or any(folder.glob("*.parquet")) or any(folder.glob("*/*.parquet")))


def _is_saved(folder: Path) -> bool:
    return (folder / _SAVED_SPLITS).is_file() or all((folder / name).is_file() for name in _SAVED)


class TableRows:
    """Rows of a dataset by number; the table stays on the disk, and other processes open it themselves.

    Args:
        table: A `datasets.Dataset`.
        name: What its rows are called, before their number.
        found: What it is, in words.
        folder: What the paths in it are relative to.
        named_labels: Give the names of labels and not their numbers.
    """

    def __init__(self, table: Any, name: str, found: str, folder: Path, named_labels: bool = True) -> None:
        self.found, self.folder = found, folder
        self._name = name
        self._table = table.with_format("arrow")
        kinds = {column: getattr(feature, "names", None) for column, feature in table.features.items()}
        self._labels = {column: names for column, names in kinds.items() if names} if named_labels else {}
        # Arrays of several dimensions, which would come as lists in lists.
        self._arrays = {column: f.dtype for column, f in table.features.items() if hasattr(f, "shape")}

    def __len__(self) -> int:
        return len(self._table)

    def name(self, index: int) -> str:
        """Return dataset and row."""
        return f"{self._name}:{index + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = self._table[index].to_pylist()[0]
        except Exception as error:  # a file that is damaged or gone: whatever Arrow raises, only this row is lost
            raise SampleError(f"cannot be read: {type(error).__name__}: {error}") from error
        for column, names in self._labels.items():
            number = row[column]
            row[column] = names[number] if number is not None and 0 <= number < len(names) else None
        for column, dtype in self._arrays.items():
            row[column] = None if row[column] is None else np.asarray(row[column], dtype)
        return row


def as_rows(given: Any, name: str) -> TableRows | None:
    """Return the rows of a dataset that was made in Python; None if it is something else, or has its own format."""
    library = sys.modules.get("datasets")
    if library is None:
        return None
    if isinstance(given, library.IterableDataset | library.IterableDatasetDict):
        raise _streaming(name)
    if isinstance(given, library.Dataset) and given.format["type"] is None:
        return TableRows(given, name, "Hugging Face dataset", Path())
    return None


def open_table(path: str, arguments: Mapping[str, Any]) -> TableRows:
    """Open a dataset: a folder written by `save_to_disk`, files, a folder of files, or a name on the hub."""
    if arguments.get("streaming"):
        raise _streaming(path)
    split, labels = arguments.get("split"), arguments.get("labels", "names")
    if labels not in ("names", "numbers"):
        raise ConfigError(f"{path}: arguments.labels = {labels!r}, expected names or numbers.")
    table, split, found, folder = _opened(_library(path), path, split, arguments)
    if not len(table):
        raise ConfigError(f"{path} is empty: the dataset has no rows.")
    name = Path(path).name + (f"[{split}]" if split is not None else "")
    in_words = f"Hugging Face dataset, {found}" + (f", split {split}" if split is not None else "")
    return TableRows(table, name, in_words, folder, labels == "names")


def _streaming(path: str) -> ConfigError:
    return ConfigError(
        f"{path}: a streaming dataset has no row numbers, and without them a run can be neither shuffled nor resumed "
        "exactly.\n  Leave `streaming` out: the table is kept on the disk and not in memory."
    )


def _library(path: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{path} is a Hugging Face dataset, but the library cannot be imported: {error}.\n"
            "  Install it with `pip install datasets`."
        ) from error
    return datasets


Opened = tuple[Any, str | None, str, Path]
"""The table, its split if it has any, what it is, and what paths in it are relative to."""


def _opened(library: ModuleType, path: str, split: str | None, arguments: Mapping[str, Any]) -> Opened:
    place = Path(path)
    if place.is_dir() and _is_saved(place):
        _expect(path, arguments, ("split",), "a folder written by save_to_disk")
        if not any(place.rglob("*.arrow")):
            raise ConfigError(
                f"{path} has no .arrow files: the dataset that was saved there is empty, or they are gone."
            )
        loaded = _tried(path, lambda: library.load_from_disk(path))
        return *_one_split(library, path, loaded, split), "saved by save_to_disk", place
    if glob.has_magic(path) or place.is_file():
        _expect(path, arguments, (), "files, which are one table")
        return _open_files(library, path)
    if place.is_dir():
        _expect(path, arguments, ("split", "name"), "a folder of files")
        loaded = _tried(path, lambda: library.load_dataset(path, arguments.get("name"), split=split))
        return *_one_split(library, path, loaded, split), "a folder of files", place
    if not _HUB_NAME.match(path) or path.lower().endswith(tuple(_BUILDERS)):
        raise ConfigError(f"{path} does not exist (looked in {Path.cwd()}).")
    return _open_from_hub(library, path, split, arguments), split, "from the hub", Path()


def _expect(path: str, arguments: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    unknown = [name for name in ("split", "name", "revision") if arguments.get(name) is not None and name not in known]
    if unknown:
        raise ConfigError(f"{path} is {what}: arguments has {', '.join(unknown)}, expected {known or 'none'} of them.")


def _open_files(library: ModuleType, path: str) -> Opened:
    files = sorted(glob.glob(path)) if glob.has_magic(path) else [path]
    if not files:
        raise ConfigError(f"{path} matches no file (looked in {Path.cwd()}).")
    suffixes = sorted({Path(file).suffix.lower() for file in files})
    if len({_BUILDERS.get(suffix) for suffix in suffixes}) != 1 or suffixes[0] not in _BUILDERS:
        raise ConfigError(f"{path}: its files end in {', '.join(suffixes)}; expected one of {', '.join(_BUILDERS)}.")
    builder = _BUILDERS[suffixes[0]]
    table = _tried(path, lambda: library.load_dataset(builder, data_files=files)["train"])
    return table, None, f"{len(files)} {builder} file{'s' if len(files) > 1 else ''}", Path(files[0]).parent


def _open_from_hub(library: ModuleType, path: str, split: str | None, arguments: Mapping[str, Any]) -> Any:
    if split is None:
        raise ConfigError(
            f"{path} is no file or folder here (looked in {Path.cwd()}). If it is a dataset of the Hugging Face hub, "
            "say which split: `arguments: {split: train}`."
        )
    name, revision = arguments.get("name"), arguments.get("revision")
    try:
        return library.load_dataset(path, name, split=split, revision=revision)
    except (ConnectionError, FileNotFoundError) as error:  # no network, or no such dataset
        raise ConfigError(
            f"{path} is no file or folder here (looked in {Path.cwd()}), and the Hugging Face hub does not give it: "
            f"{_first_line(error)}.\n  Without a network: store it where there is one, with "
            "`load_dataset(…).save_to_disk(folder)`, and give the folder."
        ) from error
    except Exception as error:
        raise _failure(path, error) from error


def _one_split(library: ModuleType, path: str, loaded: Any, split: str | None) -> tuple[Any, str | None]:
    """Return the table of a split, and its name; without splits, or with one only, it need not be said."""
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


def _tried(path: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # the library raises whatever it meets in damaged files
        raise _failure(path, error) from error


def _failure(path: str, error: Exception) -> ConfigError:
    root = error.__cause__ or error  # "An error occurred while generating the dataset" says nothing
    return ConfigError(
        f"{path} cannot be opened as a Hugging Face dataset: {type(root).__name__}: {_first_line(root)}."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")


__all__ = ["ARGUMENTS", "TableRows", "as_rows", "is_table", "open_table"]
