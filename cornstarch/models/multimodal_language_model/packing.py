"""Pack several whole samples into one row, so that no work is spent on padding.

Shapes: B rows, S tokens of a row, T tokens of all samples together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from cornstarch.errors import ConfigError, UnsupportedModelError

from .encoder import LANGUAGE_MODEL_INPUTS
from .facts import IGNORE_INDEX
from .merge import TEXT

logger = logging.getLogger(__name__)

# Entries per token, and their values at padding.
_PER_TOKEN = {"input_ids": 0, "labels": IGNORE_INDEX, "position_ids": 0, "token_type_ids": 0, "mm_token_type_ids": 0}


def pack(
    samples: Sequence[Mapping[str, Any]],
    max_length: int,
    *,
    too_long: Literal["error", "skip"] = "error",
    pad_token_id: int = 0,
    pad_to: int | Callable[[int], int] | None = None,
    token_keys: Sequence[str] = (),
    rows: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Put samples into as few rows as first-fit-decreasing finds, each sample whole and in one row.

    The loss of the batch, times its number of trained tokens, is the sum of the samples' own: a document does not see
    the others, its positions start anew, and its first label is ignored because the token before it belongs to another
    document.

    Args:
        samples: Dictionaries of tensors without batch dimension: `input_ids` [S]; optionally `labels`,
            `attention_mask` (tokens at 0 are left out), `position_ids` [S] or, for mRoPE, [n, S]; and encoders' inputs
            with their items in the first dimension (`pixel_values` [items, …]), flat or nested by modality.
        max_length: The most tokens that a row may have.
        too_long: For a sample longer than that: "error", or "skip" it and log the number of skipped samples.
        pad_token_id: The id at padding. Padding is not attended to; the id must only exist.
        pad_to: The minimum number of tokens of a row, or a function that returns it from the length of the fullest
            row; by default that length.
        token_keys: Further keys with one entry per token; they are 0 at padding.
        rows: The indices of the samples of each row, instead of those that are found; a row without is padding.

    Returns:
        A batch for `MultimodalModel`: `input_ids`, `attention_mask`, `documents` and the samples' other entries per
        token, [B, S] (mRoPE positions [n, B, S]), and encoders' inputs in the order in which their tokens appear. It
        has positions only if the samples have them: the model counts them anew in each document, and a model with
        mRoPE does so in its own way.
    """
    if isinstance(pad_to, int) and pad_to > max_length:
        raise ConfigError(f"pad_to = {pad_to} is more than max_length = {max_length}.")
    texts = [_read_tokens(index, sample, token_keys) for index, sample in enumerate(samples)]
    lengths = [text["input_ids"].shape[-1] for text in texts]
    if too_long not in ("error", "skip"):
        raise ConfigError(f"too_long = {too_long!r}: expected 'error' or 'skip'.")
    if not lengths:
        raise ConfigError("There are no samples to pack.")
    chosen = [index for index, length in enumerate(lengths) if length <= max_length]
    left_out = len(lengths) - len(chosen)
    if left_out and (too_long == "error" or not chosen):
        first = next(index for index, length in enumerate(lengths) if length > max_length)
        raise ConfigError(
            f"Sample {first} has {lengths[first]} tokens, max_length is {max_length} ({left_out} of {len(lengths)} "
            "samples are too long). Raise max_length, shorten the samples, or leave them out with too_long='skip'."
        )
    if left_out:
        logger.warning("Left out %d of %d samples with more than %d tokens.", left_out, len(lengths), max_length)
    if rows is None:
        rows = [[chosen[i] for i in row] for row in first_fit_decreasing([lengths[i] for i in chosen], max_length)]
    order = [index for row in rows for index in row]
    used = [sum(lengths[index] for index in row) for row in rows]
    if max(used) > max_length:
        raise ConfigError(f"Row {used.index(max(used))} has {max(used)} tokens, max_length is {max_length}.")
    width = max([pad_to(max(used)) if callable(pad_to) else pad_to or 0, *used])
    fills = {**_PER_TOKEN, **dict.fromkeys(token_keys, 0), "input_ids": pad_token_id}
    row_lengths = [[lengths[index] for index in row] for row in rows]
    batch = _place_tokens([texts[index] for index in order], row_lengths, width, fills)
    text = {*_PER_TOKEN, *token_keys, "attention_mask"}
    rest = [
        {key: value for key, value in sample.items() if key not in text and value is not None} for sample in samples
    ]
    refused = sorted({key for index in order for key in LANGUAGE_MODEL_INPUTS.intersection(rest[index])})
    if refused:  # they describe a whole batch
        raise ConfigError(f"Samples with {', '.join(refused)} cannot be packed; leave it out.")
    return {**batch, **_join_inputs([rest[index] for index in order], order)}


