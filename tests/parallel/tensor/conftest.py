"""The processes of the parity tests, for these too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.conftest import workers
from tests.parity.pool import Pool

__all__ = ["workers"]


@pytest.fixture
def fresh(workers: Pool) -> Iterator[Pool]:
    """Return processes that know of no other mesh.

    DTensor remembers meshes by their shape for as long as a process lives, and with them the names of process groups
    that are gone when the next job begins.
    """
    workers.renew()
    yield workers
    workers.renew()
