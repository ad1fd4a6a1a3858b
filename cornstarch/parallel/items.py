"""An encoder's call, item by item: which part of its inputs, and of what it puts out, belongs to which image or sound.

Shapes: N items, P patches of all items, T tokens of an item, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.items import mask_of, patch_counts
from cornstarch.models.multimodal_language_model.unwrap import unwrap

STACKED, FLAT, ONE_ROW = 1, 2, 3  # [N, …]; [tokens of all items, …]; [1, tokens of all items, …]
_MIXES_ITEMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Items:
    """The items that an encoder is given in one call."""

    encoder: str
    """The encoder's class, for messages."""
    advice: str
    """What to do about an encoder whose items cannot be told apart."""
    patches: list[int]
    """Of each item."""
    lengths: list[int] | None
    """Tokens of each item, where the encoder lays those of all items in one row."""
    flat: bool
    """Whether the patches of all items come in one row, too."""
    known: bool = True
    """Whether the patches are counted; else each item stands for one."""

    @classmethod
    def of(cls, encoder: nn.Module, named: Mapping[str, Any], advice: str) -> Items:
        """Return the items among an encoder's inputs."""
        name = type(unwrap(encoder)).__name__
        grid = next((value for key, value in named.items() if key.endswith("grid_thw") and value is not None), None)
        tensors = [value for value in named.values() if isinstance(value, Tensor) and value.dim()]
        if not tensors:
            raise ConfigError(f"{name}, whose items are shared out over ranks, was given no tensor with items.")
        if grid is not None:
            return cls(name, advice, torch.as_tensor(grid).prod(-1).tolist(), None, flat=True)
        count = len(tensors[0])
        mask, lengths = mask_of(named), patch_counts(encoder, named)
        if lengths is not None and len(lengths) == count:
            return cls(name, advice, lengths, lengths, flat=False)
        if mask is not None and len(mask) == count:
            return cls(name, advice, mask.sum(-1).tolist(), None, flat=False)
        pixels = _pixel_patches(encoder, tensors[0])
        return cls(name, advice, [pixels or 1] * count, None, flat=False, known=pixels is not None)

    def __len__(self) -> int:
        return len(self.patches)

    def is_by_item(self, name: str, value: Tensor) -> bool:
        """Whether an input has a row for each item, and not one for each patch."""
        if len(value) == len(self.patches):
            return True
        if self.flat and len(value) == sum(self.patches):
            return False
        raise UnsupportedModelError(
            f"{self.encoder} was given {name!r} of shape {list(value.shape)} beside {len(self.patches)} items: it is "
            f"unknown which part belongs to which item. {self.advice}"
        )

    def select(self, name: str, value: Any, chosen: Sequence[int]) -> Any:
        """Return the part of an input that belongs to some of the items, in their order."""
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if self.is_by_item(name, value):
            return value[torch.tensor(chosen, dtype=torch.long, device=value.device)]
        pieces = value.split(self.patches)
        return torch.cat([pieces[item] for item in chosen]) if chosen else value[:0]

    def chosen(self, chosen: Sequence[int]) -> Items:
        """Return some of the items, in their order."""
        lengths = None if self.lengths is None else [self.lengths[item] for item in chosen]
        patches = [self.patches[item] for item in chosen]
        return Items(self.encoder, self.advice, patches, lengths, self.flat, self.known)

    def layout(self, tensor: Tensor) -> int:
        """Return how the items lie in a tensor that the encoder has put out."""
        if self.lengths is not None and tensor.shape[:2] == (1, sum(self.lengths)):
            return ONE_ROW
        whole = sum(self.patches)
        if self.flat and tensor.dim() and all(count * len(tensor) % whole == 0 for count in self.patches):
            return FLAT
        if tensor.dim() and len(tensor) == len(self.patches):
            return STACKED
        raise UnsupportedModelError(
            f"{self.encoder} put out a tensor of shape {list(tensor.shape)} for {len(self.patches)} items: it is "
            f"unknown which part belongs to which item. {self.advice}"
        )

    def rows(self, layout: int, tensor: Tensor, encoded: Items) -> list[int]:
        """Return how many rows of an output each item has.

        Args:
            layout: How items lie in it.
            tensor: One such output.
            encoded: The items that it was made of.
        """
        if layout == STACKED:
            return [1] * len(self.patches)
        if layout == ONE_ROW:
            assert self.lengths is not None
            return self.lengths
        return [count * len(tensor) // sum(encoded.patches) for count in self.patches]


def row_dim(layout: int) -> int:
    """Return the dimension of a tensor in which the rows of items follow one another."""
    return 1 if layout == ONE_ROW else 0


def _pixel_patches(encoder: nn.Module, images: Tensor) -> int | None:
    """Return the patches of each of some images of one size, if the encoder says how large a patch is."""
    size = getattr(getattr(unwrap(encoder), "config", None), "patch_size", None)
    if images.dim() != 4 or not isinstance(size, int):
        return None
    return (images.shape[2] // size) * (images.shape[3] // size)


def check_apart(encoder: nn.Module, advice: str) -> None:
    """Refuse an encoder that, as it is now, makes something else of an item if it comes with others."""
    if encoder.training and any(isinstance(module, _MIXES_ITEMS) for module in encoder.modules()):
        raise UnsupportedModelError(
            f"{type(unwrap(encoder)).__name__} takes means over all items of a batch (BatchNorm): in training its "
            f"items cannot be shared out over ranks. Freeze it, or {advice}"
        )


def named_inputs(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an encoder's arguments by their names."""
    inner = unwrap(encoder)
    named = {**inspect.signature(type(inner).forward).bind_partial(inner, *args).arguments, **kwargs}
    named.pop("self", None)
    return named


__all__ = [
    "FLAT",
    "ONE_ROW",
    "STACKED",
    "Items",
    "check_apart",
    "named_inputs",
    "row_dim",
]
