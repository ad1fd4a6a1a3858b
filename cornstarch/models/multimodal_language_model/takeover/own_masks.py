"""A model's own attention masks as spans of tokens that see each other (see `dismantle`).

Models that make masks themselves let images see themselves in both directions, or all of a prompt. What a mask says
beyond causal attention is read off it, for each document alone; a mask that says anything else is refused.

Shape letters: N documents, S tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cornstarch.errors import UnsupportedModelError

TEXT = -1
_FULL = "full_attention"


def spans_of(masks: Any, lengths: Tensor) -> Tensor:
    """Return the spans [N, S] of documents that a model's masks describe; -1 is text.

    Args:
        masks: What the model gives its language model: a mask [N, 1, S, S] of booleans, one for each kind of layer, or
            None for causal attention.
        lengths: [N] tokens of each document; the rest is padding.
    """
    by_kind = dict(masks) if isinstance(masks, Mapping) else {_FULL: masks}
    places = torch.arange(int(lengths.max()), device=lengths.device)
    causal_SS = places[:, None] >= places
    full_NSS = _checked(by_kind.pop(_FULL, None), lengths)
    if full_NSS is None:
        full_NSS = causal_SS.expand(len(lengths), -1, -1)
    there_NS = places < lengths[:, None]
    inside_NSS = there_NS[:, :, None] & there_NS[:, None, :]
    # Two tokens that see each other are in one span, named after its first token.
    mutual_NSS = full_NSS & full_NSS.mT & inside_NSS
    first_NS = torch.where(mutual_NSS, places, len(places)).amin(-1)
    spans_NS = torch.where((mutual_NSS.sum(-1) > 1) & there_NS, first_NS, TEXT)
    together_NSS = (spans_NS[:, :, None] == spans_NS[:, None, :]) & (spans_NS >= 0)[:, :, None]
    if not torch.equal(full_NSS & inside_NSS, (causal_SS | together_NSS) & inside_NSS):
        raise UnsupportedModelError("its masks are not causal with spans that see each other")
    for mask in by_kind.values():
        other_NSS = _checked(mask, lengths)
        if other_NSS is None:
            continue
        hidden, ahead = together_NSS & ~other_NSS, other_NSS & ~causal_SS & ~together_NSS
        if bool(((hidden | ahead) & inside_NSS).any()):
            raise UnsupportedModelError("its kinds of layers let other spans of tokens see each other")
    return spans_NS


def _checked(mask: Any, lengths: Tensor) -> Tensor | None:
    """Return a mask [N, S, S], the same for all heads."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
        raise UnsupportedModelError(f"its masks are not ones of booleans ({type(mask).__name__})")
    return mask[:, 0].expand(len(lengths), -1, -1)


__all__ = ["TEXT", "spans_of"]
