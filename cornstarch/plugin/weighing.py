"""What a microbatch weighs in the loss of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.merge import IGNORED, placeholder_masks, without_context_free
from cornstarch.models.multimodal_language_model.unwrap import unwrap

_SHIFTED = ("ForCausalLM", "ForConditionalGeneration")  # losses of transformers that predict the next token


class TokenCount:
    """Counts the tokens that a model's own loss is the mean over.

    Args:
        model: The model, before it is cut.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        inner: Any = unwrap(model.language_model if isinstance(model, MultimodalModel) else model)
        is_pair = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
        self._shifts = not is_pair and getattr(inner, "loss_type", None) in (None, *_SHIFTED)

    def __call__(self, inputs: Mapping[str, Any]) -> int:
        """Return the tokens of a microbatch; without labels there are none."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor):
            return 0
        if isinstance(self._model, MultimodalModel):
            labels = self._merged(labels, inputs)
        if labels.dim() > 1 and self._shifts:
            labels = labels[:, 1:]
        return int((labels != IGNORED).sum()) if not labels.is_floating_point() else len(labels)

    def _merged(self, labels: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the labels as the model has them: without placeholders, and what follows on nothing."""
        assert isinstance(self._model, MultimodalModel)
        ids, mask, documents = (inputs.get(name) for name in ("input_ids", "attention_mask", "documents"))
        if ids is not None and not self._model.trains_on_placeholders:
            for places in placeholder_masks(ids, self._model.modality_token_ids).values():
                labels = labels.masked_fill(places, IGNORED)
        if documents is not None:
            documents = documents if mask is None else documents * (mask != 0)
        elif self._model.positions_from_mask and mask is not None and mask.dim() == 2 and not bool(mask[:, 0].all()):
            documents = mask
        found = labels if documents is None else without_context_free(labels, documents)
        assert found is not None
        return found


__all__ = ["TokenCount"]
