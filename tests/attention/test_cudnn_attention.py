"""Masks as causal pieces of rows, against the same mask written out."""

from __future__ import annotations

import pytest

from cornstarch.attention.cudnn_attention import attend_pieces, build_piece_mask
from tests.attention.packed_masks import SPECS, assert_compiled_once, assert_equals_dense_mask, pack_rows


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("name", SPECS)
def test_pieces_equal_dense_mask(name: str, heads: tuple[int, int]) -> None:
    assert_equals_dense_mask(name, heads, lambda spec, inputs: attend_pieces(*inputs, build_piece_mask(spec), 0.3))


def test_sizes_are_rounded_up_so_that_ragged_batches_share_kernels() -> None:
    shapes = set()
    for length in (9, 10, 12, 15):
        found = build_piece_mask(pack_rows([[length, 40 - length, 24]], {0: [(0, length, 0), (44, 60, 1)]}))
        assert found.documents is not None and found.spans is not None
        shapes.add((tuple(found.documents.shape), tuple(found.spans.shape), tuple(found.sizes.tolist())))
        assert found.documents[1].tolist() == [*sorted([length, 40 - length, 24], reverse=True), 0, 0]
        assert sorted(found.spans[:, :2].T.tolist()) == [[0, length - 1], [44, 15]]
    assert len(shapes) == 1


@pytest.mark.timeout(1200)  # compiles C++, which takes minutes on a busy machine
def test_compiled_layer_does_not_recompile_for_ragged_batches() -> None:
    assert_compiled_once(attend_pieces, build_piece_mask)


def test_longest_pieces_come_first() -> None:
    found = build_piece_mask(pack_rows([[5, 12, 7]], {0: [(1, 3, 0), (8, 14, 1)]}))
    assert found.documents is not None and found.spans is not None
    assert found.documents[:, :3].tolist() == [[5, 17, 0], [12, 7, 5]]
    assert found.spans[:, :2].tolist() == [[8, 1], [5, 1]]
