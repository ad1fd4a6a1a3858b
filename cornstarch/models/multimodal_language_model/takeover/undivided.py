"""A whole Hugging Face multimodal model that cannot be taken apart.

Its own forward runs it, in one piece: replicas can train it together, but its encoders have no place of their own in a
plan, and it is not cut over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.models.multimodal_language_model.modeling_multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.packing import IGNORED
from cornstarch.models.multimodal_language_model.preprocessing.shape_inference import is_float
from cornstarch.models.multimodal_language_model.takeover.modalities import ENCODER_NAMES, placeholder_id
from cornstarch.models.multimodal_language_model.unwrap import unwrap, without_cache


class UndividedModel(MultimodalModel):
    """A multimodal model in the place of a language model: batches go to its own forward as they are.

    Args:
        whole: The Hugging Face model (or a PEFT model around one).
        reason: Why it cannot be taken apart.
    """

    def __init__(self, whole: nn.Module, reason: str) -> None:
        super().__init__({}, whole)
        self.reason = reason
        model: Any = unwrap(whole)
        found = {name: placeholder_id(model, kind) for kind, name in ENCODER_NAMES.items()}
        self.modality_token_ids = {name: number for name, number in found.items() if number is not None}
        self._rows: dict[str, dict[str, Any]] = {}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        documents: Tensor | None = None,
        facts: BatchFacts | None = None,
        **batch: Any,
    ) -> Any:
        """Run the model's own forward on a batch of its own processor; packed rows are refused."""
        if documents is not None:
            raise ConfigError(
                f"{type(unwrap(self.language_model)).__name__} cannot be given packed rows: {self.reason} Set "
                "`data.packing` to false."
            )
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "labels": labels,
            "inputs_embeds": inputs_embeds,
            **batch,
        }
        inputs = {name: value for name, value in given.items() if value is not None and not isinstance(value, Mapping)}
        if self.training:
            for row in self._rows.values():
                if not row["items"].keys() & inputs.keys():
                    inputs = _with_row(inputs, row)
        return self.language_model(**without_cache(self.language_model, self._cast(inputs)))

    def _cast(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return inputs in the weights' precision: processors have one of their own, which not every forward casts."""
        if torch.is_autocast_enabled(self.device.type):
            return inputs
        return {n: v.to(self.dtype) if isinstance(v, Tensor) and is_float(v) else v for n, v in inputs.items()}

    def keep_encoders_running(self, stand_ins: Mapping[str, Mapping[str, Any]]) -> None:
        """Let every encoder take part in every step of training, also if the batch has nothing for it.

        A batch without items gets one more row that has one, and of which nothing is learned.

        Args:
            stand_ins: By modality, `tokens`: what a row of its own says of each token, [1, S], and `items`: the
                encoders' inputs.
        """
        self._rows = {name: dict(row) for name, row in stand_ins.items()}

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Continue the text as the model itself does."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        given = {name: value for name, value in inputs.items() if value is not None}
        return self.language_model.generate(**self._cast(given))  # type: ignore[operator]

    def whole(self) -> PreTrainedModel:
        """Return the Hugging Face model."""
        return unwrap(self.language_model)  # type: ignore[return-value]


def _with_row(inputs: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with one more row, of which nothing is learned."""
    ids: Tensor = inputs["input_ids"]
    tokens = {name: value.to(ids.device) for name, value in row["tokens"].items()}
    tokens["labels"] = torch.full_like(tokens["input_ids"], IGNORED)
    width = max(ids.shape[1], tokens["input_ids"].shape[1])
    joined = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape == ids.shape:
            fill = IGNORED if name == "labels" else 0
            other = tokens.get(name, torch.zeros_like(tokens["input_ids"]))
            rows = [nn.functional.pad(one, (0, width - one.shape[1]), value=fill) for one in (value, other)]
            joined[name] = torch.cat([rows[0], rows[1].to(value.dtype)])
    items = {name: value.to(ids.device) if isinstance(value, Tensor) else value for name, value in row["items"].items()}
    return {**joined, **items}


__all__ = ["UndividedModel"]
