"""Shards of tensors: which part of a tensor a rank has, how shards fit together, and their files.

A shard is a box: an offset and a size in each dim. Two layouts of a tensor are two partitions of it into boxes, and
resharding copies the intersections. torch's planners know the same boxes, but exchange them as pickled plans.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import add, sub
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cornstarch import __version__
from cornstarch.checkpoint.storage import MANIFEST, LocalStorage, RangeStorage, Storage, run_in_threads
from cornstarch.errors import ConfigError
from cornstarch.files import Manifest, own_digest
from cornstarch.kernels.master_weights import MasterWeight
from cornstarch.parallel.distributed import to_local_tensor


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part; None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(sub, map(min, self.ends, other.ends), offsets))
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that has the values of `outer`."""
        places = zip(self.offsets, self.sizes, outer.offsets, strict=True)
        return tuple(slice(offset - start, offset - start + size) for offset, size, start in places)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(add, self.offsets, self.sizes))

    def __str__(self) -> str:
        return f"[{','.join(f'{start}:{end}' for start, end in zip(self.offsets, self.ends, strict=True))}]"


@dataclass(frozen=True)
class TensorShard:
    """A shard in memory, or in a file."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: torch.dtype
    box: Box
    read: Callable[[Box], Tensor]
    """Returns the values of a box inside of the shard; of a file, nothing else is read."""

    @property
    def is_whole(self) -> bool:
        return self.box.sizes == self.shape

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Sharded:
    """A tensor of which this rank has a shard that the tensor itself does not describe.

    The shard is an interval of the flattened tensor, as in FSDP1; or several boxes, as tensor parallelism makes of
    fused parameters ([query; key; value] of some heads).
    """

    shape: torch.Size
    local: Tensor
    """The values of this rank: the very memory, in any shape; or a DTensor of it."""
    start: int = 0
    """The index of the first local value in the flattened tensor."""
    boxes: tuple[tuple[Box, tuple[slice, ...]], ...] | None = None
    """Instead of an interval: boxes of the whole tensor, each with its place in local memory."""
    divided: torch.Size | None = None
    """The shape of that memory, if ranks divide it further (ZeRO-1): `local` is an interval of it from `start`."""

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def shards(self) -> list[tuple[Box, Tensor]]:
        if self.boxes is not None and self.divided is None:
            memory = to_local_tensor(self.local.detach())
            return [(box, memory[place]) for box, place in self.boxes]
        flat = self.local.detach().reshape(-1)
        boxes = interval_boxes(self.divided or self.shape, self.start, self.start + flat.numel())
        values = flat.split([box.numel for box in boxes]) if boxes else ()
        intervals = [(box, value.view(box.sizes)) for box, value in zip(boxes, values, strict=True)]
        found: list[tuple[Box, Tensor]] = intervals if self.boxes is None else []
        # The boxes of the whole tensor that lie in memory, cut where the interval begins and ends.
        for box, place in self.boxes or ():
            there = Box(tuple(one.start for one in place), box.sizes)
            for interval, value in intervals:
                if (common := interval.intersect(there)) is not None:
                    offsets = map(add, box.offsets, map(sub, common.offsets, there.offsets))
                    found.append((Box(tuple(offsets), common.sizes), value[common.slices_in(interval)]))
        return found

    def with_local(self, local: Tensor) -> Sharded:
        """Return another tensor with the same sharding, such as an optimizer state of this parameter."""
        return replace(self, local=local)


Tensorlike: TypeAlias = Tensor | Sharded | MasterWeight


def local_shards(tensor: Tensorlike) -> list[tuple[Box, Tensor]]:
    """Return the shards of a tensor on this rank; the values are the tensor's own memory."""
    if isinstance(tensor, Sharded):
        return tensor.shards
    if isinstance(tensor, MasterWeight):
        return [(Box.whole(tensor.shape), tensor.read())]
    if not is_sharded(tensor):
        return [(Box.whole(tensor.shape), tensor.detach())]
    # The protocol of torch's own checkpoints: a DTensor knows its box for every placement on every mesh.
    distributed: Any = tensor.detach()
    local = distributed.to_local()
    [chunk] = distributed.__create_chunk_list__()
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    assert tuple(local.shape) == box.sizes, (tuple(local.shape), box)
    return [(box, local)] if box.numel or not tensor.numel() else []


