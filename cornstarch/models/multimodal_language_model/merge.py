"""Route a batch to encoders, merge their tokens into the text, and prepare the inputs of the language model.

Shapes: B samples, S tokens, D width of the language model's embeddings.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cornstarch.attention import MaskSpec
from cornstarch.attention.mask import DocumentCounts
from cornstarch.errors import ConfigError

from .encoder import LANGUAGE_MODEL_INPUTS, ModalEncoderModule
from .facts import CACHED_FEATURES, IGNORE_INDEX, BatchFacts, EncoderFeatures, TextInputs, copy_to_device
from .language_model_check import count_positions
from .unwrap import accepts_argument, get_argument_names, unwrap

if TYPE_CHECKING:
    from .modeling_multimodal_language_model import MultimodalModel

TEXT = -1  # in spans: a token that sees only the tokens before it

LlmCallback = Callable[..., dict[str, Any]]

# Keys that processors add for some models; they are dropped for a language model that does not take them.
_OPTIONAL_INPUTS = frozenset({"token_type_ids", "mm_token_type_ids"})


class TokenMerger:
    """Merges encoders' tokens into a text; the model's settings decide how."""

    def __init__(self, model: MultimodalModel) -> None:
        self.model, self.language_model = model, model.language_model
        # By modality, for all encoders: how its tokens see each other.
        self.attention = {name: encoder.attention for name, encoder in model.encoders.items()}

    def __call__(
        self, features: Mapping[str, EncoderFeatures], text: TextInputs, rest: Mapping[str, Any]
    ) -> tuple[dict[str, Any], MaskSpec | None]:
        """Return the language model's inputs, and the mask where plain causal attention is not enough."""
        input_ids, inputs_embeds, documents, facts = text.input_ids, text.inputs_embeds, text.documents, text.facts
        attention_mask, position_ids, labels = text.attention_mask, text.position_ids, text.labels
        if input_ids is not None and rest.get("past_key_values") is None:
            for name, value in (("attention_mask", attention_mask), ("labels", labels)):
                if value is not None and value.dim() == 2 and value.shape != input_ids.shape:
                    raise ConfigError(
                        f"{name} has shape {tuple(value.shape)}, the text {tuple(input_ids.shape)}; expected one entry "
                        "per token."
                    )
        spans = None
        if input_ids is not None and self.attention:
            masks = self._find_placeholders(input_ids, features, facts)
            inputs_embeds = self._embed(input_ids, inputs_embeds, masks, features, facts)
            if labels is not None and not self.model.trains_on_placeholders:
                for mask in masks.values():
                    labels = labels.masked_fill(mask, IGNORE_INDEX)
            if any(attention != "causal" for attention in self.attention.values()):
                spans, first = torch.full_like(input_ids, TEXT), 0
                for name, found in features.items():
                    first = mark_spans(spans, name, self.attention[name], masks[name], found, first)
        elif features:
            raise ConfigError("Encoders' tokens are merged where input_ids has their placeholders: pass input_ids.")
        spec = None
        is_plain = None if facts is None else self._is_plain(facts, features)
        if (documents is not None or spans is not None) and not is_plain:
            reference = input_ids if input_ids is not None else inputs_embeds[..., 0]  # type: ignore[index]
            counts = None if facts is None else self._count_spans(facts, features)
            spec = build_mask_spec(reference, attention_mask, documents, spans, is_plain, counts)
            attention_mask = (spec.documents > 0).to(torch.long)
            labels = labels if documents is None else mask_context_free_labels(labels, spec.documents)
            if position_ids is None and documents is not None:
                position_ids = spec.positions()
        if attention_mask is not None and self._starts_with_padding(attention_mask, rest, facts):
            if not self.model.traits.takes_left_padding:
                raise ConfigError(
                    f"{type(unwrap(self.language_model)).__name__} gives a text other logits when padding stands in "
                    "front of it. Pad on the right: tokenizer.padding_side = 'right'."
                )
            labels = mask_context_free_labels(labels, attention_mask)
            if position_ids is None and accepts_argument(self.language_model, "position_ids"):
                position_ids = count_positions(attention_mask)  # by default, models count padding as positions
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
        callback = self.model.preprocess_llm_callback
        if callback is not None:
            offered, names = {**llm_inputs, "input_ids": input_ids}, get_callback_names(callback)
            used = offered if names is None else {name: offered.get(name) for name in names}
            llm_inputs = {**llm_inputs, **callback(**used)}
        taken = (LANGUAGE_MODEL_INPUTS - _OPTIONAL_INPUTS).union(get_argument_names(self.language_model))
        return {name: value for name, value in llm_inputs.items() if value is not None and name in taken}, spec

    def _find_placeholders(
        self, input_ids: Tensor, features: Mapping[str, EncoderFeatures], facts: BatchFacts | None
    ) -> dict[str, Tensor]:
        token_ids, prompt_length = self.model.modality_token_ids, self.model.prompt_length
        missing = [name for name in features if name not in token_ids]
        if missing:
            raise ConfigError(
                f"The batch has input for {missing}, but the model does not know which token marks their place in the "
                "text. Call set_modality_token_ids({'" + missing[0] + "': <token id>}), or make the processor with "
                "MultimodalProcessor(…, model=this_model), which does it."
            )
        masks = find_placeholders(input_ids, token_ids)
        for name, mask in masks.items():
            if prompt_length is not None:
                mask[:, prompt_length:] = False
            check_placeholders(name, mask if facts is None else facts.tokens[name], features.get(name))
        return masks

    def _embed(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None,
        masks: Mapping[str, Tensor],
        features: Mapping[str, EncoderFeatures],
        facts: BatchFacts | None,
    ) -> Tensor:
        if inputs_embeds is None:
            # Placeholder ids may lie outside the embedding table, which is not resized.
            for mask in masks.values():
                input_ids = input_ids.masked_fill(mask, 0)
            embeddings: Any = self.model.get_input_embeddings()
            try:
                inputs_embeds = embeddings(input_ids)
            except IndexError as error:
                raise ConfigError(
                    f"input_ids has the token {int(input_ids.max())}, but the language model's table has "
                    f"{embeddings.weight.shape[0]} rows, and no modality has this token (set_modality_token_ids got "
                    f"{self.model.modality_token_ids}). Is it the language model's tokenizer?"
                ) from error
        assert inputs_embeds is not None
        for name, found in features.items():
            width = inputs_embeds.shape[-1]
            if found.tokens.shape[-1] != width:
                raise ConfigError(
                    f"Features have width {found.tokens.shape[-1]}, the language model's embeddings {width}. "
                    "The projector must put out the language model's width."
                )
            tokens = found.tokens.to(inputs_embeds.device, inputs_embeds.dtype)
            if facts is None:  # waits for the GPU, which knows the size of the mask
                inputs_embeds = inputs_embeds.masked_scatter(masks[name].unsqueeze(-1), tokens)
            else:
                flat = inputs_embeds.flatten(0, 1).index_copy(0, facts.places[name].to(tokens.device), tokens)
                inputs_embeds = flat.view_as(inputs_embeds)
        return inputs_embeds

    def _is_plain(self, facts: BatchFacts, features: Mapping[str, EncoderFeatures]) -> bool:
        """Return whether every row is one document without padding, with causal attention only."""
        sees_ahead = any(len(found.tokens) > 0 for name, found in features.items() if self.attention[name] != "causal")
        return not (sees_ahead or facts.packed or facts.padding != "none")

    def _count_spans(self, facts: BatchFacts, features: Mapping[str, EncoderFeatures]) -> DocumentCounts:
        """Return the number of documents and spans of a batch, or that one of them may not be contiguous."""
        sizes: list[int] = []
        for name, found in features.items():
            attention = self.attention[name]
            if attention == "causal" or not sum(facts.tokens[name]):
                continue
            # With "modality", all items of a row are one span, with text between them.
            if attention == "modality" or found.lengths is None:
                return replace(facts.documents, are_contiguous=False)
            if not set(itertools.accumulate(found.lengths)).issuperset(facts.breaks[name]):
                return replace(facts.documents, are_contiguous=False)
            sizes += found.lengths
        return replace(facts.documents, spans=len(sizes), longest_span=max(sizes, default=0))

    def _starts_with_padding(self, attention_mask: Tensor, rest: Mapping[str, Any], facts: BatchFacts | None) -> bool:
        if not self.model.positions_from_mask or attention_mask.dim() != 2 or rest.get("past_key_values") is not None:
            return False
        return not bool(attention_mask[:, 0].all()) if facts is None else facts.starts_with_padding

    def _needs_no_mask(self, facts: BatchFacts, rest: Mapping[str, Any]) -> bool:
        """Return whether the language model computes the same without the padding mask."""
        # In a causal model, tokens do not see the padding behind them. Without a mask, transformers does not search for
        # padding, and attention uses its fastest kernel.
        has_callback = self.model.preprocess_llm_callback is not None
        if not self.model.positions_from_mask or has_callback or "past_key_values" in rest:
            return False
        config = getattr(unwrap(self.language_model), "config", None)
        counts_all = rest.get("output_router_logits", getattr(config, "output_router_logits", False))
        return facts.padding == "none" or (facts.padding == "right" and self.model.traits.is_causal and not counts_all)


