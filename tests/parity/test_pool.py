"""A job that fails is told with its traceback, nobody waits for it, and the next job works."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from tests.parity.pool import Failed, Pool


def number() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()


def one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize(("job", "said"), [(one_fails, "ValueError: on purpose"), (one_dies, "rank 1 died with 7")])
def test_a_failure_is_told_at_once(workers: Pool, job: object, said: str) -> None:
    assert workers.run(2, number) == [(0, 2), (1, 2)]
    start = time.monotonic()
    with pytest.raises(Failed, match=said):
        workers.run(2, job)  # type: ignore[arg-type]
    assert time.monotonic() - start < 30
    assert workers.run(2, number) == [(0, 2), (1, 2)]
