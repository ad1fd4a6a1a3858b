"""Masks as what each token sees of its document, against the same mask written out."""

from __future__ import annotations

import pytest
import torch

from cornstarch.attention import MaskSpec
from cornstarch.attention.documents import ENTRY, Documents, attend_in_documents, documents_of
from cornstarch.attention.mask import BLOCK
from tests.attention.test_pieces import (
    SPECS,
    assert_compiled_once,
    assert_equals_a_dense_mask,
    marked,
    unwanted,
    with_padding,
)


def documents(spec: MaskSpec) -> Documents:
    assert spec.counts.in_pieces
    return documents_of(spec, spec.counts, unwanted)


def lists(found: Documents, tokens: int) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Where documents begin, ends, firsts, and the entries of the order."""
    assert found.ends is not None and found.firsts is not None
    front = int(found.sizes[1])
    begins, ends, order = found.ends.split([front, tokens, len(found.ends) - front - tokens])
    assert torch.equal(found.firsts[:front], begins) and torch.equal(found.firsts[front + tokens :], order)
    firsts = found.firsts[front : front + tokens]
    return begins.tolist(), ends.tolist(), firsts.tolist(), order.unflatten(0, (-1, ENTRY)).tolist()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("name", SPECS)
def test_documents_equal_a_dense_mask(name: str, heads: tuple[int, int]) -> None:
    assert_equals_a_dense_mask(name, heads, lambda spec, inputs: attend_in_documents(*inputs, documents(spec), 0.3))


def test_what_is_listed() -> None:
    spec = marked([[4, 6], [7, 3]], {0: [(1, 3, 0), (6, 9, 1)], 1: [(0, 2, 0)]})
    begins, ends, firsts, _ = lists(documents(spec), 20)
    assert begins == [0, 4, 10, 17, 20]
    assert ends == [1, 3, 3, 4, 1, 2, 5, 5, 5, 6, 2, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert firsts == [0, 1, 1, 3, 0, 1, 2, 2, 2, 5, 0, 0, 2, 3, 4, 5, 6, 0, 1, 2]


def test_rows_of_one_document_each() -> None:
    plain = documents(with_padding(marked([[8], [8]]), 0, 6))
    assert plain.ends is None and plain.firsts is None, "kernels for plain rows do"
    begins, ends, firsts, _ = lists(documents(with_padding(marked([[8], [8]], {1: [(2, 5, 0)]}), 0, 6)), 16)
    assert begins == [0, 8, 16]
    assert ends == [*range(1, 9), 1, 2, 5, 5, 5, 6, 7, 8], "what is behind a row's end is as a part of it"
    assert firsts == [*range(8), 0, 1, 2, 2, 2, 5, 6, 7]


def test_every_block_has_an_entry_and_the_longest_document_comes_first() -> None:
    lengths = [5, 2 * BLOCK + 1, BLOCK, 3]
    spec = marked([lengths])
    _, _, _, order = lists(documents(spec), sum(lengths))
    long, middle = [1, 0, 2 * BLOCK + 1, 5], [2, 3, BLOCK, 2 * BLOCK + 6]
    assert order[:6] == [long] * 3 + [middle, [0, 4, 5, 0], [3, 5, 3, 3 * BLOCK + 6]]
    assert {entry[0] for entry in order[6:]} == {-1}
    front = len(lists(documents(spec), sum(lengths))[0])
    assert len(order) == (sum(lengths) + (front - 1) * (BLOCK - 1)) // BLOCK, "as many as kernels ask for"


def test_limits_never_fall_within_a_document() -> None:
    """Kernels look at the last query of a tile, and at the first key."""
    for spec in SPECS.values():
        found = documents(spec)
        if found.ends is None:
            continue
        tokens = spec.documents.numel()
        begins, ends, firsts, _ = lists(found, tokens)
        for begin, end in zip(begins[:-1], begins[1:], strict=True):
            assert ends[begin:end] == sorted(ends[begin:end]) and firsts[begin:end] == sorted(firsts[begin:end])
            assert all(place < seen <= end - begin for place, seen in enumerate(ends[begin:end]))
            assert all(0 <= first <= place for place, first in enumerate(firsts[begin:end]))


@pytest.mark.timeout(1200)  # C++ is compiled, which a busy machine takes minutes for
def test_a_compiled_layer_is_compiled_once_for_ragged_batches() -> None:
    assert_compiled_once(attend_in_documents, documents)
