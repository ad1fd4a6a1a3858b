"""The files of a checkpoint: safetensors that say which parts of tensors they hold, and JSON.

A file holds whole tensors under their names. A part of a tensor has a key of its own, and the file's metadata says
whose part it is: `{"parameters/w[4:8,0:3]": ["parameters/w", [8, 3], [4, 0]]}` is the name, the shape of the whole, and
where the part begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from cornstarch import __version__
from cornstarch.errors import ConfigError
from cornstarch.files import Manifest, own_digest
from cornstarch.train.checkpoint.pieces import Box, Piece

T = TypeVar("T")

FORMAT = 1
MANIFEST = "checkpoint.json"
DATA = "data.json"

FILE_BYTES = 2**30  # files are written and hashed beside each other: at most so large
_LEAST_BYTES = 2**26  # and not so small that there are many for nothing
WRITERS = min(8, os.cpu_count() or 1)

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip

FOLDER_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
LEFTOVER_NAME = re.compile(r"step_\d{8,}(?:\.\d+)?\.tmp\.[0-9a-f]+")
_RANK_NAME = re.compile(r"rank-(\d+)-tensors-\d+\.safetensors")

_TORCH_TYPES = {name: dtype for dtype, name in DTYPES.items()}
_PIECES = "pieces"


def prefix_of(rank: int, size: int) -> str:
    """Return how the names of a process's files begin."""
    return "tensors" if size == 1 else f"rank-{rank:04d}-tensors"


def file_rank(name: str) -> int:
    """Return the process that wrote a file of tensors."""
    named = _RANK_NAME.fullmatch(name)
    return 0 if named is None else int(named[1])


# ---------------------------------------------------------------------------------------------------- writing


def write_pieces(folder: Path, prefix: str, pieces: Iterable[Piece], writers: int | None = None) -> Manifest:
    """Write parts of tensors to as many files as they need, so many at a time, and return their entries."""
    portions = {f"{prefix}-{n:05d}.safetensors": portion for n, portion in enumerate(_portions(pieces), start=1)}
    return side_by_side(
        lambda name: write_file(folder / name, _safetensors(portions[name])), list(portions), writers or WRITERS
    )


def write_description(folder: Path, files: Manifest, description: Mapping[str, Any]) -> None:
    """Write what makes a folder a checkpoint: the list of its files."""
    content = {"format": FORMAT, **description, "versions": versions(), "files": files}
    content["sha256"] = own_digest(content)
    write_file(folder / MANIFEST, [serialized(content)])


def check_written(folder: Path, files: Manifest) -> None:
    """Read files again, and refuse them if they are not what was written."""
    for name, digest in side_by_side(lambda name: _digest(folder / name), list(files), WRITERS).items():
        if digest != files[name]["sha256"]:
            raise ConfigError(
                f"A checkpoint was not saved, because other bytes are read than were written ({folder / name}: the "
                f"SHA-256 is {digest[:16]}…, but {files[name]['sha256'][:16]}… was written). What was saved before is "
                "untouched. Check the disk, or choose another one."
            )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def side_by_side(work: Callable[[str], T], names: Sequence[str], threads: int) -> dict[str, T]:
    """Return the results of work by name, done in several threads; the first failure is raised.

    Like a pool, but for use while the interpreter ends and waits for a save in the background: it ends pools first.
    """
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in names:
        waiting.put(name)
    results: dict[str, T] = {}
    failures: list[BaseException] = []

    def run() -> None:
        while not failures:
            try:
                name = waiting.get_nowait()
            except Empty:
                return
            try:
                results[name] = work(name)
            except BaseException as error:
                failures.append(error)

    others = [Thread(target=run) for _ in range(min(threads, len(names)) - 1)]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    if failures:
        raise failures[0]
    return {name: results[name] for name in names}


def write_file(path: Path, pieces: Iterator[bytes | memoryview] | Sequence[bytes]) -> dict[str, Any]:
    """Write a file to the disk and return its entry in the manifest; it is hashed on its way."""
    digest, size = hashlib.sha256(), 0
    file: BinaryIO
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _portions(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Cut into files; wide numbers first, because readers need each tensor at a multiple of its own width."""
    ordered = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name, piece.box.offsets))
    most = min(FILE_BYTES, max(_LEAST_BYTES, sum(piece.nbytes for piece in ordered) // WRITERS))
    portion: list[Piece] = []
    size = 0
    for piece in ordered:
        if portion and size + piece.nbytes > most:
            yield portion
            portion, size = [], 0
        portion.append(piece)
        size += piece.nbytes
    if portion:
        yield portion


def _safetensors(pieces: Sequence[Piece]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file; of tensors elsewhere only one at a time is on the CPU."""
    keys = _keys(pieces)
    cut = {
        key: [piece.name, list(piece.shape), list(piece.box.offsets)]
        for key, piece in keys.items()
        if not piece.is_whole
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **({_PIECES: json.dumps(cut)} if cut else {})}}
    end = 0
    for key, piece in keys.items():
        begin, end = end, end + piece.nbytes
        header[key] = {"dtype": DTYPES[piece.dtype], "shape": list(piece.box.sizes), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for piece in pieces:
        yield piece.load().detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _keys(pieces: Sequence[Piece]) -> dict[str, Piece]:
    taken = {piece.name for piece in pieces if piece.is_whole}
    keys: dict[str, Piece] = {}
    for piece in pieces:
        key = piece.name if piece.is_whole else f"{piece.name}{piece.box}"
        while not piece.is_whole and (key in taken or key in keys):
            key += "_"
        assert key not in keys, key
        keys[key] = piece
    return keys


def serialized(content: Mapping[str, Any]) -> bytes:
    """Return a description as its file has it, byte for byte."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def versions() -> dict[str, str]:
    """Return what a checkpoint is written with."""
    return {"cornstarch": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]}


# ---------------------------------------------------------------------------------------------------- reading


class StoredPiece:
    """A part of a tensor in a file that is open."""

    def __init__(self, handle: Any, key: str, name: str, shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
        self._handle, self._key = handle, key
        self._slice = handle.get_slice(key)
        self.name = name
        self.box = Box(offsets, tuple(self._slice.get_shape()))
        self.shape = shape
        self.dtype: torch.dtype = _TORCH_TYPES[self._slice.get_dtype()]

    def read(self, box: Box) -> torch.Tensor:
        """Return some of its numbers, reading no others."""
        if box == self.box:
            whole: torch.Tensor = self._handle.get_tensor(self._key)
            return whole
        some: torch.Tensor = self._slice[box.within(self.box)]
        return some


def open_pieces(path: Path, enter: Any) -> Iterator[StoredPiece]:
    """Open a file, which `enter` closes again, and yield what it holds."""
    try:
        handle = enter(safe_open(path, framework="pt"))
        cut = json.loads((handle.metadata() or {}).get(_PIECES, "{}"))
        for key in handle.keys():  # noqa: SIM118  (a handle is no mapping)
            if key in cut:
                name, shape, offsets = cut[key]
                yield StoredPiece(handle, key, name, tuple(shape), tuple(offsets))
            else:
                shape = tuple(handle.get_slice(key).get_shape())
                yield StoredPiece(handle, key, key, shape, (0,) * len(shape))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {error}.") from error
