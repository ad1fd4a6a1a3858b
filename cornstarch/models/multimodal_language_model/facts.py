"""What is known of a batch on the CPU, and the tokens that encoders make of it, item by item.

Reading a number from a GPU waits for all work queued on it, and the GPU then idles until new work arrives. Everything
that a step decides by is therefore recorded where the batch is built.

Shapes: N items (images, clips), T tokens per item, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from cornstarch.attention.mask import DocumentCounts, count_documents
from cornstarch.errors import ConfigError, UnsupportedModelError

from .unwrap import unwrap

IGNORE_INDEX = -100  # a label that is not trained on
CACHED_FEATURES = "known_features"
"""The key among an encoder's inputs that says which of its items were encoded before.

Its value describes all items, in order: `lengths` (tokens per item), `is_known`, `digests` (cache keys), and `tokens`
[total, D], the encoder's output for the cached items. The inputs beside it belong to the items that are not cached.
"""


@dataclass(frozen=True)
class TextInputs:
    """The text of a batch: the named arguments of `MultimodalModel.forward`."""

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    labels: Tensor | None = None
    inputs_embeds: Tensor | None = None
    documents: Tensor | None = None
    facts: BatchFacts | None = None

    @classmethod
    def split(cls, inputs: Mapping[str, Any]) -> tuple[TextInputs, dict[str, Any]]:
        """Return the text of a batch, and the batch without it."""
        names = {field.name for field in fields(cls)}
        text = cls(**{name: value for name, value in inputs.items() if name in names})
        return text, {name: value for name, value in inputs.items() if name not in names}


@dataclass(frozen=True, eq=False)
class BatchFacts:
    """Facts that a model would otherwise read from the tensors of a batch; leave them out after changing the batch."""

    # Unhashable on purpose: shapes do not depend on facts, so code that keys a cache by a batch's values skips them.
    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    shape: tuple[int, int]
    """Rows and tokens of the text."""
    padding: Literal["none", "right", "other"]
    """Where rows are padded: nowhere, only on the right, or in other places too."""
    starts_with_padding: bool
    """Whether the first token of a row is padding."""
    packed: bool
    """Whether a row has several documents."""
    documents: DocumentCounts
    """How many documents the rows have."""
    trained_tokens: int | None
    """Upper bound of the labels that count after the shift (the model skips placeholders). None: no labels."""
    token_ids: Mapping[str, int]
    """By modality: the placeholder token."""
    tokens: Mapping[str, list[int]]
    """By modality: the number of placeholders in each row."""
    places: Mapping[str, Tensor]
    """By modality: the indices of placeholders in the flattened rows [placeholders]."""
    breaks: Mapping[str, list[int]]
    """By modality: the placeholders that do not directly follow the previous one."""
    on_host: Mapping[str, Any]
    """Integer tensors among the encoders' inputs (image sizes, masks), flat or by modality, on the CPU."""

    @classmethod
    def of(cls, batch: Mapping[str, Any], token_ids: Mapping[str, int]) -> BatchFacts:
        """Return the facts of a batch that is still on the CPU."""
        ids: Tensor = batch["input_ids"]
        mask = batch.get("attention_mask")
        valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
        documents = batch.get("documents")
        numbers = valid.long() if documents is None else documents * valid
        marked = {name: ids == token for name, token in token_ids.items()}
        places = {name: mask.flatten().nonzero().flatten() for name, mask in marked.items()}
        only_right = bool(valid[:, 0].all()) and not bool((valid[:, 1:] & ~valid[:, :-1]).any())
        return cls(
            shape=(ids.shape[0], ids.shape[1]),
            padding="none" if bool(valid.all()) else "right" if only_right else "other",
            starts_with_padding=not bool(valid[:, 0].all()),
            packed=documents is not None and bool(((documents != documents[:, :1]) & (documents > 0)).any()),
            documents=count_documents(numbers),
            trained_tokens=None if batch.get("labels") is None else int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()),
            token_ids=dict(token_ids),
            tokens={name: mask.sum(-1).tolist() for name, mask in marked.items()},
            places=places,
            breaks={name: ((one.diff() != 1).nonzero().flatten() + 1).tolist() for name, one in places.items()},
            on_host=collect_integers(TextInputs.split(batch)[1]),
        )

    def matches(self, input_ids: Tensor | None, token_ids: Mapping[str, int]) -> bool:
        """Whether the facts can belong to a batch; False for a part of the batch that they were built from."""
        return input_ids is not None and tuple(input_ids.shape) == self.shape and dict(token_ids) == self.token_ids

    def host_inputs(self, modality: str) -> Mapping[str, Any]:
        """Return the integer tensors among an encoder's inputs by name; flat batches include those of others."""
        nested = self.on_host.get(modality)
        return nested if isinstance(nested, Mapping) else self.on_host

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> BatchFacts:
        """Return a copy whose indices are on a device; everything that decides control flow stays on the CPU."""
        return replace(self, places={k: one.to(device, non_blocking=non_blocking) for k, one in self.places.items()})

    def pin_memory(self) -> BatchFacts:
        places = {name: one if one.is_pinned() else one.pin_memory() for name, one in self.places.items()}
        return replace(self, places=places)


def collect_integers(inputs: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: collect_integers(value) for key, value in inputs.items() if isinstance(value, Mapping)}
    flat = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and not v.is_floating_point()}
    return {**nested, **flat}


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting for the device's queued work."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


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
    masks = [value for name, value in inputs.items() if name.endswith("mask")]
    return next((mask for mask in masks if isinstance(mask, Tensor) and mask.dim() == 2), None)


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
    """Return the tokens of every item, without the padding of shorter items."""
    # Masks and sizes may be on the CPU while the tokens are on a GPU: then no synchronization is needed.
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
