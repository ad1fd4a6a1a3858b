"""Example batches of text, images, video or audio for a model, guessed from its config and its signature."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

Inputs = dict[str, Any]

_ROWS, _TOKENS, _PADDING = 2, 12, 3
_GRID = (1, 4, 4)  # frames, rows, columns of patches
_BINS = ("num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", "feature_projection_input_dim")


def guess_inputs(model: PreTrainedModel) -> Iterator[Inputs]:
    """Yield batches that may fit a model, the most likely first."""
    taken = inspect.signature(type(model).forward).parameters
    first = model.main_input_name
    if first not in taken:
        first = next(name for name in taken if name != "self")
    for made in _make_batches(first, model.config):
        made = {name: value for name, value in made.items() if name in taken}
        if "use_cache" in taken:
            made["use_cache"] = False
        if "labels" in made:
            yield made
            made = {name: value for name, value in made.items() if name != "labels"}
        if "decoder_input_ids" in taken:
            made["decoder_input_ids"] = _make_ids(model.config)
        yield made


def _get_size(config: PreTrainedConfig, default: int, *names: str) -> int:
    """Return the first of these sizes that the config has; of a pair, its first element."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int):
            return value
    return default


def _draw(*shape: int) -> Tensor:
    return torch.randn(_ROWS, *shape, generator=torch.Generator().manual_seed(0))


def _make_ids(config: PreTrainedConfig) -> Tensor:
    words = _get_size(config.get_text_config(), 32, "vocab_size")
    noise = torch.Generator().manual_seed(0)
    return torch.randint(min(3, words - 1), words, (_ROWS, _TOKENS), generator=noise)


def _get_channels(config: PreTrainedConfig) -> int:
    return _get_size(config, 3, "num_channels", "in_channels", "in_chans")


def _get_patch_size(config: PreTrainedConfig) -> int:
    return _get_channels(config) * _get_size(config, 8, "patch_size", "spatial_patch_size") ** 2


def _make_batches(name: str, config: PreTrainedConfig) -> Iterator[Inputs]:
    """Yield batches for a model whose main input has this name."""
    match name:
        case "input_features":
            bins, longest = _get_size(config, 80, *_BINS), 2 * _get_size(config, 32, "max_source_positions")
            for has_bins_first, length in ((True, longest), (False, longest), (True, 64), (False, 64), (True, 128)):
                sound = _draw(bins, length) if has_bins_first else _draw(length, bins)
                mask = torch.ones(_ROWS, length, dtype=torch.long)
                yield {name: sound, "input_features_mask": mask, "mask": mask}
        case "input_values":
            spectrogram = _get_size(config, 64, "max_length"), _get_size(config, 80, "num_mel_bins")
            for shape in ((2000,), (1, 2000), spectrogram):
                yield {name: _draw(*shape)}
        case "hidden_states":
            yield from _make_patch_grids(name, config)
        case "pixel_values_videos":
            yield _make_video(name, config)
        case "pixel_values":
            side = _get_size(config, 32, "image_size", "img_size", "input_size")
            yield {name: _draw(_get_channels(config), side, side)}
            yield from _make_patch_grids(name, config)
            side = int(_get_size(config, 16, "num_patches") ** 0.5)
            mask = torch.ones(_ROWS, side * side, dtype=torch.long)
            shapes = torch.tensor([[side, side]] * _ROWS)
            pixels = _draw(side * side, _get_patch_size(config))
            yield {name: pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
            yield _make_video(name, config)
        case _:
            ids, mask = _make_ids(config), torch.ones(_ROWS, _TOKENS, dtype=torch.long)
            mask[-1, -_PADDING:] = 0
            text = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
            yield text
            # One row, for classifiers that need a padding token for several rows, and have none.
            yield {key: value[:1] for key, value in text.items()}


def _make_video(name: str, config: PreTrainedConfig) -> Inputs:
    side, frames = _get_size(config, 32, "image_size"), _get_size(config, 2, "num_frames")
    return {name: _draw(frames, _get_channels(config), side, side)}


def _make_patch_grids(name: str, config: PreTrainedConfig) -> Iterator[Inputs]:
    grid, sizes = torch.tensor([_GRID] * _ROWS), torch.tensor([2] * _ROWS)
    for depth in (_get_size(config, 2, "temporal_patch_size"), 1):
        patches = _draw(_GRID[1] * _GRID[2], depth * _get_patch_size(config)).flatten(0, 1)
        yield {name: patches, "grid_thw": grid, "image_grid_thw": grid, "merge_sizes": sizes}
