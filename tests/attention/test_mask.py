"""`MaskSpec` and its renderings against the brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from cornstarch.attention import MaskPattern, MaskSpec
from cornstarch.attention.mask import DocumentCounts, count_documents
from cornstarch.errors import ConfigError
from tests.attention.brute_force import expect, packed_rows, patterns
from tests.attention.packed_masks import SPECS, pack_rows

BLOCK = 128  # tokens of a FlexAttention block
PARTS = [f"{kind}{axis}_{part}" for kind in ("", "full_") for axis in ("kv", "q") for part in ("num_blocks", "indices")]


@settings(max_examples=300, deadline=None)
@given(packed_rows(), patterns)
def test_dense_mask_equals_brute_force(spec: MaskSpec, pattern: MaskPattern) -> None:
    assert torch.equal(spec.dense(pattern), expect(spec, pattern))


@settings(max_examples=60, deadline=None)
@given(packed_rows(max_rows=2, max_tokens=16), patterns)
def test_block_mask_has_the_same_rule(spec: MaskSpec, pattern: MaskPattern) -> None:
    rows, tokens = spec.documents.shape
    block_mask = spec.block_mask(pattern)
    assert torch.equal(create_mask(block_mask.mask_mod, rows, 1, tokens, tokens, "cpu"), expect(spec, pattern))


@settings(max_examples=15, deadline=None)
@given(packed_rows(max_rows=2, max_tokens=300), patterns)
def test_block_mask_equals_torchs_create_block_mask(spec: MaskSpec, pattern: MaskPattern) -> None:
    rows, tokens = spec.documents.shape
    found = spec.block_mask(pattern)
    reference = create_block_mask(spec.mask_function(pattern), rows, None, tokens, tokens, "cpu")
    for name in PARTS:
        assert torch.equal(getattr(found, name), getattr(reference, name)), name
    assert (found.shape, found.BLOCK_SIZE, found.seq_lengths) == (
        reference.shape,
        reference.BLOCK_SIZE,
        reference.seq_lengths,
    )


@pytest.mark.parametrize("tokens", [2048, 2049, 2300])
def test_block_mask_of_several_strips_keeps_exactly_the_visible_blocks(tokens: int) -> None:
    documents = (torch.arange(tokens) // 700)[None]  # 0: padding
    spec = MaskSpec(documents, torch.where(torch.arange(tokens) % 900 < 400, 0, -1)[None])
    padded = torch.nn.functional.pad(spec.dense(), (0, -tokens % BLOCK, 0, -tokens % BLOCK))
    kept = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(dim=3).any(dim=-1)
    assert torch.equal(spec.block_mask().to_dense().bool(), kept)


LONG = {
    "documents across blocks": ([0] * 7 + [1] * 150 + [2] * 40 + [3] * 120 + [0] * 3, (150, 30)),
    "one long span": ([5] * 320, (100, 170)),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("pattern", [MaskPattern(), MaskPattern(window=50), MaskPattern(chunk=64)], ids=str)
def test_long_rows_equal_brute_force_as_dense_and_block_masks(name: str, pattern: MaskPattern) -> None:
    documents, (start, length) = LONG[name]
    spans = [0 if start <= token < start + length else -1 for token in range(len(documents))]
    spec = MaskSpec(torch.tensor([documents]), torch.tensor([spans]))
    mask = expect(spec, pattern)
    assert torch.equal(spec.dense(pattern), mask)
    tokens = len(documents)
    assert torch.equal(create_mask(spec.block_mask(pattern).mask_mod, 1, 1, tokens, tokens, "cpu"), mask)


@settings(max_examples=100, deadline=None)
@given(packed_rows())
def test_positions_count_within_each_document(spec: MaskSpec) -> None:
    for row, positions in zip(spec.documents.tolist(), spec.positions().tolist(), strict=True):
        seen: dict[int, int] = {}
        for document, position in zip(row, positions, strict=True):
            assert position == (0 if document == 0 else seen.get(document, 0))
            seen[document] = seen.get(document, 0) + 1


@settings(max_examples=100, deadline=None)
@given(packed_rows(), patterns, st.data())
def test_mask_of_some_queries_and_keys_is_a_part_of_the_whole(
    spec: MaskSpec, pattern: MaskPattern, data: st.DataObject
) -> None:
    tokens = spec.documents.shape[1]
    queries, keys = (torch.tensor(sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1)))) for _ in "qk")
    part = spec.dense(pattern)[:, :, queries][..., keys]
    assert torch.equal(spec.dense(pattern, queries, keys), part)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(
    "pattern", [MaskPattern(), MaskPattern(window=50), MaskPattern(chunk=64, causal=False)], ids=str
)
def test_block_mask_of_some_queries_and_keys(pattern: MaskPattern, contiguous: bool) -> None:
    documents, (start, length) = LONG["documents across blocks"]
    spans = [0 if start <= token < start + length else -1 for token in range(len(documents))]
    spec = MaskSpec(torch.tensor([documents * 2]), torch.tensor([spans * 2]))
    if contiguous:
        spec = MaskSpec(torch.tensor([documents + [one and one + 3 for one in documents]]), spec.spans)
    assert spec.counts.are_contiguous == contiguous
    places = torch.arange(640).split(40)
    queries, keys = (
        torch.cat([places[number] for number in numbers]) for numbers in ([1, 4, 5, 9, 14, 15], range(8, 0, -1))
    )
    mask, found = spec.dense(pattern, queries, keys), spec.block_mask(pattern, queries, keys)
    assert torch.equal(create_mask(found.mask_mod, 1, 1, len(queries), len(keys), "cpu"), mask)
    padded = torch.nn.functional.pad(mask, (0, -len(keys) % BLOCK, 0, -len(queries) % BLOCK))
    blocks = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    assert (found.to_dense().bool() >= blocks.any(dim=3).any(dim=-1)).all()  # between keys there may be gaps
    assert torch.equal(found.full_kv_num_blocks, blocks.all(dim=3).all(dim=-1).sum(dim=-1))


@settings(max_examples=100, deadline=None)
@given(packed_rows(), patterns)
def test_visible_range_equals_brute_force(spec: MaskSpec, pattern: MaskPattern) -> None:
    assume(spec.counts.are_contiguous)
    first, last = (one[:, None, :, None] for one in spec.visible_range(pattern))
    places = torch.arange(spec.documents.shape[1])
    assert torch.equal((first <= places) & (places <= last), expect(spec, pattern))


@settings(max_examples=100, deadline=None)
@given(packed_rows(), st.integers(0, 5))
def test_new_tokens_are_text_of_the_last_document(spec: MaskSpec, added: int) -> None:
    tokens = spec.documents.shape[1]
    longer = spec.extend(tokens + added)
    assert longer.documents[:, :tokens].equal(spec.documents)
    assert longer.spans[:, :tokens].equal(spec.spans)
    for row, extended in zip(spec.documents.tolist(), longer.documents.tolist(), strict=True):
        last = next((document for document in reversed(row) if document), 0)
        assert extended[tokens:] == [last] * added
    assert (longer.spans[:, tokens:] == -1).all()


@pytest.mark.parametrize("name", SPECS)
def test_counts_are_upper_bounds(name: str) -> None:
    spec = SPECS[name]
    groups: dict[tuple[int, int, int], int] = {}
    for row, (documents, spans) in enumerate(zip(spec.documents.tolist(), spec.spans.tolist(), strict=True)):
        for document, span in zip(documents, spans, strict=True):
            if span >= 0 and document > 0:
                groups[row, document, span] = groups.get((row, document, span), 0) + 1
    found = spec.counts
    assert found.are_contiguous and found.spans >= len(groups) and found.longest_span >= max(groups.values(), default=0)


def test_count_documents() -> None:
    assert count_documents(torch.tensor([[1, 1, 2, 2, 2], [0, 1, 1, 0, 0]])) == DocumentCounts(5, 3, False)
    assert count_documents(torch.tensor([[1, 1, 1], [1, 1, 0]])) == DocumentCounts(3, 3, True), (
        "trailing padding does not matter"
    )
    assert not count_documents(torch.tensor([[0, 1, 1]])).whole_rows, "leading padding would be seen"
    assert not count_documents(torch.tensor([[1, 1, 2, 1, 1]])).are_contiguous
    assert not MaskSpec.from_documents(torch.tensor([[1, 2, 1]])).counts.are_contiguous
    assert count_documents(torch.tensor([[0, 1, 0], [0, 0, 0]])).are_contiguous, "padding may be on both sides"
    parts = pack_rows([[24]], {0: [(3, 8, 0), (15, 20, 0)]})
    assert not parts.counts.are_contiguous, "a span in two parts"


def test_known_counts_are_not_computed() -> None:
    known = DocumentCounts(3, 9, False)
    spec = MaskSpec(torch.ones(1, 4, dtype=torch.long), torch.full((1, 4), -1), known_counts=known)
    assert spec.counts is known and spec.to("cpu").counts is known
    assert spec.with_spans(torch.zeros(1, 4, dtype=torch.long)).counts == DocumentCounts(1, 4, True, 1, 4)


def test_padding_makes_one_document_of_each_row() -> None:
    spec = MaskSpec.from_padding(torch.tensor([[0, 1, 1], [1, 1, 0]]))
    assert spec.documents.tolist() == [[0, 1, 1], [1, 1, 0]]
    assert spec.spans.tolist() == [[-1] * 3] * 2
    assert spec.positions().tolist() == [[0, 0, 1], [0, 1, 0]]
    assert spec.with_spans(torch.tensor([[0, 0, 1]] * 2)).spans.tolist() == [[0, 0, 1]] * 2


PLAIN = [
    ([[1, 1], [2, 2]], [[-1, -1]] * 2, True),
    ([[1, 1], [1, 0]], [[-1, -1]] * 2, False),
    ([[1, 2]], [[-1, -1]], False),
    ([[1, 1]], [[-1, 0]], False),
    ([[0, 0]], [[-1, -1]], False),
]


@pytest.mark.parametrize(("documents", "spans", "plain"), PLAIN)
def test_is_plain(documents: list[list[int]], spans: list[list[int]], plain: bool) -> None:
    assert MaskSpec(torch.tensor(documents), torch.tensor(spans)).is_plain is plain


def test_rows_are_repeated_for_beams() -> None:
    spec = MaskSpec(torch.tensor([[1, 1], [0, 2]]), torch.tensor([[0, 0], [-1, -1]])).repeat_interleave(2)
    assert spec.documents.tolist() == [[1, 1], [1, 1], [0, 2], [0, 2]]
    assert spec.spans.tolist() == [[0, 0], [0, 0], [-1, -1], [-1, -1]]


def test_to_the_same_device_is_the_same_spec() -> None:
    spec = MaskSpec.from_padding(torch.ones(1, 2))
    assert spec.to("cpu") is spec
    assert spec.to("meta").documents.is_meta


MISTAKES = {
    "shapes differ": (
        lambda: MaskSpec(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)),
        "[2, 4]",
    ),
    "floats": (lambda: MaskSpec.from_documents(torch.ones(2, 3)), "float32"),
    "bools": (lambda: MaskSpec.from_documents(torch.ones(2, 3, dtype=torch.bool)), "bool"),
    "no batch": (lambda: MaskSpec.from_documents(torch.ones(3, dtype=torch.long)), "[3]"),
    "4-D mask": (lambda: MaskSpec.from_padding(torch.ones(2, 1, 3, 3)), "[2, 1, 3, 3]"),
    "empty window": (lambda: MaskPattern(window=0), "window = 0"),
    "empty chunk": (lambda: MaskPattern(chunk=0), "chunk = 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_config_errors(name: str) -> None:
    make, text = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        make()
    assert text in str(caught.value)
