"""Asynchronous updates are their formula whenever changes arrive, and nothing is staler than allowed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import forked
from tests.parallel.low_bandwidth.updates import (
    Marked,
    Replicas,
    delayed,
    delayed_over_a_slow_link,
    flat,
    leave_alone,
    mark_step,
    over_a_slow_link,
    put,
    resume,
    slow_one,
    train_run,
)
from tests.parity.pool import Pool


def plan(staleness: int, scales: bool = False) -> dict[str, Any]:
    return {"kind": "async", "asynchronous": {"staleness": staleness, "scale_learning_rate": scales}}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_staleness_zero_applies_the_mean_change(workers: Pool, ranks: int) -> None:
    found = workers.run(ranks, train_run, plan(0, scales=True), 5)
    replicas = Replicas(ranks)
    for step in range(1, 6):
        before = torch.stack(replicas.weights)
        after = before + (torch.stack(replicas.learn(step)) - before).mean(0)
        replicas.put(list(after))
        for rank in range(ranks):
            torch.testing.assert_close(found[rank]["history"][step - 1], after[rank], rtol=1e-10, atol=1e-12)


def test_resumed_synchronous_run_is_bit_equal(workers: Pool) -> None:
    for whole, after, sent, sent_after in workers.run(3, resume, plan(0), 3, 6):
        assert torch.equal(whole, after)
        assert sent == sent_after > 0


@pytest.mark.parametrize("train", [delayed, delayed_over_a_slow_link])
@pytest.mark.parametrize(("ranks", "bound", "slow"), [(2, 1, 1), (3, 1, 4), (3, 2, 1), (4, 2, 8), (4, 4, 3)])
def test_no_change_is_staler_than_the_bound(
    workers: Pool, ranks: int, bound: int, slow: int, train: Callable[..., dict[str, Any]]
) -> None:
    found = workers.run(ranks, train, plan(bound), 25, 10 * ranks + bound, 0.004, slow)
    counts = [torch.stack(one["seen"])[:, 3:].round().long() for one in found]
    measured = [stale(counts, me, other) for me in range(ranks) for other in range(ranks) if me != other]
    assert 0 < max(map(max, measured)) <= bound
    assert max(max(one["staleness"]) for one in found) <= bound
    for one in found:  # in the end everybody has everything
        torch.testing.assert_close(one["end"][3:], torch.full((ranks,), 25.0, dtype=torch.float64))
        assert torch.equal(one["end"], found[0]["end"])


def stale(counts: list[Tensor], me: int, other: int) -> list[int]:
    """Return by how many steps each change of another rank was stale when it was applied here.

    counts[i][n, j]: the steps of rank j that are in the weights of rank i after its n-th step.
    """
    found = [0]
    for step, (before, after) in enumerate(pairwise(counts[me][:, other].tolist()), start=1):
        for applied in range(before + 1, after + 1):
            base = int(counts[other][applied - 1, me])  # what the change was computed from
            found.append(step - base - 1)
    return found


@pytest.mark.parametrize(("ranks", "scales"), [(2, False), (3, True), (4, True)])
def test_weights_follow_the_formula_of_arrived_changes(workers: Pool, ranks: int, scales: bool) -> None:
    steps = 15
    found = workers.run(ranks, delayed, plan(1000, scales), steps, ranks, 0.004, 3, 2)  # nobody ever waits
    weights = [[one["seen"][0]] for one in found]
    sent: list[list[Tensor]] = [[] for _ in found]  # the changes of each rank, as all apply them
    applied = [[0] * ranks for _ in found]
    model = Marked(ranks)
    while any(len(history) <= steps for history in weights):
        rank, arrived = next_step(found, weights, sent, applied, steps)
        put(model, weights[rank][-1])
        change = mark_step(model, rank, len(weights[rank]))
        fresh = max(arrived[other] - applied[rank][other] for other in range(ranks) if other != rank)
        sent[rank].append(change / ranks / (max(1, fresh) if scales else 1))
        news = [sent[other][n] for other in range(ranks) for n in range(applied[rank][other], arrived[other])]
        weights[rank].append(weights[rank][-1] + sum(news))
        applied[rank] = arrived
        seen = found[rank]["seen"][len(weights[rank]) - 1]
        torch.testing.assert_close(seen, weights[rank][-1], rtol=1e-9, atol=1e-9)
    everything = flat(Marked(ranks)) + sum(change for changes in sent for change in changes)
    for one in found:
        torch.testing.assert_close(one["end"], everything, rtol=1e-9, atol=1e-9)
        assert torch.equal(one["end"], found[0]["end"])
    if scales:
        assert found[0]["seen"][-1][3:][0] < steps  # the slow one counted less


def next_step(
    found: list[dict[str, Any]],
    weights: list[list[Tensor]],
    sent: list[list[Tensor]],
    applied: list[list[int]],
    steps: int,
) -> tuple[int, list[int]]:
    """Return a rank whose next step needs only what is known, and how many steps of each rank are applied after it."""
    ranks = len(found)
    for rank in range(ranks):
        if len(weights[rank]) > steps:
            continue
        seen = found[rank]["seen"][len(weights[rank])][3:]
        arrived = list(applied[rank])
        arrived[rank] += 1
        for other in range(ranks):
            if other != rank:
                totals = [0.0, *torch.stack([torch.zeros_like(seen[:1]), *marks(sent, other)]).cumsum(0).flatten()[1:]]
                matching = [n for n, total in enumerate(totals) if abs(float(total) - float(seen[other])) < 1e-6]
                arrived[other] = matching[0] if matching else -1
        if min(arrived) >= 0:
            return rank, arrived
    raise AssertionError("weights hold something that nobody has sent")


def marks(sent: list[list[Tensor]], rank: int) -> list[Tensor]:
    """Return what each change of a rank adds to the count of its steps."""
    return [change[3 + rank : 4 + rank] for change in sent[rank]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slow_rank_is_waited_for_only_at_the_bound(workers: Pool, ranks: int) -> None:
    bound = 4
    counted = workers.run(ranks, slow_one, plan(bound), bound, 6)[0]  # it would hang if rank 0 waited earlier
    assert counted[:bound] == [0.0] * bound
    assert counted[bound] >= 1  # the next step may not be left before a change has come


def test_slow_link_sends_several_steps_in_one_message(workers: Pool) -> None:
    """Only the first message leaves before its sender waits; how many steps one has depends on when the other waits."""
    for messages, weights in workers.run(2, over_a_slow_link, plan(4), 101):
        assert messages < 34  # two for each five steps, one of them and the four others, would be 40
        torch.testing.assert_close(weights[3:5], torch.full((2,), 101 * 500.0, dtype=torch.float64))


def test_lost_rank_raises_and_threads_do_not_block_exit(tmp_path: Path) -> None:
    two = [forked.process(leave_alone, rank, tmp_path / "meeting", plan(2)) for rank in (0, 1)]
    for process in two:
        process.start()
    for process in two:
        process.join(120)
    codes = [process.exitcode for process in two]
    for process in two:
        process.kill()
    assert codes == [7, 0]
