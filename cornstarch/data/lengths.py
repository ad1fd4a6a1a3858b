"""Padded row lengths. A compiled model is compiled again for each length, so there should be few."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cornstarch.config import DataConfig

_BLOCK = 128  # tokens: the block size of attention kernels
_MAX_LENGTHS = 8
_RANGE = 8  # longest over shortest: shorter rows cost little however far they are padded


@dataclass(frozen=True)
class RowLengths:
    """The lengths that rows are padded to."""

    max_length: int
    """The maximum number of tokens of a sample, and of a packed row."""
    multiple: int | None = None
    """Pad to a multiple of this, up to `max_length`; None: pad to one of `lengths`."""
    lengths: tuple[int, ...] = ()
    """Ascending. Empty: rows are as long as the longest sample in them."""

    @classmethod
    def of(cls, data: DataConfig, *, compiled: bool) -> RowLengths:
        """Return the lengths that a config asks for."""
        if data.pad_to != "auto":
            return cls(data.max_length, multiple=data.pad_to)
        return cls(data.max_length, lengths=few_lengths(data.max_length) if compiled else ())

    def of_rows(self, longest: int) -> int:
        """Return the length of rows with one sample each."""
        if self.multiple is not None:
            return max(longest, min(-(-longest // self.multiple) * self.multiple, self.max_length))
        return next((length for length in self.lengths if length >= longest), longest)

    def of_packed_rows(self, fullest: int) -> int:
        """Return the length of packed rows. They are nearly full: one length is enough."""
        return self.max_length if self.lengths else self.of_rows(fullest)


def few_lengths(max_length: int) -> tuple[int, ...]:
    """Return at most eight lengths up to `max_length`: multiples of 128, each about a third longer than the last."""
    shortest = max_length / _RANGE
    factor = _RANGE ** (1 / (_MAX_LENGTHS - 1))
    wanted = (shortest * factor**number for number in range(_MAX_LENGTHS - 1))
    blocks = sorted({math.ceil(length / _BLOCK - 1e-9) * _BLOCK for length in wanted})
    return (*(length for length in blocks if length < max_length), max_length)
