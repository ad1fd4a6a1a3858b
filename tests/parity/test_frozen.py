"""What is frozen changes what stages send back; gradients of what is trained must not notice."""

from __future__ import annotations

from itertools import cycle

import pytest

from cornstarch.verify.twin_trial import TOLERANCE
from tests.parity.cell import Matrix
from tests.parity.frozen import COMBINATIONS, SCHEDULES
from tests.parity.page import frozen

# All of them with the schedule that has backward passes of two kinds; the others take turns. `make parity` runs each.
CASES = [(trained, "zero_bubble") for trained in COMBINATIONS]
CASES += zip(COMBINATIONS, cycle(schedule for schedule in SCHEDULES if schedule != "zero_bubble"), strict=False)


@pytest.mark.parametrize(("trained", "schedule"), CASES)
def test_whatever_is_frozen(matrix: Matrix, trained: tuple[bool, bool, bool], schedule: str) -> None:
    assert frozen(matrix, trained, schedule).worst < TOLERANCE
