"""Counts the tokens, samples, items and FLOPs of steps over all ranks, several steps in one collective.

A step of a small model takes a few milliseconds, and an exchange of a few numbers one or two: so several batches are
drawn ahead and counted together. How many follows from how long steps take: a rank that receives a stop signal says so
in the next exchange, and must not have to wait for it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.compat import default_store
from cornstarch.config import RunConfig
from cornstarch.cost.flops import FlopCounter, StepFlops
from cornstarch.data.loader import StepBatch
from cornstarch.engine.recompute import recompute_activations
from cornstarch.metrics.metrics import StepTotals
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import is_sharded
from cornstarch.parallel import distributed
from cornstarch.tasks.build import build_meta_model
from cornstarch.tasks.task import Task

_MOST = 8  # steps in one exchange
_SECONDS = 1.0  # that they may take
# Where ranks do not wait for one another:
_STEPS_ALONE = 4  # steps after which they look whether to end
_PATIENCE = timedelta(hours=1)  # for the slowest to look
_ASKED = "asked"

Totals = Callable[[], StepTotals]


class StepCounter:
    """Sums the counts of steps over all ranks, of which `replica_size` train on, and count, the same samples.

    `stop` returns whether this rank received a stop signal, and `flops` the FLOPs of a microbatch (None: not counted).
    """

    def __init__(
        self,
        modalities: Sequence[str],
        replica_size: int,
        stop: Callable[[], bool],
        flops: Callable[[Mapping[str, Any]], float] | None = None,
    ) -> None:
        self._modalities, self._replica_size, self._stop, self._flops = list(modalities), replica_size, stop, flops
        self._known: dict[tuple[int, int], Totals] = {}

    def ahead(self, batches: Iterator[StepBatch], left: Callable[[], int]) -> Iterator[StepBatch]:
        """Yield batches whose totals are in flight; `left` returns how many steps are left, the same on all ranks."""
        steps, began = 1, time.monotonic()
        while lot := list(islice(batches, steps)):
            wish = 1  # how many steps the exchange after the next should count
            if not distributed.is_single_process():
                wish = max(1, min(_MOST, int(_SECONDS * steps / max(time.monotonic() - began, 1e-6))))
            sums, next_steps = self._begin(lot, wish)
            began = time.monotonic()
            self._known = dict(zip([(batch.epoch, batch.index) for batch in lot], sums, strict=True))
            yield from lot
            steps = min(next_steps(), left())

    def totals(self, batch: StepBatch) -> Totals:
        """Return a function that waits for the totals of a batch; if they are not in flight, all ranks must ask now."""
        return self._known.pop((batch.epoch, batch.index), None) or self._begin([batch], 1)[0][0]

    def _begin(self, lot: Sequence[StepBatch], wish: int) -> tuple[list[Totals], Callable[[], int]]:
        """Start the exchange of some steps; return their totals, and how many steps the next exchange counts."""
        first = wish if distributed.rank() == 0 else 0  # rank 0 decides: the others add nothing to its wish
        counts = [self._counts(batch) for batch in lot]
        sums = distributed.begin_sum_over_ranks([first, self._stop(), *chain.from_iterable(counts)])

        @cache
        def read_sums() -> tuple[int, list[StepTotals]]:
            steps, stop, *rest = map(int, sums())
            numbers = iter(rest)
            return steps, [self._read(stop > 0, list(islice(numbers, len(one)))) for one in counts]

        def read_totals(number: int) -> StepTotals:
            return read_sums()[1][number]

        return [partial(read_totals, number) for number in range(len(lot))], lambda: read_sums()[0]

    def _counts(self, batch: StepBatch) -> list[int]:
        items = [sum(microbatch.items.get(name, 0) for microbatch in batch.microbatches) for name in self._modalities]
        tokens = sum(microbatch.tokens for microbatch in batch.microbatches)
        too_long = sum(sample.too_long for sample in batch.skipped)
        flops = 0
        if self._flops is not None:
            # A microbatch that stands in for nothing, to keep in step with others, has no samples.
            flops = int(sum(self._flops(one.inputs) for one in batch.microbatches if one.sample_ids))
        return [batch.trained_tokens, tokens, batch.samples, len(batch.skipped) - too_long, too_long, flops, *items]

    def _read(self, stop: bool, sums: Sequence[int]) -> StepTotals:
        trained, tokens, samples, broken, too_long, flops, *counts = (one // self._replica_size for one in sums)
        by_name = dict(zip(self._modalities, counts, strict=True))
        return StepTotals(trained, tokens, samples, by_name, broken, too_long, stop, flops)


class UnsynchronizedStepCounter(StepCounter):
    """Counts the steps of this rank, which does not wait for others: they train on batches of their own.

    After every few steps each rank checks whether one received a stop signal. Then each reports how many steps it has
    begun, and all go on to the largest of these numbers, so that all end after the same step; only then do they wait.
    Once a rank has done all of its steps, the others do theirs, too.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begun = 0
        self._last: int | None = None  # the step after which all end, once they have agreed on it
        self._board: dist.Store | None = None
        if not distributed.is_single_process():
            name = distributed.broadcast_json(uuid.uuid4().hex)
            self._board = dist.PrefixStore(f"cornstarch/ending/{name}", default_store())

    def ahead(self, batches: Iterator[StepBatch], left: Callable[[], int]) -> Iterator[StepBatch]:
        """Yield batches; other ranks may have drawn any number of theirs."""
        try:
            yield from super().ahead(batches, left)
        finally:
            if self._board is not None and self._last is None:
                with suppress(RuntimeError):  # the process with the store has ended
                    self._board.set(str(distributed.rank()), str(self._begun))

    def _begin(self, lot: Sequence[StepBatch], wish: int) -> tuple[list[Totals], Callable[[], int]]:
        first = self._begun + 1
        self._begun += len(lot)
        if self._last is None:
            self._last = self._read_agreed_end()
        ends = [self._last is not None and number >= self._last for number in range(first, self._begun + 1)]
        return [self._count_alone(batch, stop) for batch, stop in zip(lot, ends, strict=True)], lambda: _STEPS_ALONE

    def _read_agreed_end(self) -> int | None:
        """Return the step after which all end, if a rank received a stop signal."""
        if self._board is None:
            return self._begun if self._stop() else None
        if not self._stop() and not self._board.check([_ASKED]):
            return None
        self._board.set(_ASKED, "1")
        self._board.set(str(distributed.rank()), str(self._begun))
        everyone = [str(rank) for rank in range(distributed.world_size())]
        self._board.wait(everyone, _PATIENCE)
        return max(int(self._board.get(one)) for one in everyone)

    def _count_alone(self, batch: StepBatch, stop: bool) -> Totals:
        """Return the trained tokens of this rank; for the rest the others are taken to have as much."""
        trained, *others = self._counts(batch)
        totals = self._read(stop, [trained, *(count * distributed.world_size() for count in others)])
        return lambda: totals


