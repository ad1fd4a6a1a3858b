"""A whole multimodal model, taken apart: one process has images, the other text alone, and neither waits for ever."""

from __future__ import annotations

import pytest

from cornstarch.train.witness import TOLERANCE
from tests.parity.cell import Matrix
from tests.parity.page import TAKEN_APART, taken_apart


@pytest.mark.parametrize(("family", "kind"), TAKEN_APART)
def test_images_in_one_process_and_text_in_the_other(matrix: Matrix, family: str, kind: str) -> None:
    assert taken_apart(matrix, family, kind) < TOLERANCE
