"""Count the pairs of a query and a key that attention computes, from documents and spans instead of a mask.

The mask of a row of S tokens has S × S entries. The number of visible pairs follows from the lengths of documents and
the positions of spans, in the time that sorting the tokens takes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.attention.mask import CAUSAL, MaskFunction, MaskPattern, MaskSpec

EVERYTHING = MaskPattern(causal=False)
"""Every token sees all of its document."""

_LONGEST = 1 << 17  # the longest window or chunk that is recognized
_CHECKED = 512  # pairs that check a recognized pattern
_FAR = np.int64(1) << 40  # more than any position

Integers = np.ndarray[Any, np.dtype[np.int64]]


def visible_pairs(spec: MaskSpec, pattern: MaskPattern = CAUSAL) -> int:
    """Return the number of visible pairs of a query and a key over all rows, without padding."""
    documents, spans = _integers(spec.documents), _integers(spec.spans)
    rows = np.arange(len(documents), dtype=np.int64)[:, None]
    real = documents > 0
    groups = (rows * _span_of_numbers(documents) + documents)[real]
    seen = int(_within(_counts(groups), pattern).sum())
    in_span = spans[real] >= 0
    if not in_span.any():
        return seen
    # All tokens of a span see each other; the pairs that the pattern shows are counted already.
    numbers = groups[in_span] * _span_of_numbers(spans) + spans[real][in_span]
    if pattern.causal and pattern.window is None and pattern.chunk is None:
        sizes = _counts(numbers)
        return seen + int((sizes * (sizes - 1) // 2).sum())
    positions = _integers(spec.positions())[real][in_span]
    return seen + int((_counts(numbers) ** 2).sum()) - _count_in_groups(numbers, positions, pattern)


def _integers(tensor: Tensor) -> Integers:
    return tensor.detach().cpu().numpy().astype(np.int64)


def _span_of_numbers(values: Integers) -> np.int64:
    return np.int64(values.max(initial=0)) + 1


def _counts(groups: Integers) -> Integers:
    return np.unique(groups, return_counts=True)[1].astype(np.int64)


def _within(lengths: Integers, pattern: MaskPattern) -> Integers:
    """Return the number of visible pairs in documents of these lengths."""
    if pattern.chunk is None:
        return _in_one_chunk(lengths, pattern)
    whole = _in_one_chunk(np.array([pattern.chunk], dtype=np.int64), pattern)
    return lengths // pattern.chunk * whole + _in_one_chunk(lengths % pattern.chunk, pattern)


def _in_one_chunk(lengths: Integers, pattern: MaskPattern) -> Integers:
    near = lengths if pattern.window is None else np.minimum(lengths, pattern.window)
    back = near * (near + 1) // 2 + (lengths - near) * near
    return back if pattern.causal else 2 * back - lengths


def _count_in_groups(groups: Integers, positions: Integers, pattern: MaskPattern) -> int:
    """Return the number of pairs inside groups that a pattern shows."""
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


def recognize_pattern(rule: MaskFunction) -> MaskPattern | None:
    """Return the pattern of a mask function of transformers; None if it is not a `MaskPattern`.

    The queries that see the first token give the reach; whether the next query sees the second token distinguishes a
    window from a chunk. Random pairs then check the pattern.
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
    asking, asked = _draw_pairs(reach)
    agree = torch.equal(_ask(rule, asking, asked), _ask(pattern, asking, asked))
    return pattern if agree else None


def _ask(rule: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    none = torch.zeros_like(queries)
    return torch.as_tensor(rule(none, none, queries, keys)).broadcast_to(queries.shape)


@lru_cache(maxsize=64)
def _draw_pairs(reach: int) -> tuple[Tensor, Tensor]:
    """Return random pairs at distances around the reach."""
    noise = torch.Generator().manual_seed(0)
    queries = torch.randint(0, min(4 * reach + 4, _LONGEST), (_CHECKED,), generator=noise)
    distance = torch.randint(-reach - 2, reach + 3, (_CHECKED,), generator=noise)
    return queries, (queries - distance).clamp(0, _LONGEST - 1)
