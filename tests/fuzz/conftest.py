"""What runs cases, in the processes that the parity tests have, too."""

from __future__ import annotations

import pytest

from tests.fuzz.runner import Runner
from tests.parity.pool import Pool, pool


@pytest.fixture(scope="session")
def workers() -> Pool:
    """Return the processes."""
    return pool()


@pytest.fixture(scope="session")
def runner(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Return what runs cases, and remembers what one process does."""
    return Runner(workers, tmp_path_factory.mktemp("fuzz"))
