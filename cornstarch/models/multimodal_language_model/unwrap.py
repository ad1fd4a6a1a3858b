"""Access to the module inside wrappers (PEFT, torch.compile, DDP, FSDP, checkpoint_wrapper)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from cornstarch.compat import is_flattened

# The submodule names that wrappers use: torch.compile, FSDP1, checkpoint_wrapper and offload_wrapper.
_WRAPPED_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module inside wrappers: PEFT, torch.compile, DDP, FSDP1, checkpoint_wrapper.

    Use the result to read settings. To run the module, call the wrapper: its hooks gather parameters, reduce gradients
    and recompute activations.
    """
    while True:
        if hasattr(module, "get_base_model"):  # peft.PeftModel, without importing peft
            module = module.get_base_model()  # type: ignore[operator]
        elif name := next((name for name in _WRAPPED_NAMES if name in module._modules), None):
            module = module._modules[name]  # type: ignore[assignment]
        elif isinstance(module, DistributedDataParallel):
            module = module.module
        else:
            return module


@functools.lru_cache(maxsize=1024)  # called for every batch and sample, and reading a signature is slow
def get_parameter_names(function: Any) -> tuple[str, ...]:
    """Return the names of a function's arguments in order, without `self`, `*args` and `**kwargs`."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.name != "self" and p.kind in named)


def get_argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of the module's own forward, in order."""
    inner = unwrap(module)
    forward = inspect.unwrap(inner.__dict__.get("forward", type(inner).forward))
    # Not the bound method: the cache would keep `inner` alive.
    return get_parameter_names(getattr(forward, "__func__", forward))


def accepts_argument(module: nn.Module, name: str) -> bool:
    return name in get_argument_names(module)


def disable_cache(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with `use_cache=False` if they have labels, unless they set it or the module lacks it."""
    # No code reads the key-value cache after a loss. It costs memory, and compiled layers would be compiled again for
    # the cache entry of each layer.
    if inputs.get("labels") is None or "use_cache" in inputs or not accepts_argument(module, "use_cache"):
        return dict(inputs)
    return {**inputs, "use_cache": False}


def strip_wrapper_names(name: str) -> str:
    """Return a parameter name without the prefixes of torch.compile, FSDP1 and checkpoint_wrapper."""
    for wrapper in _WRAPPED_NAMES:
        name = name.replace(f"{wrapper}.", "")
    return name


def find_tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, each with the first name."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(one)] for name, one in named if first.setdefault(id(one), name) != name}


def is_peft(module: nn.Module) -> bool:
    """Whether the module is a PEFT model, of which only the adapters are meant to be trained."""
    return hasattr(module, "get_base_model") and hasattr(module, "peft_config")


def is_sharded(module: nn.Module) -> bool:
    """Whether ranks gather the module's parameters together when it runs: FSDP, or tensor parallelism."""
    is_fsdp1 = any("_fsdp_wrapped_module" in inner._modules for inner in module.modules())
    return is_fsdp1 or any(hasattr(one, "device_mesh") or is_flattened(one) for one in module.parameters())


def is_instrumented(module: nn.Module) -> bool:
    """Whether a forward inside the module was changed: hooks, compiled code, pipeline stages, shards."""
    inside = list(module.modules())
    if is_sharded(module) or any("forward" in inner.__dict__ for inner in inside):
        return True
    hooks = [hook for inner in inside for hook in (*inner._forward_hooks.values(), *inner._forward_pre_hooks.values())]
    # transformers collects hidden states through its own hooks, which it leaves in place.
    return any(getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks)


def is_gathered_by_caller(module: nn.Module, inner: nn.Module) -> bool:
    """Whether `inner` is whole only while `module`, or one between the two, runs: one of these is an FSDP unit."""
    path = _modules_between(module, inner)
    return any("_fsdp_wrapped_module" in one._modules or isinstance(one, FSDPModule) for one in path)


def _modules_between(module: nn.Module, inner: nn.Module) -> list[nn.Module]:
    """Return `module` and the modules that lead to `inner`, without `inner`; empty if `inner` is not inside."""
    for child in module.children():
        if child is inner:
            return [module]
        if found := _modules_between(child, inner):
            return [module, *found]
    return []


def run_inside(wrapper: nn.Module, function: Callable[[Callable[..., Any]], Any], **inputs: Any) -> Any:
    """Call `wrapper(**inputs)` with `function(forward)` in place of the own `forward` of the module inside."""
    inner = unwrap(wrapper)
    own = inner.forward
    with replace_forward(inner, lambda *_, **__: function(own)):
        return wrapper(**inputs)


@contextmanager
def replace_forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward inside the block; its hooks and wrappers stay."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = functools.wraps(module.forward)(function)
    try:
        yield
    finally:
        module.__dict__.pop("forward")
        if before is not None:
            module.__dict__["forward"] = before
