"""Items that encoders may have encoded before: such come with their features and are not decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cornstarch.models.multimodal_language_model.items import KNOWN
from cornstarch.train.data.sample import Media


@dataclass(frozen=True)
class SeenItem:
    """An image or a sound, with what it is known by."""

    digest: str
    decoded: Any
    """None where its features are known."""
    tokens: Tensor | None
    """[T, D], what the encoder made of it before; None: it is to be encoded."""


class ItemLookup(Protocol):
    """Knows items that were encoded before; it lives in the processes that read data."""

    def item(self, modality: str, media: Media, decode: Callable[[], Any]) -> SeenItem:
        """Return an item with its features, or decoded if there are none."""
        ...


def known_inputs(
    items: Sequence[SeenItem], inputs: Mapping[str, Any], lengths: Sequence[int]
) -> tuple[dict[str, Any], list[int]]:
    """Return an encoder's inputs for items of which some are known, and the tokens of each item.

    Args:
        items: All of one modality, in order.
        inputs: What the processor made of those that are not known.
        lengths: The tokens of each of these.
    """
    counted = iter(lengths)
    every = [next(counted) if item.tokens is None else len(item.tokens) for item in items]
    known: dict[str, Any] = {
        "digests": [item.digest for item in items],
        "lengths": every,
        "is_known": [item.tokens is not None for item in items],
    }
    stored = [item.tokens for item in items if item.tokens is not None]
    if stored:
        known["tokens"] = torch.cat(stored)
    return {**inputs, KNOWN: known}, every
