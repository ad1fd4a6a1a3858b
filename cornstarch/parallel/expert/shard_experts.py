"""Shares the experts of a model out over ranks, and checks beforehand that it can be done.

transformers declares how a module of experts is called and laid out (`use_experts_implementation`): stacked weights
[experts, ...], and a forward of hidden states, chosen experts and their weights. Whatever is declared so can be cut;
the module's own function, with its activation, biases and clamps, goes on computing the experts that are left.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.collective_ops import RankGroup
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.parallel.expert.dispatch import ExpertShards, dispatch_tokens, get_expert_shards
from cornstarch.parallel.tensor.shard_boxes import ShardSpec, get_shard_specs, shard_parameter
from cornstarch.plan.expert_options import explain_expert_count

_DECLARED = ("has_bias", "is_transposed", "num_experts")  # what the declaration leaves on a module


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of stacked experts that transformers declares, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(key in module.__dict__ for key in _DECLARED) and isinstance(module.__dict__["num_experts"], int)
    }


def find_expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose experts are shared out over ranks."""
    return [module for module in model.modules() if get_expert_shards(module) is not None]


def find_expert_replicas(model: nn.Module) -> dict[int, dist.ProcessGroup]:
    """Return, by id, the parameters that are shared out over ranks, with the ranks that have the same shard of each."""
    found: dict[int, dist.ProcessGroup] = {}
    for module in find_expert_modules(model):
        shards = get_expert_shards(module)
        assert shards is not None
        if shards.data.ndim == 1:
            found |= dict.fromkeys(map(id, module.parameters(recurse=False)), shards.data.get_group())
    return found


def check_expert_plan(model: nn.Module, size: int) -> None:
    """Refuse a model whose experts cannot be shared out over `size` ranks; no process group is needed."""
    inner = unwrap(model)
    name, found = type(inner).__name__, find_experts(inner)
    if not found:
        lists = [where for where, one in inner.named_modules() if isinstance(one, nn.ModuleList) and _is_experts(where)]
        others = [where for where, _ in inner.named_parameters() if _is_experts(where.rpartition(".")[0])]
        what = "it has no experts"
        if lists:
            what = f"the experts in {lists[0]} are separate modules in a list, each with weights of its own"
        elif others:
            what = f"transformers does not declare how {others[0].rpartition('.')[0]} is called and laid out"
        raise UnsupportedModelError(f"{name} cannot share experts out over ranks (ep = {size}): {what}. Leave ep at 1.")
    for where, module in found.items():
        if (problem := _find_problem(module)) is not None:
            raise UnsupportedModelError(f"{name} cannot share {where} out over ranks (ep = {size}): {problem}.")
    # Before PEFT's wrappers: what they wrap has the name of the wrapper in its own.
    if adapted := [where for where, one in model.named_modules() if hasattr(one, "parameter_name")]:
        raise UnsupportedModelError(
            f"{adapted[0]} has an adapter on stacked experts (PEFT's target_parameters), which cannot be shared out "
            f"over ranks (ep = {size}). Leave ep at 1, or adapt other layers: lora.targets, such as [q_proj, v_proj]."
        )
    for where, module in found.items():
        if (problem := explain_expert_count(_count(module), size)) is not None:
            raise ConfigError(f"{name} cannot share {where} out over ranks: {problem}")


def shard_experts(model: nn.Module, mesh: DeviceMesh, data: DeviceMesh) -> nn.Module:
    """Share the experts of a model out over the ranks of a mesh, in place, and return the model.

    All ranks must come with the same weights. They call the model equally often, each with tokens of its own.
    Parameters keep their names and become DTensors; their gradients are to be averaged over `data`.

    Args:
        model: A transformers model, or a PEFT model around one.
        mesh: The ranks that have all experts together, each as many: the axis `ep`. With tensor parallelism, which is
            applied before, also the axis `tp`: its ranks have the same tokens, and channels of the same experts.
        data: The ranks that have the same experts and other tokens.
    """
    inner, along = unwrap(model), mesh["ep"] if mesh.ndim > 1 else mesh
    if find_expert_modules(inner):
        raise ConfigError(f"The experts of {type(inner).__name__} are shared out over ranks already; do it once.")
    check_expert_plan(model, along.size())
    group = RankGroup.of(along.get_group())
    for module in find_experts(inner).values():
        names = tuple(name for name, _ in module.named_parameters(recurse=False))
        for name in names:
            if mesh.ndim == 1:
                shard_parameter(module, name, ShardSpec(0, (_count(module),), along.size()), along)
            else:
                _shard_further(module, name, mesh)
        dispatch_tokens(module, ExpertShards(group, _count(module), data, names))
    return model


def _shard_further(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Replace a parameter that tensor parallelism has cut, or left whole, by this rank's experts of it."""
    parameter = module._parameters[name]
    assert parameter is not None
    experts, ranks = parameter.shape[0], mesh["ep"].size()
    inner = list(parameter.placements) if isinstance(parameter, DTensor) else [Replicate()]
    with torch.no_grad():
        local = to_local_tensor(parameter).narrow(0, mesh["ep"].get_local_rank() * experts // ranks, experts // ranks)
    sizes: dict[str, Any] = {"shape": parameter.shape, "stride": torch.empty(parameter.shape, device="meta").stride()}
    # A copy: a view would keep all experts in memory.
    own = local.detach().clone(memory_format=torch.contiguous_format)
    distributed = DTensor.from_local(own, mesh, [Shard(0), *inner], run_check=False, **sizes)
    module._parameters[name] = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    # Of one that tensor parallelism has cut, that is remembered: the order of fused matrices.
    get_shard_specs(module).setdefault(name, ShardSpec(0, (experts,), ranks))


def _count(module: nn.Module) -> int:
    return int(module.__dict__["num_experts"])


def _is_experts(name: str) -> bool:
    return name.rpartition(".")[2] == "experts"


def _find_problem(module: nn.Module) -> str | None:
    """Return why a declared module of experts cannot be cut; None if it can."""
    count, own = _count(module), dict(module.named_parameters())
    others = [name for name, one in own.items() if "." in name or not one.ndim or one.shape[0] != count]
    others += [name for name, _ in module.named_buffers()]
    if others:
        return f"it has {others[0]} beside the stacked weights of its experts. Leave ep at 1"
    if whole := [name for name, one in own.items() if not one.is_floating_point()]:
        return f"{whole[0]} is not stored in floating-point numbers. Leave ep at 1"
    if "forward" in module.__dict__:
        return "its forward was replaced. Share experts out before anything else changes the model"
    return None
