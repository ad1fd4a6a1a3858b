"""The files of the feature cache: outputs of frozen encoders, one file per item, and their lookup by data workers."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL
import torch
import transformers
from torch import Tensor, nn

from cornstarch import __version__
from cornstarch.checkpoint.shards import DTYPES
from cornstarch.data.media import content_digest
from cornstarch.data.sample import Media
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import CACHED_FEATURES
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.device import DevicePlacement


@dataclass(frozen=True)
class CachedItem:
    """An image or a sound whose features may be in the cache."""

    digest: str
    decoded: Any  # None if the features are cached
    tokens: Tensor | None  # [T, D], the cached features; None: the item must be encoded


def merge_cached_items(
    items: Sequence[CachedItem], inputs: Mapping[str, Any], lengths: Sequence[int]
) -> tuple[dict[str, Any], list[int]]:
    """Add cached features to an encoder's `inputs` for the items that are not cached, and return all items' lengths."""
    fresh_lengths = iter(lengths)
    all_lengths = [next(fresh_lengths) if item.tokens is None else len(item.tokens) for item in items]
    known: dict[str, Any] = {
        "digests": [item.digest for item in items],
        "lengths": all_lengths,
        "is_known": [item.tokens is not None for item in items],
    }
    cached = [item.tokens for item in items if item.tokens is not None]
    if cached:
        known["tokens"] = torch.cat(cached)
    return {**inputs, CACHED_FEATURES: known}, all_lengths


_TENSOR = "features"
_SHORT = 16  # letters of the key in the folder's name; the files have the whole key
_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class FeatureStore:
    """Tensors of tokens [T, D] by the digest of their item, as safetensors; damaged and outdated files are ignored."""

    def __init__(self, space: CacheFolder, key: str) -> None:
        self.space, self.key = space, key
        self.folder = space.folder / key[:_SHORT]

    def path(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.safetensors"

    def item(self, media: Media, decode: Callable[[], Any]) -> CachedItem:
        """Return an item with its features, or decoded if there are none; called in the data workers."""
        digest = content_digest(media)
        tokens = self.load(digest)
        return CachedItem(digest, decode() if tokens is None else None, tokens)

    def load(self, digest: str) -> Tensor | None:
        """Return the features of an item; None if there are none that can be used."""
        path = self.path(digest)
        try:
            with open(path, "rb") as file:
                content = bytearray(file.read())
        except OSError:
            return None
        tokens = self._parse(content, digest)
        if tokens is None:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        _touch(path)
        return tokens

    def save(self, digest: str, tokens: Tensor) -> bool:
        """Store the features of an item, on the CPU; False: they exist already, or there is no space."""
        data = tokens.contiguous().reshape(-1).view(torch.uint8).numpy().data
        about: dict[str, Any] = {"dtype": DTYPES[tokens.dtype], "shape": list(tokens.shape)}
        metadata = {"format": "pt", "key": self.key, "item": digest, "crc32": str(_checksum(about, data))}
        header = {"__metadata__": metadata, _TENSOR: {**about, "data_offsets": [0, len(data)]}}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return self.space.write(self.path(digest), [len(text).to_bytes(8, "little") + text, data])

    def _parse(self, content: bytearray, digest: str) -> Tensor | None:
        """Return the tensor of a file, or None if any byte is damaged."""
        start = 8 + int.from_bytes(content[:8], "little")
        try:
            header = json.loads(content[8:start])
            metadata, entry = header["__metadata__"], header[_TENSOR]
            about = {"dtype": entry["dtype"], "shape": entry["shape"]}
            data = memoryview(content)[start:]
            found = (metadata["key"], metadata["item"], metadata["crc32"], entry["data_offsets"])
            if found != (self.key, digest, str(_checksum(about, data)), [0, len(data)]):
                return None
            flat = torch.frombuffer(content, dtype=_TYPES[entry["dtype"]], offset=start)
            return flat.reshape(entry["shape"])
        except (ValueError, KeyError, TypeError, RuntimeError, RecursionError):  # a damaged header
            return None


def _checksum(about: dict[str, Any], data: memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(json.dumps(about).encode()))


_LOCK, _USED = ".lock", ".used"
_UNFINISHED = ".tmp"
_ABANDONED = 3600.0  # seconds after which an unfinished file belongs to a dead process
_EMPTIED_TO = 0.95  # of the limit: listing every file is slow, so it makes room for more than one


class CacheFolder:
    """A folder of many small files that stay below `limit` bytes in all, with any number of writing processes.

    The sum of all sizes is in a file. Processes change it, make room and rename files one at a time, under a lock; an
    unfinished file has its final size from the start. A process that dies leaves the sum too large, never too small: it
    is recounted whenever the folder is opened, or full.

    The least recently used files make room for others, except files used since `opened` (default: now): epochs are
    cyclic, so the least recently used file of this run is the one needed next.
    """

    def __init__(self, folder: Path, limit: int, opened: float | None = None) -> None:
        self.folder, self.limit = folder, limit
        self._opened = time.time() if opened is None else opened
        self._is_full = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._lock():
                self._write_used(self._count())
        except OSError as error:
            raise ConfigError(
                f"features.folder = {folder}\n  It cannot be written: {error.strerror}. Choose another folder."
            ) from error

    @property
    def used(self) -> int:
        try:
            return int((self.folder / _USED).read_text())
        except (OSError, ValueError):
            return self._count()

    def write(self, path: Path, parts: Sequence[bytes | memoryview]) -> bool:
        """Write a file atomically; False: it exists already, or there is no space."""
        size = sum(len(part) for part in parts)
        if path.exists() or self._is_full or size > self.limit:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}{_UNFINISHED}")
        if not self._reserve(temporary, size):
            return False
        try:
            with open(temporary, "r+b") as file:
                for part in parts:
                    file.write(part)
            with self._lock():
                if not path.exists():  # no other process was faster
                    # No fsync: after a power cut the checksum detects the damage, and the file is written again.
                    os.replace(temporary, path)
                    _touch(path)
                    return True
        except OSError:
            self._release(temporary, size)
            raise
        self._release(temporary, size)
        return False

    def _reserve(self, temporary: Path, size: int) -> bool:
        """Create an unfinished file of the final size, which counts as used; remove older files if necessary."""
        with self._lock():
            used = self.used
            if used + size > self.limit:
                # Remove the least recently used files until the file fits, with some space to spare.
                files = sorted(self._files())
                used = sum(one for _, one, _ in files)
                for last, freed, path in files:
                    if used + size <= self.limit * _EMPTIED_TO or last >= self._opened:
                        break
                    if path.name.endswith(_UNFINISHED):
                        continue
                    with suppress(OSError):  # a process that is reading the file can go on reading
                        path.unlink(missing_ok=True)
                        used -= freed
                self._is_full = used + size > self.limit
            if not self._is_full:
                with open(temporary, "xb") as file:
                    file.truncate(size)
                used += size
            self._write_used(used)
        return not self._is_full

    def _release(self, temporary: Path, size: int) -> None:
        with suppress(OSError), self._lock():
            temporary.unlink(missing_ok=True)
            self._write_used(max(self.used - size, 0))

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with open(self.folder / _LOCK, "a+") as file:  # closing unlocks it, and so does the end of the process
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _write_used(self, used: int) -> None:
        temporary = self.folder / f"{_USED}{_UNFINISHED}"
        temporary.write_text(str(used))
        os.replace(temporary, self.folder / _USED)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield time of last use, size and path of each file; remove abandoned files."""
        for parent, _, names in os.walk(self.folder):
            for path in (Path(parent, name) for name in names):
                if path.parent == self.folder:
                    continue
                try:
                    status = path.stat()
                    if path.name.endswith(_UNFINISHED) and time.time() - status.st_mtime > _ABANDONED:
                        path.unlink()
                        continue
                except OSError:  # another process has removed it
                    continue
                yield status.st_mtime, status.st_size, path

    def _count(self) -> int:
        return sum(size for _, size, _ in self._files())


