"""Tokens reach their experts and come back, whoever has none, and gradients are those of one module."""

from __future__ import annotations

import pytest

from tests.parallel.expert import dispatching
from tests.parity.pool import Pool

ALL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "implementation", "counts", "among"),
    [
        ("mixtral", "grouped_mm", [5, 9], ALL),
        ("mixtral", "eager", [9, 1], ALL),
        ("gpt_oss", "grouped_mm", [4, 7], ALL),
        ("gpt_oss", "eager", [4, 7], ALL),
        ("mixtral", "grouped_mm", [6, 0], ALL),  # a rank without tokens of its own
        ("mixtral", "grouped_mm", [6, 3], [0, 1]),  # a rank whose experts get none
        ("gpt_oss", "eager", [0, 6], [0, 1]),  # both
    ],
)
def test_outputs_and_gradients_are_those_of_one_module(
    workers: Pool, kind: str, implementation: str, counts: list[int], among: list[int]
) -> None:
    for found in workers.run(2, dispatching.compare, kind, implementation, counts, among):
        balance = found.pop("balance")
        assert max(found.values()) < 2e-5, found
        assert 0.5 <= balance <= 1.0 and (balance == 0.5) == (among == [0, 1])


def test_four_ranks_have_one_expert_each(workers: Pool) -> None:
    for found in workers.run(4, dispatching.compare, "mixtral", "grouped_mm", [3, 0, 8, 1], ALL):
        assert found.pop("balance") < 1.0 and max(found.values()) < 2e-5, found


def test_tokens_without_gradients_take_part_in_the_backward_pass(workers: Pool) -> None:
    first, *others = workers.run(2, dispatching.gradients_of_one_rank_only)
    assert first < 1e-5 and not any(others)


def test_what_a_router_may_not_do_is_refused(workers: Pool) -> None:
    for skipped, unchosen in workers.run(2, dispatching.collect_refusal):
        assert "an expert that does not exist" in skipped and "Leave ep at 1" in skipped
        assert "weights [3, 4] for choices [3, 2]" in unchosen
