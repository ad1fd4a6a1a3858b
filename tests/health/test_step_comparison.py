"""Ranks that do other things, or read other data, are named before the weights change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from cornstarch.health.comparison_group import ComparisonGroup
from cornstarch.health.step_comparison import RankComparison, describe_differences
from cornstarch.parallel import distributed
from cornstarch.parallel.activity import Activity
from tests.parity.pool import pool


def compare(fault: str, replica_size: int) -> list[str | None]:
    """Compare three steps in several processes, of which rank 1 does something else in the second."""
    rank, said = distributed.rank(), []
    first = rank // replica_size * replica_size
    group = dist.new_group(list(range(dist.get_world_size())))
    activity = Activity()
    comparison = RankComparison(
        ComparisonGroup(), activity, list(range(first, first + replica_size)), {group.group_name}
    )
    for step in range(1, 4):
        is_wrong = rank == 1 and step == 2
        if not (is_wrong and fault == "left out"):
            activity.note_collective("all_reduce", 5)
        if is_wrong and fault == "added":
            dist.all_reduce(torch.zeros(2), group=group, async_op=True)
        samples = [f"row {first}"] if not (is_wrong and fault == "samples") else ["row 9"]
        comparison.begin_step(step, 0, step + (is_wrong and fault == "batch"), samples, 9 + (fault == "content") * rank)
        said.append(comparison.check())
        if said[-1] is not None:
            break
    return said


@pytest.mark.parametrize(
    ("fault", "replica_size", "words"),
    [
        ("none", 1, None),
        ("none", 2, None),
        ("left out", 1, "Rank 1 has taken part in other collectives than rank 0, up to step 2"),
        ("added", 1, "Rank 1 has taken part in other collectives than rank 0, up to step 2: 1 in group 0 of 3 ranks"),
        ("batch", 1, "Rank 1 is out of step: it is at step 2 (epoch 0, batch 3), rank 0 at step 2 (epoch 0, batch 2)"),
        ("samples", 1, None),  # replicas have samples of their own
    ],
)
def test_three_ranks(fault: str, replica_size: int, words: str | None) -> None:
    ranks = 3 if replica_size == 1 else 4
    found = pool().run(ranks, compare, fault, replica_size)
    pool().close()  # a collective may be left
    assert found == [found[0]] * ranks
    assert found[0] == [None] * 3 if words is None else found[0][1].startswith(words)


@pytest.mark.parametrize(("fault", "step"), [("samples", 2), ("content", 1)])
def test_ranks_of_a_replica_read_the_same(fault: str, step: int) -> None:
    found = pool().run(2, compare, fault, 2)
    assert found[0] == found[1]
    said = found[0][-1]
    assert f"has read other data than rank {1 - int(said[5])} of the same replica, in step {step}" in said


def test_the_odd_one_of_three_is_named() -> None:
    def rank(last: int) -> dict[str, Any]:
        return {
            "replica": 0, "position": [3, 0, 3], "samples": ["a"], "data": 1, "counts": {"0 of 3 ranks": last},
            "collectives": 5, "last": [], "recorded": [[number, f"all_reduce [{number}]"] for number in range(last)],
        }  # fmt: skip

    odd = rank(6)
    odd["recorded"] = [[number, "broadcast [2]"] for number in range(6)]
    said = describe_differences([rank(7), odd, rank(7)])
    assert said is not None and said.startswith("Rank 1 has taken part in other collectives than rank 0, up to step 3")
    assert "6 in group 0 of 3 ranks, rank 0 7; number 0 is broadcast [2] on rank 1 and all_reduce [0] on rank 0" in said
    assert describe_differences([rank(7)] * 3) is None