def is_sharded(tensor: Tensorlike) -> bool:
    """Return whether ranks may have different shards of a tensor."""
    return isinstance(tensor, Sharded) or hasattr(tensor, "__create_chunk_list__")


def list_shards(name: str, tensor: Tensorlike) -> list[TensorShard]:
    """Return the shards of a tensor on this rank; without any there is an empty one: nothing is missing then."""
    if isinstance(tensor, MasterWeight):  # read when it is written: one master at a time is in memory
        box = Box.whole(tensor.shape)
        return [TensorShard(name, box.sizes, tensor.dtype, box, lambda part: read_part(tensor.read(), box, part))]
    empty = (Box((0,) * len(tensor.shape), (0, *tensor.shape[1:])), torch.empty(0, dtype=tensor.dtype))
    return [
        TensorShard(name, tuple(tensor.shape), tensor.dtype, box, partial(read_part, values, box))
        for box, values in local_shards(tensor) or [empty]
    ]


def read_part(values: Tensor, whole: Box, part: Box) -> Tensor:
    """Return the values of `part`, given those of `whole`."""
    return values if part == whole else values[part.slices_in(whole)]


def assemble(parts: Iterable[tuple[Box, Callable[[Box], Tensor]]], dtype: torch.dtype, box: Box) -> Tensor:
    """Return the values of a box, which several parts of the tensor have."""
    result = torch.empty(box.sizes, dtype=dtype)
    copy_intersections(box, result, parts)
    return result


def copy_intersections(box: Box, destination: Tensor, parts: Iterable[tuple[Box, Callable[[Box], Tensor]]]) -> None:
    """Fill the values of `box`, `destination`, from parts of the tensor: a part and how to read a box inside of it."""
    missing = box.numel
    for part, read in parts:
        common = box.intersect(part)
        if common is not None:
            destination[common.slices_in(box)].copy_(read(common))
            missing -= common.numel
    assert missing == 0, f"{missing} of {box.numel} values are on other ranks, or missing"


def interval_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Return the boxes, in order, of the values `start` to `end` of a flattened tensor."""
    if start >= end:
        return []
    if not shape:
        return [Box((), ())]
    boxes: list[Box] = []
    row = math.prod(shape[1:])
    while start < end:
        index, inside = divmod(start, row)
        rows = 0 if inside else (end - start) // row
        if rows:
            boxes.append(Box((index, *(0 for _ in shape[1:])), (rows, *shape[1:])))
            start += rows * row
        else:
            stop = min(end, (index + 1) * row)
            for rest in interval_boxes(shape[1:], inside, inside + stop - start):
                boxes.append(Box((index, *rest.offsets), (1, *rest.sizes)))
            start = stop
    return boxes


def is_partition(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether boxes fill a tensor without overlap."""
    if not shape or not math.prod(shape):
        return list(boxes) == [Box.whole(shape)] or (not boxes and 0 in shape[:1])
    # Between two neighbouring borders along the first dim, the same boxes fill the other dims.
    borders = sorted({border for box in boxes for border in (box.offsets[0], box.ends[0])})
    strips: dict[int, list[Box]] = {border: [] for border in borders[:-1]}
    for box in boxes:
        for border in borders[bisect_left(borders, box.offsets[0]) : bisect_left(borders, box.ends[0])]:
            strips[border].append(Box(box.offsets[1:], box.sizes[1:]))
    spans = borders[:1] + borders[-1:] == [0, shape[0]]
    return spans and all(is_partition(shape[1:], rest) for rest in strips.values())


# ---------------------------------------------------------------------------------------------------- files
# A safetensors file has whole tensors under their names. A shard has a key of its own, and the metadata of the file
# maps it to its tensor: `{"parameters/w[4:8,0:3]": ["parameters/w", [8, 3], [4, 0]]}` is the name, the whole shape and
# the offsets.

FORMAT = 1
DATA = "data.json"

FILE_BYTES = 2**30  # the largest file: files are written and hashed in parallel
_MIN_FILE_BYTES = 2**26
_MAX_HEADER_BYTES = 10**8  # as safetensors itself limits it
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
    return "tensors" if size == 1 else f"rank-{rank:04d}-tensors"


def file_rank(name: str) -> int:
    match = _RANK_NAME.fullmatch(name)
    return 0 if match is None else int(match[1])


