"""Sequence parallelism: activations between attention and feed-forward layers are sharded along tokens.

Each rank has its own tokens there, and the collectives of a region change: reduce becomes reduce-scatter, and copy
becomes gather. As much is sent as before; less is kept.

    tokens (sharded) -> norm -> gather -> attention, by heads -> reduce-scatter -> + tokens (sharded) -> norm -> ...

Lengths that do not divide are padded with zeros, which no token sees: they are removed where tokens are gathered.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GradientCheckpointingLayer

from cornstarch.errors import UnsupportedModelError
from cornstarch.parallel.collective_ops import RankGroup, SequenceShards
from cornstarch.parallel.tensor.dropout import has_dropout, separate_token_dropout
from cornstarch.parallel.tensor.layers import Use, change_output, sum_parameter_gradients
from cornstarch.parallel.tensor.regions import Region, TensorPlan

_LENGTH = "tokens_of_all_ranks"
CALLED = "cornstarch_called"
"""The attribute of the first layer with a function to call with its inputs, also where another stage has the layer."""


def check_sequence(model: nn.Module, plan: TensorPlan) -> None:
    """Refuse a model whose activations cannot be sharded along tokens between its regions."""
    name, layers = find_layers(model)
    regions = {region.owner: region for region in plan.regions}
    why = None if layers else "it has no list of layers"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        why = "it has an encoder and a decoder, with a list of layers each"
    for number, layer in enumerate(layers):
        if f"{name}.{number}" in regions:
            why = "its feed-forward layers lie openly in its layers"
        for key, block in layer.named_children():
            region = regions.get(f"{name}.{number}.{key}")
            if why is None and not _is_tokenwise(block) and _find_activation(block) is None:
                why = f"{key} does not say which of its arguments is the activation"
            has_adapters = any(hasattr(inner, "base_layer") for inner in block.modules())
            if why is None and region is not None and _is_plain(region) and has_adapters:
                why = f"{key} has adapters"
    if why is not None:
        kind = type(model).__name__
        raise UnsupportedModelError(f"{kind} cannot have activations cut along tokens (sequence=True): {why}.")


def find_layers(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the name of the list of a model's layers, and the layers."""
    lists = [(name, list(module)) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    known = [one for one in lists if one[1] and all(isinstance(layer, GradientCheckpointingLayer) for layer in one[1])]
    return max(known, key=lambda pair: len(pair[1]), default=("", []))


def _is_tokenwise(module: nn.Module) -> bool:
    """Return whether a module works on each token alone: norms, dropout, scales, activation functions."""
    kind = type(module).__name__.lower()
    return any(word in kind for word in ("norm", "scale")) or not any(True for _ in module.parameters())


def _find_activation(module: nn.Module) -> str | None:
    """Return the name of a module's first argument if it is an activation."""
    first = next(iter(inspect.signature(module.forward).parameters), None)
    return first if first in ("hidden_states", "hidden_state", "x", "inputs", "input") else None


def _is_plain(region: Region) -> bool:
    """Return whether a region has only layers that read its input, and one that returns its output."""
    kinds = [style.kind for style in region.styles.values()]
    known = set(kinds) <= {"column", "row", "partial", "heads"} and kinds.count("row") == 1
    return known and "." not in "".join(region.styles) and not any(style.whole for style in region.styles.values())


def shard_sequence(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Shard activations between the regions of a model's layers along tokens; the regions are sharded already."""
    tokens = SequenceShards(RankGroup.of(mesh.get_group()))
    name, layers = find_layers(model)
    regions = {region.owner: region for region in plan.regions}
    full_blocks: list[nn.Module] = []
    for number, layer in enumerate(layers):
        for key, block in layer.named_children():
            region = regions.get(f"{name}.{number}.{key}")
            if _is_tokenwise(block):
                for module in block.modules():
                    sum_parameter_gradients(module, tokens.group)
            elif region is not None and _is_plain(region):
                for inner, style in region.styles.items():
                    if style.kind == "column":
                        block.get_submodule(inner).__dict__["copies"] = False
                    elif style.kind == "row":  # the layer at the end reduces and scatters tokens
                        block.get_submodule(inner).__dict__["tokens"] = tokens
                _change_input(block, tokens.gather_for_region)
            else:  # a module that works on full activations
                _change_input(block, tokens.gather)
                block.register_forward_hook(lambda _, inputs, output: change_output(output, tokens.scatter))
                full_blocks.append(block)
        sum_parameter_gradients(layer, tokens.group)
        _carry_length(layer, tokens, is_first=number == 0)
    layers[-1].register_forward_hook(lambda _, inputs, output: change_output(output, tokens.gather))
    if has_dropout(model):
        separate_token_dropout(layers, full_blocks, tokens.group)


def _change_input(module: nn.Module, change: Use) -> None:
    name = _find_activation(module) or "hidden_states"
    module.register_forward_pre_hook(
        lambda _, inputs, options: _change_argument(inputs, options, name, change), with_kwargs=True
    )


def _change_argument(inputs: tuple[Any, ...], options: dict[str, Any], name: str, change: Use) -> Any:
    if inputs:
        return (change(inputs[0]), *inputs[1:]), options
    return inputs, {**options, name: change(options[name])}


def _carry_length(layer: nn.Module, tokens: SequenceShards, is_first: bool) -> None:
    """Let a layer know the number of tokens, also when it is recomputed, after another batch may have been through.

    So the number is an argument of the layer's call, which is repeated with the same arguments.
    """
    name = _find_activation(layer) or "hidden_states"

    def set_length(*inputs: Any, **options: Any) -> None:
        tokens.total = (inputs[0] if inputs else options[name]).shape[-2]

    def enter(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tokens.length = options.pop(_LENGTH)
        return _change_argument(inputs, options, name, tokens.scatter) if is_first else (inputs, options)

    if is_first:
        layer.__dict__[CALLED] = set_length  # also where another stage has the layer itself
    layer.__dict__["cornstarch_tokens"] = tokens
    layer.__class__ = _derive_calling_class(type(layer))  # type: ignore[arg-type]
    layer.register_forward_pre_hook(enter, with_kwargs=True)


@cache  # as for bound parameters: layers of one class stay of one class
def _derive_calling_class(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        if CALLED in self.__dict__:
            self.__dict__[CALLED](*inputs, **options)
        tokens = self.__dict__["cornstarch_tokens"]
        return kind.__call__(self, *inputs, **options, **{_LENGTH: tokens.total})

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
