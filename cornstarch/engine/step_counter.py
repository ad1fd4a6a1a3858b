"""What a step has in all processes together, counted for several steps in one exchange.

A step of a small model takes a few milliseconds, and an exchange of a few numbers one or two: so several batches are
drawn ahead and counted together. How many follows from how long steps take: a process that is told to end says so in
the next exchange, and must not have to wait for it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import islice
from typing import Any

import torch.distributed as dist

from cornstarch.compat import default_store
from cornstarch.data.loader import StepBatch
from cornstarch.metrics.results import StepTotals
from cornstarch.parallel import distributed

_MOST = 8  # steps in one exchange
_SECONDS = 1.0  # that they may take
# Where processes do not wait for one another:
_OWN = 4  # steps after which they look whether to end
_PATIENCE = timedelta(hours=1)  # for the slowest to look
_ASKED = "asked"

Totals = Callable[[], StepTotals]


def _none(inputs: Mapping[str, Any]) -> float:
    return 0.0


class StepCounter:
    """Adds up over all processes what steps have.

    Args:
        modalities: Their names, the same in all processes.
        replica_size: So many processes have, and count, the same.
        stop: Tells whether this process was told to end.
        flops: Returns what a step on a microbatch's inputs multiplies; without it nothing is counted.
    """

    def __init__(
        self,
        modalities: Sequence[str],
        replica_size: int,
        stop: Callable[[], bool],
        flops: Callable[[Mapping[str, Any]], float] | None = None,
    ) -> None:
        self._modalities, self._replica_size, self._stop = list(modalities), replica_size, stop
        self._flops = flops or _none
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

    def count_no_flops(self) -> None:
        """Leave out what steps multiply: to know that, batches of each new size are traced through the model."""
        self._flops = _none

    def totals(self, batch: StepBatch) -> Totals:
        """Return what waits for the totals of a batch; if it is not known, all processes must ask now."""
        return self._known.pop(_place(batch), None) or self._begin([batch], 1)[0][0]

    def _wish(self, seconds: float, steps: int) -> int:
        """Return how many steps the exchange after the next should count."""
        return 1 if distributed.is_single_process() else max(1, min(_MOST, int(_SECONDS * steps / max(seconds, 1e-6))))

    def _begin(self, lot: Sequence[StepBatch], wish: int) -> tuple[list[Totals], Callable[[], int]]:
        first = wish if distributed.rank() == 0 else 0  # one of them decides, and the sum is what it says
        counts = [self._counts(batch) for batch in lot]
        sums = distributed.begin_sum_over_ranks([first, self._stop(), *(count for one in counts for count in one)])
        width = len(counts[0])

        @cache
        def read_sums() -> list[int]:
            return [int(one) for one in sums()]

        def totals(number: int) -> StepTotals:
            begin = 2 + number * width
            return self._read(read_sums()[1] > 0, read_sums()[begin : begin + width])

        return [cache(lambda number=number: totals(number)) for number in range(len(lot))], lambda: read_sums()[0]

    def _counts(self, batch: StepBatch) -> list[int]:
        items = [sum(microbatch.items.get(name, 0) for microbatch in batch.microbatches) for name in self._modalities]
        tokens = sum(microbatch.tokens for microbatch in batch.microbatches)
        too_long = sum(sample.too_long for sample in batch.skipped)
        # A microbatch that stands in for nothing, to keep in step with others, has no samples.
        flops = int(sum(self._flops(microbatch.inputs) for microbatch in batch.microbatches if microbatch.sample_ids))
        return [batch.trained_tokens, tokens, batch.samples, len(batch.skipped) - too_long, too_long, flops, *items]

    def _read(self, stop: bool, sums: Sequence[int]) -> StepTotals:
        trained, tokens, samples, broken, too_long, flops, *counts = (one // self._replica_size for one in sums)
        by_name = dict(zip(self._modalities, counts, strict=True))
        return StepTotals(trained, tokens, samples, by_name, broken, too_long, stop, flops)


class UnsynchronizedStepCounter(StepCounter):
    """Counts the steps of this process, which does not wait for others: they train on batches of their own.

    After every few steps they look whether one of them was told to end. Then each says how many steps it has begun, and
    all go on to the largest of these numbers, so that all end after the same step; only whoever is told to end waits.
    Once one of them has done all of its steps, the others do theirs, too.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begun = 0
        self._last: int | None = None
        self._board: dist.Store | None = None
        if not distributed.is_single_process():
            name = distributed.broadcast_json(uuid.uuid4().hex)
            self._board = dist.PrefixStore(f"cornstarch/ending/{name}", default_store())

    def ahead(self, batches: Iterator[StepBatch], left: Callable[[], int]) -> Iterator[StepBatch]:
        """Yield batches; other processes may have drawn any number of theirs."""
        try:
            yield from super().ahead(batches, left)
        finally:
            if self._board is not None and self._last is None:
                with suppress(RuntimeError):  # whoever has the store has gone
                    self._tell()

    def _begin(self, lot: Sequence[StepBatch], wish: int) -> tuple[list[Totals], Callable[[], int]]:
        first = self._begun + 1
        self._begun += len(lot)
        if self._last is None:
            self._last = self._read_agreed_end()
        ends = [self._last is not None and number >= self._last for number in range(first, self._begun + 1)]
        return [self._own(batch, stop) for batch, stop in zip(lot, ends, strict=True)], lambda: _OWN

    def _read_agreed_end(self) -> int | None:
        """Return the step after which all end, if one of them was told to."""
        if self._board is None:
            return self._begun if self._stop() else None
        if not self._stop() and not self._board.check([_ASKED]):
            return None
        self._board.set(_ASKED, "1")
        self._tell()
        everyone = [str(rank) for rank in range(distributed.world_size())]
        self._board.wait(everyone, _PATIENCE)
        return max(int(self._board.get(one)) for one in everyone)

    def _tell(self) -> None:
        """Say how many steps this process has begun."""
        assert self._board is not None
        self._board.set(str(distributed.rank()), str(self._begun))

    def _own(self, batch: StepBatch, stop: bool) -> Totals:
        """Return the trained tokens of this process; for the rest the others are taken to have as much."""
        trained, *others = self._counts(batch)
        totals = self._read(stop, [trained, *(count * distributed.world_size() for count in others)])
        return lambda: totals


def _place(batch: StepBatch) -> tuple[int, int]:
    return batch.epoch, batch.index
