"""One part of a model on disk: an encoder, a projector, a language model.

A transformers model is written and read by transformers itself; any other module is its weights in one safetensors
file, read into a module that the user makes. What transformers does not keep is kept here: the precision of every
tensor, buffers that are not saved (a rotary table that was rounded to bfloat16 with its model), what is trained.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.configuration_multimodal_language_model import (
    MultimodalProjectorConfig,
)
from cornstarch.models.multimodal_language_model.projector import MultimodalProjector
from cornstarch.models.multimodal_language_model.storage.adapters import (
    base_state,
    is_from_peft,
    load_adapters,
    reload_adapters,
    save_adapters,
)
from cornstarch.models.multimodal_language_model.storage.format import ADAPTERS, WEIGHTS, NameSet, StoredPart
from cornstarch.models.multimodal_language_model.trainable import FIXED
from cornstarch.models.multimodal_language_model.unwrap import is_peft

_TRUSTED = ("transformers.", "cornstarch.")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Every machine has these; another choice (a flash kernel) is the machine's and is made again where it is loaded.
_PORTABLE_ATTENTION = ("eager", "sdpa")

Maker = type[nn.Module] | Callable[[], nn.Module] | nn.Module


@dataclass(frozen=True)
class LoadOptions:
    """What the user asks of every part that is loaded."""

    dtype: torch.dtype | None = None
    device: torch.device | None = None
    trust_remote_code: bool = False


# ----------------------------------------------------------------------------------------------------- saving


def without_wrappers(part: nn.Module) -> nn.Module:
    """Return a part without what torch.compile and DDP put around it; PEFT stays."""
    while True:
        if "_orig_mod" in part._modules:
            part = part.get_submodule("_orig_mod")
        elif isinstance(part, DistributedDataParallel):
            part = part.get_submodule("module")
        else:
            return part


def save_part(name: str, part: nn.Module, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> StoredPart:
    """Write a part into a folder of its own and return what else must be known to load it.

    Args:
        name: What the part is called.
        part: The part.
        folder: Its folder, which is made.
        state_dict: Its weights, if they are not to be taken from the part.
    """
    part = without_wrappers(part)
    folder.mkdir()
    base, adapters = part, None
    if is_peft(part):
        adapters = save_adapters(part, folder / ADAPTERS)
        base = part.get_base_model()  # type: ignore[operator]
    elif any(is_from_peft(module) for module in part.modules()) and isinstance(part, PreTrainedModel):
        raise ConfigError(f"{name} has adapters inside. Wrap it with peft.get_peft_model, then it can be saved.")
    state = dict(base.state_dict() if state_dict is None else state_dict)
    if adapters is not None:
        state = base_state(base)
    try:
        kind, described = _save_base(base, folder, state)
    except RuntimeError as error:  # weights that share memory in a way that cannot be restored
        raise ConfigError(f"{name} cannot be saved: {error}") from error
    config = getattr(base, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    return StoredPart(
        kind=kind,
        class_path=f"{type(described).__module__}.{type(described).__qualname__}",
        adapters=adapters,
        attn_implementation=attention if kind == "transformers" and attention in _PORTABLE_ATTENTION else None,
        **_state_of(part),
    )


def _save_base(base: nn.Module, folder: Path, state: dict[str, Any]) -> tuple[Any, nn.Module]:
    """Write the weights and the config; return the kind of the part and the module whose class says what it is."""
    if isinstance(base, MultimodalProjector) and base.config.projection_type == "custom":
        base.config.save_pretrained(folder)
        save_tensors(state, folder / WEIGHTS)
        return "projector", base.projection
    if isinstance(base, PreTrainedModel):
        base.save_pretrained(folder, state_dict=state)
        return "transformers", base
    save_tensors(state, folder / WEIGHTS)
    return "module", base


def save_tensors(state: dict[str, Any], path: Path) -> None:
    """Write tensors by name; a tensor that has several names is written once."""
    kept: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise RuntimeError(f"{name} is a {type(tensor).__name__}; only tensors can be saved.")
        view = (tensor.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and view in seen:
            continue
        seen.add(view)
        kept[name] = tensor.detach().contiguous()
    save_file(kept, path, metadata={"format": "pt"})


def unsaved_buffers(part: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that no state dict has: a model may have rounded them, and computes with what they are."""
    found = _buffers_of(without_wrappers(part))
    return {name: buffer.detach().clone().contiguous() for name, buffer, persistent in found if not persistent}