class RunFlops:
    """Counts the FLOPs of a run's steps for the whole model; if that fails, logs the reason once and counts nothing."""

    def __init__(self, task: Task, config: RunConfig, log: Callable[[str], None]) -> None:
        self._task, self._config, self._log = task, config, log
        self._counter: FlopCounter | None = None
        self._can_count = True
        if not is_sharded(task.model):
            self._build_counter(lambda: task.model)

    def step(self, inputs: Mapping[str, Any]) -> StepFlops | None:
        """Return the FLOPs of a forward and a backward pass by part; None if they cannot be counted."""
        if self._counter is None and self._can_count:  # sharded: count a whole copy, built when it is first needed
            self._build_counter(self._build_unsharded)
        if self._counter is None:
            return None
        try:
            return self._counter.step(inputs)
        except Exception as error:
            self._give_up(error)
            return None

    def total(self, inputs: Mapping[str, Any]) -> float:
        """Return the FLOPs of all parts; 0 if they cannot be counted."""
        found = self.step(inputs)
        return 0.0 if found is None else found.total

    def _build_counter(self, whole: Callable[[], nn.Module]) -> None:
        try:
            self._counter = FlopCounter(whole(), self._compute_loss)
        except Exception as error:  # a module that cannot be copied, say: a missing figure must not end a run
            self._give_up(error)

    def _build_unsharded(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            bare = build_meta_model(self._config)
        if isinstance(bare, MultimodalModel) and isinstance(self._task.model, MultimodalModel):
            bare.set_modality_token_ids(self._task.model.modality_token_ids)
        if self._config.loop.activation_checkpointing:
            recompute_activations(bare)
        return bare

    def _compute_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        before, self._task.wrapped = self._task.wrapped, model
        try:
            return self._task.loss(inputs)
        finally:
            self._task.wrapped = before

    def _give_up(self, error: Exception) -> None:
        self._counter, self._can_count = None, False
        self._log(f"FLOPs are not counted: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
