"""Something to read, to look at or to listen to, for a model of which only its config and its arguments are known."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

Inputs = dict[str, Any]
Maker = Callable[[PreTrainedConfig, torch.Generator], Inputs]

_ROWS, _TOKENS, _PADDING = 2, 12, 3
_GRID = (1, 4, 4)  # frames, rows, columns of patches


def guesses(model: PreTrainedModel) -> Iterator[Inputs]:
    """Yield batches that a model may be able to read, the likeliest first."""
    taken = inspect.signature(type(model).forward).parameters
    first = model.main_input_name
    if first not in taken:
        first = next(name for name in taken if name != "self")
    for make in _MAKERS.get(first, (_text, _one_text)):
        made = {name: value for name, value in make(model.config, _noise()).items() if name in taken}
        if "use_cache" in taken:
            made["use_cache"] = False
        if "labels" in made:
            yield made
            made = {name: value for name, value in made.items() if name != "labels"}
        if "decoder_input_ids" in taken:
            made["decoder_input_ids"] = _ids(model.config, _noise())
        yield made


def first_working(
    model: nn.Module, batches: Iterator[Inputs], call: Callable[[nn.Module, Mapping[str, Any]], Any]
) -> Inputs:
    """Return the first batch on which a model runs; raises the first complaint if there is none."""
    complaint: Exception | None = None
    for batch in batches:
        try:
            with torch.no_grad():
                call(model, batch)
        except Exception as error:  # every model has a kind of complaint of its own
            complaint = complaint or error
        else:
            return batch
    raise complaint or ValueError("there is nothing to run it on")


def _noise() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _size(config: PreTrainedConfig, default: int, *names: str) -> int:
    """Return the first size that the config has by one of these names; of a pair, the first."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int):
            return value
    return default


def _ids(config: PreTrainedConfig, noise: torch.Generator) -> Tensor:
    words = _size(config.get_text_config(), 32, "vocab_size")
    return torch.randint(min(3, words - 1), words, (_ROWS, _TOKENS), generator=noise)


def _text(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    ids, mask = _ids(config, noise), torch.ones(_ROWS, _TOKENS, dtype=torch.long)
    mask[-1, -_PADDING:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _one_text(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    """Make one row, for classifiers that need a padding token to find the ends of several rows, and have none."""
    return {name: value[:1] for name, value in _text(config, noise).items()}


def _channels(config: PreTrainedConfig) -> int:
    return _size(config, 3, "num_channels", "in_channels", "in_chans")


def _patch(config: PreTrainedConfig) -> int:
    return _channels(config) * _size(config, 8, "patch_size", "spatial_patch_size") ** 2


def _image(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    side = _size(config, 32, "image_size", "img_size", "input_size")
    return {"pixel_values": torch.randn(_ROWS, _channels(config), side, side, generator=noise)}


def _video(name: str) -> Maker:
    def make(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
        side, frames = _size(config, 32, "image_size"), _size(config, 2, "num_frames")
        return {name: torch.randn(_ROWS, frames, _channels(config), side, side, generator=noise)}

    return make


def _patch_rows(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    side = int(_size(config, 16, "num_patches") ** 0.5)
    return {
        "pixel_values": torch.randn(_ROWS, side * side, _patch(config), generator=noise),
        "pixel_attention_mask": torch.ones(_ROWS, side * side, dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * _ROWS),
    }


def _patch_grid(name: str, frames: bool) -> Maker:
    def make(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
        depth = _size(config, 2, "temporal_patch_size") if frames else 1
        patches = torch.randn(_ROWS * _GRID[1] * _GRID[2], depth * _patch(config), generator=noise)
        grid = torch.tensor([_GRID] * _ROWS)
        return {name: patches, "grid_thw": grid, "image_grid_thw": grid, "merge_sizes": torch.tensor([2] * _ROWS)}

    return make


_BINS = ("num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", "feature_projection_input_dim")


def _spectrogram(bins_first: bool, frames: int | None = None) -> Maker:
    def make(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
        bins, length = _size(config, 80, *_BINS), frames or 2 * _size(config, 32, "max_source_positions")
        shape = (bins, length) if bins_first else (length, bins)
        mask = torch.ones(_ROWS, length, dtype=torch.long)
        sound = torch.randn(_ROWS, *shape, generator=noise)
        return {"input_features": sound, "input_features_mask": mask, "mask": mask}

    return make


def _waveform(*shape: int) -> Maker:
    return lambda config, noise: {"input_values": torch.randn(_ROWS, *shape, generator=noise)}


def _spectrogram_values(config: PreTrainedConfig, noise: torch.Generator) -> Inputs:
    length, bins = _size(config, 64, "max_length"), _size(config, 80, "num_mel_bins")
    return {"input_values": torch.randn(_ROWS, length, bins, generator=noise)}


_MAKERS: dict[str, tuple[Maker, ...]] = {
    "pixel_values": (
        _image,
        _patch_grid("pixel_values", True),
        _patch_grid("pixel_values", False),
        _patch_rows,
        _video("pixel_values"),
    ),
    "pixel_values_videos": (_video("pixel_values_videos"),),
    "hidden_states": (_patch_grid("hidden_states", True), _patch_grid("hidden_states", False)),
    "input_features": (
        _spectrogram(True),
        _spectrogram(False),
        _spectrogram(True, 64),
        _spectrogram(False, 64),
        _spectrogram(True, 128),
    ),
    "input_values": (_waveform(2000), _waveform(1, 2000), _spectrogram_values),
}


__all__ = ["Inputs", "first_working", "guesses"]
