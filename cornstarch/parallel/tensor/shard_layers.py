"""Tensor parallelism: shard the layers of a model over the ranks of a mesh, and check beforehand that it works.

The steps of `shard_tensors`, for each region of the plan: separate random numbers for dropout, shard the layers (and
LoRA adapters around them), and tell attention modules how many heads they have here. Then, if asked for, shard
activations between regions along tokens, and the vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.collective_ops import RankGroup, copy_to_ranks
from cornstarch.parallel.tensor import layers, shard_boxes
from cornstarch.parallel.tensor.dropout import has_dropout, separate_adapter_dropout, separate_dropout
from cornstarch.parallel.tensor.regions import Region, TensorPlan, get_child, get_linear, plan_regions
from cornstarch.parallel.tensor.sequence import check_sequence, shard_sequence
from cornstarch.parallel.tensor.styles import HEADS, KEY_VALUE_HEADS, KEY_VALUE_WIDTHS, WIDTHS, Style
from cornstarch.parallel.tensor.vocabulary import check_vocabulary, shard_vocabulary

_MAX_RANKS = 1024  # tried when an error lists the sizes that work


def shard_tensors(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, Style | str] | None = None,
    sequence: bool = False,
    vocabulary: bool = False,
) -> nn.Module:
    """Shard a model's layers over the ranks of a mesh, in place, and return it.

    All ranks must come with the same weights, or with a model on the meta device; they call the model with the same
    inputs and get the same outputs. Parameters keep their names. Sharded ones become DTensors on the mesh; all others
    stay as they are, and their gradients are the same on every rank. `fully_shard` over another axis of the same root
    mesh may follow. For dropout, seed the ranks of the mesh alike: they then drop the same elements of full
    activations, and each its own of sharded ones.

    Args:
        model: A transformers model, or a PEFT model around one.
        mesh: The ranks; it has one axis.
        plan: Styles of layers by name, instead of the model's own plan.
        sequence: Shard activations between attention and feed-forward layers along tokens.
        vocabulary: Shard the embedding table and the head by words.
    """
    if mesh.ndim != 1:
        raise ConfigError(f"Tensor parallelism needs a mesh with one axis, found {mesh.ndim}: give mesh['tp'].")
    inner = unwrap(model)
    if shard_boxes.is_sharded(inner):
        raise ConfigError(f"{type(inner).__name__} is cut over ranks already; cut it once.")
    check_tensor_plan(model, mesh.size(), plan=plan, sequence=sequence, vocabulary=vocabulary)
    found = plan_regions(model, plan)
    if mesh.size() == 1:
        return model
    drops = has_dropout(model)
    for region in found.regions:
        owner = inner.get_submodule(region.owner)
        if drops:
            # Before the layers change: adapters look for the random state of the layer that they are around.
            separate_dropout(owner, region, RankGroup.of(mesh.get_group()))
        _shard_region(owner, region, mesh)
        if region.attention is not None:
            counting = get_child(owner, region.attention) if region.attention else owner
            assert counting is not None
            set_local_head_counts(counting, region, mesh.size())
            _sum_argument_gradients(counting, RankGroup.of(mesh.get_group()))
    if sequence:
        shard_sequence(inner, found, mesh)  # after the regions: it changes the collectives of their layers
    if vocabulary:
        shard_vocabulary(inner, mesh)
    return model


def check_tensor_plan(
    model: nn.Module,
    size: int,
    *,
    plan: Mapping[str, Style | str] | None = None,
    sequence: bool = False,
    vocabulary: bool = False,
    found: TensorPlan | None = None,
) -> None:
    """Refuse a model that `shard_tensors` cannot shard over `size` ranks with these options; list the sizes that work.

    No process group is needed, and the model may be on the meta device, or sharded already. `found`: what
    `plan_regions` returned for the model and the plan; default: it is asked again.
    """
    inner = unwrap(model)
    if shard_boxes.is_sharded(inner):
        return  # it was checked then
    found = found or plan_regions(model, plan)
    for region in found.regions:
        for name in (region.owner.rsplit(".", up)[0] for up in range(region.owner.count("."), 0, -1)):
            if hasattr(around := inner.get_submodule(name), "base_layer"):
                _check_adapters(name, around, can_be_sharded=False)
        for name, style in region.full_names.items():
            layer = get_child(inner, name)  # None if it is a parameter
            if layer is not None and hasattr(layer, "base_layer"):
                _check_adapters(name, layer, style.kind in ("column", "row"))
    if sequence:
        check_sequence(inner, found)
    if vocabulary:
        check_vocabulary(inner)
    misfits = sorted({misfit for region in found.regions for misfit in region.misfits(size)})
    if misfits:
        fitting = [str(n) for n in range(1, _MAX_RANKS + 1) if not any(region.misfits(n) for region in found.regions)]
        alternatives = fitting[0] if len(fitting) == 1 else f"{', '.join(fitting[:-1])} or {fitting[-1]}"
        raise ConfigError(
            f"{type(inner).__name__} cannot be cut over {size} ranks (tp = {size}): it has "
            f"{' and '.join(misfits)}.\n  Use {alternatives}."
        )


def _shard_region(owner: nn.Module, region: Region, mesh: DeviceMesh) -> None:
    group, ranks = RankGroup.of(mesh.get_group()), mesh.size()
    # The layers at the beginning of a region read one copy of their input: its gradient is reduced once.
    shared = layers.SharedInput()
    for key, style in region.styles.items():
        child = get_child(owner, key)
        is_bare = child is get_linear(owner, key)  # with adapters there may be dropout before each
        if style.kind == "column" and not style.whole and child is not None and is_bare:
            child.__dict__["shared"] = shared
            shared.readers += 1
    for key, style in region.styles.items():
        layer: Any = get_linear(owner, key)
        match style.kind:
            case "column" if key in region.shared and region.key_value_heads % ranks:
                layers.ReplicatedColumnLinear.from_linear(layer, mesh, region.key_value_heads)
            case "column":
                layers.ColumnParallelLinear.from_linear(layer, mesh, style.parts or None, style.whole)
            case "row":
                layers.RowParallelLinear.from_linear(layer, mesh, style.whole)
            case "rotary_keys":
                layers.PartlyReplicatedLinear.from_linear(layer, mesh, style.parts[0])
            case "partial":
                layers.sum_parameter_gradients(owner.get_submodule(key), group)
            case "heads" | "expert":
                where, _, name = key.rpartition(".")
                module = owner.get_submodule(where)
                parts = style.parts or (module.get_parameter(name).shape[style.dim],)
                shard_boxes.shard_parameter(module, name, shard_boxes.ShardSpec(style.dim, parts, ranks), mesh)
                layers.bind_local_parameters(module, {name: shard_boxes.to_local_parameter})
            case "experts":
                layers.sum_output_over_ranks(owner, group)
            case "expert_bias":  # every rank adds it to its partial sum, so each adds a fraction
                uses = {key: lambda parameter: copy_to_ranks(parameter, group) / ranks}
                layers.bind_local_parameters(owner, uses)
        if style.kind in ("column", "row"):
            shard_adapters(get_child(owner, key), layer, mesh)


# LoRA adapters:
# column:  x -> A -> B, with B sharded by its outputs as the layer is; A is replicated
# row:     x (sharded) -> A, sharded by its inputs, reduced -> B; B is replicated

_ADAPTER_PARTS = {"base_layer", "lora_A", "lora_B"}


def _check_adapters(name: str, wrapper: nn.Module, can_be_sharded: bool) -> None:
    """Refuse adapters around a sharded layer that are not plain LoRA, or not around a plain linear layer."""
    found = {part for part, inside in wrapper.named_children() if any(True for _ in inside.parameters())}
    if not can_be_sharded or found - _ADAPTER_PARTS:
        others = ", ".join(sorted(found - _ADAPTER_PARTS)) or type(wrapper).__name__
        raise UnsupportedModelError(
            f"{name} has adapters that tensor parallelism cannot cut ({others}); LoRA on linear layers can be."
        )


def shard_added_adapters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the LoRA matrices that were put around the layers of a model that is sharded already."""
    for name, wrapper in list(model.named_modules()):
        layer = getattr(wrapper, "base_layer", None)
        if layer is None or not (isinstance(layer, layers.ShardedLayer) or shard_boxes.get_shard_specs(layer)):
            continue
        known = layers.ColumnParallelLinear | layers.RowParallelLinear | layers.ReplicatedColumnLinear
        _check_adapters(name, wrapper, isinstance(layer, known))
        shared = layer.__dict__.pop("shared", None)  # there may be dropout before each
        if shared is not None:
            shared.readers -= 1
        shard_adapters(wrapper, layer, mesh)


