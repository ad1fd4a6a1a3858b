"""Putting encoders' tokens where the text has their placeholders.

Shapes: B samples, S tokens, D width of the language model's embeddings.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cornstarch.attention import MaskSpec
from cornstarch.attention.mask import Counts
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import IGNORED, BatchFacts, sent
from cornstarch.models.multimodal_language_model.items import Features

TEXT = -1  # in spans: a token that sees only what is before it


def placeholder_masks(input_ids: Tensor, token_ids: Mapping[str, int]) -> dict[str, Tensor]:
    """Return, for each modality, where its placeholders are: bool [B, S]."""
    return {name: input_ids == token_id for name, token_id in token_ids.items()}


def check_counts(modality: str, mask_BS: Tensor, features: Features | None) -> None:
    """Refuse a batch whose placeholders and features do not match, naming the first sample where they part."""
    check_tokens(modality, mask_BS.sum(-1).tolist(), features)


def check_tokens(modality: str, tokens: Sequence[int], features: Features | None) -> None:
    """Do the same for the numbers of placeholders of each sample."""
    if features is None:
        if any(tokens):
            sample = next(i for i, count in enumerate(tokens) if count)
            raise ConfigError(
                f"Sample {sample} has {tokens[sample]} {modality} tokens, but the batch has no input for the "
                f"{modality} encoder. Give the encoder's input, or take the tokens out of the text."
            )
        return
    n_features = len(features.tokens)
    if features.lengths is None:
        if sum(tokens) != n_features:
            raise ConfigError(
                f"The batch has {sum(tokens)} {modality} tokens (per sample: {list(tokens)}) and {n_features} "
                f"{modality} features; the numbers must be equal. Expand each placeholder to its item's number of "
                "features."
            )
        return
    _check_samples(modality, tokens, features.lengths)


def _check_samples(modality: str, tokens: Sequence[int], lengths: Sequence[int]) -> None:
    """Walk through the samples, giving each the next whole items, and stop where they do not fit."""
    item = 0
    for sample, wanted in enumerate(tokens):
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


def check_shapes(text: torch.Size, **inputs_BS: Tensor | None) -> None:
    """Refuse inputs that have not one entry per token of the text [B, S]."""
    for name, value in inputs_BS.items():
        if value is not None and value.dim() == 2 and value.shape != text:
            raise ConfigError(
                f"{name} has shape {tuple(value.shape)}, the text {tuple(text)}; expected one entry per token."
            )


def without_context_free(labels_BS: Tensor | None, documents_BS: Tensor) -> Tensor | None:
    """Return the labels without tokens that would be predicted from padding or from another document.

    The first token of a text is predicted from nothing; behind something else it would be predicted from that.
    `documents_BS` may be an attention mask: one document per row.
    """
    if labels_BS is None:
        return None
    foreign = torch.zeros_like(documents_BS, dtype=torch.bool)
    foreign[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return labels_BS.masked_fill(foreign, IGNORED)


def inject(embeds_BSD: Tensor, mask_BS: Tensor, features: Features, places: Tensor | None = None) -> Tensor:
    """Return the embeddings with the placeholders' rows replaced by the features, in order.

    Where the places are known (see `BatchFacts`), a GPU is not waited for: how many the mask marks it alone would know.
    """
    width = embeds_BSD.shape[-1]
    if features.tokens.shape[-1] != width:
        raise ConfigError(
            f"Features have width {features.tokens.shape[-1]}, the language model's embeddings {width}. "
            "The projector must put out the language model's width."
        )
    tokens = features.tokens.to(embeds_BSD.device, embeds_BSD.dtype)
    if places is None:
        return embeds_BSD.masked_scatter(mask_BS.unsqueeze(-1), tokens)
    merged: Tensor = embeds_BSD.flatten(0, 1).index_copy(0, places.to(tokens.device), tokens)
    return merged.view_as(embeds_BSD)


def mark_spans(spans_BS: Tensor, modality: str, attention: str, mask_BS: Tensor, features: Features, first: int) -> int:
    """Write into `spans_BS` which tokens of one modality see each other in both directions.

    Their spans are numbered from `first` on; returns the first number that is left for others.
    """
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
    spans_BS.masked_scatter_(mask_BS, sent(numbers, spans_BS.device))
    return after


def count_spans(facts: BatchFacts, modalities: Mapping[str, tuple[str, Features]]) -> Counts:
    """Return how many documents and spans a batch has, or that one of them may not be in one piece.

    Args:
        facts: Of the batch.
        modalities: By modality: how its tokens see each other, and its features.
    """
    sizes: list[int] = []
    for name, (attention, features) in modalities.items():
        if attention == "causal" or not sum(facts.tokens[name]):
            continue
        if attention == "modality" or features.lengths is None:  # a row's items are one span
            return replace(facts.documents, in_pieces=False)
        ends = set(itertools.accumulate(features.lengths))
        if not ends.issuperset(facts.breaks[name]):
            return replace(facts.documents, in_pieces=False)
        sizes += features.lengths
    return replace(facts.documents, spans=len(sizes), longest_span=max(sizes, default=0))


def mask_spec(
    tokens_BS: Tensor,
    attention_mask: Tensor | None,
    documents: Tensor | None,
    spans: Tensor | None,
    is_plain: bool | None = None,
    counts: Counts | None = None,
) -> MaskSpec:
    """Return who sees whom in a batch that is packed, or has tokens that see in both directions.

    Whether it is plain causal attention after all, and how many documents and spans there are, is found out from the
    tensors, unless it is said.
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