def write_shards(
    storage: Storage, folder: Path, prefix: str, shards: Iterable[TensorShard], writers: int | None = None
) -> Manifest:
    """Write shards to as many files as they need and return the files' manifest entries."""
    files = {f"{prefix}-{n:05d}.safetensors": file for n, file in enumerate(_split_into_files(shards), start=1)}
    return run_in_threads(
        lambda name: storage.write(folder / name, _FileContent(files[name])), list(files), writers or WRITERS
    )


@dataclass(frozen=True)
class _FileContent:
    """The bytes of a safetensors file, encoded anew each time: a failed upload begins again."""

    shards: Sequence[TensorShard]

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return _encode_safetensors(self.shards)


def write_manifest(storage: Storage, folder: Path, files: Manifest, description: Mapping[str, Any]) -> None:
    """Write the manifest, which makes a folder a checkpoint."""
    versions = {"cornstarch": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]}
    content = {"format": FORMAT, "versions": versions, **description, "files": files}
    content["sha256"] = own_digest(content)
    storage.write(folder / MANIFEST, [encode_manifest(content)])


def encode_manifest(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def check_written(storage: Storage, folder: Path, files: Manifest) -> None:
    """Read files back and refuse them if they are not what was written."""
    for name, digest in run_in_threads(lambda name: storage.confirm(folder / name), list(files), WRITERS).items():
        if digest != files[name]["sha256"]:
            raise ConfigError(
                f"A checkpoint was not saved, because other bytes are read than were written ({folder / name}: the "
                f"SHA-256 is {digest[:16]}…, but {files[name]['sha256'][:16]}… was written). What was saved before is "
                "untouched. Check the disk, or choose another one."
            )


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
        yield shard.read(shard.box).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def open_shards(storage: Storage, path: Path, stack: ExitStack, sha256: str | None = None) -> Iterator[TensorShard]:
    """Open a file, which `stack` closes, and yield its shards."""
    try:
        file = _StoredFile(storage, path, stack, sha256)
        header = file.read_header() if isinstance(storage, RangeStorage) else file.list_tensors()
        parts = json.loads((header.pop("__metadata__", None) or {}).get(_SHARDS_KEY, "{}"))
        for key, stored in header.items():
            sizes, dtype = tuple(stored["shape"]), TORCH_DTYPES[stored["dtype"]]
            name, shape, offsets = parts.get(key, (key, sizes, (0,) * len(sizes)))
            box = Box(tuple(offsets), sizes)
            yield TensorShard(name, tuple(shape), dtype, box, partial(_read_stored, file, key, box))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {error}.") from error


class _StoredFile:
    """A safetensors file. One that is not on this machine is downloaded when a value of it is needed."""

    def __init__(self, storage: Storage, path: Path, stack: ExitStack, sha256: str | None) -> None:
        self._storage, self._path, self._stack, self._sha256 = storage, path, stack, sha256

    def read_header(self) -> dict[str, Any]:
        """Return the header, without the rest of the file."""
        assert isinstance(self._storage, RangeStorage)
        length = int.from_bytes(self._storage.read_range(self._path, 0, 8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        header = json.loads(self._storage.read_range(self._path, 8, 8 + length))
        return {key: header[key] for key in sorted(header)}

    def list_tensors(self) -> dict[str, Any]:
        """Return the header of a file that is here."""
        stored = {key: self.handle.get_slice(key) for key in self.handle.keys()}  # noqa: SIM118  (no mapping)
        tensors = {key: {"shape": one.get_shape(), "dtype": one.get_dtype()} for key, one in stored.items()}
        return {"__metadata__": self.handle.metadata(), **tensors}

    @cached_property
    def handle(self) -> Any:
        """The open file."""
        with self._storage.open_local(self._path) as local:  # a copy is deleted while it is mapped, also by a kill
            if isinstance(self._storage, RangeStorage) and self._sha256 not in (None, LocalStorage().digest(local)):
                raise ConfigError(f"{self._path} was damaged on the way, or after it was verified. Start again.")
            return self._stack.enter_context(safe_open(local, framework="pt"))


def _read_stored(file: _StoredFile, key: str, whole: Box, part: Box) -> Tensor:
    handle = file.handle
    values: Tensor = handle.get_tensor(key) if part == whole else handle.get_slice(key)[part.slices_in(whole)]
    return values
