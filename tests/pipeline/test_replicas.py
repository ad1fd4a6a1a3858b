"""Replicas of a pipeline that train together also stop together."""

from __future__ import annotations

from tests.parity.pool import QUIET, Pool
from tests.pipeline import replicas


def test_a_failure_in_one_replica_stops_the_other_which_waits_for_its_gradients(workers: Pool) -> None:
    told = workers.run(4, replicas.fail, 3, 1)
    assert [words for words, _ in told] == ["rank 3, stage 1 (model 1), microbatch 1: ValueError: a bad number"] * 4
    assert max(ended for _, ended in told) - told[3][1] < QUIET["cpu"] / 2  # not because gloo has waited long enough
