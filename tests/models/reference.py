"""What a composed model must compute, written out by hand on the bare parts.

Shape letters: B samples, S positions, T features, D channels, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.zoo import IGNORED, EncoderPart, Inputs

Gradients = dict[str, Tensor | None]


def project(part: EncoderPart, encoder: nn.Module, projection: nn.Module, inputs: Inputs) -> Tensor:
    """Encode the items and bring their features to the language model's width: [T, D]."""
    return projection(part.select(encoder(**inputs), inputs))


def merge_embeddings(language_model: PreTrainedModel, ids_BS: Tensor, features_TD: Tensor, token_id: int) -> Tensor:
    """Look the text up and put the features where the items' tokens are, in reading order."""
    is_item_BS = ids_BS == token_id
    embeddings_BSD = language_model.get_input_embeddings()(ids_BS.masked_fill(is_item_BS, 0)).clone()
    embeddings_BSD[is_item_BS] = features_TD
    return embeddings_BSD


def run_batch(language_model: PreTrainedModel, batch: Inputs, features_TD: Tensor, token_id: int) -> Any:
    """Run the language model on the whole padded batch."""
    ids_BS, mask_BS = batch["input_ids"], batch["attention_mask"]
    arguments: dict[str, Any] = {
        "inputs_embeds": merge_embeddings(language_model, ids_BS, features_TD, token_id),
        "attention_mask": mask_BS,
    }
    if "labels" in batch:
        arguments["labels"] = batch["labels"].masked_fill(ids_BS == token_id, IGNORED)
    starts_with_padding = bool((mask_BS[:, 0] == 0).any())
    if starts_with_padding and "position_ids" in inspect.signature(language_model.forward).parameters:
        arguments["position_ids"] = (mask_BS.cumsum(-1) - 1).clamp(min=0)
    return language_model(**arguments)


def run_rows(language_model: PreTrainedModel, batch: Inputs, features_TD: Tensor, token_id: int) -> list[Tensor]:
    """Run every sample alone and without padding, and return its logits [S, V]: the truth about padding."""
    logits = []
    start = 0
    for ids_S, mask_S in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        row_1S = ids_S[mask_S.bool()].unsqueeze(0)
        end = start + int((row_1S == token_id).sum())
        embeddings = merge_embeddings(language_model, row_1S, features_TD[start:end], token_id)
        logits.append(language_model(inputs_embeds=embeddings).logits[0])
        start = end
    return logits


def rows_of(logits_BSV: Tensor, mask_BS: Tensor) -> list[Tensor]:
    """Cut the padding out of a batch of logits."""
    return [row[mask.bool()] for row, mask in zip(logits_BSV, mask_BS, strict=True)]


def backward(loss: Tensor, **modules: nn.Module) -> Gradients:
    """Return every gradient of `loss`, None where there is none, and leave none behind."""
    loss.backward()
    found: Gradients = {}
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            found[f"{prefix}.{name}"] = parameter.grad
            parameter.grad = None
    return found


def assert_same_gradients(found: Gradients, expected: Gradients, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """Compare all gradients, also which parameters have none."""
    assert found.keys() == expected.keys()
    assert missing(found) == missing(expected)
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def missing(gradients: Mapping[str, Tensor | None]) -> list[str]:
    """Return the parameters without a gradient."""
    return [name for name, gradient in gradients.items() if gradient is None]
