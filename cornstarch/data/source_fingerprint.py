"""Fingerprints of data sources: ranks must read the same rows, or they would train on different data without a word."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cornstarch.config import SourceConfig
from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed

if TYPE_CHECKING:
    from cornstarch.data.formats import DataSource

_BUDGET = 1 << 28  # bytes of a source that are read; of larger ones, blocks at even distances
_BLOCK = 1 << 16


def check_same_sources(configs: Sequence[SourceConfig], sources: Sequence[DataSource], key: str) -> None:
    """Refuse sources whose files or number of rows differ between ranks. All ranks must call it.

    Files of up to 256 MB are read whole, larger ones in part. Images and sounds that rows name are not read, and rows
    that Python made are only counted.
    """
    if distributed.is_single_process():
        return
    own = [[len(source), compute_fingerprint(config)] for config, source in zip(configs, sources, strict=True)]
    found = distributed.all_gather_json(own)
    for number, config in enumerate(configs):
        first, *others = (one[number] if number < len(one) else None for one in found)
        for rank, other in enumerate(others, start=1):
            if other == first:
                continue
            counts = f"rank 0 has {first[0]:,} rows, rank {rank} has {other[0]:,}" if first and other else ""
            what = counts if first and other and first[0] != other[0] else f"the files of ranks 0 and {rank} differ"
            raise ConfigError(
                f"{key}.{number} = {config.path}\n  Ranks would train on different data: {what}. Copy the same files "
                "to every machine, or use a shared folder."
            )


def compute_fingerprint(config: SourceConfig) -> str:
    """Return a digest of the names and contents of a source's files; "" for rows that are made in Python."""
    path = Path(config.path)
    if config.format in ("given", "callable") or not path.exists():
        return ""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    budget = max(_BUDGET // max(len(files), 1), _BLOCK)
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        name = file.name if file == path else file.relative_to(path).as_posix()
        size = file.stat().st_size
        digest.update(f"{name} {size}".encode(errors="replace"))
        with file.open("rb") as opened:
            for start in _choose_blocks(size, budget):
                opened.seek(start)
                digest.update(opened.read(_BLOCK))
    return digest.hexdigest()


def _choose_blocks(size: int, budget: int) -> Iterator[int]:
    """Yield where blocks begin: all of them within the budget, else as many at even distances, the last one too."""
    blocks, most = -(-size // _BLOCK), max(budget // _BLOCK, 1)
    if blocks <= most:
        yield from range(0, size, _BLOCK)
    else:
        yield from ((blocks - 1) * number // max(most - 1, 1) * _BLOCK for number in range(most))
