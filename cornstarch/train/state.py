"""What a run has to remember to go on as if it had not stopped, as tensors and JSON.

Everything goes by the names that the parameters have in the model: which optimizer group or process held them is not
asked. Saved are the parameters that are trained, or that the optimizer holds, and all buffers. Frozen parameters come
from where the model comes from; a checkpoint of a 7B model with a trained projector has the size of the projector. Of
each frozen parameter the type, the shape and a hash of some of its values are noted, so that another model is refused.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError

__all__ = [
    "Restored", "capture", "named_parameters", "random_state", "restore", "restore_random_state", "restore_weights",
    "seed_all",
]  # fmt: skip

FORMAT = 1

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_IMPLEMENTATION = {"foreach", "fused", "capturable", "param_names"}  # how a step is computed, not which step
_SAMPLES = 64
_SHOWN = 5


class Stateful(Protocol):
    """What keeps its state in a dictionary: an optimizer, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state over."""


@dataclass(frozen=True)
class Restored:
    """What `restore` hands back to the loop, as it was given to `capture`."""

    scheduler_state: Any
    loader_position: Any


# ---------------------------------------------------------------------------------------------------- the two doors


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler_state: Any = None,
    ema: Mapping[str, Tensor] | None = None,
    scaler: Stateful | None = None,
    loader_position: Any = None,
    rng: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the JSON data of a run's state.

    The tensors are the live ones: save or copy them before the next step. The data has the one key "state"; others may
    be added beside it. `ema` are averaged weights by parameter name. `rng` is a `random_state` taken earlier (default:
    now). `scheduler_state` and `loader_position` may be numbers, texts, tensors, arrays, and lists and dictionaries of
    them.
    """
    tensors: dict[str, Tensor] = {}
    parameters = named_parameters(model)
    held = {name for group in _groups(optimizer, parameters) for name in group}
    described = {name: _parameter_entry(p, p.requires_grad or name in held) for name, p in parameters.items()}
    tensors.update({f"parameters/{n}": p.detach() for n, p in parameters.items() if described[n]["saved"]})
    tensors.update({f"buffers/{name}": buffer.detach() for name, buffer, _ in _buffers(model)})
    tensors.update({f"ema/{name}": average.detach() for name, average in (ema or {}).items()})
    state = {
        "format": FORMAT,
        "parameters": described,
        "buffers": {name: {"is": _describe(b), "persistent": persistent} for name, b, persistent in _buffers(model)},
        "ema": None if ema is None else {name: _describe(average) for name, average in ema.items()},
        "optimizer": _pack(_optimizer_state(optimizer, parameters), "optimizer", tensors),
        "scaler": None if scaler is None else _pack(scaler.state_dict(), "scaler", tensors),
        "scheduler": _pack(scheduler_state, "scheduler", tensors),
        "loader": _pack(loader_position, "loader", tensors),
        "rng": _pack(random_state() if rng is None else rng, "rng", tensors),
    }
    return tensors, {"state": state}


def restore(
    tensors: Mapping[str, Tensor],
    data: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ema: Mapping[str, Tensor] | None = None,
    scaler: Stateful | None = None,
) -> Restored:
    """Bring a run into a captured state, random numbers last; nothing is changed if the state does not fit.

    Call it when everything that draws random numbers while it is made (the model, the loader) is there.
    """
    state = _state(data)
    parameters = named_parameters(model)
    _refuse(_model_differences(state, model) + _trained_differences(state, parameters), "the model")
    _refuse(_optimizer_differences(state["optimizer"], optimizer, parameters), "the optimizer")
    _refuse(_ema_differences(state["ema"], ema), "the averaged weights")
    _refuse(_scaler_differences(state["scaler"], scaler), "the gradient scaler")
    _check_complete(state, tensors)
    _copy_weights(state, tensors, model, averaged=False)
    _restore_optimizer(state["optimizer"], tensors, optimizer, parameters)
    with torch.no_grad():
        for name, average in (ema or {}).items():
            average.copy_(tensors[f"ema/{name}"])
    if scaler is not None and state["scaler"]:
        scaler.load_state_dict(_unpack(state["scaler"], tensors))
    handed_back = Restored(_unpack(state["scheduler"], tensors), _unpack(state["loader"], tensors))
    restore_random_state(_unpack(state["rng"], tensors))
    return handed_back


