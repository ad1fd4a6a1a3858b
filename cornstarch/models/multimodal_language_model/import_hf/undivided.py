"""A whole Hugging Face multimodal model that cannot be decomposed.

Its own forward runs it as one module: data parallelism works, but its encoders have no place of their own in a plan,
and it is not sharded over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX, TextInputs
from cornstarch.models.multimodal_language_model.import_hf.modalities import ENCODER_NAMES, find_placeholder_id
from cornstarch.models.multimodal_language_model.modeling_multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.shape_inference import is_float
from cornstarch.models.multimodal_language_model.unwrap import disable_cache, unwrap


class UndividedModel(MultimodalModel):
    """A multimodal model in place of a language model: batches go to its own forward unchanged.

    Args:
        whole: The Hugging Face model (or a PEFT model around one).
        reason: Why it cannot be decomposed.
    """

    def __init__(self, whole: nn.Module, reason: str) -> None:
        super().__init__({}, whole)
        self.reason = reason
        model: Any = unwrap(whole)
        found = {name: find_placeholder_id(model, kind) for kind, name in ENCODER_NAMES.items()}
        self.modality_token_ids = {name: number for name, number in found.items() if number is not None}
        self._rows: dict[str, dict[str, Any]] = {}

    def _run_batch(self, text: TextInputs, batch: dict[str, Any]) -> Any:
        """Run the model's own forward on a batch of its own processor; packed rows are refused."""
        if text.documents is not None:
            raise ConfigError(
                f"{type(unwrap(self.language_model)).__name__} cannot be given packed rows: {self.reason} Set "
                "`data.packing` to false."
            )
        given = {**vars(text), "facts": None, **batch}
        inputs = {name: value for name, value in given.items() if value is not None and not isinstance(value, Mapping)}
        if self.training:
            for row in self._rows.values():
                if not row["items"].keys() & inputs.keys():
                    inputs = _append_row(inputs, row)
        return self.language_model(**disable_cache(self.language_model, self._cast(inputs)))

    def _cast(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Cast inputs to the dtype of the weights: processors use another, and not every forward casts it."""
        if torch.is_autocast_enabled(self.device.type):
            return inputs
        return {n: v.to(self.dtype) if isinstance(v, Tensor) and is_float(v) else v for n, v in inputs.items()}

    def keep_encoders_running(self, stand_ins: Mapping[str, Mapping[str, Any]]) -> None:
        """Run every encoder in every training step, also if the batch has nothing for it.

        A batch without items gets an additional row with an item, whose labels are ignored. `stand_ins` has, by
        modality, the row's `tokens` (entries per token, [1, S]) and its `items` (the encoders' inputs).
        """
        self._rows = {name: dict(row) for name, row in stand_ins.items()}

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Continue the text with the model's own `generate`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        given = {name: value for name, value in inputs.items() if value is not None}
        return self.language_model.generate(**self._cast(given))  # type: ignore[operator]

    def whole(self) -> PreTrainedModel:
        """Return the Hugging Face model."""
        return unwrap(self.language_model)  # type: ignore[return-value]


def _append_row(inputs: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with one more row, whose labels are ignored."""
    ids: Tensor = inputs["input_ids"]
    tokens = {name: value.to(ids.device) for name, value in row["tokens"].items()}
    tokens["labels"] = torch.full_like(tokens["input_ids"], IGNORE_INDEX)
    width = max(ids.shape[1], tokens["input_ids"].shape[1])
    joined = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape == ids.shape:
            fill = IGNORE_INDEX if name == "labels" else 0
            other = tokens.get(name, torch.zeros_like(tokens["input_ids"]))
            rows = [nn.functional.pad(one, (0, width - one.shape[1]), value=fill) for one in (value, other)]
            joined[name] = torch.cat([rows[0], rows[1].to(value.dtype)])
    items = {name: value.to(ids.device) if isinstance(value, Tensor) else value for name, value in row["items"].items()}
    return {**joined, **items}
