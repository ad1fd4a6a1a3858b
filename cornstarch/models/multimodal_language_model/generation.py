"""Continuing a text with a multimodal model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cornstarch.attention import attend_through_masks, use_mask

if TYPE_CHECKING:
    from cornstarch.models.multimodal_language_model.modeling_multimodal_language_model import MultimodalModel


def _batch_keys(model: MultimodalModel) -> set[str]:
    """Return what belongs to a batch; everything else is an argument of the language model's `generate`."""
    keys = {"position_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids", *model.encoder_names}
    for encoder in model.encoders.values():
        keys.update(encoder.input_names)
    return keys


def generate(model: MultimodalModel, input_ids: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> Any:
    """Merge the encoders' tokens into the prompt and let the language model continue it."""
    keys = _batch_keys(model)
    batch = {name: value for name, value in kwargs.items() if name in keys}
    options = {name: value for name, value in kwargs.items() if name not in keys}
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    encoder_inputs, rest = model.split_batch(batch)
    features = {name: model.run_encoder(name, inputs) for name, inputs in encoder_inputs.items()}
    prompt = {"inputs_embeds": None, "position_ids": None, "labels": None, "documents": None, **rest}
    llm_inputs, spec = model.merge(features, input_ids=input_ids, attention_mask=attention_mask, **prompt)
    if "inputs_embeds" not in llm_inputs:  # no encoders at all
        return model.language_model.generate(**llm_inputs, **options)  # type: ignore[operator]
    if spec is not None:
        attend_through_masks(model.language_model)
    with use_mask(spec) if spec is not None else nullcontext():
        output = model.language_model.generate(**llm_inputs, **options)  # type: ignore[operator]
    return _with_prompt(input_ids, output)


def _with_prompt(input_ids: Tensor, output: Any) -> Any:
    """Put the prompt's ids in front: a language model given embeddings returns the new tokens only."""
    new = output if isinstance(output, Tensor) else output.sequences
    prompt = input_ids.repeat_interleave(new.shape[0] // input_ids.shape[0], dim=0)
    sequences = torch.cat([prompt, new], dim=1)
    if isinstance(output, Tensor):
        return sequences
    output.sequences = sequences
    return output
