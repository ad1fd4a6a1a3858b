"""From a batch's text and the encoders' tokens to the inputs of the language model.

Shapes: B samples, S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.attention import MaskSpec
from cornstarch.attention.mask import Counts
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.encoder import TokenAttention
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.models.multimodal_language_model.items import Features
from cornstarch.models.multimodal_language_model.merge import (
    IGNORED,
    TEXT,
    check_counts,
    check_shapes,
    check_tokens,
    count_spans,
    inject,
    mark_spans,
    mask_spec,
    placeholder_masks,
    without_context_free,
)
from cornstarch.models.multimodal_language_model.routing import LlmCallback, prepare_llm_inputs
from cornstarch.models.multimodal_language_model.unwrap import accepts, unwrap
from cornstarch.models.multimodal_language_model.verify import LanguageModelTraits, positions_of


@dataclass(frozen=True)
class Joining:
    """How a model joins encoders' tokens to a text: what of it decides that."""

    language_model: nn.Module
    traits: LanguageModelTraits
    token_ids: Mapping[str, int]
    """By modality: the token that marks the places of its tokens."""
    attention: Mapping[str, TokenAttention]
    """By modality, of all encoders: how its tokens see each other."""
    callback: LlmCallback | None
    """The user's, which has the last say."""
    trains_on_placeholders: bool
    positions_from_mask: bool
    """Whether positions are counted from the first token that is not padding."""
    prompt_length: int | None = None
    """So many tokens may be placeholders; those behind them were generated, and are text. None: all."""

    def __call__(
        self,
        features: Mapping[str, Features],
        *,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        labels: Tensor | None,
        inputs_embeds: Tensor | None,
        documents: Tensor | None,
        facts: BatchFacts | None = None,
        **rest: Any,
    ) -> tuple[dict[str, Any], MaskSpec | None]:
        """Return the language model's inputs, and the mask where plain causal attention is not enough."""
        if input_ids is not None and rest.get("past_key_values") is None:
            check_shapes(input_ids.shape, attention_mask=attention_mask, labels=labels)
        spans = None
        if input_ids is not None and self.attention:
            masks = self._checked_placeholders(input_ids, features, facts)
            inputs_embeds = self._embed(input_ids, inputs_embeds, masks, features, facts)
            labels = labels if self.trains_on_placeholders else _without_placeholders(labels, masks)
            spans = self._spans(input_ids, masks, features)
        elif features:
            raise ConfigError("Encoders' tokens are merged where input_ids has their placeholders: pass input_ids.")
        spec = None
        is_plain = None if facts is None else self._is_plain(facts, features)
        if (documents is not None or spans is not None) and not is_plain:
            reference = input_ids if input_ids is not None else inputs_embeds[..., 0]  # type: ignore[index]
            spec = mask_spec(reference, attention_mask, documents, spans, is_plain, self._counts(facts, features))
            attention_mask = (spec.documents > 0).to(torch.long)
            labels = labels if documents is None else without_context_free(labels, spec.documents)
            if position_ids is None and documents is not None:
                position_ids = spec.positions()
        if attention_mask is not None and self._starts_with_padding(attention_mask, rest, facts):
            self._check_left_padding()
            labels = without_context_free(labels, attention_mask)
            if position_ids is None and accepts(self.language_model, "position_ids"):
                position_ids = positions_of(attention_mask)  # models count padding as positions unless told otherwise
        if facts is not None and spec is None and position_ids is None and self._needs_no_mask(facts, rest):
            attention_mask = None
        llm_inputs = {
            "input_ids": input_ids if inputs_embeds is None else None,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "labels": labels,
            **rest,
        }
        return prepare_llm_inputs(self.language_model, self.callback, llm_inputs, input_ids), spec

    # ------------------------------------------------------------------ embeddings

    def _checked_placeholders(
        self, input_ids: Tensor, features: Mapping[str, Features], facts: BatchFacts | None
    ) -> dict[str, Tensor]:
        missing = [name for name in features if name not in self.token_ids]
        if missing:
            raise ConfigError(
                f"The batch has input for {missing}, but the model was not told which token marks their place in the "
                "text. Call set_modality_token_ids({'" + missing[0] + "': <token id>}), or make the processor with "
                "MultimodalProcessor(…, model=this_model), which does it."
            )
        masks = placeholder_masks(input_ids, self.token_ids)
        if self.prompt_length is not None:
            for mask in masks.values():
                mask[:, self.prompt_length :] = False
        for name, mask in masks.items():
            if facts is None:
                check_counts(name, mask, features.get(name))
            else:
                check_tokens(name, facts.tokens[name], features.get(name))
        return masks

    def _embed(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None,
        masks: Mapping[str, Tensor],
        features: Mapping[str, Features],
        facts: BatchFacts | None,
    ) -> Tensor:
        if inputs_embeds is None:
            # Placeholders' ids may lie outside the embedding table, which is not resized.
            text_ids = input_ids
            for mask in masks.values():
                text_ids = text_ids.masked_fill(mask, 0)
            inputs_embeds = self._looked_up(text_ids)
        assert inputs_embeds is not None
        for name, found in features.items():
            inputs_embeds = inject(inputs_embeds, masks[name], found, None if facts is None else facts.places[name])
        return inputs_embeds

    def _looked_up(self, text_ids: Tensor) -> Tensor:
        embeddings = unwrap(self.language_model).get_input_embeddings()  # type: ignore[operator]
        try:
            return embeddings(text_ids)
        except IndexError as error:
            raise ConfigError(
                f"input_ids has the token {int(text_ids.max())}, but the language model's table has "
                f"{embeddings.weight.shape[0]} rows, and no modality has this token "
                f"(set_modality_token_ids was told {dict(self.token_ids)}). Is it the language model's tokenizer?"
            ) from error

    # ------------------------------------------------------------------ who sees whom

    def _spans(self, input_ids: Tensor, masks: Mapping[str, Tensor], features: Mapping[str, Features]) -> Tensor | None:
        """Return which tokens see each other in both directions [B, S], or None if all attention is causal."""
        if all(attention == "causal" for attention in self.attention.values()):
            return None
        spans, first = torch.full_like(input_ids, TEXT), 0
        for name, found in features.items():
            first = mark_spans(spans, name, self.attention[name], masks[name], found, first)
        return spans

    def _is_plain(self, facts: BatchFacts, features: Mapping[str, Features]) -> bool:
        """Return whether every row is one document without padding, and none of its tokens sees what is behind it."""
        sees_ahead = any(len(found.tokens) > 0 for name, found in features.items() if self.attention[name] != "causal")
        return not (sees_ahead or facts.packed or facts.padding != "none")

    def _counts(self, facts: BatchFacts | None, features: Mapping[str, Features]) -> Counts | None:
        if facts is None:
            return None
        return count_spans(facts, {name: (self.attention[name], found) for name, found in features.items()})

    # ------------------------------------------------------------------ padding

    def _starts_with_padding(self, attention_mask: Tensor, rest: Mapping[str, Any], facts: BatchFacts | None) -> bool:
        if not self.positions_from_mask or attention_mask.dim() != 2 or rest.get("past_key_values") is not None:
            return False
        return not bool(attention_mask[:, 0].all()) if facts is None else facts.starts_with_padding

    def _needs_no_mask(self, facts: BatchFacts, rest: Mapping[str, Any]) -> bool:
        """Return whether the language model computes the same without the mask over padding.

        Nothing in front of padding sees it in a causal model. Without a mask, transformers need not look for padding,
        and attention takes its fastest kernel.
        """
        if not self.positions_from_mask or self.callback is not None or "past_key_values" in rest:
            return False
        config = getattr(unwrap(self.language_model), "config", None)
        counts_all = rest.get("output_router_logits", getattr(config, "output_router_logits", False))
        return facts.padding == "none" or (facts.padding == "right" and self.traits.is_causal and not counts_all)

    def _check_left_padding(self) -> None:
        if not self.traits.takes_left_padding:
            raise ConfigError(
                f"{type(unwrap(self.language_model)).__name__} gives a text other logits when padding stands in front "
                "of it. Pad on the right: tokenizer.padding_side = 'right'."
            )


def _without_placeholders(labels: Tensor | None, masks: Mapping[str, Tensor]) -> Tensor | None:
    if labels is None:
        return None
    for mask in masks.values():
        labels = labels.masked_fill(mask, IGNORED)
    return labels


__all__ = ["Joining"]
