"""What is frozen changes what stages send back; gradients of what is trained must not notice."""

from __future__ import annotations

import pytest

from cornstarch.train.witness import TOLERANCE
from tests.parity.cell import Matrix
from tests.parity.frozen import COMBINATIONS, SCHEDULES
from tests.parity.page import frozen


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("trained", COMBINATIONS)
def test_whatever_is_frozen(matrix: Matrix, trained: tuple[bool, bool, bool], schedule: str) -> None:
    assert frozen(matrix, trained, schedule).worst < TOLERANCE