def _buffers_of(part: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Return (name, buffer, whether a state dict has it)."""
    return [
        (f"{prefix}.{name}".lstrip("."), buffer, name not in module._non_persistent_buffers_set)
        for prefix, module in part.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _weights_of(part: nn.Module) -> dict[str, Tensor]:
    """Return what a state dict has of a part and has a precision: parameters and buffers, not integers."""
    weights: dict[str, Tensor] = dict(part.named_parameters())
    weights.update({name: buffer for name, buffer, persistent in _buffers_of(part) if persistent})
    return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}


def _state_of(part: nn.Module) -> dict[str, Any]:
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in _weights_of(part).items()}
    most = Counter(dtypes.values()).most_common(1)
    usual = most[0][0] if most else None
    others: dict[str, list[str]] = {}
    for name, dtype in dtypes.items():
        if dtype != usual:
            others.setdefault(dtype, []).append(name)
    parameters = dict(part.named_parameters())
    trainable = {name for name, parameter in parameters.items() if parameter.requires_grad}
    fixed = part.__dict__.get(FIXED)
    return {
        "dtype": usual,
        "other_dtypes": others,
        "trainable": NameSet.of(trainable, parameters),
        "fixed": None if fixed is None else NameSet.of(fixed, parameters),
    }


# ---------------------------------------------------------------------------------------------------- loading


def load_part(
    name: str,
    stored: StoredPart,
    folder: Path,
    given: Maker | None,
    buffers: Mapping[str, Tensor],
    options: LoadOptions,
) -> nn.Module:
    """Read a part.

    Args:
        name: What the part is called.
        stored: What was said when it was saved.
        folder: The part's own folder.
        given: Its class, or the module to load into, or what makes it.
        buffers: Its `unsaved_buffers`.
        options: What the user asks for.
    """
    part: nn.Module
    if stored.kind == "transformers":
        part = _load_transformers(name, stored, folder, given, options)
    else:
        part = _load_module(name, stored, folder, given)
    if stored.adapters is not None:
        part = load_adapters(part, folder / ADAPTERS, stored.adapters)
    _restore_dtypes(part, stored, options.dtype)
    if stored.adapters is not None:
        reload_adapters(part, folder / ADAPTERS, stored.adapters)
    # In another precision a transformers model is what transformers makes of it, with buffers of its own.
    if options.dtype is None or stored.kind != "transformers":
        _restore_buffers(part, buffers)
    _restore_trainable(part, stored)
    return part if options.device is None else part.to(options.device)


def _load_transformers(
    name: str, stored: StoredPart, folder: Path, given: Maker | None, options: LoadOptions
) -> nn.Module:
    model_class = _model_class(name, stored, folder, given, options.trust_remote_code)
    arguments: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    dtype = options.dtype or _stored_dtype(folder)
    if dtype is not None:
        arguments["dtype"] = dtype
    if stored.attn_implementation in _PORTABLE_ATTENTION:
        arguments["attn_implementation"] = stored.attn_implementation
    loaded: Any = model_class.from_pretrained(folder, **arguments)
    model, report = loaded
    wrong = {reason: list(keys)[:3] for reason, keys in report.items() if keys}
    if wrong:
        raise ConfigError(
            f"The weights in {folder} do not fit {model_class.__name__}: {wrong}. "
            "They were saved from a model with other modules, or by another version of transformers."
        )
    return model


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the precision that holds every weight of a folder exactly."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update(file.get_slice(key).get_dtype() for key in file.keys())  # noqa: SIM118
    known = [_DTYPES[name] for name in sorted(found) if name in _DTYPES]
    return reduce(torch.promote_types, known) if known else None


def _model_class(
    name: str, stored: StoredPart, folder: Path, given: Maker | None, trust_remote_code: bool
) -> type[PreTrainedModel]:
    found: Any = given
    if given is None and is_trusted(stored.class_path):
        found = imported_class(stored.class_path)
    elif given is None and trust_remote_code:
        found = _remote_class(stored.class_path, folder)
    if found is None:
        raise ConfigError(
            f"{name} is a {stored.class_path}, which is neither of transformers nor of Cornstarch and is not imported "
            f"on a file's word. Pass the class: from_pretrained(…, classes={{{name!r}: {_last(stored.class_path)}}})."
        )
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ConfigError(f"{name}: {found!r} is not a class of transformers models; classes[{name!r}] must be one.")
    return found


def _last(class_path: str) -> str:
    return class_path.rpartition(".")[2]


def is_trusted(class_path: str) -> bool:
    """Whether a class is one of transformers or of Cornstarch."""
    return class_path.startswith(_TRUSTED)


def imported_class(class_path: str) -> Any:
    """Return a class of transformers or Cornstarch by its path."""
    module_name, _, name = class_path.rpartition(".")
    assert is_trusted(class_path)
    try:
        found = getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{class_path} does not exist in the installed version ({error}). "
            "Install the version that cornstarch_model.json states under versions."
        ) from error
    # What a module has merely imported from elsewhere is not its class.
    return found if getattr(found, "__module__", None) == module_name else None


def _remote_class(class_path: str, folder: Path) -> Any:
    references = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map", {})
    for reference in references.values():
        if isinstance(reference, str) and "--" not in reference and _last(reference) == _last(class_path):
            return get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
    return None


def _load_module(name: str, stored: StoredPart, folder: Path, given: Maker | None) -> nn.Module:
    if given is None:
        raise ConfigError(
            f"{name} is your own module ({stored.class_path}), which only you can make. Pass it, or what makes it: "
            f"from_pretrained(…, classes={{{name!r}: {_last(stored.class_path)}(…)}})."
        )
    module = given if isinstance(given, nn.Module) else _made(name, given)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"classes[{name!r}] made a {type(module).__name__}; expected a torch.nn.Module.")
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        module = module.to_empty(device="cpu")
    if stored.kind == "projector" and not isinstance(module, MultimodalProjector):
        module = MultimodalProjector(MultimodalProjectorConfig.from_pretrained(folder), projection=module)
    tensors = load_file(folder / WEIGHTS)
    for key, tensor in module.state_dict(keep_vars=True).items():
        if key in tensors and tensors[key].dtype != tensor.dtype:
            tensor.data = tensor.data.to(tensors[key].dtype)
    try:
        load_model(module, folder / WEIGHTS)
    except RuntimeError as error:
        raise ConfigError(
            f"The module given for {name} does not fit the saved weights of {stored.class_path}: {error}"
        ) from error
    return module


def _made(name: str, maker: Callable[[], nn.Module]) -> Any:
    try:
        return maker()
    except TypeError as error:
        raise ConfigError(
            f"classes[{name!r}] cannot be called without arguments ({error}). Pass the module itself, or a function."
        ) from error


def _restore_dtypes(part: nn.Module, stored: StoredPart, asked: torch.dtype | None) -> None:
    others = {name: dtype for dtype, names in stored.other_dtypes.items() for name in names}
    for name, tensor in _weights_of(part).items():
        wanted = asked or dtype_named(others.get(name, stored.dtype))
        if tensor.dtype != wanted:
            tensor.data = tensor.data.to(wanted)


def dtype_named(name: object) -> torch.dtype:
    """Return the torch precision of this name."""
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype = {name!r}: expected a precision of torch, such as torch.bfloat16 or 'bfloat16'.")
    return found


def _restore_buffers(part: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for prefix, module in part.named_modules():
        for name in module._non_persistent_buffers_set:
            found = buffers.get(f"{prefix}.{name}".lstrip("."))
            if found is not None and name in module._buffers:
                module._buffers[name] = found


def _restore_trainable(part: nn.Module, stored: StoredPart) -> None:
    parameters = dict(part.named_parameters())
    trainable = stored.trainable.among(parameters)
    for name, parameter in parameters.items():
        if parameter.is_floating_point():
            parameter.requires_grad_(name in trainable)
    if stored.fixed is not None:
        part.__dict__[FIXED] = stored.fixed.among(parameters)
