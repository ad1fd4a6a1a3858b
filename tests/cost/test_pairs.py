"""Pairs counted from documents and spans, against masks that are laid out."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from cornstarch.attention.mask import CAUSAL, MaskPattern, MaskSpec
from cornstarch.cost.meta_kernels import EVERYTHING, recognize_pattern
from cornstarch.cost.scaling import visible_pairs

PATTERNS = [
    CAUSAL,
    EVERYTHING,
    MaskPattern(window=1),
    MaskPattern(window=5),
    MaskPattern(chunk=4),
    MaskPattern(window=3, chunk=7),
    MaskPattern(window=4, causal=False),
    MaskPattern(chunk=6, causal=False),
]


def brute_force(spec: MaskSpec, pattern: MaskPattern) -> int:
    """Lay the mask out; padding, which sees itself there, is taken off."""
    return int(spec.dense(pattern).sum()) - int((spec.documents <= 0).sum())


def random_spec(seed: int) -> MaskSpec:
    """Make packed rows with padding anywhere, and spans that need not lie in one piece."""
    noise = torch.Generator().manual_seed(seed)
    rows, tokens = 3, 41
    documents = torch.randint(0, 4, (rows, tokens), generator=noise)
    if seed % 2:
        documents = documents.sort(dim=1, descending=bool(seed % 4 == 1)).values
    spans = torch.randint(-1, 4, (rows, tokens), generator=noise)
    return MaskSpec(documents, spans if seed % 3 else torch.full_like(spans, -1))


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_visible_pairs_equal_those_of_the_dense_mask(pattern: MaskPattern) -> None:
    for seed in range(24):
        spec = random_spec(seed)
        assert visible_pairs(spec, pattern) == brute_force(spec, pattern), seed


def test_rows_of_padding_alone_see_nothing() -> None:
    assert visible_pairs(MaskSpec.from_documents(torch.zeros(2, 5, dtype=torch.long))) == 0


def test_long_rows_take_milliseconds() -> None:
    """A mask of this row would have 17 thousand million entries."""
    tokens = 1 << 17
    spans = torch.full((1, tokens), -1)
    spans[0, 1000:1729] = 0
    spec = MaskSpec(torch.ones(1, tokens, dtype=torch.long), spans)
    began = time.process_time()
    assert visible_pairs(spec) == tokens * (tokens + 1) // 2 + 729 * 728 // 2
    assert time.process_time() - began < 1.0


KNOWN: list[tuple[Any, MaskPattern]] = [
    (causal_mask_function, CAUSAL),
    (bidirectional_mask_function, EVERYTHING),
    (sliding_window_causal_mask_function(8), MaskPattern(window=8)),
    (sliding_window_causal_mask_function(4096), MaskPattern(window=4096)),
    (sliding_window_bidirectional_mask_function(8), MaskPattern(window=9, causal=False)),  # of distance 8, too
    (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)), MaskPattern(chunk=8)),
]


@pytest.mark.parametrize(("rule", "pattern"), KNOWN, ids=["causal", "both", "window", "long", "both-window", "chunk"])
def test_masks_of_transformers_are_recognized(rule: Any, pattern: MaskPattern) -> None:
    assert recognize_pattern(rule) == pattern


def test_an_unknown_mask_is_not_recognized() -> None:
    assert recognize_pattern(lambda row, head, query, key: (query + key) % 3 == 0) is None