def _touch(path: Path) -> None:
    now = time.time()  # by this machine's clock, not the file server's
    with suppress(OSError):
        os.utime(path, (now, now))


_FORMAT = 1
_UNIMPORTANT = ("_name_or_path", "transformers_version", "architectures")  # of a config: they change no output


def encoder_key(module: nn.Module, processor: Any, reading: Mapping[str, Any], placement: DevicePlacement) -> str:
    """Return the digest of everything that features depend on beside the item; `reading` are settings of reading it."""
    inner = unwrap(module)
    config: Any = getattr(inner, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else repr(config)
    if isinstance(settings, dict):
        settings = {name: value for name, value in settings.items() if name not in _UNIMPORTANT}
    # A processor may be a container of others, which have the settings.
    parts = [processor, *(getattr(processor, name, None) for name in ("image_processor", "feature_extractor"))]
    processor_settings = [part.to_dict() for part in parts if hasattr(part, "to_dict")]
    if not processor_settings:
        raise ConfigError(
            f"features.cache: a {type(processor).__name__} does not say how it is set (it has no `to_dict`), so "
            "outdated features cannot be detected. Use a processor of transformers, or leave the cache out."
        )
    weights = hashlib.sha256()  # of all parameters and buffers: names, types, shapes and values
    tensors: dict[str, Tensor] = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
    # torch.compile adds a prefix to names.
    for name, tensor in sorted((name.replace("_orig_mod.", ""), tensor) for name, tensor in tensors.items()):
        weights.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    key = {
        "format": _FORMAT,
        "encoder": f"{type(inner).__module__}.{type(inner).__qualname__}",
        "config": settings,
        "attention": getattr(config, "_attn_implementation", None),
        "weights": weights.hexdigest(),
        "processor": f"{type(processor).__module__}.{type(processor).__qualname__}",
        "settings": processor_settings,
        "reading": dict(reading),
        "device": placement.device.type,
        "precision": placement.precision,
        "matmul": torch.get_float32_matmul_precision(),
        "versions": {
            "cornstarch": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "pillow": PIL.__version__,
        },
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
