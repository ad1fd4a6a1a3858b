"""What processes tell one another, and the meshes they are in."""

from __future__ import annotations

import pytest

from cornstarch.parallel import processes
from tests.parallel.work import mesh_of, refused_mesh, talked
from tests.parity.pool import Pool


def test_a_process_without_a_group_is_alone() -> None:
    assert (processes.is_alone(), processes.rank(), processes.size()) == (True, 0, 1)
    assert processes.sum_over_ranks([1, 2.5]) == [1.0, 2.5]
    assert processes.gather_data({"a": 1}) == [{"a": 1}]
    assert processes.broadcast_data(None) is None


@pytest.mark.parametrize("values", [["", "é" * 1000, None], [{}, {"a": [1, 2.5, True, None]}, []]])
def test_processes_tell_one_another(workers: Pool, values: list[object]) -> None:
    ranks = len(values)
    for rank, found in enumerate(workers.run(ranks, talked, values)):
        assert found == {
            "alone": False,
            "rank": rank,
            "size": ranks,
            "sum": [float(ranks * 2**52 + sum(range(ranks))), 0.5 * ranks, float(sum(range(ranks)))],
            "gathered": values,
            "first": values[0],
            "last": values[-1],
        }


def test_meshes(workers: Pool) -> None:
    assert workers.run(2, mesh_of, None) == [(("dp",), [0, 1])] * 2
    assert workers.run(4, mesh_of, 2) == [(("replicate", "shard"), [[0, 1], [2, 3]])] * 4


@pytest.mark.parametrize("replicate", [3, 0, -1])
def test_replicas_that_do_not_fit_are_refused(workers: Pool, replicate: int) -> None:
    expected = f"{replicate} replicas do not fit 2 processes; expected one of 1, 2."
    assert workers.run(2, refused_mesh, replicate) == [expected] * 2
