"""Activations between attention and feed-forward layers cut along tokens (sequence parallelism of norms).

Without it every rank has all activations between the regions, and computes all norms. With it, each rank has its own
tokens there, and the exchanges of a region change places: what was added up is now added up and dealt out, and what
was copied in is gathered. As much is sent as before; less is kept.

    tokens (cut) -> norm -> gather -> attention, by heads -> add up and deal out -> + tokens (cut) -> norm -> ...

Lengths that do not divide are filled up with zeros, which no token sees: they are taken away where tokens are gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GradientCheckpointingLayer

from cornstarch.errors import UnsupportedModelError
from cornstarch.parallel.tensor.collectives import Group, copy_in
from cornstarch.parallel.tensor.layers import with_local_parameters
from cornstarch.parallel.tensor.noise import draws_noise, separate_token_noise
from cornstarch.parallel.tensor.plan import TensorPlan
from cornstarch.parallel.tensor.regions import Region

_LENGTH = "tokens_of_all_ranks"
CALLED = "cornstarch_called"
"""The attribute of a layer that holds what is told of its calls, by whatever stands in its place, too."""
Change = Callable[[Tensor], Tensor]


class Tokens:
    """How tokens are cut, as the modules of one model share it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.total = 0
        """Of the forward pass that runs."""
        self.length = 0
        """Of the layer that runs."""

    def deal(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens of an activation that all ranks have."""
        return _Deal.apply(whole, self.group)

    def collect(self, own: Tensor) -> Tensor:
        """Return all tokens; those who use them do the same on all ranks."""
        return _Collect.apply(own, self.group, self.length, False)

    def gather(self, own: Tensor) -> Tensor:
        """Return all tokens; ranks use them differently, and their gradients are added up."""
        return _Collect.apply(own, self.group, self.length, True)

    def add_up(self, share: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of what all ranks have."""
        return _AddUp.apply(share, self.group)


def _dim(x: Tensor) -> int:
    return x.ndim - 2  # [..., tokens, channels]


def _padded(x: Tensor, ranks: int) -> Tensor:
    short = -x.shape[-2] % ranks
    return nn.functional.pad(x, (0, 0, 0, short)) if short else x


def _own(x: Tensor, group: Group) -> Tensor:
    return _padded(x, group.size()).chunk(group.size(), _dim(x))[group.rank()].contiguous()


def _all(x: Tensor, group: Group, length: int) -> Tensor:
    own = x.contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, _dim(x)).narrow(_dim(x), 0, length).contiguous()


def _sum_of_own(x: Tensor, group: Group) -> Tensor:
    parts = [part.contiguous() for part in _padded(x, group.size()).chunk(group.size(), _dim(x))]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group, context.length = group, x.shape[-2]
        return _own(x, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all(gradients[0], context.group, context.length), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group, length: int, add: bool) -> Tensor:
        context.group, context.add = group, add
        return _all(x, group, length)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back = _sum_of_own if context.add else _own
        return back(gradients[0], context.group), None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, group: Group) -> Tensor:
        context.group, context.length = group, x.shape[-2]
        return _sum_of_own(x, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all(gradients[0], context.group, context.length), None


# ------------------------------------------------------------------------------------------------ finding


def check_sequence(model: nn.Module, plan: TensorPlan) -> None:
    """Refuse a model between whose regions activations cannot be cut along tokens."""
    name, layers = layers_of(model)
    regions = {region.owner: region for region in plan.regions}
    why = None if layers else "it has no list of layers"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        why = "it has an encoder and a decoder, with a list of layers each"
    for number, layer in enumerate(layers):
        if f"{name}.{number}" in regions:
            why = "its feed-forward layers lie openly in its layers"
        for key, block in layer.named_children():
            region = regions.get(f"{name}.{number}.{key}")
            if why is None and not _is_tokenwise(block) and _activation(block) is None:
                why = f"{key} does not say which of its arguments is the activation"
            if why is None and region is not None and _is_plain(region) and _has_adapters(block):
                why = f"{key} has adapters"
    if why is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot have activations cut along tokens (sequence=True): {why}."
        )


