"""Check that a language model behaves as composition assumes; refuse it otherwise.

Architectures differ silently: one uses token ids beyond its embedding table, one expects labels that are already
shifted, one is not causal. A few forward passes over six tokens detect this.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from cornstarch.attention.mask_verification import use_eval_mode, use_parameter_precision
from cornstarch.errors import UnsupportedModelError
from cornstarch.models.twin import add_noise, build_twin_config

from .unwrap import accepts_argument, is_sharded, unwrap

_PROBE_LENGTH = 6
_PADDING = 2
_LARGE = 50_000_000  # parameters; a dozen passes of larger models on a CPU take seconds to minutes


@dataclass(frozen=True)
class LanguageModelTraits:
    """Properties of a language model that passed the checks."""

    takes_left_padding: bool = True  # whether left padding leaves the logits of a text unchanged
    is_causal: bool = False  # whether later tokens leave the logits of a text unchanged; False if it was not checked


def check_language_model(language_model: nn.Module) -> LanguageModelTraits:
    """Refuse a language model into which encoders' tokens cannot be merged correctly.

    Of a large model a tiny twin is run, if there is one. Of a model on the meta device, only the signature is checked.
    """
    name = type(unwrap(language_model)).__name__
    if not accepts_argument(language_model, "inputs_embeds"):
        raise UnsupportedModelError(
            f"{name}.forward has no argument inputs_embeds, so encoders' tokens cannot be merged into its text."
        )
    embeddings = unwrap(language_model).get_input_embeddings()  # type: ignore[operator]
    if embeddings is None or not hasattr(embeddings, "weight"):
        raise UnsupportedModelError(f"{name}.get_input_embeddings() gives no embedding table to merge into.")
    if is_sharded(language_model):  # it cannot be run by one process
        twin = _build_twin(language_model)
        return LanguageModelTraits() if twin is None else check_language_model(twin)
    if any(tensor.is_meta for tensor in (*language_model.parameters(), *language_model.buffers())):
        return LanguageModelTraits()
    if sum(parameter.numel() for parameter in language_model.parameters()) > _LARGE:
        twin = _build_twin(language_model)
        if twin is not None:
            with suppress(UnsupportedModelError):  # narrow layers may be what does not work: the model itself decides
                return check_language_model(twin)
    probe = _Probe(name, language_model, embeddings)
    with use_eval_mode(language_model), use_parameter_precision(language_model):
        probe.check_embeddings()
        probe.check_training()
        return LanguageModelTraits(takes_left_padding=probe.takes_left_padding(), is_causal=True)


def _build_twin(language_model: nn.Module) -> nn.Module | None:
    """Return a tiny model of the same class and options; None if there is none."""
    inner: Any = unwrap(language_model)
    plain: Any = next(base for base in type(inner).__mro__ if not issubclass(base, FSDPModule))
    try:
        with torch.random.fork_rng(devices=[]):
            twin = plain(build_twin_config(inner.config))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return None
    add_noise(twin)
    return twin


class _Probe:
    """Six tokens, and the checks that run a language model on them."""

    def __init__(self, name: str, model: nn.Module, embeddings: nn.Module) -> None:
        self.name, self.model, self.embeddings = name, model, embeddings
        table: Tensor = embeddings.weight  # type: ignore[assignment]
        self.input_ids = (torch.arange(3, 3 + _PROBE_LENGTH, device=table.device) % table.shape[0]).unsqueeze(0)

    def embeds(self) -> Tensor:
        # A new tensor for every call: some models scale their input in place.
        return self.embeddings(self.input_ids).clone()

    def logits(self, **inputs: Tensor) -> Tensor:
        flags = {"use_cache": False} if accepts_argument(self.model, "use_cache") else {}
        return self.model(**inputs, **flags).logits

    def check_embeddings(self) -> None:
        """Refuse a model whose logits for embeddings differ from those for the token ids."""
        try:
            expected = self.logits(input_ids=self.input_ids)
            found = self.logits(inputs_embeds=self.embeds())
        except Exception as error:
            raise UnsupportedModelError(f"{self.name} cannot be run on inputs_embeds: {error}") from error
        if not _close(expected, found):
            raise UnsupportedModelError(
                f"{self.name} gives other logits for inputs_embeds than for the input_ids they were looked up from: it "
                "uses the token ids beyond its embedding table. Merging encoders' tokens into it would train a wrong "
                "model."
            )

    def check_training(self) -> None:
        """Refuse a model that is not causal, has another loss, or takes only embeddings of its own table."""
        embeds = self.embeds()
        embeds[:, -1] = embeds[:, :2].mean(1)  # not in the table, like any encoder's output
        try:
            whole = self.logits(inputs_embeds=embeds.clone())
            prefix = self.logits(inputs_embeds=embeds[:, :-2].clone())
            # Without the router's auxiliary loss, which does not depend on labels.
            alone = {"output_router_logits": False} if accepts_argument(self.model, "output_router_logits") else {}
            loss = self.model(inputs_embeds=embeds.clone(), labels=self.input_ids, **alone).loss
        except Exception as error:
            raise UnsupportedModelError(f"{self.name} cannot be trained on inputs_embeds: {error}") from error
        if not _close(prefix, whole[:, :-2]):
            raise UnsupportedModelError(
                f"{self.name} is not causal: its logits for a text change with the tokens behind it."
            )
        next_token = nn.functional.cross_entropy(whole[0, :-1].float(), self.input_ids[0, 1:])
        same_token = nn.functional.cross_entropy(whole[0].float(), self.input_ids[0])
        # Closer, not equal: a model may add a loss of its own.
        if (loss - same_token).abs() < (loss - next_token).abs():
            raise UnsupportedModelError(
                f"{self.name} does not train on the next token: its loss on a sample is {loss.item():.4f}, the cross "
                f"entropy of the next token {next_token.item():.4f}, of the same token {same_token.item():.4f}. "
                "It expects labels that were shifted beforehand."
            )

    def takes_left_padding(self) -> bool:
        padded = torch.cat([self.embeds()[:, -_PADDING:], self.embeds()], dim=1)
        mask = torch.tensor([[0] * _PADDING + [1] * _PROBE_LENGTH], device=padded.device)
        positions = {"position_ids": count_positions(mask)} if accepts_argument(self.model, "position_ids") else {}
        try:
            alone = self.logits(inputs_embeds=self.embeds())
            found = self.logits(inputs_embeds=padded, attention_mask=mask, **positions)
        except Exception:
            return False
        return _close(alone, found[:, _PADDING:])


def count_positions(attention_mask: Tensor) -> Tensor:
    """Return positions that count from the first token that is not padding."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def _close(expected: Tensor, found: Tensor) -> bool:
    # In half precision, the same sums in another order differ by some units of the last place.
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    if expected.shape != found.shape:
        return False
    expected, found = expected.float(), found.float()
    scale = expected.abs().amax().clamp(min=1e-6)
    return torch.allclose(expected / scale, found / scale, rtol=tolerance, atol=tolerance, equal_nan=True)
