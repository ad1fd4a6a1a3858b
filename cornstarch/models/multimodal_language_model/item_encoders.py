"""Switches encoders of items of any size to one attention call for all items, after verifying it on tiny twins.

An encoder is recognized by its code: attention modules that take `cu_seqlens`, or a forward that gives the bounds of
items to attention functions. A twin of it (the same class with few, narrow layers) then computes items of several sizes
in both ways. If an output or a gradient differs, or the twin cannot run, the encoder keeps its attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
            items = build_items(twin)
            results = []
            for implementation in ("sdpa", ITEM_IMPLEMENTATION):
                twin.config._attn_implementation = implementation
                results.append(_compute_gradients(twin, items))
    except Exception as error:  # encoders of other kinds fail in many ways
        text = str(error).splitlines()[0].rstrip(".") if str(error) else ""
        return f"a tiny twin of it cannot run ({type(error).__name__}: {text})"
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
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: one.grad.clone() for name, one in twin.named_parameters() if one.grad is not None}
    return {**results, **{f"the gradient of {name}": one for name, one in gradients.items()}}


def build_items(encoder: nn.Module) -> dict[str, Tensor]:
    """Return three items of different sizes for an encoder, by the names of its arguments."""
    names, config = get_argument_names(encoder), getattr(encoder, "config", None)
    patch, merge = read_size(config, "patch_size"), read_size(config, "spatial_merge_size") or 1
    channels = read_size(config, "num_channels", "in_channels", "in_chans") or 3
    if patch is None:
        raise ConfigError("its config has no patch_size, so that no item can be made")
    sides = [(2 * merge, 3 * merge), (merge, 2 * merge), (4 * merge, 2 * merge)]
    grid = next((name for name in names if name.endswith("grid_thw")), None)
    if grid is not None:
        grids = torch.tensor([(1, *side) for side in sides])
        width = channels * (read_size(config, "temporal_patch_size") or 1) * patch**2
        first = "hidden_states" if "hidden_states" in names else "pixel_values"
        return {first: torch.randn(int(grids.prod(-1).sum()), width), grid: grids}
    if "pixel_values" in names and "image_sizes" in names:
        sizes = torch.tensor(sides) * patch
        height, width = sizes.amax(0).tolist()
        return {"pixel_values": torch.randn(len(sides), channels, height, width), "image_sizes": sizes}
    raise ConfigError(f"no items can be made for its arguments {', '.join(names)}")
