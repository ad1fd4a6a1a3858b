"""Which samples share a row: the rows of an epoch, filled from its order over a buffer of samples. No torch.

The rows are a function of the order, the lengths, `max_length` and the size of the buffer alone: not of the number of
replicas, microbatches or workers. A step is the next few rows.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from cornstarch.config import DataConfig
from cornstarch.data.sampler import EpochOrder

CountTokens = Callable[[np.ndarray], np.ndarray]
"""(indices of samples) -> tokens of each; 0 for a sample that cannot be used."""

_ENOUGH = 1 / 256  # of a row: with less room than this left, no better combination is searched
_MOST_SUMMED = 256  # samples that one search combines; a few dozen nearly always fill a row
_CRITICAL = 0.8  # samples longer than half a row, over the rows that all tokens need: above, short ones are scarce
_KEPT_EPOCHS = 2  # plans of epochs in memory: the current one, and the next


def fill_rows(
    numbers: np.ndarray, count_tokens: CountTokens, max_length: int, buffer: int
) -> Iterator[tuple[int, ...]]:
    """Yield the rows of an epoch, as indices of samples: each of `numbers` once, rows at most `max_length` long.

    A row begins with the sample that has waited longest, so that none waits for more than `buffer` rows. The others
    are chosen among the next `buffer` samples so that they fill it. When the order ends, rows begin with the longest
    sample that is left, because the short ones fit everywhere. A sample of length 0, which cannot be used, stands in
    the row where its turn comes; it has no row for itself, which would be a step without anything to train on.
    """
    waiting = _WaitingSamples(max_length)
    begin = 0
    row: tuple[int, ...] = ()
    while True:
        while begin < len(numbers) and (len(waiting) < buffer or not waiting.has_usable):
            some = numbers[begin : begin + buffer]
            begin += len(some)
            waiting.add(some.tolist(), count_tokens(some).tolist())
        if not waiting.has_usable:  # the end: unusable samples that are left go to the last row
            if row := row + waiting.take_rest():
                yield row
            return
        if row:
            yield row
        row = waiting.take_row(begins_longest=begin >= len(numbers))


class _WaitingSamples:
    """The samples of a buffer that are in no row yet, by age and by length."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._by_age: deque[int] = deque()  # places, of which some are taken already
        self._lengths: dict[int, int] = {}  # of the waiting samples, by place
        self._numbers: dict[int, int] = {}
        self._sorted: list[tuple[int, int]] = []  # (length, -place), so that of equal lengths the oldest is the last
        self._added = self._total = 0  # samples ever added, and the tokens of those that wait

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def has_usable(self) -> bool:
        return bool(self._sorted)

    def add(self, numbers: Sequence[int], lengths: Sequence[int]) -> None:
        for number, length in zip(numbers, lengths, strict=True):
            place, self._added = self._added, self._added + 1
            self._by_age.append(place)
            self._numbers[place], self._lengths[place] = number, length
            self._total += length
            if length:
                insort(self._sorted, (length, -place))

    def take_row(self, begins_longest: bool) -> tuple[int, ...]:
        """Take the samples of one row, in the order of their age; `begins_longest`: see `fill_rows`."""
        places, room = [], self._max_length
        while self._by_age:  # unusable samples, up to the oldest that can be used
            oldest = self._by_age[0]
            if self._lengths.get(oldest, 0):
                break
            self._by_age.popleft()
            if oldest in self._lengths:
                places.append(oldest)
                del self._lengths[oldest]
        if self._sorted:
            first = -self._sorted[-1][1] if begins_longest else self._by_age[0]
            room -= self._lengths[first]
            places += [self._take(first), *self._fill(room)]
        return tuple(self._numbers.pop(place) for place in sorted(places))

    def take_rest(self) -> tuple[int, ...]:
        """Take all samples, none of which can be used."""
        assert not self._sorted
        return tuple(self._numbers.pop(place) for place in sorted(self._lengths))

    def _take(self, place: int) -> int:
        length = self._lengths.pop(place)
        self._total -= length
        del self._sorted[bisect_left(self._sorted, (length, -place))]
        return place

    def _fill(self, room: int) -> list[int]:
        """Take samples that fill the room left in a row."""
        # Mostly the longest that fit do. Where lengths are much alike, none of them is short enough for the last gap.
        # But where most rows begin with a sample of more than half a row, the short ones are needed beside those.
        limit = int(self._max_length * _ENOUGH)
        chosen, left = self._choose_longest(room)
        long = len(self._sorted) - bisect_left(self._sorted, (self._max_length // 2 + 1,))
        if left > limit and long * self._max_length < _CRITICAL * self._total:
            combined, still_left = self._choose_combination(room, limit)
            chosen = combined if still_left < left else chosen
        return [self._take(place) for place in chosen]

    def _choose_longest(self, room: int) -> tuple[list[int], int]:
        """Return the longest samples that fit, one after the other, and the room that they leave."""
        chosen: list[int] = []
        end = len(self._sorted)
        while room:
            end = min(bisect_left(self._sorted, (room + 1,)), end) - 1  # the next one down, or the longest that fits
            if end < 0:
                break
            length, negative = self._sorted[end]
            chosen.append(-negative)
            room -= length
        return chosen, room

    def _choose_combination(self, room: int, limit: int) -> tuple[list[int], int]:
        """Return samples whose lengths add up to the most that fits, the longest possible, and the room they leave."""
        end = bisect_left(self._sorted, (room + 1,))
        # Bit n of a number says whether a length of n can be reached with the samples so far.
        reached, mask = [1], (1 << (room + 1)) - 1
        stride = max(end / _MOST_SUMMED, 1.0)
        candidates = [self._sorted[end - 1 - int(stride * number)] for number in range(min(end, _MOST_SUMMED))]
        for length, _ in candidates:
            reached.append((reached[-1] | reached[-1] << length) & mask)
            if reached[-1] >> (room - limit):
                break
        total = reached[-1].bit_length() - 1
        left, chosen = room - total, []
        for number in range(len(reached) - 1, 0, -1):
            if not reached[number - 1] >> total & 1:
                length, negative = candidates[number - 1]
                chosen.append(-negative)
                total -= length
        return chosen, left


class PackedOrder:
    """The rows of every step of a run."""

    def __init__(
        self, order: EpochOrder, count_tokens: CountTokens, max_length: int, rows_per_step: int, buffer: int
    ) -> None:
        self.order, self.max_length, self.rows_per_step, self.buffer = order, max_length, rows_per_step, buffer
        self.count_tokens = count_tokens
        self._epochs: dict[int, _EpochRows] = {}
        self._steps: dict[int, int] = {}

    def rows_per_microbatch(self, ranks: int, microbatches: int) -> int:
        """Return the rows of a replica's microbatch, the same in every step; some may have no samples."""
        return -(-self.rows_per_step // (ranks * microbatches))

    def steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch; this needs the lengths of all of its samples."""
        if epoch not in self._steps:
            rows = self._epoch(epoch)
            rows.plan(None)
            self._steps[epoch] = -(-len(rows) // self.rows_per_step)
        return self._steps[epoch]

    def estimate_steps(self, epoch: int) -> int:
        """Return about as many steps as an epoch has, from the lengths of the first samples alone."""
        mean = float(self.count_tokens(self.order.order(0)[: self.buffer]).mean())
        tokens = self.order.count(epoch) * mean
        return max(math.ceil(tokens / (self.max_length * self.rows_per_step)), 1)

    def step(self, epoch: int, index: int) -> list[np.ndarray]:
        """Return the rows of a step; empty behind the end of the epoch. The last step may have fewer than others."""
        return self._epoch(epoch).read(index * self.rows_per_step, self.rows_per_step)

    def list_steps(self, epoch: int, first: int) -> Iterator[tuple[int, list[np.ndarray], bool]]:
        """Yield the number of each step of an epoch, its rows, and whether it is the last."""
        rows = self.step(epoch, first)
        while rows:
            following = self.step(epoch, first + 1)
            yield first, rows, not following
            rows, first = following, first + 1

    def count_samples(self, epoch: int, steps: int) -> int:
        """Return the number of samples in the first steps of an epoch."""
        return self._epoch(epoch).count_samples(steps * self.rows_per_step)

    def plan_steps(self, steps: int) -> None:
        """Plan a number of steps from the first epoch on, which asks for the lengths that they need."""
        epoch = 0
        while steps > 0:
            rows = self._epoch(epoch)
            planned = -(-rows.plan(steps * self.rows_per_step) // self.rows_per_step)
            steps, epoch = steps - planned, epoch + 1

    def _epoch(self, epoch: int) -> _EpochRows:
        if epoch not in self._epochs:
            while len(self._epochs) >= _KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            numbers = self.order.order(epoch)
            self._epochs[epoch] = _EpochRows(fill_rows(numbers, self.count_tokens, self.max_length, self.buffer))
        return self._epochs[epoch]


def build_packed_order(order: EpochOrder, count_tokens: CountTokens, data: DataConfig, batch_size: int) -> PackedOrder:
    """Return the rows of a run; a step has as many as `batch_size` samples fill on average, or as `data` says."""
    if data.tokens_per_step is not None:
        rows = data.tokens_per_step // data.max_length
    else:  # the mean of the first buffer, so that a long run need not count all samples before it starts
        first = count_tokens(order.order(0)[: data.packing_buffer])
        mean = float(first[first > 0].mean()) if (first > 0).any() else 1.0
        rows = math.ceil(batch_size * mean / data.max_length)
    return PackedOrder(order, count_tokens, data.max_length, rows, data.packing_buffer)


class _EpochRows:
    """The rows of an epoch, filled as far as they were asked for."""

    def __init__(self, rows: Iterator[tuple[int, ...]]) -> None:
        self._rows = rows
        self._numbers, self._ends = array("q"), array("q", [0])  # of all rows; a row is the numbers between two ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def plan(self, count: int | None) -> int:
        """Fill rows until there are `count`, or all; return how many of them there are."""
        for row in islice(self._rows, None if count is None else max(count - len(self), 0)):
            self._numbers.extend(row)
            self._ends.append(len(self._numbers))
        return len(self) if count is None else min(count, len(self))

    def read(self, begin: int, count: int) -> list[np.ndarray]:
        end = self.plan(begin + count)
        pairs = zip(self._ends[begin:end], self._ends[begin + 1 : end + 1], strict=True)
        return [np.array(self._numbers[one:other], np.int64) for one, other in pairs]

    def count_samples(self, rows: int) -> int:
        return self._ends[self.plan(rows)]