def shard_adapters(wrapper: Any, layer: Any, mesh: DeviceMesh) -> None:
    if wrapper is layer:
        return
    separate_adapter_dropout(wrapper, layer, RankGroup.of(mesh.get_group()))
    for adapter in wrapper.lora_A:
        before, after = wrapper.lora_A[adapter], wrapper.lora_B[adapter]
        if isinstance(layer, layers.RowParallelLinear):
            layers.RowParallelLinear.from_linear(before, mesh)
        elif isinstance(layer, layers.ReplicatedColumnLinear):
            heads = layer.weight.shape[0] // (layer.rows.stop - layer.rows.start)
            layers.ReplicatedColumnLinear.from_linear(after, mesh, heads)
        else:
            assert isinstance(layer, layers.ColumnParallelLinear)
            parts = shard_boxes.get_shard_specs(layer)["weight"].parts
            layers.ColumnParallelLinear.from_linear(after, mesh, parts, layer.gather)


def set_local_head_counts(module: nn.Module, region: Region, ranks: int) -> None:
    """Replace the numbers of heads that an attention module has by those of this rank."""
    heads = region.heads // ranks
    pairs = max(region.key_value_heads // ranks, 1)
    numbers = dict.fromkeys(HEADS, (region.heads, heads))
    numbers |= dict.fromkeys(KEY_VALUE_HEADS, (region.key_value_heads, pairs))
    own = module.__dict__
    for name, (before, after) in numbers.items():
        if own.get(name) == before:
            own[name] = after
    for name in WIDTHS:
        if own.get(name) == region.width:
            own[name] = region.width // ranks
    for name in KEY_VALUE_WIDTHS:
        if isinstance(own.get(name), int):
            own[name] = own[name] // region.key_value_heads * pairs
    if "num_key_value_groups" in own:
        own["num_key_value_groups"] = heads // pairs
    if own.get("config") is not None:
        local = {name: after for name, (before, after) in numbers.items() if getattr(own["config"], name, 0) == before}
        own["config"] = LocalHeadsConfig(own["config"], local)


class LocalHeadsConfig:
    """A config as an attention module sees it: the same object, except for the numbers of heads."""

    def __init__(self, config: Any, numbers: Mapping[str, int]) -> None:
        self.__dict__.update(_config=config, _numbers=dict(numbers))

    def __getattr__(self, name: str) -> Any:
        numbers = self.__dict__["_numbers"]
        return numbers[name] if name in numbers else getattr(self.__dict__["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_config"], name, value)

    def __deepcopy__(self, memory: Any) -> LocalHeadsConfig:
        return LocalHeadsConfig(copy.deepcopy(self.__dict__["_config"], memory), self.__dict__["_numbers"])


# Arguments that each rank uses for its heads as they are: if they are learned, their gradients are summed over ranks.
_FOR_ALL_HEADS = ("position_emb", "rotary", "cos", "sin", "freqs")
# Arguments that layers of the region read, and biases that the region itself has made for its heads.
_READ = ("state", "position_bias", "key_value", "query", "key", "value", "context", "embeds", "latents", "features")
_READ_EXACTLY = {"x", "q", "k", "v", "input", "inputs", "kv"}


def _sum_argument_gradients(module: nn.Module, group: RankGroup) -> None:
    """Sum the gradients of learned tensors that an attention module uses for its heads, beside its layers."""
    names = list(inspect.signature(module.forward).parameters)

    def enter(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        named = dict(zip(names, inputs, strict=False))
        changed = {name: change(name, value) for name, value in {**named, **options}.items()}
        return tuple(changed[name] for name in named) + inputs[len(named) :], {name: changed[name] for name in options}

    def change(name: str, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(change(name, inner) for inner in value)
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        if any(word in name for word in _FOR_ALL_HEADS):
            return copy_to_ranks(value, group)
        if name in _READ_EXACTLY or any(word in name for word in _READ):
            return value
        raise UnsupportedModelError(
            f"{type(module).__name__} is given `{name}`, which is learned; tensor parallelism does not know how it is "
            "used. Leave `tp` at 1."
        )

    module.register_forward_pre_hook(enter, with_kwargs=True)
