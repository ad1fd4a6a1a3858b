"""Fingerprints of files of data, by which ranks find that they read different ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_WHOLE = 64 * 2**20  # bytes of a file that are read; of a larger one, pieces from all over
_PIECES, _PIECE = 64, 64 * 1024
_FILES = 10_000  # of a folder


def fingerprint_path(path: Path) -> str:
    """Return a fingerprint of a file, or of the names and sizes in a folder and its small files; "" of neither."""
    digest = hashlib.sha256()
    if path.is_file():
        _add_file(digest, path)
    elif path.is_dir():
        left = _WHOLE
        for folder, folders, names in os.walk(path):
            folders.sort()
            for name in sorted(names)[:_FILES]:
                one = Path(folder, name)
                size = one.stat().st_size
                digest.update(f"{one.relative_to(path)} {size}\n".encode())
                if size <= left:
                    _add_file(digest, one)
                    left -= size
    else:
        return ""
    return digest.hexdigest()[:16]


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
            return
        for number in range(_PIECES):
            file.seek((size - _PIECE) * number // (_PIECES - 1))
            digest.update(file.read(_PIECE))


def describe_sources(paths: Sequence[str], lengths: Mapping[str, int]) -> dict[str, str]:
    """Return what a rank says of its data: by path a fingerprint, and how many samples there are."""
    found = {}
    for path in paths:
        try:
            found[path] = fingerprint_path(Path(path))
        except OSError as error:
            found[path] = error.strerror or "unreadable"
    return found | {f"samples of {name}": str(length) for name, length in lengths.items()}
