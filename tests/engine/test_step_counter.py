"""Totals of several steps travel in one exchange, and are what each step has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch.distributed as dist

from cornstarch.compat import default_store
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.loader import StepBatch
from cornstarch.engine import step_counter as counting
from cornstarch.engine.step_counter import StepCounter, UnsynchronizedStepCounter
from cornstarch.parallel import distributed
from tests.parity.pool import pool


def batch(index: int) -> StepBatch:
    microbatch = CollatedBatch({}, trained_tokens=10 + index, tokens=20 + index, sample_ids=[], items={"vision": index})
    return StepBatch([microbatch], epoch=0, index=index, skipped=[], samples=2)


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Two processes with the same counts; what was exchanged, in order."""
    seen: list[list[float]] = []

    def begin_sum(values: Sequence[float]) -> Callable[[], list[float]]:
        seen.append(list(values))
        first, *rest = values
        return lambda: [float(first), *(2.0 * one for one in rest)]  # the wish is that of one process alone

    monkeypatch.setattr(distributed, "begin_sum_over_ranks", begin_sum)
    monkeypatch.setattr(distributed, "is_single_process", lambda: False)
    return seen


def totals_of(counter: StepCounter, batches: Iterator[StepBatch], left: int) -> list[tuple[int, int, int, int]]:
    found = []
    for one in counter.ahead(batches, lambda: left - len(found)):
        totals = counter.totals(one)()
        found.append((one.index, totals.trained_tokens, totals.samples, totals.items["vision"]))
    return found


def test_short_steps_are_counted_several_at_a_time(exchanges: list[list[float]]) -> None:
    counter = StepCounter(["vision"], 1, lambda: False)
    found = totals_of(counter, map(batch, range(30)), left=30)
    assert found == [(index, 2 * (10 + index), 4, 2 * index) for index in range(30)]
    assert len(exchanges) < 10
    assert sum((len(one) - 2) // 7 for one in exchanges) == 30


def test_no_more_batches_are_drawn_than_there_are_steps_left(exchanges: list[list[float]]) -> None:
    drawn: list[int] = []

    def batches() -> Iterator[StepBatch]:
        for index in range(100):
            drawn.append(index)
            yield batch(index)

    assert len(totals_of(StepCounter(["vision"], 1, lambda: False), batches(), left=12)) == 12
    assert drawn == list(range(12))


def test_long_steps_are_counted_one_at_a_time(exchanges: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("cornstarch.engine.step_counter.time.monotonic", lambda: 2.0 * next(clock))
    totals_of(StepCounter(["vision"], 1, lambda: False), map(batch, range(5)), left=5)
    assert len(exchanges) == 5


def test_processes_of_a_replica_count_the_same_once(exchanges: list[list[float]]) -> None:
    assert totals_of(StepCounter(["vision"], 2, lambda: False), iter([batch(3)]), left=1) == [(3, 13, 2, 3)]


def test_a_signal_reaches_all_with_the_next_exchange(exchanges: list[list[float]]) -> None:
    told = [False]
    counter = StepCounter(["vision"], 2, lambda: told[0])
    stops = []
    for one in counter.ahead(map(batch, range(40)), lambda: 40 - len(stops)):
        stops.append(counter.totals(one)().stop)
        told[0] = one.index >= 10
    assert not any(stops[:11])
    assert all(stops[11 + 8 :])


def test_a_batch_that_was_not_drawn_here_is_counted_when_it_is_asked_for(exchanges: list[list[float]]) -> None:
    counter = StepCounter(["vision"], 1, lambda: False)
    assert counter.totals(batch(5))().trained_tokens == 30
    assert len(exchanges) == 1


# ---------------------------------------------------------------------------------------------------- each by itself


def end_after(told: int) -> tuple[int, list[int]]:
    """Count until all know that the second process was told to end, in this many steps; return when, and own tokens."""
    tokens: list[int] = []
    counter = UnsynchronizedStepCounter(["vision"], 1, lambda: distributed.rank() == 1 and len(tokens) >= told)
    for one in counter.ahead(map(batch, range(1000)), lambda: 1000 - len(tokens)):
        totals = counter.totals(one)()
        tokens.append(totals.trained_tokens)
        if totals.stop:
            break
        if len(tokens) == 2 * told and distributed.rank() == 0:
            assert counter._board is not None
            counter._board.wait([counting._ASKED])  # however slowly the other one gets there
    return len(tokens), tokens


def test_processes_that_do_not_wait_for_one_another_end_after_the_same_step() -> None:
    first, second = pool().run(2, end_after, 20)
    assert first == second
    done, tokens = first
    assert 20 < done < 50  # the quicker one looks a few steps after the 40 that it makes before it waits
    assert tokens == [10 + index for index in range(done)]  # of this process alone


def count_far_ahead(steps: int, is_told: bool) -> int:
    """Let one process count all its steps before the other begins, which is then told to end, or not."""
    counter = UnsynchronizedStepCounter(["vision"], 1, lambda: is_told and distributed.rank() == 1)
    board = dist.PrefixStore(f"test/far_ahead/{is_told}", default_store())
    if distributed.rank() == 1:
        board.wait(["done"])
    count = len(totals_of(counter, map(batch, range(steps)), left=steps))
    board.set("done", "1")
    return count


@pytest.mark.parametrize("is_told", [False, True])
def test_counting_by_oneself_waits_for_nobody(is_told: bool) -> None:
    assert pool().run(2, count_far_ahead, 500, is_told) == [500, 500]


def test_one_process_alone_ends_by_itself() -> None:
    done: list[int] = []
    counter = UnsynchronizedStepCounter(["vision"], 1, lambda: len(done) >= 10)
    for one in counter.ahead(map(batch, range(100)), lambda: 100 - len(done)):
        done.append(one.index)
        if counter.totals(one)().stop:
            break
    assert 10 < len(done) < 20
