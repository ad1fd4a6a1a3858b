"""What a step has in all processes together, counted for several steps in one exchange.

A step of a small model takes a few milliseconds, and an exchange of a few numbers one or two: so several batches are
drawn ahead and counted together. How many follows from how long steps take: a process that is told to end says so in
the next exchange, and must not have to wait for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

from cornstarch.parallel import processes
from cornstarch.train.data.loader import StepBatch
from cornstarch.train.results import StepTotals

_MOST = 8  # steps in one exchange
_SECONDS = 1.0  # that they may take
# Where processes do not wait for one another:
_OWN = 4  # steps between two exchanges
_PATIENCE = 4  # exchanges that may be on their way

Totals = Callable[[], StepTotals]


class Counter:
    """Adds up over all processes what steps have.

    Args:
        modalities: Their names, the same in all processes.
        replica_size: So many processes have, and count, the same.
        stop: Tells whether this process was told to end.
        flops: Returns what a step on a portion's inputs multiplies; without it nothing is counted.
    """

    def __init__(
        self,
        modalities: Sequence[str],
        replica_size: int,
        stop: Callable[[], bool],
        flops: Callable[[Mapping[str, Any]], float] | None = None,
    ) -> None:
        self._modalities, self._replica_size, self._stop = list(modalities), replica_size, stop
        self._flops = flops or (lambda inputs: 0.0)
        self._known: dict[tuple[int, int], Totals] = {}

    def ahead(self, batches: Iterator[StepBatch], left: Callable[[], int]) -> Iterator[StepBatch]:
        """Yield batches whose totals are known, or on their way; all processes must draw the same number of them.

        Args:
            batches: What this process trains on.
            left: Tells how many steps are left, the same in all processes.
        """
        steps, began = 1, time.monotonic()
        while lot := list(islice(batches, steps)):
            sums, next_steps = self._begin(lot, self._wish(time.monotonic() - began, steps))
            began = time.monotonic()
            self._known = dict(zip(map(_place, lot), sums, strict=True))
            yield from lot
            steps = min(next_steps(), left())

    def totals(self, batch: StepBatch) -> Totals:
        """Return what waits for the totals of a batch; if it is not known, all processes must ask now."""
        return self._known.pop(_place(batch), None) or self._begin([batch], 1)[0][0]

    def _wish(self, seconds: float, steps: int) -> int:
        """Return how many steps the exchange after the next should count."""
        return 1 if processes.is_alone() else max(1, min(_MOST, int(_SECONDS * steps / max(seconds, 1e-6))))

    def _begin(self, lot: Sequence[StepBatch], wish: int) -> tuple[list[Totals], Callable[[], int]]:
        first = wish if processes.rank() == 0 else 0  # one of them decides, and the sum is what it says
        counts = [self._counts(batch) for batch in lot]
        sums = processes.begin_sum([first, self._stop(), *(count for one in counts for count in one)])
        width = len(counts[0])

        @cache
        def found() -> list[int]:
            return [int(one) for one in sums()]

        def totals(number: int) -> StepTotals:
            begin = 2 + number * width
            return self._read(found()[1] > 0, found()[begin : begin + width])

        return [cache(lambda number=number: totals(number)) for number in range(len(lot))], lambda: found()[0]

    def _counts(self, batch: StepBatch) -> list[int]:
        items = [sum(portion.items.get(name, 0) for portion in batch.portions) for name in self._modalities]
        tokens = sum(portion.tokens for portion in batch.portions)
        too_long = sum(sample.too_long for sample in batch.skipped)
        # A portion that stands in for nothing, to keep in step with others, has no samples.
        flops = int(sum(self._flops(portion.inputs) for portion in batch.portions if portion.sample_ids))
        return [batch.trained_tokens, tokens, batch.samples, len(batch.skipped) - too_long, too_long, flops, *items]

    def _read(self, stop: bool, sums: Sequence[int]) -> StepTotals:
        trained, tokens, samples, broken, too_long, flops, *counts = (one // self._replica_size for one in sums)
        by_name = dict(zip(self._modalities, counts, strict=True))
        return StepTotals(trained, tokens, samples, by_name, broken, too_long, stop, flops)


class OwnCounter(Counter):
    """Counts the steps of this process, which does not wait for others: they train on batches of their own.

    They only ask one another whether to end, after every few steps, and go on meanwhile: whoever was told to end waits
    until all know, so that all end after the same step.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asked: deque[Callable[[], list[float]]] = deque()

    def _begin(self, lot: Sequence[StepBatch], wish: int) -> tuple[list[Totals], Callable[[], int]]:
        self._asked.append(processes.begin_sum([self._stop()]))
        stop = len(self._asked) > _PATIENCE and self._asked.popleft()()[0] > 0
        return [self._own(batch, stop) for batch in lot], lambda: _OWN

    def _own(self, batch: StepBatch, stop: bool) -> Totals:
        """Return the trained tokens of this process; for the rest the others are taken to have as much."""
        trained, *others = self._counts(batch)
        totals = self._read(stop, [trained, *(count * processes.size() for count in others)])
        return lambda: totals


def _place(batch: StepBatch) -> tuple[int, int]:
    return batch.epoch, batch.index


__all__ = ["Counter", "OwnCounter"]
