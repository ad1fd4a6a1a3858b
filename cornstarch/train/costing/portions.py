"""How large a microbatch is that costs are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from cornstarch.models.multimodal_language_model import MultimodalModel

if TYPE_CHECKING:
    from cornstarch.plan.facts import DataFacts
    from cornstarch.train.config import RunConfig


@dataclass(frozen=True)
class Portion:
    """What a rank computes at a time."""

    rows: int
    """Samples."""
    tokens: int
    """Of each."""
    items: Mapping[str, int] = field(default_factory=dict)
    """By encoder, those of all rows together. Default: one for each row."""
    trained: int | None = None
    """Tokens of all rows that have a label; the head computes no others. Default: all."""

    def count(self, encoder: str) -> int:
        """Return how many items an encoder has."""
        return max(1, self.items.get(encoder, self.rows))

    @property
    def labels(self) -> int:
        """Tokens that the head computes."""
        return self.rows * self.tokens if self.trained is None else min(self.trained, self.rows * self.tokens)


def portion_of(config: RunConfig, model: nn.Module, facts: DataFacts | None = None) -> Portion:
    """Return a microbatch of a run on one rank: a batch cut into as many portions as the config says.

    Without facts about the data, samples are as long as they may be, with one item for each encoder, and every token is
    trained on.

    Args:
        config: The run.
        model: Its model; what encoders it has.
        facts: What the data is like.
    """
    rows = max(1, config.loop.batch_size // config.loop.accumulation)
    encoders = list(model.encoders) if isinstance(model, MultimodalModel) else []
    if facts is None:
        return Portion(rows, config.data.max_length, dict.fromkeys(encoders, rows))
    tokens = max(1, min(round(facts.tokens), config.data.max_length))
    items = {name: round(rows * facts.items.get(name, 1.0)) for name in encoders}
    seen = sum(rows * facts.items.get(name, 1.0) * facts.item_tokens.get(name, 0.0) for name in encoders)
    return Portion(rows, tokens, items, max(1, round(rows * tokens - seen)))


__all__ = ["Portion", "portion_of"]
