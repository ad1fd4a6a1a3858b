"""From what an encoder puts out to tokens per item (one image, one clip).

Shapes: N items, T tokens per item, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.facts import sent
from cornstarch.models.multimodal_language_model.unwrap import unwrap


@dataclass
class Features:
    """The tokens that one encoder contributes to a batch, in the order of its items."""

    tokens: Tensor
    """[total, D]"""
    lengths: list[int] | None
    """Tokens per item; None where the boundaries are unknown (a callback returned one flat tensor)."""

    def given(self) -> list[Tensor]:
        """Return all that the language model is given of them."""
        return [self.tokens]


KNOWN = "known_features"
"""The key among an encoder's inputs that tells which of its items were encoded before.

Beside it are the inputs of the other items, if there are any. It has, of all items in their order, `lengths` (tokens),
`is_known`, and `digests` (what an item is known by); and `tokens` [total, D], what the encoder made of the known ones.
"""


def join_known(known: Mapping[str, Any], fresh: Tensor | None) -> Tensor:
    """Return the encoder's tokens [total, D] of all items, in their order.

    Args:
        known: What is known of the items, see `KNOWN`.
        fresh: The tokens of the items that were encoded now; None: there are no such.
    """
    wanted = sum(fresh_lengths(known))
    found = 0 if fresh is None else len(fresh)
    if found != wanted:
        raise ConfigError(
            f"An encoder made {found} tokens of items for which the text has {wanted} placeholders. "
            "Expand each placeholder to its item's number of features."
        )
    if fresh is None:
        return known["tokens"]
    stored: Tensor | None = known.get("tokens")
    if stored is None:
        return fresh
    before = stored.split([n for n, is_known in zip(known["lengths"], known["is_known"], strict=True) if is_known])
    parts = {True: iter(before), False: iter(fresh.split(fresh_lengths(known)))}
    return torch.cat([next(parts[is_known]) for is_known in known["is_known"]])


def fresh_lengths(known: Mapping[str, Any]) -> list[int]:
    """Return the tokens of each item that is not known."""
    return [n for n, is_known in zip(known["lengths"], known["is_known"], strict=True) if not is_known]


def token_states(output: Any) -> Any:
    """Return the tokens in an encoder's output: [N, T, D], flat [total, D], or a list of [T, D]."""
    states: Any
    if isinstance(output, (Tensor, list)):
        states = output
    elif isinstance(output, tuple):  # return_dict=False
        states = output[0]
    else:
        states = getattr(output, "last_hidden_state", None)
        pooled = getattr(output, "pooler_output", None)
        # Encoders over flat patches end in a merger: what the language model sees is the merged tokens.
        if isinstance(states, Tensor) and states.dim() == 2 and isinstance(pooled, Tensor) and pooled.dim() == 2:
            states = pooled
    if states is None:
        keys = ", ".join(output.keys()) if isinstance(output, Mapping) else type(output).__name__
        raise UnsupportedModelError(
            f"The encoder's output has no last_hidden_state (it has: {keys}). "
            "Choose the tokens with postprocess_module_callback(inputs, output) and set output.last_hidden_state."
        )
    if isinstance(states, Tensor) and states.dim() == 4:  # a feature map [N, D, height, width]
        states = states.flatten(2).transpose(1, 2)
    return states


def mask_of(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the mask [N, L] over an encoder's inputs, if it was given one."""
    for name, value in inputs.items():
        if name.endswith("mask") and isinstance(value, Tensor) and value.dim() == 2:
            return value
    return None


def patch_counts(module: nn.Module, inputs: Mapping[str, Any]) -> list[int] | None:
    """Return the tokens per item of encoders that run over the patches of all images in one row."""
    config = getattr(unwrap(module), "config", None)
    for name, value in inputs.items():
        if name.endswith("grid_thw"):
            merge = getattr(config, "spatial_merge_size", 1)
            return (torch.as_tensor(value).prod(-1) // merge**2).tolist()
        patch = getattr(config, "patch_size", None)
        if name == "image_sizes" and isinstance(patch, int):
            merge = getattr(config, "spatial_merge_size", 1)
            return (torch.as_tensor(value) // (patch * merge)).prod(-1).tolist()
    return None


def sample_lengths(module: nn.Module, mask: Tensor) -> list[int] | None:
    """Return the tokens per item of an audio encoder, from the valid samples or frames in `mask` [N, L]."""
    shorten = getattr(unwrap(module), "_get_feat_extract_output_lengths", None)
    if shorten is None:
        return None
    lengths = shorten(mask.sum(-1))
    if isinstance(lengths, tuple):  # after the convolutions, after the pooling
        lengths = lengths[-1]
    return torch.as_tensor(lengths).tolist()


def split_items(module: nn.Module, inputs: Mapping[str, Any], states: Any) -> Features:
    """Return the tokens of every item, without what only pads an item to the length of the longest.

    Masks and sizes among the inputs may be on the CPU, whatever the tokens are on: then nothing has to be waited for.
    """
    if isinstance(states, Sequence):
        return Features(torch.cat(list(states)), [len(item) for item in states])
    if states.dim() == 2:
        counts = patch_counts(module, inputs)
        return Features(states, counts if counts is not None and sum(counts) == len(states) else None)
    if states.dim() != 3:
        raise ConfigError(
            f"An encoder's tokens have shape {tuple(states.shape)}; expected [items, tokens, width], "
            "[tokens, width] or a list of [tokens, width]. Reshape them in a postprocess callback."
        )
    n_items, n_tokens, width = states.shape
    mask = mask_of(inputs)
    if mask is not None and mask.shape == (n_items, n_tokens):
        keep = mask.to(torch.bool)
        kept = sent(keep.flatten().nonzero().flatten(), states.device)
        return Features(states.flatten(0, 1).index_select(0, kept), keep.sum(-1).tolist())
    if mask is not None and mask.shape[0] == n_items and mask.shape[1] > n_tokens:
        lengths = sample_lengths(module, mask)
        if lengths is not None and all(length <= n_tokens for length in lengths):
            return Features(torch.cat([s[:n] for s, n in zip(states, lengths, strict=True)]), lengths)
    if n_items == 1 and _given_items(inputs) != 1:  # all items in one row, as encoders over patches lay them
        counts = patch_counts(module, inputs)
        if counts is not None and sum(counts) != n_tokens:
            raise ConfigError(
                f"{type(unwrap(module)).__name__} put out {n_tokens} tokens in one row, but items of the given sizes "
                f"make {counts}: it is unknown which belong to which. Return a list of tensors, one per item, from a "
                "postprocess callback."
            )
        return Features(states[0], counts)
    return Features(states.reshape(-1, width), [n_tokens] * n_items)


def _given_items(inputs: Mapping[str, Any]) -> int:
    """Return how many items the encoder was given: the first dimension of its first tensor."""
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()), 1)