def restore_weights(
    tensors: Mapping[str, Tensor], data: Mapping[str, Any], model: nn.Module, *, averaged: bool = False
) -> None:
    """Bring only the model into a captured state, to use it; with the averaged weights if asked."""
    state = _state(data)
    _refuse(_model_differences(state, model), "the model")
    if averaged and state["ema"] is None:
        raise ConfigError("The checkpoint has no averaged weights: the run was made without an EMA.")
    _check_complete(state, tensors)
    _copy_weights(state, tensors, model, averaged=averaged)


def _state(data: Mapping[str, Any]) -> dict[str, Any]:
    state = data.get("state")
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise ConfigError(f'The data holds no state of a run; found {", ".join(data) or "nothing"}, expected "state".')
    if state["format"] > FORMAT:
        raise ConfigError(
            f"The state has format {state['format']}, written by a newer Cornstarch; this one reads formats up to "
            f"{FORMAT}. Update Cornstarch."
        )
    return state


# ---------------------------------------------------------------------------------------------------- the model


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that they have without torch.compile, DDP and other wrappers."""
    return {_original_name(model, name): parameter for name, parameter in model.named_parameters()}


def _original_name(model: nn.Module, name: str) -> str:
    parts = name.split(".")
    root: nn.Module | None = model
    while root is not None and parts[0] in _WRAPPERS | {"module"}:
        if parts[0] == "module" and type(root).__name__ != "DistributedDataParallel":
            break
        root = root._modules.get(parts[0])
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, buffer, whether it belongs to the model's state dict)."""
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        yield _original_name(model, name), buffer, name not in passing


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _parameter_entry(parameter: nn.Parameter, saved: bool) -> dict[str, Any]:
    entry = {"is": _describe(parameter), "trained": parameter.requires_grad, "saved": saved}
    return entry if saved else {**entry, "sample": _sample(parameter)}


