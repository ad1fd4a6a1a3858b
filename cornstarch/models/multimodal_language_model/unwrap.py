"""Looking through the wrappers that other libraries put around a part."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module inside PEFT, torch.compile, DDP and FSDP wrappers."""
    while True:
        if hasattr(module, "get_base_model"):  # peft.PeftModel, without importing peft
            module = module.get_base_model()  # type: ignore[operator]
        elif "_orig_mod" in module._modules:  # torch.compile
            module = module._modules["_orig_mod"]  # type: ignore[assignment]
        elif isinstance(module, DistributedDataParallel) or type(module).__name__ == "FullyShardedDataParallel":
            module = next(iter(module.children()))
        else:
            return module


@lru_cache(maxsize=1024)
def _parameters_of(function: Any) -> tuple[tuple[str, ...], bool]:
    parameters = inspect.signature(function).parameters.values()
    names = tuple(
        p.name
        for p in parameters
        if p.name != "self" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)
    )
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of the module's own forward, in order."""
    inner = unwrap(module)
    forward = inner.__dict__.get("forward", type(inner).forward)
    return _parameters_of(forward)[0]


def accepts(module: nn.Module, name: str) -> bool:
    """Whether the module's own forward has an argument of this name."""
    return name in argument_names(module)


def is_sharded(module: nn.Module) -> bool:
    """Whether processes gather the module's parameters together when it is run: FSDP, or matrices that are cut."""
    fully = any(type(inner).__name__ == "FullyShardedDataParallel" for inner in module.modules())
    return fully or any(hasattr(parameter, "device_mesh") for parameter in module.parameters())


def is_changed_inside(module: nn.Module) -> bool:
    """Whether something was put around the forward of a module inside: hooks, compiled code, stages, shards."""
    return is_sharded(module) or any(
        "forward" in inner.__dict__ or inner._forward_hooks or inner._forward_pre_hooks for inner in module.modules()
    )


def is_peft(module: nn.Module) -> bool:
    """Whether the module is a PEFT model: only its adapters are meant to be trained."""
    return hasattr(module, "get_base_model") and hasattr(module, "peft_config")
