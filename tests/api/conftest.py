"""The processes of the parity tests, for these too."""

from __future__ import annotations

import pytest

from tests.parity.pool import Pool, pool


@pytest.fixture(scope="session")
def workers() -> Pool:
    """Return the processes."""
    return pool()