def _sample(tensor: Tensor) -> str:
    """Hash values from all over a tensor: enough to tell it from that of another model, and quick for billions."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLES)].cpu().contiguous()
    return hashlib.sha256(some.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _model_differences(state: Mapping[str, Any], model: nn.Module) -> list[str]:
    parameters, saved = named_parameters(model), state["parameters"]
    found = _differences(
        {name: entry["is"] for name, entry in saved.items()}, {name: _describe(p) for name, p in parameters.items()}
    )
    found += _differences(
        {name: entry["is"] for name, entry in state["buffers"].items() if entry["persistent"]},
        {name: _describe(buffer) for name, buffer, persistent in _buffers(model) if persistent},
    )
    if not found:
        found = [
            f"{name} is frozen and was not saved, and has other values now (was it loaded from another model?)"
            for name, entry in saved.items()
            if not entry["saved"] and entry["sample"] != _sample(parameters[name])
        ]
    return found


def _trained_differences(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> list[str]:
    def word(trained: bool) -> str:
        return "trained" if trained else "frozen"

    return [
        f"{name} is {word(entry['trained'])} in the checkpoint, {word(parameters[name].requires_grad)} here"
        for name, entry in state["parameters"].items()
        if name in parameters and entry["trained"] != parameters[name].requires_grad
    ]


def _differences(saved: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return [
        *(f"{name} ({saved[name]}) is in the checkpoint only" for name in saved if name not in found),
        *(f"{name} ({found[name]}) is not in the checkpoint" for name in found if name not in saved),
        *(
            f"{name} is {saved[name]} in the checkpoint, {found[name]} here"
            for name in saved
            if name in found and saved[name] != found[name]
        ),
    ]


def _refuse(differences: list[str], what: str) -> None:
    if differences:
        shown = "\n  ".join(differences[:_SHOWN])
        rest = f"\n  … and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise ConfigError(
            f"The checkpoint does not fit {what}, and nothing was restored. {len(differences)} difference(s):\n  "
            f"{shown}{rest}\nContinue with what the checkpoint was made with, or start a new run in another folder."
        )


def _check_complete(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    needed = [f"parameters/{name}" for name, entry in state["parameters"].items() if entry["saved"]]
    needed += [f"buffers/{name}" for name in state["buffers"]]
    needed += [f"ema/{name}" for name in state["ema"] or ()]
    needed += _tensor_names([state[part] for part in ("optimizer", "scaler", "scheduler", "loader", "rng")])
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ConfigError(
            f"The checkpoint is incomplete: {len(missing)} of {len(needed)} tensors are missing, the first is "
            f"{missing[0]}. Nothing was restored."
        )


@torch.no_grad()
def _copy_weights(state: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module, averaged: bool) -> None:
    averages = (state["ema"] or {}) if averaged else {}
    parameters = named_parameters(model)
    for name, entry in state["parameters"].items():
        if entry["saved"]:
            _copy(tensors[f"ema/{name}" if name in averages else f"parameters/{name}"], parameters[name], name)
    for name, buffer, persistent in _buffers(model):
        entry = state["buffers"].get(name)
        # What the model does not count to its state it can make again: a cache of another size is left alone.
        if persistent or (entry is not None and entry["is"] == _describe(buffer)):
            _copy(tensors[f"buffers/{name}"], buffer, name)


def _copy(source: Tensor, target: Tensor, name: str) -> None:
    if source.shape != target.shape:  # else a single number would fill the whole target
        raise ConfigError(f"{name} has the shape {list(source.shape)} in the checkpoint, {list(target.shape)} here.")
    repeated = any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True))
    if repeated and torch.equal(source.to(target.device), target):
        return  # a buffer made by `expand` cannot be written, and need not be
    target.copy_(source)


# ---------------------------------------------------------------------------------------------------- the optimizer


def _groups(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"The optimizer holds a parameter ({_describe(parameter)}) that is not one of the model's "
                    f"{len(names)}. Make the optimizer from the model that is trained."
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return an optimizer's state with names in place of torch's running numbers."""
    packed = optimizer.state_dict()
    groups = _groups(optimizer, parameters)
    names = {
        number: name
        for group, members in zip(packed["param_groups"], groups, strict=True)
        for number, name in zip(group["params"], members, strict=True)
    }
    return {
        "class": type(optimizer).__qualname__,
        "groups": [
            {"parameters": members, "options": {k: v for k, v in group.items() if k != "params"}}
            for group, members in zip(packed["param_groups"], groups, strict=True)
        ],
        "parameters": {names[key]: value for key, value in packed["state"].items() if key in names},
        "whole": {key: value for key, value in packed["state"].items() if key not in names},
    }


