"""Steps of random samples never hang, whoever has nothing, and end where one process ends."""

from __future__ import annotations

import pytest

from tests.parity.cell import Matrix
from tests.parity.page import BY_HAND, MANY_LIMIT, RANDOM, by_hand, random_steps

STEPS = 60  # `make parity` does 200; those of which the kind is not left to chance are among the first seven


@pytest.mark.parametrize(("row", "kind"), [("vision_audio", "ddp"), ("vision_audio", "fsdp2")])
def test_random_steps(matrix: Matrix, row: str, kind: str) -> None:
    assert (row, kind) in RANDOM
    losses, weights = random_steps(matrix, row, kind, steps=STEPS)
    assert losses < 1e-5 and weights < MANY_LIMIT


@pytest.mark.parametrize(("way", "frozen"), [("ddp", False), ("fsdp1", False), ("fsdp2", True), ("fsdp2", False)])
def test_a_loop_written_by_hand(matrix: Matrix, way: str, frozen: bool) -> None:
    assert (way, frozen) in BY_HAND
    losses, weights = by_hand(matrix, way, frozen, steps=40)
    assert losses < 1e-5 and weights < MANY_LIMIT
