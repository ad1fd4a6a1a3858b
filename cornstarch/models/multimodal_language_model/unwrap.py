"""Looking through the wrappers that other libraries put around a part."""

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

# The name under which a wrapper holds the module inside: torch.compile, FSDP1, checkpoint_wrapper and offload_wrapper.
_INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module inside wrappers: PEFT, torch.compile, DDP, FSDP1, checkpoint_wrapper.

    For reading the module's settings. To run the module, call the wrapper: its hooks gather parameters, exchange
    gradients, recompute activations.
    """
    while True:
        if hasattr(module, "get_base_model"):  # peft.PeftModel, without importing peft
            module = module.get_base_model()  # type: ignore[operator]
        elif name := next((name for name in _INSIDE if name in module._modules), None):
            module = module._modules[name]  # type: ignore[assignment]
        elif isinstance(module, DistributedDataParallel):
            module = module.module
        else:
            return module


@functools.lru_cache(maxsize=1024)
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
    forward = inspect.unwrap(inner.__dict__.get("forward", type(inner).forward))
    # Not the bound method: the cache would keep `inner`.
    return _parameters_of(getattr(forward, "__func__", forward))[0]


def accepts(module: nn.Module, name: str) -> bool:
    """Whether the module's own forward has an argument of this name."""
    return name in argument_names(module)


def without_cache(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a loss, with `use_cache=False` unless they say otherwise, where the module knows that.

    Nothing reads a cache of keys and values after a loss, with gradients or without. It costs memory, and compiled
    layers would be compiled once more for the cache entry of each layer.
    """
    if inputs.get("labels") is None or "use_cache" in inputs or not accepts(module, "use_cache"):
        return dict(inputs)
    return {**inputs, "use_cache": False}


def without_wrapper_names(name: str) -> str:
    """Return the name of a parameter without what torch.compile, FSDP1 and checkpoint_wrapper put into it."""
    for wrapper in _INSIDE:
        name = name.replace(f"{wrapper}.", "")
    return name


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the second names of parameters that have several, each with the first."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(one)] for name, one in named if first.setdefault(id(one), name) != name}


def is_sharded(module: nn.Module) -> bool:
    """Whether processes gather the module's parameters together when it is run: FSDP, or matrices that are cut."""
    fully = any("_fsdp_wrapped_module" in inner._modules for inner in module.modules())
    return fully or any(hasattr(one, "device_mesh") or is_flattened(one) for one in module.parameters())


def is_gathered_by_caller(module: nn.Module, inner: nn.Module) -> bool:
    """Whether the parameters of `inner` are whole only while `module`, or a module between the two, runs.

    So it is if `module` or a module on the way to `inner` is a unit of FSDP.
    """
    return any(
        "_fsdp_wrapped_module" in one._modules or isinstance(one, FSDPModule) for one in _modules_between(module, inner)
    )


def run_inside(wrapper: nn.Module, function: Callable[[Callable[..., Any]], Any], **inputs: Any) -> Any:
    """Call a wrapper, with `function(forward)` in the place of the forward of the module inside, and return its result.

    Args:
        wrapper: Some wrappers around a module, or a module with hooks.
        function: Is given the module's own forward, which it may call with whatever it likes.
        inputs: What the wrapper is called with.
    """
    inner = unwrap(wrapper)
    own = inner.forward
    with replaced_forward(inner, lambda *_, **__: function(own)):
        return wrapper(**inputs)


@contextmanager
def replaced_forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Run a block in which a module computes something else; what was put around its calls stays."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = functools.wraps(module.forward)(function)
    try:
        yield
    finally:
        module.__dict__.pop("forward")
        if before is not None:
            module.__dict__["forward"] = before


def _modules_between(module: nn.Module, inner: nn.Module) -> list[nn.Module]:
    """Return `module` and the modules that lead to `inner`, without `inner`; nothing if `inner` is not inside."""
    for child in module.children():
        if child is inner:
            return [module]
        if found := _modules_between(child, inner):
            return [module, *found]
    return []


def is_changed_inside(module: nn.Module) -> bool:
    """Whether something was put around the forward of a module inside: hooks, compiled code, stages, shards."""
    return is_sharded(module) or any("forward" in inner.__dict__ or _has_hooks(inner) for inner in module.modules())


def _has_hooks(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # transformers collects hidden states through hooks of its own, which it leaves in place.
    return any(getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks)


def is_peft(module: nn.Module) -> bool:
    """Whether the module is a PEFT model: only its adapters are meant to be trained."""
    return hasattr(module, "get_base_model") and hasattr(module, "peft_config")
