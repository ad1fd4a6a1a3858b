"""Texts with items in them into tokens: each placeholder as often as its item has tokens, and none of them cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.preprocessing.placeholders import Items, expand, share_out


@dataclass(frozen=True)
class ItemTokenizer:
    """A tokenizer that knows the placeholders of items."""

    tokenizer: PreTrainedTokenizerBase
    tokens: Mapping[str, str]
    """The placeholder of each modality."""
    ids: Mapping[str, int]
    """Their ids."""

    def __call__(self, texts: list[str], items: Mapping[str, Items], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokenized texts, with each placeholder repeated to the number of its item's tokens.

        Args:
            texts: One per sample.
            items: Those of each modality that has some.
            options: Of the tokenizer.
        """
        expanded = texts
        expected: dict[str, list[int]] = {}
        for name, token in self.tokens.items():
            shares = share_out(name, token, texts, items.get(name, Items([])))
            expected[name] = [sum(share) for share in shares]
            expanded = [expand(text, token, share) for text, share in zip(expanded, shares, strict=True)]
        encoded = dict(self.tokenizer(expanded, **options))
        for name, token_id in self.ids.items():
            for sample, ids in enumerate(encoded["input_ids"]):
                kept = int((np.asarray(ids) == token_id).sum())
                if kept != expected[name][sample]:
                    problem = self._cut_item(name, expanded[sample], kept, expected[name][sample], options)
                    raise ConfigError(f"Sample {sample} {problem}")
        return encoded

    def _cut_item(self, name: str, text: str, kept: int, wanted: int, options: Mapping[str, Any]) -> str:
        """Say why a text has lost tokens of an item."""
        if not options.get("truncation"):
            return (
                f"has {kept} tokens {self.tokens[name]!r} instead of {wanted}: the tokenizer does not keep "
                f"this token whole (options: {options})."
            )
        length = len(self.tokenizer(text, verbose=False)["input_ids"])
        limit = options.get("max_length") or self.tokenizer.model_max_length
        return (
            f"has {length} tokens, the limit is {limit}: truncation would leave {kept} of its {wanted} {name} tokens, "
            "and an item is never cut. Raise max_length, or give fewer items or less text beside them (text beyond "
            "the last item may be cut)."
        )


__all__ = ["ItemTokenizer"]
