"""The features of one encoder in files, a file for each item."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cornstarch.train.checkpoint.files import DTYPES
from cornstarch.train.features.space import Space, touch

_NAME = "features"
_SHORT = 16  # letters of a key in the name of a folder; the whole key is in the files
_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class FeatureStore:
    """Tensors of tokens [T, D] by the digest of their item, as safetensors with a checksum.

    Any number of processes may read and write at once. A file that is damaged, or of another key, is as good as none.

    Args:
        space: The folder, and how much room there is in it.
        key: What features depend on beside the item.
    """

    def __init__(self, space: Space, key: str) -> None:
        self.space, self.key = space, key
        self.folder = space.folder / key[:_SHORT]

    def path(self, digest: str) -> Path:
        """Return where the features of an item are."""
        return self.folder / digest[:2] / f"{digest}.safetensors"

    def load(self, digest: str) -> Tensor | None:
        """Return the features of an item; None if there are none that can be used."""
        path = self.path(digest)
        try:
            with open(path, "rb") as file:
                content = bytearray(file.read())
        except OSError:
            return None
        tokens = self._read(content, digest)
        if tokens is None:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        touch(path)
        return tokens

    def save(self, digest: str, tokens: Tensor) -> bool:
        """Store the features of an item, on the CPU; False: they are there already, or there is no room."""
        path = self.path(digest)
        data = tokens.contiguous().reshape(-1).view(torch.uint8).numpy().data
        about: dict[str, Any] = {"dtype": DTYPES[tokens.dtype], "shape": list(tokens.shape)}
        metadata = {"format": "pt", "key": self.key, "item": digest, "crc32": str(_checksum(about, data))}
        header = {"__metadata__": metadata, _NAME: {**about, "data_offsets": [0, len(data)]}}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return self.space.write(path, [len(text).to_bytes(8, "little") + text, data])

    def _read(self, content: bytearray, digest: str) -> Tensor | None:
        """Return the tensor of a file, or None if a byte of it is not as it was written."""
        start = 8 + int.from_bytes(content[:8], "little")
        try:
            header = json.loads(content[8:start])
            metadata, entry = header["__metadata__"], header[_NAME]
            about = {"dtype": entry["dtype"], "shape": entry["shape"]}
            data = memoryview(content)[start:]
            named = (metadata["key"], metadata["item"], metadata["crc32"], entry["data_offsets"])
            if named != (self.key, digest, str(_checksum(about, data)), [0, len(data)]):
                return None
            flat = torch.frombuffer(content, dtype=_TYPES[entry["dtype"]], offset=start)
            return flat.reshape(entry["shape"])
        except (ValueError, KeyError, TypeError, RuntimeError):  # whatever is met in a damaged file
            return None


def _checksum(about: dict[str, Any], data: memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(json.dumps(about).encode()))
