"""Looking up, while data is read, what encoders made of an item before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cornstarch.train.data.media import content_digest
from cornstarch.train.data.sample import Media
from cornstarch.train.data.seen import SeenItem
from cornstarch.train.features.store import FeatureStore


class FeatureLookup:
    """Looks items up in the stores of their encoders.

    Args:
        stores: By modality.
    """

    def __init__(self, stores: Mapping[str, FeatureStore]) -> None:
        self._stores = dict(stores)

    def item(self, modality: str, media: Media, decode: Callable[[], Any]) -> SeenItem:
        """Return an item with its features, or decoded if there are none."""
        digest = content_digest(media)
        tokens = self._stores[modality].load(digest)
        return SeenItem(digest, decode() if tokens is None else None, tokens)
