"""Steps of random samples never hang, whoever has nothing, and end where one process ends."""

from __future__ import annotations

import pytest

from tests.parity.cell import Matrix
from tests.parity.page import BY_HAND, MANY, MANY_LIMIT, RANDOM, by_hand, random_steps


@pytest.mark.parametrize(("row", "kind"), [("vision_audio", "ddp"), ("vision_audio", "fsdp2")])
def test_200_random_steps(matrix: Matrix, row: str, kind: str) -> None:
    assert (row, kind) in RANDOM
    losses, weights = random_steps(matrix, row, kind, steps=MANY)
    assert losses < 1e-5 and weights < MANY_LIMIT


@pytest.mark.parametrize(("way", "frozen"), [("ddp", False), ("fsdp1", False), ("fsdp2", True), ("fsdp2", False)])
def test_a_loop_written_by_hand(matrix: Matrix, way: str, frozen: bool) -> None:
    assert (way, frozen) in BY_HAND
    losses, weights = by_hand(matrix, way, frozen, steps=40)
    assert losses < 1e-5 and weights < MANY_LIMIT
