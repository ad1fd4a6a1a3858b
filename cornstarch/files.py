"""Files that can be trusted: synced to the disk, listed with their checksums, and never outside their folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from cornstarch.errors import ConfigError

Manifest = dict[str, dict[str, Any]]
"""By file name: its `size` and `sha256`."""

_MOST_LAYERS = 10_000
_HASH_THREADS = min(8, os.cpu_count() or 1)  # hashing leaves the interpreter lock; more threads wait for the disk


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, at once or not at all: a reader finds the old content or the new one, also after a power cut."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        # Anew: in a folder that somebody else has made, this name could be a link to a file elsewhere.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def check_manifest(path: Path, files: object) -> None:
    """Refuse a list of files, read from `path`, that is malformed or could lead out of the folder."""
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    ):
        raise ConfigError(f"{path} is damaged: it has no list of files. Restore the folder from a copy.")
    for name in files:
        check_inside(path, name)


def check_inside(source: Path, name: object) -> None:
    """Refuse a file name, read from `source`, that could lead out of the folder."""
    pure = PurePosixPath(name) if isinstance(name, str) else None
    if pure is None or pure.is_absolute() or not pure.parts or ".." in pure.parts or "\\" in str(name):
        raise ConfigError(f"{source} names the file {name!r}, which does not lie in the model's folder: refused.")


def check_weight_files(folder: Path) -> None:
    """Refuse a folder whose index of weights names files outside of it, before a library reads them."""
    for path in sorted(folder.glob("*.index.json")):
        content = parse_json(path, path.read_bytes())
        names = content.get("weight_map") if isinstance(content, dict) else None
        for name in set(names.values()) if isinstance(names, dict) else ():
            check_inside(path, name)


def check_layer_count(source: str, config: Mapping[str, Any]) -> None:
    """Refuse the config of a model, read from `source`, with more layers than any model has: they are built one by one.

    Other sizes that are too large are refused by the memory.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_layer_count(source, value)
        elif isinstance(value, int) and value > _MOST_LAYERS and ("layers" in key or "depth" in key):
            raise ConfigError(f"{source}: {key} = {value:.3g}; expected at most {_MOST_LAYERS:,}.")


def parse_json(path: Path, content: bytes | str) -> Any:
    """Return the JSON of a file; ConfigError if it is none, or nested deeper than Python can follow."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: it is not JSON ({error}).") from error


@contextmanager
def as_config_errors(start: str) -> Iterator[None]:
    """Turn whatever a library raises over files that somebody else may have written into one ConfigError.

    Its text is `start` and what was raised. A library that expects its own files fails on others in any way.
    A ConfigError stays as it is.
    """
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"{start}{kind}{error}") from error


def open_regular(path: Path, flags: int) -> int:
    """Open a file of a run for writing and return its descriptor; a link in its place is refused.

    Somebody else may have made the folder, and the link would lead to a file elsewhere.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link, and is not written to. Delete it, or use another folder.") from error
        raise


def file_digests(folder: Path, names: list[str]) -> dict[str, str]:
    """Return the SHA-256 of files of a folder, by name."""

    def digest(name: str) -> str:
        try:
            with open(folder / name, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"{folder / name} cannot be read ({error}).") from error

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def own_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a description, leaving out the one that it states itself."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def find_damaged_weights(folder: Path) -> str:
    """Return what is wrong with the first safetensors file of a folder that cannot be read; "" if nothing."""
    # Only headers are read: how long a file must be is written there.
    for path in sorted(folder.glob("*.safetensors")):
        if problem := _damage(path):
            return f"{path.name} {problem}"
    return ""


def _damage(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            return "is a pointer of Git LFS, not the weights. Fetch them: git lfs pull."
        length = int.from_bytes(start[:8], "little")
        if size < 8 + length:
            return f"is cut off: it has {size:,} bytes, too few for its own header. Copy or download the file again."
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
            expected = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return "is damaged: its header cannot be read. Copy or download the file again."
    if size < expected:
        return f"is cut off: it has {size:,} of {expected:,} bytes. Copy or download the file again."
    return ""
