"""Items (images, sounds) that an encoder takes, as its config describes them: shapes without numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.unwrap import argument_names, unwrap


def items_from_config(module: nn.Module, count: int) -> dict[str, Tensor]:
    """Return images or sounds of the size that an encoder's config has, on the meta device."""
    config, names = getattr(unwrap(module), "config", None), argument_names(module)
    side, bins = size_in(config, "image_size", "img_size"), size_in(config, "num_mel_bins")
    positions = size_in(config, "max_source_positions")
    if "pixel_values" in names and side is not None:
        return {"pixel_values": torch.empty(count, _channels(config), side, side, device="meta")}
    if "input_features" in names and bins is not None and positions is not None:
        return {"input_features": torch.empty(count, bins, 2 * positions, device="meta")}
    raise ConfigError(f"the config of {type(unwrap(module)).__name__} does not say how large its items are")


def some_item(module: nn.Module) -> dict[str, Tensor]:
    """Return one item that an encoder takes, of any size; whole numbers have values."""
    config, names = getattr(unwrap(module), "config", None), argument_names(module)
    patch, strides = size_in(config, "patch_size"), getattr(config, "conv_stride", None)
    if "hidden_states" in names and "grid_thw" in names and patch is not None:
        side = 2 * (size_in(config, "spatial_merge_size") or 1)
        width = _channels(config) * (size_in(config, "temporal_patch_size") or 1) * patch**2
        patches = torch.empty(side**2, width, device="meta")
        return {"hidden_states": patches, "grid_thw": torch.tensor([[1, side, side]])}
    if "input_values" in names and isinstance(strides, (list, tuple)):
        return {"input_values": torch.empty(1, 16 * math.prod(strides), device="meta")}
    return items_from_config(module, 1)


def size_in(config: Any, *names: str) -> int | None:
    """Return the first of these numbers that a config has; of several (height and width), the first."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and value > 0:
            return value
    return None


def _channels(config: Any) -> int:
    return size_in(config, "num_channels", "in_channels", "in_chans") or 3


__all__ = ["items_from_config", "size_in", "some_item"]
