"""Checks that a part really behaves as composition assumes; what does not is refused, never trained wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cornstarch.errors import UnsupportedModelError
from cornstarch.models.multimodal_language_model.unwrap import accepts, unwrap

_PROBE_LENGTH = 6


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Run a block with the model in eval mode and without gradients; every module's mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def can_run(model: nn.Module) -> bool:
    """Whether the model can be run here and now: not on the meta device, not sharded yet."""
    tensors = [*model.parameters(), *model.buffers()]
    return all(t.device.type != "meta" and type(t).__name__ != "DTensor" and t.numel() for t in tensors)


def _logits(model: nn.Module, **inputs: Tensor) -> Tensor:
    flags = {"use_cache": False} if accepts(model, "use_cache") else {}
    return model(**inputs, **flags).logits


def check_embeddings_path(language_model: nn.Module) -> None:
    """Refuse a language model that computes something else from `inputs_embeds` than from the same `input_ids`.

    Some models use the token ids beyond the embedding table (per-layer embeddings, scaling before the layers):
    composing them by injection would train another model than the user chose.
    """
    name = type(unwrap(language_model)).__name__
    if not accepts(language_model, "inputs_embeds"):
        raise UnsupportedModelError(
            f"{name}.forward has no argument inputs_embeds, so encoders' tokens cannot be merged into its text."
        )
    embeddings = language_model.get_input_embeddings()  # type: ignore[operator]
    if embeddings is None or not hasattr(embeddings, "weight"):
        raise UnsupportedModelError(f"{name}.get_input_embeddings() gives no embedding table to merge into.")
    if not can_run(language_model):
        return
    device = embeddings.weight.device
    rows = embeddings.weight.shape[0]
    input_ids = (torch.arange(3, 3 + _PROBE_LENGTH, device=device) % rows).unsqueeze(0)
    with evaluation(language_model):
        try:
            expected = _logits(language_model, input_ids=input_ids)
            found = _logits(language_model, inputs_embeds=embeddings(input_ids))
        except Exception as error:
            raise UnsupportedModelError(f"{name} cannot be run on inputs_embeds: {error}") from error
    if expected.shape != found.shape or not torch.allclose(expected, found, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise UnsupportedModelError(
            f"{name} gives other logits for inputs_embeds than for the input_ids they were looked up from: it uses "
            "the token ids beyond its embedding table. Merging encoders' tokens into it would train a wrong model."
        )
