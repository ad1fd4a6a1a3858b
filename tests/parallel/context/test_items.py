"""Encoders whose items are dealt out give the features, and the gradients, of one process."""

from __future__ import annotations

import pytest

from tests import zoo
from tests.parallel.context import refused, special
from tests.parity.pool import Pool


@pytest.mark.parametrize(("ranks", "items"), [(2, 5), (3, 2)])
@pytest.mark.parametrize("name", zoo.ENCODERS)
def test_encoders(workers: Pool, name: str, ranks: int, items: int) -> None:
    assert workers.run(ranks, special.encoder, name, items) == [""] * ranks


def test_items_are_balanced_by_patches(workers: Pool) -> None:
    for patches in workers.run(2, special.patches_encoded):
        assert patches == [24, 24]  # of grids of 16, 8, 16 and 8 patches


def test_what_cannot_be_dealt_out_is_refused(workers: Pool) -> None:
    for found in workers.run(2, refused.refused_items):
        assert "takes means over all items of a batch" in found["batch norm"]
        assert "were given different items" in found["different items"]
        assert "mesh of one axis" in found["mesh"]
        assert "'sizes' of shape [3]" in found["unknown input"]
