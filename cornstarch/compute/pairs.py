"""How many pairs of a query and a key attention computes, counted from documents and spans and never from a mask.

Of a row of S tokens a mask has S × S entries; what is seen follows from the lengths of documents and from where spans
lie in them, in the time it takes to sort the tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.attention.mask import CAUSAL, MaskPattern, MaskSpec, Visibility

EVERYTHING = MaskPattern(causal=False)
"""Tokens see all of their document."""

_LONGEST = 1 << 17  # tokens within which a window or a chunk is looked for
_ASKED = 512  # pairs by which a pattern is checked
_FAR = np.int64(1) << 40  # more than any position

Integers = np.ndarray[Any, np.dtype[np.int64]]


def visible_pairs(spec: MaskSpec, pattern: MaskPattern = CAUSAL) -> int:
    """Return how many pairs of a query and a key see each other, over all rows; padding is in none."""
    documents, spans = _integers(spec.documents), _integers(spec.spans)
    rows = np.arange(len(documents), dtype=np.int64)[:, None]
    real = documents > 0
    groups = (rows * _span_of_numbers(documents) + documents)[real]
    seen = int(_within(_counts(groups), pattern).sum())
    in_span = spans[real] >= 0
    if not in_span.any():
        return seen
    # Tokens of a span see each other; what the pattern shows them of it is counted already.
    numbers = groups[in_span] * _span_of_numbers(spans) + spans[real][in_span]
    if pattern.causal and pattern.window is None and pattern.chunk is None:
        sizes = _counts(numbers)
        return seen + int((sizes * (sizes - 1) // 2).sum())
    positions = _integers(spec.positions())[real][in_span]
    return seen + int((_counts(numbers) ** 2).sum()) - _seen_in_groups(numbers, positions, pattern)


def _integers(tensor: Tensor) -> Integers:
    return tensor.detach().cpu().numpy().astype(np.int64)


def _span_of_numbers(values: Integers) -> np.int64:
    return np.int64(values.max(initial=0)) + 1


def _counts(groups: Integers) -> Integers:
    return np.unique(groups, return_counts=True)[1].astype(np.int64)


def _within(lengths: Integers, pattern: MaskPattern) -> Integers:
    """Return the pairs in documents of these lengths."""
    if pattern.chunk is None:
        return _in_one_chunk(lengths, pattern)
    whole = _in_one_chunk(np.array([pattern.chunk], dtype=np.int64), pattern)
    return lengths // pattern.chunk * whole + _in_one_chunk(lengths % pattern.chunk, pattern)


def _in_one_chunk(lengths: Integers, pattern: MaskPattern) -> Integers:
    near = lengths if pattern.window is None else np.minimum(lengths, pattern.window)
    back = near * (near + 1) // 2 + (lengths - near) * near
    return back if pattern.causal else 2 * back - lengths


def _seen_in_groups(groups: Integers, positions: Integers, pattern: MaskPattern) -> int:
    """Return how many pairs inside groups a pattern shows."""
    low = np.zeros_like(positions)
    high = positions if pattern.causal else np.full_like(positions, _FAR - 1)
    if pattern.window is not None:
        low, high = np.maximum(low, positions - pattern.window + 1), np.minimum(high, positions + pattern.window - 1)
    if pattern.chunk is not None:
        start = positions // pattern.chunk * pattern.chunk
        low, high = np.maximum(low, start), np.minimum(high, start + pattern.chunk - 1)
    _, numbers = np.unique(groups, return_inverse=True)
    offset = numbers.astype(np.int64) * _FAR
    order = np.sort(offset + positions)
    return int((np.searchsorted(order, offset + high, "right") - np.searchsorted(order, offset + low, "left")).sum())


# ---------------------------------------------------------------------------------------------------- patterns


def recognised(rule: Visibility) -> MaskPattern | None:
    """Return the pattern that a mask function of transformers stands for; None if it is none of ours.

    It is asked who sees the first token, and what the first token that does not sees instead.
    """
    queries = torch.arange(_LONGEST)
    causal = not bool(_ask(rule, torch.tensor([0]), torch.tensor([1])))
    seers = _ask(rule, queries, torch.zeros_like(queries))
    reach = int(seers.sum())
    pattern = MaskPattern(causal=causal)
    if 0 < reach < _LONGEST:
        next_sees = bool(_ask(rule, torch.tensor([reach]), torch.tensor([1])))
        is_window = reach == 1 or next_sees
        pattern = MaskPattern(reach if is_window else None, None if is_window else reach, causal)
    asking, asked = _some_pairs(reach)
    agree = torch.equal(_ask(rule, asking, asked), _ask(pattern, asking, asked))
    return pattern if agree else None


def _ask(rule: Visibility, queries: Tensor, keys: Tensor) -> Tensor:
    none = torch.zeros_like(queries)
    return torch.as_tensor(rule(none, none, queries, keys)).broadcast_to(queries.shape)


@lru_cache(maxsize=64)
def _some_pairs(reach: int) -> tuple[Tensor, Tensor]:
    """Return pairs that lie about as far from each other as a token sees."""
    noise = torch.Generator().manual_seed(0)
    queries = torch.randint(0, min(4 * reach + 4, _LONGEST), (_ASKED,), generator=noise)
    distance = torch.randint(-reach - 2, reach + 3, (_ASKED,), generator=noise)
    return queries, (queries - distance).clamp(0, _LONGEST - 1)


__all__ = ["EVERYTHING", "recognised", "visible_pairs"]