def _optimizer_differences(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    if saved["class"] != type(optimizer).__qualname__:
        return [f"it is {saved['class']} in the checkpoint, {type(optimizer).__qualname__} here"]
    group_of = {name: index for index, group in enumerate(saved["groups"]) for name in group["parameters"]}
    groups = _groups(optimizer, parameters)
    here = {name: "held by the optimizer" for group in groups for name in group}
    found = _differences({name: "held by the optimizer" for name in group_of}, here)
    for members in groups:
        origins = {group_of[name]: name for name in reversed(members) if name in group_of}
        if len(origins) > 1:
            first, second, *_ = origins.values()
            found.append(f"{first} and {second} are in one group here, but were in two in the checkpoint")
    return found


def _restore_optimizer(
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
) -> None:
    options_of = {name: group["options"] for group in saved["groups"] for name in group["parameters"]}
    packed_groups = optimizer.state_dict()["param_groups"]
    numbers: dict[str, Any] = {}
    for packed, members in zip(packed_groups, _groups(optimizer, parameters), strict=True):
        numbers.update(zip(members, packed["params"], strict=True))
        options = _unpack(options_of[members[0]], tensors) if members else {}
        packed.update({key: value for key, value in options.items() if key not in _IMPLEMENTATION})
    state = {
        numbers[name]: _placed(_unpack(value, tensors), parameters[name]) for name, value in saved["parameters"].items()
    }
    whole = _unpack(saved["whole"], tensors)
    optimizer.load_state_dict({"state": {**whole, **state}, "param_groups": packed_groups})
    for name in saved["parameters"]:
        _keep_types(state[numbers[name]], optimizer.state[parameters[name]])


def _placed(value: Any, parameter: Tensor) -> Any:
    """Bring what belongs to a parameter to its device one by one; where counters live is the optimizer's affair."""
    if isinstance(value, Tensor):
        return value.to(parameter.device) if value.dim() else value
    return {key: _placed(item, parameter) for key, item in value.items()} if isinstance(value, dict) else value


def _keep_types(saved: Mapping[str, Any], loaded: dict[str, Any]) -> None:
    """Undo torch's conversion of a state to its parameter's type: float32 moments of bfloat16 weights stay exact."""
    for key, value in saved.items():
        if isinstance(value, Tensor) and isinstance(loaded.get(key), Tensor) and loaded[key].dtype != value.dtype:
            loaded[key] = value.to(loaded[key].device)


# ---------------------------------------------------------------------------------------------------- what is optional


def _ema_differences(saved: Mapping[str, str] | None, ema: Mapping[str, Tensor] | None) -> list[str]:
    if ema is None:
        return []
    if saved is None:
        return ["the run has averaged weights, the checkpoint was made without"]
    return _differences(saved, {name: _describe(average) for name, average in ema.items()})


def _scaler_differences(saved: Mapping[str, Any] | None, scaler: Stateful | None) -> list[str]:
    if scaler is not None and scaler.state_dict() and not saved:
        return ["the run scales its gradients (fp16), the checkpoint was made without"]
    return []


# ---------------------------------------------------------------------------------------------------- random numbers


def seed_all(seed: int) -> None:
    """Begin the random numbers of Python, NumPy and torch anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's random numbers, of every GPU if one is in use."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Continue the random numbers of a `random_state`; GPUs that only one of the two machines has are left alone."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index, one in zip(range(torch.cuda.device_count()), state.get("cuda", []), strict=False):
            torch.cuda.set_rng_state(one, index)


# ---------------------------------------------------------------------------------------------------- JSON and tensors


def _pack(value: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    """Return a nested value as JSON that `_unpack` turns back into an equal one; tensors go into `tensors`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (Tensor, np.ndarray)):
        while at in tensors:
            at += "_"
        tensors[at] = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.detach()
        return {"$array" if isinstance(value, np.ndarray) else "$tensor": at}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _pack(item, f"{at}/{key}", tensors) for key, item in value.items()}
        pairs = enumerate(value.items())
        return {"$items": [[_pack(k, at, tensors), _pack(v, f"{at}/{i}", tensors)] for i, (k, v) in pairs]}
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{at}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise ConfigError(
        f"{at} is a {type(value).__name__}, which cannot be saved. Give numbers, texts, tensors, arrays, and lists, "
        "tuples and dictionaries of them."
    )


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `_pack` packed; the tensors are copies."""
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]].clone()
    if "$array" in value:
        return tensors[value["$array"]].numpy().copy()
    if "$tuple" in value:
        return tuple(_unpack(item, tensors) for item in value["$tuple"])
    if "$items" in value:
        return {_unpack(key, tensors): _unpack(item, tensors) for key, item in value["$items"]}
    return {key: _unpack(item, tensors) for key, item in value.items()}


def _tensor_names(value: Any) -> list[str]:
    if isinstance(value, dict) and ("$tensor" in value or "$array" in value):
        return list(value.values())
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [name for part in parts for name in _tensor_names(part)]
