"""A whole multimodal model, taken apart: one process has images, the other text alone, and neither waits for ever."""

from __future__ import annotations

import pytest

from cornstarch.verify.twin_trial import TOLERANCE
from tests.parity.cell import Matrix, farthest, together
from tests.parity.page import TAKEN_APART, take_apart
from tests.parity.taken_apart import gradients


@pytest.mark.parametrize(("family", "kind"), TAKEN_APART)
def test_images_in_one_process_and_text_in_the_other(matrix: Matrix, family: str, kind: str) -> None:
    assert take_apart(matrix, family, kind) < TOLERANCE


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_model_in_one_piece(matrix: Matrix, kind: str) -> None:
    alone = matrix.remembered("llava in one piece", gradients, "llava", None, True)
    found = matrix.workers.run(2, gradients, "llava", kind, True)
    assert farthest(together(found)[0], alone)[0] < TOLERANCE
