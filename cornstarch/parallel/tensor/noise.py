"""Dropout in a model that is cut: other random numbers where ranks have other heads or channels, the same elsewhere.

All ranks draw the same numbers, because they are seeded alike, and so whole activations stay the same on every rank.
Between the layers at the beginning of a region and the one at its end each rank has a part of its own, and draws
numbers of its own: its generator is given a seed that follows from the common state and the rank. At the end the common
state is put back. So nothing is to be remembered beside it: layers that are computed again in the backward pass, which
begin with the state that they had, and runs that go on from a checkpoint, draw what they drew.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.parallel.tensor.collectives import Group
from cornstarch.parallel.tensor.layers import RowParallelLinear
from cornstarch.parallel.tensor.regions import Region

_DROPS = re.compile(r".*drop.*")
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def draws_noise(model: nn.Module) -> bool:
    """Say whether anything in a model drops out values in training."""
    modules = list(model.modules())
    if any(isinstance(module, _DROPOUTS) and module.p > 0 for module in modules):
        return True
    configs = [getattr(getattr(module, "config", None), "__dict__", {}) for module in modules]
    numbers: list[dict[str, Any]] = [*map(vars, modules), *configs]
    return any(_DROPS.fullmatch(name) and isinstance(n, float) and n > 0 for one in numbers for name, n in one.items())


class OwnNumbers:
    """Random numbers of a rank's own, from one point of a forward pass to another."""

    def __init__(self, group: Group) -> None:
        self._rank = group.rank()
        self._common: tuple[torch.Generator, Tensor] | None = None

    @property
    def are_drawn(self) -> bool:
        """Whether this rank draws its own numbers now."""
        return self._common is not None

    def forget(self) -> None:
        """Begin anew: a pass that was repeated may have been left in the middle, its random state is put back then."""
        self._common = None

    def begin(self, device: torch.device) -> None:
        """Draw numbers of this rank's own from now on."""
        generator = _generator(device)
        if generator is None or self._common is not None:
            return
        torch.rand((), device=device, generator=generator)  # moves the common state on: no two regions draw alike
        state = generator.get_state()
        generator.manual_seed(_seed(state, self._rank))
        self._common = (generator, state)

    def end(self) -> None:
        """Draw the common numbers again."""
        if self._common is not None:
            generator, state = self._common
            generator.set_state(state)
            self._common = None


def _generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None


def _seed(state: Tensor, rank: int) -> int:
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, key=rank.to_bytes(4, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1


# ------------------------------------------------------------------------------------------------ in a model


def separate_noise(owner: nn.Module, region: Region, group: Group) -> None:
    """Let ranks draw their own numbers inside a region, from its first layers that are cut to its last one.

    Call it before the region is cut: adapters around its layers are told then.
    """
    numbers = OwnNumbers(group)
    rows = [key for key, style in region.styles.items() if style.kind == "row"]
    if "" in region.styles:  # experts
        _draw_own_inside(owner, numbers)
    if not rows:
        return
    owner.register_forward_pre_hook(lambda module, inputs: numbers.forget())
    for key, style in region.styles.items():
        layer: Any = owner.get_submodule(key) if style.kind in ("column", "row") else None
        if layer is None:
            continue
        inner = getattr(layer, "base_layer", layer)
        inner.__dict__["numbers"] = numbers
        if style.kind == "row":
            inner.register_forward_hook(lambda module, inputs, output: numbers.end())
        elif not style.whole:
            inner.register_forward_hook(_begin_behind(numbers))


def _begin_behind(numbers: OwnNumbers) -> Any:
    def begin(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if module.training:
            numbers.begin(output.device)

    return begin


def _draw_own_inside(module: nn.Module, numbers: OwnNumbers) -> None:
    def enter(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        numbers.forget()
        given = next((one for one in (*inputs, *options.values()) if isinstance(one, Tensor)), None)
        if module.training and given is not None:
            numbers.begin(given.device)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(lambda module, inputs, output: numbers.end())


def separate_adapter_noise(wrapper: Any, layer: nn.Module, group: Group) -> None:
    """Let LoRA's own dropout follow what it drops: whole inputs of a column layer, or the cut ones of a row layer."""
    if wrapper is layer:
        return
    is_row = isinstance(layer, RowParallelLinear)
    numbers: OwnNumbers = layer.__dict__.get("numbers") or OwnNumbers(group)
    was_drawn: list[bool] = []

    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        was_drawn[:] = [numbers.are_drawn]
        if is_row and module.training:
            numbers.begin(inputs[0].device)
        elif not is_row:
            numbers.end()

    def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if is_row:
            numbers.end()
        elif was_drawn[0]:
            numbers.begin(output.device)

    for dropout in getattr(wrapper, "lora_dropout", {}).values():
        if getattr(dropout, "p", 0.0) > 0:
            dropout.register_forward_pre_hook(enter)
            dropout.register_forward_hook(leave)


def separate_token_noise(layers: list[nn.Module], wholes: list[nn.Module], group: Group) -> None:
    """Let ranks draw their own numbers in layers whose tokens are cut, but in the parts that see whole activations."""
    numbers = OwnNumbers(group)
    for layer in layers:
        _draw_own_inside(layer, numbers)
    for module in wholes:
        module.register_forward_pre_hook(lambda module, inputs: numbers.end())
        module.register_forward_hook(lambda module, inputs, output: _resume(module, numbers, output))


def _resume(module: nn.Module, numbers: OwnNumbers, output: Any) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if module.training:
        numbers.begin(first.device)


__all__ = ["OwnNumbers", "draws_noise", "separate_adapter_noise", "separate_noise", "separate_token_noise"]
