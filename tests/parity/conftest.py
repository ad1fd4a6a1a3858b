"""One pool of processes for all parity tests, and the matrix that runs in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.cell import Matrix
from tests.parity.pool import Pool, pool


@pytest.fixture(scope="session")
def workers() -> Pool:
    """Return the processes."""
    return pool()


@pytest.fixture(scope="session")
def matrix(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Return the matrix, which remembers what one process does."""
    return Matrix(workers, tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="session")
def on_gpu() -> Iterator[Pool]:
    """Return processes that share a GPU."""
    pool = Pool("cuda")
    yield pool
    pool.close()
