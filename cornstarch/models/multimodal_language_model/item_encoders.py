"""Switches encoders of items of any size to one attention call for all items, after verifying it on tiny twins.

An encoder is recognized by its code: attention modules that take `cu_seqlens`, or a forward that gives the bounds of
items to attention functions. A twin of it (the same class with few, narrow layers) then computes items of several sizes
in both ways. If an output or a gradient differs, or the twin cannot run, the encoder keeps its attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.attention.item_attention import ITEM_IMPLEMENTATION
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.shape_inference import get_argument_names, read_size
from cornstarch.models.twin import build_twin_config
from cornstarch.trees import tensors_in

_BOUNDS = "cu_seqlens"
_BOUNDS_OPTION = "cu_seq_lens_q"  # what transformers calls them where it hands them to attention functions
_TOLERANCE = 1e-5  # relative, in float32


def attend_within_items(model: nn.Module, log: Callable[[str], None] = lambda text: None) -> list[str]:
    """Let encoders of items of any size attend to all items at once, in place; return the classes that do.

    `log` is called with the reason for each encoder that keeps its attention, item by item.
    """
    switched = []
    for encoder in find_item_encoders(model):
        name = type(encoder).__name__
        config: Any = encoder.config
        if config._attn_implementation == ITEM_IMPLEMENTATION:
            continue
        reason = explain_difference(encoder)
        if reason is None:
            config._attn_implementation = ITEM_IMPLEMENTATION
            switched.append(name)
        else:
            log(f"{name} attends item by item: {reason}")
    return switched


def find_item_encoders(model: nn.Module) -> list[PreTrainedModel]:
    """Return the encoders whose layers attend within items that lie end to end in a row."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel) and _has_item_layers(part)]


def _has_item_layers(model: PreTrainedModel) -> bool:
    own = (part for part in model.modules() if part is not model and getattr(part, "config", None) is model.config)
    if any(takes_bounds(part) for part in own):
        return True
    try:
        return _BOUNDS_OPTION in inspect.getsource(type(model).forward)
    except (OSError, TypeError):  # a class without a file
        return False


def takes_bounds(module: nn.Module) -> bool:
    """Whether a layer or an attention module is given the bounds of items."""
    return _BOUNDS in inspect.signature(type(module).forward).parameters


def is_item_attention(module: nn.Module) -> bool:
    """Whether a module attends to all items at once."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == ITEM_IMPLEMENTATION


# ------------------------------------------------------------------------------------------------ verification


def explain_difference(encoder: PreTrainedModel) -> str | None:
    """Return why a twin of an encoder does not compute the same with all items at once, or None."""
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.inference_mode(False):
            torch.manual_seed(0)
            twin: Any = type(encoder)(build_twin_config(encoder.config)).float().eval()
            twin.config._attn_implementation = "sdpa"
            items, results = find_items(twin), []
            for implementation in ("sdpa", ITEM_IMPLEMENTATION):
                twin.config._attn_implementation = implementation
                results.append(_compute_gradients(twin, items))
    except Exception as error:  # encoders of other kinds fail in many ways
        text = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        return f"a tiny twin of it cannot run ({text})"
    expected, found = results
    if expected.keys() != found.keys():
        return "with all items at once other parameters get gradients"
    for name, right in expected.items():
        off = float((found[name] - right).norm() / right.norm().clamp(min=1e-12))
        if not off <= _TOLERANCE:
            return f"with all items at once {name} differs by {off:.1e}, at most {_TOLERANCE:.0e} expected"
    return None


def _compute_gradients(twin: nn.Module, items: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs and the gradients of all parameters."""
    twin.zero_grad()
    outputs = [one for one in tensors_in(twin(**items)) if one.is_floating_point()]
    results = {f"output {number}": one.detach() for number, one in enumerate(outputs)}
    loss = sum(one.square().mean() * (1 + number) + one.sin().mean() for number, one in enumerate(outputs))
    assert isinstance(loss, Tensor)
    loss.backward()
    gradients = {name: one.grad.clone() for name, one in twin.named_parameters() if one.grad is not None}
    return {**results, **{f"the gradient of {name}": one for name, one in gradients.items()}}


def iterate_items(encoder: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield three items of different sizes for an encoder, in the forms that its argument names may stand for."""
    names, config = get_argument_names(encoder), getattr(encoder, "config", None)
    patch, merge = read_size(config, "patch_size"), read_size(config, "spatial_merge_size", "merge_kernel_size") or 1
    channels = read_size(config, "num_channels", "in_channels", "in_chans") or 3
    sides = torch.tensor([(2, 3), (1, 2), (4, 2)]) * merge
    grid = next((name for name in names if name.endswith("grid_thw")), None)
    if patch is not None and grid is not None:
        frames, tokens = read_size(config, "temporal_patch_size") or 1, int(sides.prod(-1).sum())
        first = "hidden_states" if "hidden_states" in names else "pixel_values"
        rest = {grid: nn.functional.pad(sides, (1, 0), value=1)}
        if "merge_sizes" in names:
            rest["merge_sizes"] = torch.full((len(sides),), merge)
        for size in ((frames * channels * patch**2,), (2 * channels * patch**2,), (channels, patch, patch)):
            yield {first: torch.randn(tokens, *size), **rest}
        yield {first: torch.randn(1, tokens, channels, patch, patch), **rest}
    if patch is not None and "pixel_values" in names and "image_sizes" in names:
        height, width = (sides.amax(0) * patch).tolist()
        yield {"pixel_values": torch.randn(len(sides), channels, height, width), "image_sizes": sides * patch}
    bins = read_size(config, "num_mel_bins")
    if bins is not None and "feature_lens" in names:
        lengths = torch.tensor([24, 8, 40])
        yield {"input_features": torch.randn(bins, int(lengths.sum())), "feature_lens": lengths}


def find_items(twin: nn.Module) -> dict[str, Tensor]:
    """Return the first form of items that an encoder runs on."""
    reason = f"no items can be made for its arguments {', '.join(get_argument_names(twin))}"
    for items in iterate_items(twin):
        try:
            with torch.no_grad():
                twin(**items)
            return items
        except Exception as error:  # encoders fail in many ways on other items than theirs
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(".: ")
    raise ConfigError(reason)
