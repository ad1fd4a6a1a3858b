"""How long rows are made: a compiled model is compiled anew for each length, so that there should be few."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cornstarch.train.config import DataConfig

_BLOCK = 128  # tokens; attention kernels work in such blocks
_MOST = 8  # lengths of a run
_RANGE = 8  # the longest over the shortest: what is shorter costs little, whatever it is filled up to


@dataclass(frozen=True)
class RowLengths:
    """The lengths that rows are filled up to."""

    max_length: int
    """The most tokens of a sample, and of a packed row."""
    multiple: int | None = None
    """Of which they are multiples, up to the longest; None: of `lengths`, one."""
    lengths: tuple[int, ...] = ()
    """In ascending order. None: rows are as long as the longest sample in them."""

    @classmethod
    def of(cls, data: DataConfig, *, compiled: bool) -> RowLengths:
        """Return those that a config asks for, in a run whose model is compiled or not."""
        if data.pad_to != "auto":
            return cls(data.max_length, multiple=data.pad_to)
        return cls(data.max_length, lengths=few_lengths(data.max_length) if compiled else ())

    def of_rows(self, longest: int) -> int:
        """Return the length of rows that are samples."""
        if self.multiple is not None:
            return max(longest, min(-(-longest // self.multiple) * self.multiple, self.max_length))
        return next((length for length in self.lengths if length >= longest), longest)

    def of_packed_rows(self, fullest: int) -> int:
        """Return the length of packed rows: they are nearly full, so that one length is enough."""
        return self.max_length if self.lengths else self.of_rows(fullest)


def few_lengths(max_length: int) -> tuple[int, ...]:
    """Return at most eight lengths up to a longest: multiples of 128, each by about a third longer than the last."""
    shortest = max_length / _RANGE
    factor = _RANGE ** (1 / (_MOST - 1))
    wanted = (shortest * factor**number for number in range(_MOST - 1))
    blocks = sorted({math.ceil(length / _BLOCK - 1e-9) * _BLOCK for length in wanted})
    return (*(length for length in blocks if length < max_length), max_length)


__all__ = ["RowLengths", "few_lengths"]