def layers_of(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the name of the list of a model's layers, and the layers."""
    lists = [
        (name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    return max(lists, key=lambda pair: len(pair[1]), default=("", []))


def _is_tokenwise(module: nn.Module) -> bool:
    """Say whether a module works on each token alone: norms, dropout, factors, activation functions."""
    kind = type(module).__name__.lower()
    return any(word in kind for word in ("norm", "scale")) or not any(True for _ in module.parameters())


def _activation(module: nn.Module) -> str | None:
    """Return the name of a module's first argument if that is an activation."""
    first = next(iter(inspect.signature(module.forward).parameters), None)
    return first if first in ("hidden_states", "hidden_state", "x", "inputs", "input") else None


def _is_plain(region: Region) -> bool:
    """Say whether a region has nothing but layers that read what goes in, and one that gives what comes out."""
    kinds = [style.kind for style in region.styles.values()]
    known = set(kinds) <= {"column", "row", "partial", "heads"} and kinds.count("row") == 1
    return known and "." not in "".join(region.styles) and not any(style.whole for style in region.styles.values())


def _has_adapters(module: nn.Module) -> bool:
    return any(hasattr(inner, "base_layer") for inner in module.modules())


# ------------------------------------------------------------------------------------------------ cutting


def cut_sequence(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Cut activations between the regions of a model's layers along tokens; the regions are cut already."""
    tokens = Tokens(mesh.get_group())
    name, layers = layers_of(model)
    regions = {region.owner: region for region in plan.regions}
    wholes: list[nn.Module] = []
    for number, layer in enumerate(layers):
        for key, block in layer.named_children():
            region = regions.get(f"{name}.{number}.{key}")
            if _is_tokenwise(block):
                for module in block.modules():
                    _add_up_gradients(module, tokens.group)
            elif region is not None and _is_plain(region):
                _wrap_region(block, region, tokens)
            else:
                _wrap_block(block, tokens)
                wholes.append(block)
        _add_up_gradients(layer, tokens.group)
        _carry_length(layer, tokens, is_first=number == 0)
    layers[-1].register_forward_hook(lambda _, inputs, output: _with_output(output, tokens.collect))
    if draws_noise(model):
        separate_token_noise(layers, wholes, tokens.group)


def _add_up_gradients(module: nn.Module, group: Group) -> None:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if names:
        with_local_parameters(module, {name: lambda parameter: copy_in(parameter, group) for name in names})


def _wrap_region(block: nn.Module, region: Region, tokens: Tokens) -> None:
    """Gather tokens where a region begins; the layer at its end deals out what it adds up."""
    for key, style in region.styles.items():
        if style.kind == "column":
            block.get_submodule(key).__dict__["copies"] = False
        elif style.kind == "row":
            block.get_submodule(key).__dict__["tokens"] = tokens
    _before(block, tokens.gather)


def _wrap_block(block: nn.Module, tokens: Tokens) -> None:
    """Give a module that takes and returns whole activations all tokens, and keep this rank's of what it returns."""
    _before(block, tokens.collect)
    block.register_forward_hook(lambda _, inputs, output: _with_output(output, tokens.deal))


def _before(module: nn.Module, change: Change) -> None:
    name = _activation(module) or "hidden_states"

    def enter(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), options
        return inputs, {**options, name: change(options[name])}

    module.register_forward_pre_hook(enter, with_kwargs=True)


def _with_output(output: Any, change: Change) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _carry_length(layer: nn.Module, tokens: Tokens, is_first: bool) -> None:
    """Let a layer know how many tokens there are, also when its activations are computed again.

    That happens in the backward pass, when another batch may have gone through. The number is an argument of the
    layer's call, which is what is repeated.
    """
    kind = type(layer)
    name = _activation(layer) or "hidden_states"

    def note_length(*inputs: Any, **options: Any) -> None:
        tokens.total = (inputs[0] if inputs else options[name]).shape[-2]

    def call(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        if is_first:
            note_length(*inputs, **options)
        return kind.__call__(self, *inputs, **options, **{_LENGTH: tokens.total})

    def enter(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tokens.length = options.pop(_LENGTH)
        if not is_first:
            return inputs, options
        if inputs:
            return (tokens.deal(inputs[0]), *inputs[1:]), options
        return inputs, {**options, name: tokens.deal(options[name])}

    if is_first:
        layer.__dict__[CALLED] = note_length  # also where the layer itself is in another stage
    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    layer.register_forward_pre_hook(enter, with_kwargs=True)


__all__ = ["CALLED", "check_sequence", "cut_sequence", "layers_of"]
