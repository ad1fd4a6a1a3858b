"""Safetensors files of shards, and the manifest that lists them.

A file has whole tensors under their names. A shard has a key of its own, and the metadata of the file maps it to its
tensor: `{"parameters/w[4:8,0:3]": ["parameters/w", [8, 3], [4, 0]]}` is the name, the whole shape and the offsets.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from cornstarch import __version__
from cornstarch.checkpoint.shards import Box, TensorShard
from cornstarch.checkpoint.storage import Storage
from cornstarch.errors import ConfigError
from cornstarch.files import Manifest, own_digest

T = TypeVar("T")

FORMAT = 1
MANIFEST = "checkpoint.json"
DATA = "data.json"

FILE_BYTES = 2**30  # the largest file: files are written and hashed in parallel
_MIN_FILE_BYTES = 2**26
WRITERS = min(8, os.cpu_count() or 1)

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

FOLDER_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
LEFTOVER_NAME = re.compile(r"step_\d{8,}(?:\.\d+)?\.tmp\.[0-9a-f]+")
_RANK_NAME = re.compile(r"rank-(\d+)-tensors-\d+\.safetensors")
_SHARDS_KEY = "pieces"  # in the metadata of a file; fixed by the format


def file_prefix(rank: int, size: int) -> str:
    """Return the beginning of the names of a rank's files."""
    return "tensors" if size == 1 else f"rank-{rank:04d}-tensors"


def file_rank(name: str) -> int:
    """Return the rank that wrote a file."""
    match = _RANK_NAME.fullmatch(name)
    return 0 if match is None else int(match[1])


# ---------------------------------------------------------------------------------------------------- writing


def write_shards(
    storage: Storage, folder: Path, prefix: str, shards: Iterable[TensorShard], writers: int | None = None
) -> Manifest:
    """Write shards to as many files as they need and return the files' manifest entries."""
    files = {f"{prefix}-{n:05d}.safetensors": file for n, file in enumerate(_split_into_files(shards), start=1)}
    return run_in_threads(
        lambda name: storage.write(folder / name, _encode_safetensors(files[name])), list(files), writers or WRITERS
    )


def write_manifest(storage: Storage, folder: Path, files: Manifest, description: Mapping[str, Any]) -> None:
    """Write the manifest, which makes a folder a checkpoint."""
    versions = {"cornstarch": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]}
    content = {"format": FORMAT, "versions": versions, **description, "files": files}
    content["sha256"] = own_digest(content)
    storage.write(folder / MANIFEST, [encode_manifest(content)])


def encode_manifest(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest file."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def check_written(storage: Storage, folder: Path, files: Manifest) -> None:
    """Read files back and refuse them if they are not what was written."""
    for name, digest in run_in_threads(lambda name: storage.digest(folder / name), list(files), WRITERS).items():
        if digest != files[name]["sha256"]:
            raise ConfigError(
                f"A checkpoint was not saved, because other bytes are read than were written ({folder / name}: the "
                f"SHA-256 is {digest[:16]}…, but {files[name]['sha256'][:16]}… was written). What was saved before is "
                "untouched. Check the disk, or choose another one."
            )


def run_in_threads(work: Callable[[str], T], names: Sequence[str], threads: int) -> dict[str, T]:
    """Return the results of `work` by name, computed in several threads; the first failure is raised.

    A ThreadPoolExecutor would not do: the interpreter shuts pools down before it waits for a background save.
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


def _split_into_files(shards: Iterable[TensorShard]) -> Iterator[list[TensorShard]]:
    # Wide dtypes first: readers need each tensor aligned to its own width.
    ordered = sorted(shards, key=lambda shard: (-shard.dtype.itemsize, shard.name, shard.box.offsets))
    limit = min(FILE_BYTES, max(_MIN_FILE_BYTES, sum(shard.nbytes for shard in ordered) // WRITERS))
    file: list[TensorShard] = []
    size = 0
    for shard in ordered:
        if file and size + shard.nbytes > limit:
            yield file
            file, size = [], 0
        file.append(shard)
        size += shard.nbytes
    if file:
        yield file


def _encode_safetensors(shards: Sequence[TensorShard]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file; only one tensor at a time is copied to the CPU."""
    whole = {shard.name for shard in shards if shard.is_whole}
    keys: dict[str, TensorShard] = {}
    for shard in shards:
        key = shard.name if shard.is_whole else f"{shard.name}{shard.box}"
        while not shard.is_whole and (key in whole or key in keys):
            key += "_"
        assert key not in keys, key
        keys[key] = shard
    parts = {key: [one.name, one.shape, one.box.offsets] for key, one in keys.items() if not one.is_whole}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **({_SHARDS_KEY: json.dumps(parts)} if parts else {})}}
    end = 0
    for key, shard in keys.items():
        begin, end = end, end + shard.nbytes
        header[key] = {"dtype": DTYPES[shard.dtype], "shape": list(shard.box.sizes), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for shard in shards:
        yield shard.load().detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


# ---------------------------------------------------------------------------------------------------- reading


class StoredShard:
    """A shard in an open file."""

    def __init__(self, handle: Any, key: str, name: str, shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
        self._handle, self._key = handle, key
        self._slice = handle.get_slice(key)
        self.name, self.shape = name, shape
        self.box = Box(offsets, tuple(self._slice.get_shape()))
        self.dtype: torch.dtype = TORCH_DTYPES[self._slice.get_dtype()]

    def read(self, box: Box) -> torch.Tensor:
        """Return the values of a box inside of the shard; no others are read."""
        values: torch.Tensor = (
            self._handle.get_tensor(self._key) if box == self.box else self._slice[box.slices_in(self.box)]
        )
        return values


def open_shards(storage: Storage, path: Path, stack: ExitStack) -> Iterator[StoredShard]:
    """Open a file, which `stack` closes, and yield its shards."""
    try:
        local = stack.enter_context(storage.open_local(path))
        handle = stack.enter_context(safe_open(local, framework="pt"))
        parts = json.loads((handle.metadata() or {}).get(_SHARDS_KEY, "{}"))
        for key in handle.keys():  # noqa: SIM118  (a handle is no mapping)
            if key in parts:
                name, shape, offsets = parts[key]
                yield StoredShard(handle, key, name, tuple(shape), tuple(offsets))
            else:
                shape = tuple(handle.get_slice(key).get_shape())
                yield StoredShard(handle, key, key, shape, (0,) * len(shape))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {error}.") from error
