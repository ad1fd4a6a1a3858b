"""Facts about a batch that are known before it is on a GPU, so that no number is read back from there.

Reading a number from a GPU waits for all work queued on it, and the GPU then idles until new work arrives. Everything
that a step decides by is therefore recorded where the batch is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cornstarch.attention.mask import DocumentCounts, count_documents

Padding = Literal["none", "right", "other"]

IGNORE_INDEX = -100  # a label that is not trained on


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
    """Facts that a model would otherwise read from the tensors of a batch.

    They belong to one batch: leave them out after changing it.
    """

    # Unhashable on purpose: shapes do not depend on facts, so code that keys a cache by a batch's values skips them.
    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    shape: tuple[int, int]
    """Rows and tokens of the text."""
    padding: Padding
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
        places = {name: one.to(device, non_blocking=non_blocking) for name, one in self.places.items()}
        return replace(self, places=places)

    def pin_memory(self) -> BatchFacts:
        """Return a copy in pinned memory, for asynchronous copies to a GPU."""
        places = {name: one if one.is_pinned() else one.pin_memory() for name, one in self.places.items()}
        return replace(self, places=places)


def collect_integers(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the integer tensors among inputs, also nested ones."""
    found: dict[str, Any] = {}
    for key, value in inputs.items():
        if isinstance(value, Mapping):
            found[key] = collect_integers(value)
        elif isinstance(value, Tensor) and not value.is_floating_point():
            found[key] = value
    return found


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting for the device's queued work."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
