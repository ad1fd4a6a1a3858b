"""What is known of a batch before it is on a GPU, so that nothing has to be read back from there.

Reading a number from a GPU waits for all that it was told to do, and it then idles until it is told more. Whatever a
step has to decide by is therefore written down where the batch is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cornstarch.attention.mask import Counts, count_documents

Padding = Literal["none", "right", "other"]

IGNORED = -100  # a label that is not trained on


@dataclass(frozen=True, eq=False)
class BatchFacts:
    """What a model would else find out from a batch. They are of this very batch: change it, and leave them out."""

    # What shapes follow from is not in here: whoever looks at a batch by value passes over it.
    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    shape: tuple[int, int]
    """Rows and tokens of the text."""
    padding: Padding
    """Where rows have some: nowhere, only behind their tokens, or elsewhere, too."""
    starts_with_padding: bool
    """Whether the first token of a row is padding."""
    packed: bool
    """Whether a row has several documents."""
    documents: Counts
    """How many documents the rows have."""
    trained_tokens: int | None
    """Labels that count after the shift, at most: the model leaves out placeholders. None: there are no labels."""
    token_ids: Mapping[str, int]
    """Which token marks the place of each modality."""
    tokens: Mapping[str, list[int]]
    """By modality: placeholders of each row."""
    places: Mapping[str, Tensor]
    """By modality: where they are in the rows laid end to end [placeholders]."""
    breaks: Mapping[str, list[int]]
    """By modality: which of the placeholders do not stand right behind the one before."""
    on_host: Mapping[str, Any]
    """Whole numbers among the encoders' inputs (sizes of images, masks), flat or by modality, on the CPU."""

    @classmethod
    def of(cls, batch: Mapping[str, Any], token_ids: Mapping[str, int]) -> BatchFacts:
        """Return the facts of a batch that is still on the CPU."""
        ids: Tensor = batch["input_ids"]
        mask = batch.get("attention_mask")
        there = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
        documents = batch.get("documents")
        numbers = there.long() if documents is None else documents * there
        marked = {name: ids == token for name, token in token_ids.items()}
        places = {name: one.flatten().nonzero().flatten() for name, one in marked.items()}
        text = ("input_ids", "attention_mask", "labels", "documents", "position_ids")
        return cls(
            shape=(ids.shape[0], ids.shape[1]),
            padding=_padding(there),
            starts_with_padding=not bool(there[:, 0].all()),
            packed=documents is not None and bool(((documents != documents[:, :1]) & (documents > 0)).any()),
            documents=count_documents(numbers),
            trained_tokens=None if batch.get("labels") is None else int((batch["labels"][:, 1:] != IGNORED).sum()),
            token_ids=dict(token_ids),
            tokens={name: one.sum(-1).tolist() for name, one in marked.items()},
            places=places,
            breaks={name: ((one.diff() != 1).nonzero().flatten() + 1).tolist() for name, one in places.items()},
            on_host=whole_numbers({key: value for key, value in batch.items() if key not in text}),
        )

    def are_of(self, input_ids: Tensor | None, token_ids: Mapping[str, int]) -> bool:
        """Whether they can be those of a batch: not if it is a part of the batch that they were made of."""
        return input_ids is not None and tuple(input_ids.shape) == self.shape and dict(token_ids) == self.token_ids

    def known(self, modality: str) -> Mapping[str, Any]:
        """Return the whole numbers among an encoder's inputs, and perhaps others', by name."""
        nested = self.on_host.get(modality)
        return nested if isinstance(nested, Mapping) else self.on_host

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> BatchFacts:
        """Return the same with what is computed with on a device; what is decided by stays where it is."""
        places = {name: one.to(device, non_blocking=non_blocking) for name, one in self.places.items()}
        return replace(self, places=places)

    def pin_memory(self) -> BatchFacts:
        """Return the same, ready to be copied to a GPU while something else goes on."""
        places = {name: one if one.is_pinned() else one.pin_memory() for name, one in self.places.items()}
        return replace(self, places=places)


def _padding(there: Tensor) -> Padding:
    if bool(there.all()):
        return "none"
    only_behind = bool(there[:, 0].all()) and not bool((there[:, 1:] & ~there[:, :-1]).any())
    return "right" if only_behind else "other"


def whole_numbers(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of whole numbers among inputs, also nested ones."""
    found: dict[str, Any] = {}
    for key, value in inputs.items():
        if isinstance(value, Mapping):
            found[key] = whole_numbers(value)
        elif isinstance(value, Tensor) and not value.is_floating_point():
            found[key] = value
    return found


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device, without waiting for what the device is doing."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


__all__ = ["IGNORED", "BatchFacts", "Padding", "sent", "whole_numbers"]