def first_fit_decreasing(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return rows of indices (longest first, each to the first row with room), at most 11/9 of the fewest, plus one.

    Rows, and the indices in a row, are in the order of the samples.
    """
    # A tournament tree over the rows' room finds the first that fits in logarithmic time.
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [limit] * (2 * leaves)  # room[n] is the most room below node n; the rows are the leaves
    rows: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        assert lengths[index] <= limit
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < lengths[index]:
                node += 1
        rows.setdefault(node, []).append(index)
        room[node] -= lengths[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return sorted(sorted(row) for row in rows.values())


def _read_tokens(index: int, sample: Mapping[str, Any], token_keys: Sequence[str]) -> dict[str, Tensor]:
    """Return the entries per token of a sample, checked and without padding."""
    if sample.get("input_ids") is None:
        raise ConfigError(f"Sample {index} has no input_ids (it has {list(sample)}).")
    wanted = [*_PER_TOKEN, "attention_mask", *token_keys]
    tokens = {key: torch.as_tensor(sample[key]) for key in wanted if sample.get(key) is not None}
    length = tokens["input_ids"].shape[-1] if tokens["input_ids"].dim() == 1 else 0
    for key, value in tokens.items():
        dims = (1, 2) if key == "position_ids" else (1,)
        if value.dim() not in dims or value.shape[-1] != length or length == 0:
            raise ConfigError(
                f"Sample {index}: {key} has shape {list(value.shape)}, input_ids has "
                f"{list(tokens['input_ids'].shape)}; expected one entry per token, without a batch dimension."
            )
    kept = tokens.pop("attention_mask", None)
    if kept is not None and not bool(kept.all()):
        tokens = {key: value[..., kept != 0] for key, value in tokens.items()}
        if not bool((kept != 0).any()):
            raise ConfigError(f"Sample {index}: attention_mask is 0 everywhere, so there is nothing to pack.")
    return tokens


def _place_tokens(
    texts: list[dict[str, Tensor]], rows: list[list[int]], width: int, fills: Mapping[str, int]
) -> dict[str, Any]:
    """Return the batch [B, S] of texts in the order of `rows`, which are lists of their lengths."""
    lengths = torch.tensor([length for row in rows for length in row])
    starts = lengths.cumsum(0) - lengths  # the first of each sample's tokens among the T
    fronts = torch.tensor(
        [number * width + end - row[i] for number, row in enumerate(rows) for i, end in enumerate(accumulate(row))]
    )
    positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    places = fronts.repeat_interleave(lengths) + positions  # [T] in the flattened rows
    numbers = torch.tensor([i + 1 for row in rows for i in range(len(row))]).repeat_interleave(lengths)

    def place(tokens: Tensor, fill: int) -> Tensor:  # [..., T] to [..., B, S]
        packed = tokens.new_full((*tokens.shape[:-1], len(rows) * width), fill)
        packed[..., places.to(tokens.device)] = tokens
        return packed.unflatten(-1, (len(rows), width))

    batch: dict[str, Any] = {}
    for key in {key: None for text in texts for key in text}:
        missing = sum(key not in text for text in texts)
        if missing:
            raise ConfigError(f"{missing} of {len(texts)} samples have no {key}; give it to all samples or to none.")
        values = [text[key] for text in texts]
        if key == "position_ids":  # with mRoPE, text has the same position on each axis
            axes = {value.shape[0] for value in values if value.dim() == 2}
            if len(axes) > 1:
                raise ConfigError(f"Samples have position_ids of {sorted(axes)} axes; expected the same number in all.")
            values = [value.expand(*axes, -1) if value.dim() == 1 else value for value in values]
        tokens = torch.cat(values, dim=-1)
        if key == "labels":
            tokens[starts.to(tokens.device)] = IGNORE_INDEX
        batch[key] = place(tokens, fills[key])
    batch["documents"] = place(numbers.to(batch["input_ids"].device), 0)
    batch["attention_mask"] = (batch["documents"] > 0).long()
    return batch


def _join_inputs(parts: list[dict[str, Any]], samples: list[int], prefix: str = "") -> dict[str, Any]:
    """Join the encoders' inputs of the samples that have them, in the order of the rows."""
    joined: dict[str, Any] = {}
    for key in {key: None for part in parts for key in part}:
        owners = [index for index, part in enumerate(parts) if key in part]
        values, numbers = [parts[index][key] for index in owners], [samples[index] for index in owners]
        if not any(isinstance(value, Mapping) for value in values):
            joined[key] = _join_values(f"{prefix}{key}", values, numbers)
            continue
        for value, sample in zip(values, numbers, strict=True):  # otherwise items and masks would not match
            if not isinstance(value, Mapping) or set(value) != set(values[0]):
                found = list(value) if isinstance(value, Mapping) else type(value).__name__
                raise ConfigError(f"{key}: sample {numbers[0]} has {list(values[0])}, sample {sample} has {found}.")
        joined[key] = _join_inputs([dict(value) for value in values], numbers, f"{key}.")
    return joined


def _join_values(name: str, values: list[Any], samples: list[int]) -> Any:
    first = values[0]
    if isinstance(first, list | tuple):
        return [item for value in values for item in value]
    if not isinstance(first, Tensor) or first.dim() == 0:
        if all(value == first for value in values):
            return first  # an option, the same for all
        raise ConfigError(f"{name} is {first!r} in sample {samples[0]} and something else in others.")
    for value, sample in zip(values, samples, strict=True):
        if value.shape[1:] != first.shape[1:]:
            raise ConfigError(
                f"{name} has shape {list(first.shape)} in sample {samples[0]} and {list(value.shape)} in sample "
                f"{sample}; only the first dimension, the items, may differ. Process the samples to one size."
            )
    return torch.cat(values)


def find_spans(masks: Any, lengths: Tensor) -> Tensor:
    """Return the spans [N, S] of tokens that see each other in both directions, read from a model's masks; -1 is text.

    A mask that is anything else than causal attention with such spans (images, whole prompts) is refused. `masks` are
    given to the language model: boolean [N, 1, S, S], one for each kind of layer, or None for causal attention.
    `lengths` [N] are the tokens of each document; the rest is padding. N: documents, S: tokens of the longest.
    """
    full = "full_attention"
    by_kind = dict(masks) if isinstance(masks, Mapping) else {full: masks}
    places = torch.arange(int(lengths.max()), device=lengths.device)
    causal_SS = places[:, None] >= places
    full_NSS = _check_mask(by_kind.pop(full, None), lengths)
    if full_NSS is None:
        full_NSS = causal_SS.expand(len(lengths), -1, -1)
    valid_NS = places < lengths[:, None]
    inside_NSS = valid_NS[:, :, None] & valid_NS[:, None, :]
    # Two tokens that see each other are in one span, numbered by its first token.
    mutual_NSS = full_NSS & full_NSS.mT & inside_NSS
    first_NS = torch.where(mutual_NSS, places, len(places)).amin(-1)
    spans_NS = torch.where((mutual_NSS.sum(-1) > 1) & valid_NS, first_NS, TEXT)
    together_NSS = (spans_NS[:, :, None] == spans_NS[:, None, :]) & (spans_NS >= 0)[:, :, None]
    if not torch.equal(full_NSS & inside_NSS, (causal_SS | together_NSS) & inside_NSS):
        raise UnsupportedModelError("its masks are not causal with spans that see each other")
    for mask in by_kind.values():
        other_NSS = _check_mask(mask, lengths)
        if other_NSS is None:
            continue
        hidden, ahead = together_NSS & ~other_NSS, other_NSS & ~causal_SS & ~together_NSS
        if bool(((hidden | ahead) & inside_NSS).any()):
            raise UnsupportedModelError("its kinds of layers let other spans of tokens see each other")
    return spans_NS


def _check_mask(mask: Any, lengths: Tensor) -> Tensor | None:
    """Return a mask [N, S, S], the same for all heads."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
        raise UnsupportedModelError(f"its masks are not ones of booleans ({type(mask).__name__})")
    return mask[:, 0].expand(len(lengths), -1, -1)