def route_batch(
    encoders: Mapping[str, ModalEncoderModule], batch: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Split a batch into the inputs of each encoder that runs, and the rest for the language model."""
    nested = {name: batch[name] for name in encoders if isinstance(batch.get(name), Mapping)}
    flat = {name: value for name, value in batch.items() if name not in nested and value is not None}
    routed: dict[str, dict[str, Any]] = {}
    taken: dict[str, str] = {}
    for name, encoder in encoders.items():
        if name in nested:
            known = {*get_argument_names(encoder.module), *encoder.input_names, CACHED_FEATURES}
            unknown = [key for key in nested[name] if key not in known and key not in LANGUAGE_MODEL_INPUTS]
            if unknown and encoder.preprocess_callback is None:  # a callback may read any key
                hint = suggest_name(unknown[0], known)
                raise ConfigError(f"The {name} encoder does not take {unknown[0]!r}.{hint} It takes {sorted(known)}.")
            routed[name] = encoder.rename_inputs(dict(nested[name]))
            continue
        for key in encoder.input_names:
            if key in flat and key in taken:
                raise ConfigError(
                    f"Both the {taken[key]} and the {name} encoder take {key!r}. "
                    f"Give it nested: {taken[key]}={{{key!r}: …}}, {name}={{{key!r}: …}}."
                )
            if key in flat:
                taken[key] = name
        inputs = encoder.select_inputs(flat)
        if inputs is not None:
            routed[name] = inputs
    return routed, {key: value for key, value in flat.items() if key not in taken}


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known name that is closest to a misspelt one, or nothing."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def get_callback_names(callback: LlmCallback | None) -> list[str] | None:
    """Return the inputs that the language model's callback takes; None: all inputs."""
    if callback is None:
        return []
    parameters = inspect.signature(callback).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def check_batch_keys(
    encoders: Mapping[str, ModalEncoderModule],
    language_model: nn.Module,
    callback: LlmCallback | None,
    rest: Mapping[str, Any],
) -> None:
    """Refuse a batch with a key that no part takes: most often it is misspelt."""
    wanted = get_callback_names(callback)
    known = LANGUAGE_MODEL_INPUTS.union(get_argument_names(language_model), _OPTIONAL_INPUTS, wanted or ())
    unknown = [] if wanted is None else [name for name in rest if name not in known]
    for name in unknown:
        taken = {key: list(encoder.input_names) for key, encoder in encoders.items()}
        hint = suggest_name(name, [*known, *encoders, *(n for names in taken.values() for n in names)])
        raise ConfigError(
            f"No part of the model takes {name!r}.{hint} Encoders take {taken}; "
            "name further inputs of an encoder in its additional_args."
        )


def find_placeholders(input_ids: Tensor, token_ids: Mapping[str, int]) -> dict[str, Tensor]:
    """Return, for each modality, where its placeholders are: bool [B, S]."""
    return {name: input_ids == token_id for name, token_id in token_ids.items()}


def check_placeholders(modality: str, placeholders: Tensor | Sequence[int], features: EncoderFeatures | None) -> None:
    """Refuse a batch whose placeholders (a mask [B, S], or the number of each sample) and features do not match."""
    tokens = placeholders.sum(-1).tolist() if isinstance(placeholders, Tensor) else placeholders
    if features is None:
        if any(tokens):
            sample = next(i for i, count in enumerate(tokens) if count)
            raise ConfigError(
                f"Sample {sample} has {tokens[sample]} {modality} tokens, but the batch has no input for the "
                f"{modality} encoder. Give the encoder's input, or take the tokens out of the text."
            )
        return
    lengths, n_features = features.lengths, len(features.tokens)
    if lengths is None:
        if sum(tokens) != n_features:
            raise ConfigError(
                f"The batch has {sum(tokens)} {modality} tokens (per sample: {list(tokens)}) and {n_features} "
                f"{modality} features; the numbers must be equal. Expand each placeholder to its item's number of "
                "features."
            )
        return
    item = 0
    for sample, wanted in enumerate(tokens):  # each sample takes the next whole items
        first, got = item, 0
        while got < wanted and item < len(lengths):
            got += lengths[item]
            item += 1
        if got != wanted:
            raise ConfigError(
                f"Sample {sample} has {wanted} {modality} tokens, but its {modality} items "
                f"({', '.join(map(str, lengths[first:item])) or 'none left'}) have {got} features. "
                "Expand each placeholder to its item's number of features."
            )
    left = [length for length in lengths[item:] if length]
    if left:
        raise ConfigError(
            f"The text of the last sample (sample {len(tokens) - 1}) ends, and {len(left)} {modality} items with "
            f"{sum(left)} features have no tokens (tokens per sample: {list(tokens)}). "
            "Put a placeholder in the text for each item."
        )


def mask_context_free_labels(labels_BS: Tensor | None, documents_BS: Tensor) -> Tensor | None:
    """Return the labels without tokens that would be predicted from padding or from another document.

    The first token of a text has no context; behind other tokens it would be predicted from those. `documents_BS` may
    be an attention mask: one document per row.
    """
    if labels_BS is None:
        return None
    foreign = torch.zeros_like(documents_BS, dtype=torch.bool)
    foreign[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return labels_BS.masked_fill(foreign, IGNORE_INDEX)


def mark_spans(
    spans_BS: Tensor, modality: str, attention: str, mask_BS: Tensor, features: EncoderFeatures, first: int
) -> int:
    """Write into `spans_BS` which tokens of a modality see each other, numbered from `first`; return the next one."""
    if attention == "causal":
        return first
    if attention == "modality":
        spans_BS.masked_fill_(mask_BS, first)
        return first + 1
    if features.lengths is None:
        raise ConfigError(
            f"attention='item' of the {modality} encoder needs to know where each item ends, but its features came as "
            "one flat tensor. Return a list of tensors, one per item, from the callback."
        )
    lengths, after = features.lengths, first + len(features.lengths)
    items = torch.arange(first, after, dtype=spans_BS.dtype)
    numbers = items.repeat_interleave(torch.tensor(lengths, dtype=torch.long), output_size=sum(lengths))
    spans_BS.masked_scatter_(mask_BS, copy_to_device(numbers, spans_BS.device))
    return after


def build_mask_spec(
    tokens_BS: Tensor,
    attention_mask: Tensor | None,
    documents: Tensor | None,
    spans: Tensor | None,
    is_plain: bool | None = None,
    counts: DocumentCounts | None = None,
) -> MaskSpec:
    """Return the mask of a batch that is packed, or has tokens that see in both directions.

    Without `is_plain` (plain causal attention is enough) and `counts`, both are computed from the tensors.
    """
    if documents is None:
        documents = torch.ones_like(tokens_BS, dtype=torch.long) if attention_mask is None else attention_mask
    if documents.shape != tokens_BS.shape:
        raise ConfigError(
            f"documents (or attention_mask) has shape {tuple(documents.shape)}, the text {tuple(tokens_BS.shape)}; "
            "they must be equal."
        )
    documents = documents.to(torch.long)
    if attention_mask is not None:
        documents = documents * (attention_mask != 0)
    return MaskSpec(documents, torch.full_like(documents, TEXT) if spans is None else spans, is_plain, counts)
