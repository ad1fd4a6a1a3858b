"""Example batches of text, images, video or audio for a model, guessed from its config and its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

Inputs = dict[str, Any]
Maker = Callable[[PreTrainedConfig, torch.Generator], Inputs]

_ROWS, _TOKENS, _PADDING = 2, 12, 3
_GRID = (1, 4, 4)  # frames, rows, columns of patches


def guess_inputs(model: PreTrainedModel) -> Iterator[Inputs]:
    """Yield batches that may fit a model, the most likely first."""
    taken = inspect.signature(type(model).forward).parameters
    first = model.main_input_name
    if first not in taken:
        first = next(name for name in taken if name != "self")
    for make in _MAKERS.get(first, (_make_text, _make_one_text)):
        noise = torch.Generator().manual_seed(0)
        made = {name: value for name, value in make(model.config, noise).items() if name in taken}
        if "use_cache" in taken:
            made["use_cache"] = False
        if "labels" in made:
            yield made
            made = {name: value for name, value in made.items() if name != "labels"}
        if "decoder_input_ids" in taken:
            made["decoder_input_ids"] = _make_ids(model.config, torch.Generator().manual_seed(0))
        yield made


def _get_size(config: PreTrainedConfig, default: int, *names: str) -> int:
    """Return the first of these sizes that the config has; of a pair, its first element."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int):
            return value
    return default


def _make_ids(config: PreTrainedConfig, noise: torch.Generator) -> Tensor:
    words = _get_size(config.get_text_config(), 32, "vocab_size")
    return torch.randint(min(3, words - 1), words, (_ROWS, _TOKENS), generator=noise)


def _make_text(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    ids, mask = _make_ids(config, noise), torch.ones(_ROWS, _TOKENS, dtype=torch.long)
    mask[-1, -_PADDING:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _make_one_text(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    """Return one row, for classifiers that need a padding token for several rows, and have none."""
    return {name: value[:1] for name, value in _make_text(config, noise).items()}


def _get_channels(config: PreTrainedConfig) -> int:
    return _get_size(config, 3, "num_channels", "in_channels", "in_chans")


def _get_patch_size(config: PreTrainedConfig) -> int:
    return _get_channels(config) * _get_size(config, 8, "patch_size", "spatial_patch_size") ** 2


def _make_image(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    side = _get_size(config, 32, "image_size", "img_size", "input_size")
    return {"pixel_values": torch.randn(_ROWS, _get_channels(config), side, side, generator=noise)}


def _video_maker(name: str) -> Maker:
    def make(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
        side, frames = _get_size(config, 32, "image_size"), _get_size(config, 2, "num_frames")
        return {name: torch.randn(_ROWS, frames, _get_channels(config), side, side, generator=noise)}

    return make


def _make_patch_rows(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    side = int(_get_size(config, 16, "num_patches") ** 0.5)
    return {
        "pixel_values": torch.randn(_ROWS, side * side, _get_patch_size(config), generator=noise),
        "pixel_attention_mask": torch.ones(_ROWS, side * side, dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * _ROWS),
    }


def _patch_grid_maker(name: str, frames: bool) -> Maker:
    def make(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
        depth = _get_size(config, 2, "temporal_patch_size") if frames else 1
        patches = torch.randn(_ROWS * _GRID[1] * _GRID[2], depth * _get_patch_size(config), generator=noise)
        grid = torch.tensor([_GRID] * _ROWS)
        return {name: patches, "grid_thw": grid, "image_grid_thw": grid, "merge_sizes": torch.tensor([2] * _ROWS)}

    return make


_BINS = ("num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", "feature_projection_input_dim")


def _spectrogram_maker(bins_first: bool, frames: int | None = None) -> Maker:
    def make(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
        bins, length = _get_size(config, 80, *_BINS), frames or 2 * _get_size(config, 32, "max_source_positions")
        shape = (bins, length) if bins_first else (length, bins)
        mask = torch.ones(_ROWS, length, dtype=torch.long)
        sound = torch.randn(_ROWS, *shape, generator=noise)
        return {"input_features": sound, "input_features_mask": mask, "mask": mask}

    return make


def _waveform_maker(*shape: int) -> Maker:
    return lambda config, noise: {"input_values": torch.randn(_ROWS, *shape, generator=noise)}


def _make_spectrogram_values(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    length, bins = _get_size(config, 64, "max_length"), _get_size(config, 80, "num_mel_bins")
    return {"input_values": torch.randn(_ROWS, length, bins, generator=noise)}


_MAKERS: dict[str, tuple[Maker, ...]] = {
    "pixel_values": (
        _make_image,
        _patch_grid_maker("pixel_values", True),
        _patch_grid_maker("pixel_values", False),
        _make_patch_rows,
        _video_maker("pixel_values"),
    ),
    "pixel_values_videos": (_video_maker("pixel_values_videos"),),
    "hidden_states": (_patch_grid_maker("hidden_states", True), _patch_grid_maker("hidden_states", False)),
    "input_features": (
        _spectrogram_maker(True),
        _spectrogram_maker(False),
        _spectrogram_maker(True, 64),
        _spectrogram_maker(False, 64),
        _spectrogram_maker(True, 128),
    ),
    "input_values": (_waveform_maker(2000), _waveform_maker(1, 2000), _make_spectrogram_values),
}
