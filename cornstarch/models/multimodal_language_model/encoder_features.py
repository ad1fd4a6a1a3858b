"""From an encoder's output to tokens per item (one image, one clip).

Shapes: N items, T tokens per item, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.facts import copy_to_device
from cornstarch.models.multimodal_language_model.unwrap import unwrap

CACHED_FEATURES = "known_features"
"""The key among an encoder's inputs that says which of its items were encoded before.

Its value describes all items, in order: `lengths` (tokens per item), `is_known`, `digests` (cache keys), and `tokens`
[total, D], the encoder's output for the cached items. The inputs beside it belong to the items that are not cached.
"""


@dataclass
class EncoderFeatures:
    """The tokens that one encoder contributes to a batch, in the order of its items."""

    tokens: Tensor
    """[total, D]"""
    lengths: list[int] | None
    """Tokens per item; None where the boundaries are unknown (a callback returned one flat tensor)."""

    def tensors(self) -> list[Tensor]:
        """Return every tensor that the language model is given."""
        return [self.tokens]


def join_cached(cached: Mapping[str, Any], fresh: Tensor | None) -> Tensor:
    """Return the tokens [total, D] of all items, in order, from the cache and from the items that were encoded now."""
    lengths = fresh_lengths(cached)
    found = 0 if fresh is None else len(fresh)
    if found != sum(lengths):
        raise ConfigError(
            f"An encoder made {found} tokens of items for which the text has {sum(lengths)} placeholders. "
            "Expand each placeholder to its item's number of features."
        )
    if fresh is None:
        return cached["tokens"]
    stored: Tensor | None = cached.get("tokens")
    if stored is None:
        return fresh
    before = [n for n, is_cached in zip(cached["lengths"], cached["is_known"], strict=True) if is_cached]
    parts = {True: iter(stored.split(before)), False: iter(fresh.split(lengths))}
    return torch.cat([next(parts[is_cached]) for is_cached in cached["is_known"]])


def fresh_lengths(cached: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of each item that is not cached."""
    return [n for n, is_cached in zip(cached["lengths"], cached["is_known"], strict=True) if not is_cached]


def get_token_states(output: Any) -> Any:
    """Return the tokens in an encoder's output: [N, T, D], flat [total, D], or a list of [T, D]."""
    states: Any
    if isinstance(output, (Tensor, list)):
        states = output
    elif isinstance(output, tuple):  # return_dict=False
        states = output[0]
    else:
        states = getattr(output, "last_hidden_state", None)
        pooled = getattr(output, "pooler_output", None)
        # Encoders over flat patches end in a merger: the language model sees the merged tokens.
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


def find_mask(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the mask [N, L] among an encoder's inputs, if there is one."""
    for name, value in inputs.items():
        if name.endswith("mask") and isinstance(value, Tensor) and value.dim() == 2:
            return value
    return None


def count_patches(module: nn.Module, inputs: Mapping[str, Any]) -> list[int] | None:
    """Return the tokens per item of encoders that run over the patches of all images in one row."""
    config = getattr(unwrap(module), "config", None)
    merge, patch = getattr(config, "spatial_merge_size", 1), getattr(config, "patch_size", None)
    for name, value in inputs.items():
        if name.endswith("grid_thw"):
            return (torch.as_tensor(value).prod(-1) // merge**2).tolist()
        if name == "image_sizes" and isinstance(patch, int):
            return (torch.as_tensor(value) // (patch * merge)).prod(-1).tolist()
    return None


def count_audio_tokens(module: nn.Module, mask: Tensor) -> list[int] | None:
    """Return the tokens per item of an audio encoder, from the valid samples or frames in `mask` [N, L]."""
    shorten = getattr(unwrap(module), "_get_feat_extract_output_lengths", None)
    if shorten is None:
        return None
    lengths = shorten(mask.sum(-1))
    if isinstance(lengths, tuple):  # after the convolutions, after the pooling
        lengths = lengths[-1]
    return torch.as_tensor(lengths).tolist()


def split_items(module: nn.Module, inputs: Mapping[str, Any], states: Any) -> EncoderFeatures:
    """Return the tokens of every item, without the padding of shorter items.

    Masks and sizes among the inputs may be on the CPU while the tokens are on a GPU: then no synchronization is needed.
    """
    if isinstance(states, Sequence):
        return EncoderFeatures(torch.cat(list(states)), [len(item) for item in states])
    if states.dim() == 2:
        counts = count_patches(module, inputs)
        return EncoderFeatures(states, counts if counts is not None and sum(counts) == len(states) else None)
    if states.dim() != 3:
        raise ConfigError(
            f"An encoder's tokens have shape {tuple(states.shape)}; expected [items, tokens, width], "
            "[tokens, width] or a list of [tokens, width]. Reshape them in a postprocess callback."
        )
    n_items, n_tokens, width = states.shape
    mask = find_mask(inputs)
    if mask is not None and mask.shape == (n_items, n_tokens):
        keep = mask.to(torch.bool)
        kept = copy_to_device(keep.flatten().nonzero().flatten(), states.device)
        return EncoderFeatures(states.flatten(0, 1).index_select(0, kept), keep.sum(-1).tolist())
    if mask is not None and mask.shape[0] == n_items and mask.shape[1] > n_tokens:
        lengths = count_audio_tokens(module, mask)
        if lengths is not None and all(length <= n_tokens for length in lengths):
            return EncoderFeatures(torch.cat([s[:n] for s, n in zip(states, lengths, strict=True)]), lengths)
    n_inputs = next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()), 1)
    if n_items == 1 and n_inputs != 1:  # encoders over patches put all items into one row
        counts = count_patches(module, inputs)
        if counts is not None and sum(counts) != n_tokens:
            raise ConfigError(
                f"{type(unwrap(module)).__name__} put out {n_tokens} tokens in one row, but items of the given sizes "
                f"make {counts}: it is unknown which belong to which. Return a list of tensors, one per item, from a "
                "postprocess callback."
            )
        return EncoderFeatures(states[0], counts)
    return EncoderFeatures(states.reshape(-1, width), [n_tokens] * n_items)
