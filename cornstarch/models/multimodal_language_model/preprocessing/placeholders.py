"""Placeholder tokens in a text: which item each stands for, and how often it is repeated."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerBase

from cornstarch.errors import ConfigError


@dataclass(frozen=True)
class Items:
    """The items (images, clips) of one modality in a batch."""

    lengths: list[int]
    """Tokens per item, in the order of the items."""
    per_sample: list[int] | None = None
    """Items per sample; None if they were given as one flat list, to be handed out in order."""


def register_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, str]) -> dict[str, int]:
    """Make each modality's token a special token of the tokenizer, beside those it has, and return the ids."""
    for name, token in tokens.items():
        for other, longer in tokens.items():
            if other != name and token in longer:
                raise ConfigError(
                    f"The tokens of {name} and {other}, {token!r} and {longer!r}, cannot be told apart in a text. "
                    "Choose others with predefined_tokens."
                )
    new = [token for token in tokens.values() if token not in tokenizer.all_special_tokens]
    if new:
        special = [AddedToken(token, normalized=False, special=True) for token in new]
        tokenizer.add_special_tokens({"extra_special_tokens": special}, replace_extra_special_tokens=False)
    ids: Any = tokenizer.convert_tokens_to_ids(list(tokens.values()))
    return dict(zip(tokens, ids, strict=True))


# ---------------------------------------------------------------------------------------- what was given


def count_items(items: Any, item_dimensions: int) -> int:
    """Return how many items are in what a processor is given: one, an array of them, or nested lists."""
    if isinstance(items, (list, tuple)):
        if items and isinstance(items[0], numbers.Number):  # one sound, as a list of samples
            return 1
        return sum(count_items(item, item_dimensions) for item in items)
    return len(items) if getattr(items, "ndim", 0) > item_dimensions else 1


def is_per_sample(items: Any) -> bool:
    """Whether items come as one list per sample."""
    return (
        isinstance(items, (list, tuple))
        and len(items) > 0
        and all(isinstance(sample, (list, tuple)) for sample in items)
        and not any(sample and isinstance(sample[0], numbers.Number) for sample in items)
    )


def claimed_items(claim: Any, n_items: int | None, source: str) -> Items:
    """Return what a user's function said: a number for all items, a list over the batch, or a list per sample."""
    claim = claim.tolist() if hasattr(claim, "tolist") else claim
    per_sample = None
    if isinstance(claim, int) and n_items is not None:
        lengths: Any = [claim] * n_items
    elif isinstance(claim, (list, tuple)) and any(isinstance(sample, (list, tuple)) for sample in claim):
        per_sample = [len(sample) for sample in claim]
        lengths = [length for sample in claim for length in sample]
    else:
        lengths = claim
    if not isinstance(lengths, (list, tuple)) or not all(type(n) is int and n >= 0 for n in lengths):
        raise ConfigError(
            f"{source} returned {claim!r}; expected the number of tokens of an item: one integer for all, a list over "
            "the batch, or a list per sample."
        )
    if n_items is not None and len(lengths) != n_items:
        raise ConfigError(f"{source} returned {len(lengths)} numbers for {n_items} items; expected one per item.")
    return Items(list(lengths), per_sample)


def group_lengths(lengths: list[int], n_items: int | None, modality: str) -> list[int]:
    """Return the tokens per item that the user gave, of which the processor may have made several (crops)."""
    if n_items is None or n_items == len(lengths):
        return lengths
    if n_items == 1:
        return [sum(lengths)]
    raise ConfigError(
        f"The {modality} processor made {len(lengths)} items out of {n_items}, so it is unknown which belong together. "
        f"Pass num_feature_calculation_funcs={{{modality!r}: …}} that returns the tokens of each of the {n_items}."
    )


# ---------------------------------------------------------------------------------------- into the text


def share_out(modality: str, token: str, texts: list[str], items: Items) -> list[list[int]]:
    """Return, for each text, the lengths of the items that its placeholders stand for."""
    found = [text.count(token) for text in texts]
    if items.per_sample is None:
        _check_total(modality, token, found, len(items.lengths))
    else:
        _check_samples(modality, token, found, items.per_sample)
    ends = accumulate(found, initial=0)
    return [items.lengths[start:end] for start, end in pairwise(ends)]


def _check_total(modality: str, token: str, found: list[int], given: int) -> None:
    if sum(found) == given:
        return
    ends = list(accumulate(found))
    short = next((sample for sample, end in enumerate(ends) if end > given), None)
    where = f"sample {short} runs out of items" if short is not None else f"{given - sum(found)} items are left over"
    raise ConfigError(
        f"The texts have {sum(found)} placeholders {token!r} (per sample: {found}), but {given} {modality} items are "
        f"given: {where}. {_advice(token, found)}"
    )


def _check_samples(modality: str, token: str, found: list[int], given: list[int]) -> None:
    if len(found) != len(given):
        raise ConfigError(f"There are {len(found)} texts, but {modality} items for {len(given)} samples.")
    for sample, (placeholders, n_items) in enumerate(zip(found, given, strict=True)):
        if placeholders != n_items:
            raise ConfigError(
                f"Sample {sample} has {placeholders} placeholders {token!r} in its text, but {n_items} {modality} "
                f"items. {_advice(token, [placeholders])}"
            )


def _advice(token: str, found: list[int]) -> str:
    if not any(found):
        return f"The text does not say where its items belong: write {token!r} there."
    return f"Write one {token!r} for each item, and give one item for each {token!r}."


def expand(text: str, token: str, lengths: list[int]) -> str:
    """Return the text with each placeholder repeated to the number of its item's tokens."""
    first, *rest = text.split(token)
    return first + "".join(token * length + piece for length, piece in zip(lengths, rest, strict=True))
