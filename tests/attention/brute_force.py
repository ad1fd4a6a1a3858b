"""The rule of masks as data as plain loops over rows, queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from cornstarch.attention import MaskPattern, MaskSpec


def brute_force(
    documents: Sequence[Sequence[int]],
    spans: Sequence[Sequence[int]],
    window: int | None = None,
    chunk: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Return which token sees which, bool [B, S, S]."""
    masks = []
    for row, marks in zip(documents, spans, strict=True):
        places = [row[:token].count(document) for token, document in enumerate(row)]
        tokens = range(len(row))
        masks.append([[sees(row, marks, places, q, k, window, chunk, causal) for k in tokens] for q in tokens])
    return torch.tensor(masks)


def sees(
    documents: Sequence[int],
    spans: Sequence[int],
    places: Sequence[int],
    query: int,
    key: int,
    window: int | None,
    chunk: int | None,
    causal: bool,
) -> bool:
    """Return whether token `query` of a row sees token `key`; `places` are their indices within the document."""
    if documents[query] == 0:
        return query == key
    if documents[query] != documents[key]:
        return False
    if spans[query] >= 0 and spans[query] == spans[key]:
        return True
    if causal and places[key] > places[query]:
        return False
    if window is not None and abs(places[query] - places[key]) >= window:
        return False
    return chunk is None or places[query] // chunk == places[key] // chunk


@st.composite
def packed_rows(draw: st.DrawFn, max_rows: int = 3, max_tokens: int = 24) -> MaskSpec:
    """Draw rows of documents in any numbering, padded left and right, with spans in and across documents."""
    tokens = draw(st.integers(1, max_tokens))
    rows = draw(st.integers(1, max_rows))
    return MaskSpec(
        torch.tensor([draw(_documents(tokens)) for _ in range(rows)]),
        torch.tensor([draw(_spans(tokens)) for _ in range(rows)]),
    )


@st.composite
def _documents(draw: st.DrawFn, tokens: int) -> list[int]:
    if draw(st.integers(0, 9)) == 0:  # documents that are not contiguous
        return draw(st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens))
    left = draw(st.integers(0, tokens // 2))
    right = draw(st.integers(0, tokens - left))
    numbers = draw(st.permutations(range(1, tokens + 1)))
    row, number = [0] * left, 0
    for place in range(tokens - left - right):
        if place and draw(st.integers(0, 4)) == 0:
            number += 1
        row.append(numbers[number])
    return row + [0] * right


@st.composite
def _spans(draw: st.DrawFn, tokens: int) -> list[int]:
    row: list[int] = []
    while len(row) < tokens:
        row += [draw(st.integers(-1, 2))] * draw(st.integers(1, 6))
    return row[:tokens]


patterns = st.builds(
    MaskPattern,
    window=st.none() | st.integers(1, 8),
    chunk=st.none() | st.integers(1, 8),
    causal=st.booleans(),
)


def expect(spec: MaskSpec, pattern: MaskPattern) -> Tensor:
    """Return the brute force for a spec, bool [B, 1, S, S]."""
    mask = brute_force(spec.documents.tolist(), spec.spans.tolist(), pattern.window, pattern.chunk, pattern.causal)
    return mask[:, None]
