"""Dropout in a sharded model: different random numbers where ranks have different heads or channels, else the same.

All ranks are seeded alike, so that full activations stay the same on every rank. Inside a region each rank has a part
of its own, and draws its own numbers: its generator gets a seed that follows from the common state and the rank. At the
end the common state is restored. So there is no other state to save: layers that are recomputed in the backward pass,
and runs that resume from a checkpoint, draw the same numbers again.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.parallel.collective_ops import RankGroup
from cornstarch.parallel.tensor.layers import RowParallelLinear
from cornstarch.parallel.tensor.regions import Region

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def has_dropout(model: nn.Module) -> bool:
    """Return whether anything in a model drops out values in training."""
    modules = list(model.modules())
    if any(isinstance(module, _DROPOUTS) and module.p > 0 for module in modules):
        return True
    configs = [getattr(getattr(module, "config", None), "__dict__", {}) for module in modules]
    numbers: list[dict[str, Any]] = [*map(vars, modules), *configs]
    return any("drop" in name and isinstance(n, float) and n > 0 for one in numbers for name, n in one.items())


class RankRandomState:
    """Lets a rank draw its own random numbers from one point of a forward pass to another."""

    def __init__(self, group: RankGroup) -> None:
        self._rank = group.rank()
        self._common: tuple[torch.Generator, Tensor] | None = None

    @property
    def is_active(self) -> bool:
        return self._common is not None

    def reset(self) -> None:
        """Start over: recomputation may stop in the middle of a pass, and restores the random state itself."""
        self._common = None

    def begin(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda") or self._common is not None:
            return
        generator = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        torch.rand((), device=device, generator=generator)  # advances the common state: no two regions draw alike
        state = generator.get_state()
        key = self._rank.to_bytes(4, "little")
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, key=key).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        self._common = (generator, state)

    def end(self) -> None:
        if self._common is not None:
            generator, state = self._common
            generator.set_state(state)
            self._common = None


def separate_dropout(owner: nn.Module, region: Region, group: RankGroup) -> None:
    """Let ranks draw their own numbers inside a region; call it before the region is sharded."""
    numbers = RankRandomState(group)
    if "" in region.styles:  # experts
        _use_inside(owner, numbers)
    if not any(style.kind == "row" for style in region.styles.values()):
        return
    owner.register_forward_pre_hook(lambda module, inputs: numbers.reset())
    for key, style in region.styles.items():
        if style.kind not in ("column", "row"):
            continue
        layer = owner.get_submodule(key)
        inner: Any = getattr(layer, "base_layer", layer)
        inner.__dict__["numbers"] = numbers
        if style.kind == "row":
            inner.register_forward_hook(lambda module, inputs, output: numbers.end())
        elif not style.whole:
            inner.register_forward_hook(lambda module, inputs, output: _resume(module, numbers, output))


def _use_inside(module: nn.Module, numbers: RankRandomState) -> None:
    def enter(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        numbers.reset()
        given = next((one for one in (*inputs, *options.values()) if isinstance(one, Tensor)), None)
        if module.training and given is not None:
            numbers.begin(given.device)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(lambda module, inputs, output: numbers.end())


def separate_adapter_dropout(wrapper: Any, layer: nn.Module, group: RankGroup) -> None:
    """Let LoRA's dropout draw common numbers for full inputs (column layer), and own ones for sharded inputs (row)."""
    if wrapper is layer:
        return
    is_row = isinstance(layer, RowParallelLinear)
    numbers: RankRandomState = layer.__dict__.get("numbers") or RankRandomState(group)
    was_active: list[bool] = []

    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        was_active[:] = [numbers.is_active]
        if is_row and module.training:
            numbers.begin(inputs[0].device)
        elif not is_row:
            numbers.end()

    def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if is_row:
            numbers.end()
        elif was_active[0]:
            numbers.begin(output.device)

    for dropout in getattr(wrapper, "lora_dropout", {}).values():
        if getattr(dropout, "p", 0.0) > 0:
            dropout.register_forward_pre_hook(enter)
            dropout.register_forward_hook(leave)


def separate_token_dropout(layers: list[nn.Module], full_blocks: list[nn.Module], group: RankGroup) -> None:
    """Let ranks draw their own numbers in layers with sharded tokens, except in modules with full activations."""
    numbers = RankRandomState(group)
    for layer in layers:
        _use_inside(layer, numbers)
    for module in full_blocks:
        module.register_forward_pre_hook(lambda module, inputs: numbers.end())
        module.register_forward_hook(lambda module, inputs, output: _resume(module, numbers, output))


def _resume(module: nn.Module, numbers: RankRandomState, output: Any) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if module.training:
        numbers.begin(first.device)
