"""What processes tell one another, and the meshes they are in."""

from __future__ import annotations

import pytest

from cornstarch.parallel import distributed
from tests.parallel.work import collect_refused_mesh, mesh_of, talk
from tests.parity.pool import Pool


def test_process_without_group_is_single() -> None:
    assert (distributed.is_single_process(), distributed.rank(), distributed.world_size()) == (True, 0, 1)
    assert distributed.sum_over_ranks([1, 2.5]) == [1.0, 2.5]
    assert distributed.all_gather_json({"a": 1}) == [{"a": 1}]
    assert distributed.broadcast_json(None) is None


@pytest.mark.parametrize("values", [["", "é" * 1000, None], [{}, {"a": [1, 2.5, True, None]}, []]])
def test_all_ranks_gather_json_values_in_rank_order(workers: Pool, values: list[object]) -> None:
    ranks = len(values)
    for rank, found in enumerate(workers.run(ranks, talk, values)):
        assert found == {
            "alone": False,
            "rank": rank,
            "size": ranks,
            "sum": [float(ranks * 2**52 + sum(range(ranks))), 0.5 * ranks, float(sum(range(ranks)))],
            "gathered": values,
            "first": values[0],
            "last": values[-1],
        }


def test_meshes_contain_the_expected_ranks(workers: Pool) -> None:
    assert workers.run(2, mesh_of, None) == [(("dp",), [0, 1])] * 2
    assert workers.run(4, mesh_of, 2) == [(("replicate", "shard"), [[0, 1], [2, 3]])] * 4


@pytest.mark.parametrize("replicate", [3, 0, -1])
def test_replica_count_that_does_not_divide_is_refused(workers: Pool, replicate: int) -> None:
    expected = f"{replicate} replicas do not fit 2 processes; expected one of 1, 2."
    assert workers.run(2, collect_refused_mesh, replicate) == [expected] * 2
