"""Cutting a model over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.pytorch_utils import Conv1D

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.tensor.adapters import cut_adapters
from cornstarch.parallel.tensor.check import check_tensor_plan
from cornstarch.parallel.tensor.collectives import copy_in
from cornstarch.parallel.tensor.heads import count_own_heads, watch_arguments
from cornstarch.parallel.tensor.layers import (
    ColumnParallelConv1D,
    ColumnParallelLinear,
    PartlySharedLinear,
    RowParallelConv1D,
    RowParallelLinear,
    SharedColumnLinear,
    SharedInput,
    with_local_parameters,
    with_summed_output,
)
from cornstarch.parallel.tensor.noise import draws_noise, separate_noise
from cornstarch.parallel.tensor.order import Cut, distribute, local_use, named_cuts
from cornstarch.parallel.tensor.plan import plan_regions
from cornstarch.parallel.tensor.regions import Region, child, linear
from cornstarch.parallel.tensor.sequence import cut_sequence
from cornstarch.parallel.tensor.styles import Style
from cornstarch.parallel.tensor.vocabulary import cut_vocabulary


def shard_tensors(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, Style | str] | None = None,
    sequence: bool = False,
    vocabulary: bool = False,
) -> nn.Module:
    """Cut a model's layers over the ranks of a mesh, in place, and return it.

    All ranks must come with the same weights, or with a model on the meta device; they call the model with the same
    inputs and get the same outputs. Parameters keep their names. Those that are cut become DTensors on the mesh; all
    others stay as they are, and their gradients come out the same on every rank. `fully_shard` over another axis of the
    same root mesh may follow. For dropout, seed the ranks of the mesh alike: they then drop the same of what is whole,
    and each its own of what is cut.

    Args:
        model: A transformers model, or a PEFT model around one.
        mesh: The ranks; it has one axis.
        plan: How layers are cut, by name, instead of the model's own plan.
        sequence: Cut activations between attention and feed-forward layers along tokens.
        vocabulary: Cut the table of embeddings and the head by words.
    """
    if mesh.ndim != 1:
        raise ConfigError(f"Tensor parallelism needs a mesh with one axis, found {mesh.ndim}: give mesh['tp'].")
    inner = unwrap(model)
    if named_cuts(inner):
        raise ConfigError(f"{type(inner).__name__} is cut over ranks already; cut it once.")
    check_tensor_plan(model, mesh.size(), plan=plan, sequence=sequence, vocabulary=vocabulary)
    found = plan_regions(model, plan)
    if mesh.size() == 1:
        return model
    has_noise = draws_noise(model)
    for region in found.regions:
        if has_noise:
            separate_noise(inner.get_submodule(region.owner), region, mesh.get_group())
        _cut_region(inner.get_submodule(region.owner), region, mesh)
    if sequence:
        cut_sequence(inner, found, mesh)
    if vocabulary:
        cut_vocabulary(inner, mesh)
    return model


def _cut_region(owner: nn.Module, region: Region, mesh: DeviceMesh) -> None:
    _share_inputs(owner, region, mesh)
    for key, style in region.styles.items():
        _CUTTERS[style.kind](owner, key, style, region, mesh)
    if region.attention is not None:
        counting = child(owner, region.attention) if region.attention else owner
        assert counting is not None
        count_own_heads(counting, region, mesh.size())
        watch_arguments(counting, mesh.get_group())


# ------------------------------------------------------------------------------------------------ layers


def _column(owner: nn.Module, key: str, style: Style, region: Region, mesh: DeviceMesh) -> None:
    layer = linear(child(owner, key))
    assert layer is not None
    if key in region.shared and region.key_value_heads % mesh.size():
        assert isinstance(layer, nn.Linear)
        SharedColumnLinear.from_linear(layer, mesh, region.key_value_heads)
    else:
        kind: Any = ColumnParallelConv1D if isinstance(layer, Conv1D) else ColumnParallelLinear
        kind.from_linear(layer, mesh, style.parts or None, style.whole)
    cut_adapters(child(owner, key), layer, mesh)


def _row(owner: nn.Module, key: str, style: Style, region: Region, mesh: DeviceMesh) -> None:
    layer = linear(child(owner, key))
    kind: Any = RowParallelConv1D if isinstance(layer, Conv1D) else RowParallelLinear
    kind.from_linear(layer, mesh, style.whole)
    cut_adapters(child(owner, key), layer, mesh)


def _rotary_keys(owner: nn.Module, key: str, style: Style, region: Region, mesh: DeviceMesh) -> None:
    layer = linear(child(owner, key))
    assert isinstance(layer, nn.Linear)
    PartlySharedLinear.from_linear(layer, mesh, style.parts[0])


def _share_inputs(owner: nn.Module, region: Region, mesh: DeviceMesh) -> None:
    """Let the layers at the beginning of a region read one copy of what goes in."""
    first = [key for key, style in region.styles.items() if style.kind == "column" and not style.whole]
    shared = SharedInput()
    for key in first:
        layer = linear(child(owner, key))
        if layer is child(owner, key):  # with adapters there may be dropout before each
            assert layer is not None
            layer.__dict__["shared"] = shared
            shared.readers += 1


# ------------------------------------------------------------------------------------------------ parameters


def _partial(owner: nn.Module, key: str, style: Style, region: Region, mesh: DeviceMesh) -> None:
    module, group = owner.get_submodule(key), mesh.get_group()
    names = [name for name, _ in module.named_parameters(recurse=False)]
    with_local_parameters(module, {name: lambda parameter: copy_in(parameter, group) for name in names})


def _parameter(owner: nn.Module, key: str, style: Style, region: Region, mesh: DeviceMesh) -> None:
    where, _, name = key.rpartition(".")
    module = owner.get_submodule(where)
    parameter = module._parameters[name]
    assert parameter is not None
    distribute(module, name, Cut(style.dim, style.parts or (parameter.shape[style.dim],), mesh.size()), mesh)
    with_local_parameters(module, {name: local_use})


def _expert_bias(owner: nn.Module, key: str, style: Style, region: Region, mesh: DeviceMesh) -> None:
    group, ranks = mesh.get_group(), mesh.size()
    with_local_parameters(owner, {key: lambda parameter: copy_in(parameter, group) / ranks})


def _experts(owner: nn.Module, key: str, style: Style, region: Region, mesh: DeviceMesh) -> None:
    with_summed_output(owner, mesh.get_group())


_CUTTERS = {
    "column": _column,
    "row": _row,
    "partial": _partial,
    "heads": _parameter,
    "experts": _experts,
    "expert": _parameter,
    "expert_bias": _expert_bias,
    "rotary_keys": _rotary_keys,
}


__all__ = ["shard_tensors"]
