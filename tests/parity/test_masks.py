"""Tokens that are cut over processes see what they see in one."""

from __future__ import annotations

import pytest

from cornstarch.verify.twin_trial import TOLERANCE
from tests.parity.cell import Matrix
from tests.parity.masks import MASKS, WAYS
from tests.parity.page import masked

# Every mask and every way once; `make parity` runs all of them.
SOME = [(mask, WAYS[number % len(WAYS)]) for number, mask in enumerate(MASKS)]


@pytest.mark.parametrize(("mask", "way"), SOME)
def test_every_mask(matrix: Matrix, mask: str, way: str) -> None:
    assert masked(matrix, mask, way).worst < TOLERANCE
