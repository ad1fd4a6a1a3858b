"""Something to look at or listen to, for an encoder of which nothing is known but its config and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tests.zoo import Inputs, generator

ItemMaker = Callable[[PreTrainedConfig, torch.Generator], Inputs]
GRID = (1, 4, 4)  # frames, rows, columns of patches


@dataclass(frozen=True)
class Stimuli:
    """Several items, as one batch and one by one."""

    together: Inputs
    apart: list[Inputs]


def size_of(config: PreTrainedConfig, default: int, *names: str) -> int:
    """Return the first size that the config has by one of these names; of a pair, the first."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int):
            return value
    return default


def channels(config: PreTrainedConfig) -> int:
    """Return the number of colours."""
    return size_of(config, 3, "num_channels", "in_channels", "in_chans")


def patch_width(config: PreTrainedConfig) -> int:
    """Return the number of values in one patch of one frame."""
    return channels(config) * size_of(config, 8, "patch_size", "spatial_patch_size") ** 2


def image(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    """Make a square image."""
    side = size_of(config, 32, "image_size", "img_size", "input_size")
    return {"pixel_values": torch.randn(1, channels(config), side, side, generator=noise)}


def video(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    """Make a short film."""
    side, frames = size_of(config, 32, "image_size"), size_of(config, 2, "num_frames")
    return {"pixel_values": torch.randn(1, frames, channels(config), side, side, generator=noise)}


def named_video(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    """Make a short film for models that keep films and images apart."""
    return {"pixel_values_videos": video(config, noise)["pixel_values"]}


def patch_row(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    """Make an image that was cut into patches."""
    count = size_of(config, 16, "num_patches")
    side = int(count**0.5)
    return {
        "pixel_values": torch.randn(1, side * side, patch_width(config), generator=noise),
        "pixel_attention_mask": torch.ones(1, side * side, dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]]),
    }


def patch_grid(name: str, frames: bool) -> ItemMaker:
    """Make a maker of images whose patches lie in one row with those of all other images."""

    def make(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
        depth = size_of(config, 2, "temporal_patch_size") if frames else 1
        patches = torch.randn(GRID[1] * GRID[2], depth * patch_width(config), generator=noise)
        grid = torch.tensor([GRID])
        return {name: patches, "grid_thw": grid, "image_grid_thw": grid, "merge_sizes": torch.tensor([2])}

    return make


def spectrogram(bins_first: bool, frames: int | None = None) -> ItemMaker:
    """Make a maker of mel spectrograms."""

    def make(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
        bins = size_of(
            config,
            80,
            "num_mel_bins",
            "feature_size",
            "input_dim",
            "input_feat_per_channel",
            "feature_projection_input_dim",
        )
        length = frames or 2 * size_of(config, 32, "max_source_positions")
        shape = (bins, length) if bins_first else (length, bins)
        mask = torch.ones(1, length, dtype=torch.long)
        return {"input_features": torch.randn(1, *shape, generator=noise), "input_features_mask": mask, "mask": mask}

    return make


def waveform(*shape: int) -> ItemMaker:
    """Make a maker of raw audio."""
    return lambda config, noise: {"input_values": torch.randn(1, *shape, generator=noise)}


def spectrogram_values(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    """Make a spectrogram for models that call it a wave."""
    length, bins = size_of(config, 64, "max_length"), size_of(config, 80, "num_mel_bins")
    return {"input_values": torch.randn(1, length, bins, generator=noise)}


# What to try, by the name of the encoder's first argument.
MAKERS: dict[str, tuple[ItemMaker, ...]] = {
    "pixel_values": (image, patch_grid("pixel_values", True), patch_grid("pixel_values", False), patch_row, video),
    "pixel_values_videos": (named_video,),
    "hidden_states": (patch_grid("hidden_states", True), patch_grid("hidden_states", False)),
    "input_features": (
        spectrogram(True),
        spectrogram(False),
        spectrogram(True, 64),
        spectrogram(False, 64),
        spectrogram(True, 128),
    ),
    "input_values": (waveform(2000), waveform(1, 2000), spectrogram_values),
}


def first_argument(model_class: type[PreTrainedModel]) -> str:
    """Return the name of what the model reads."""
    return next((name for name in inspect.signature(model_class.forward).parameters if name != "self"), "")


def stimuli(model: PreTrainedModel, make: ItemMaker, count: int) -> Stimuli:
    """Make items and keep of them what the model's forward takes."""
    taken = inspect.signature(type(model).forward).parameters
    noise = generator(2)
    made = [make(model.config, noise) for _ in range(count)]
    apart = [{name: value for name, value in item.items() if name in taken} for item in made]
    return Stimuli({name: torch.cat([item[name] for item in apart]) for name in apart[0]}, apart)


def tokens_of(output: Any, width: int) -> Tensor | None:
    """Return the tokens [T, D] that an encoder makes of one item, or None where they cannot be told."""
    states = getattr(output, "last_hidden_state", None)
    if not isinstance(states, Tensor):
        return None
    if states.dim() == 2:  # patches of all images in one row, which the tower may have merged
        merged = getattr(output, "pooler_output", None)
        return merged if isinstance(merged, Tensor) else states
    if states.dim() == 4 and states.shape[1] == width:  # a map with its channels in front
        return states.flatten(2)[0].T
    return states[0] if states.dim() == 3 else None
