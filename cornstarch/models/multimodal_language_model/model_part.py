"""One part of a model on disk: an encoder, a projector, a language model, with its PEFT adapters.

A transformers model is written and read by transformers itself. Any other module is stored as one safetensors file,
and read into a module that the user builds. Properties that transformers does not store are stored here: the dtype of
every tensor, non-persistent buffers (a rotary table that was rounded to bfloat16 with its model), trainability.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from cornstarch.files import check_layer_count, parse_json

from .configuration_multimodal_language_model import MultimodalProjectorConfig
from .encoder import FIXED, MultimodalProjector
from .model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTERS, WEIGHTS, NameSet, StoredAdapters, StoredPart
from .unwrap import is_peft

_TRUSTED = ("transformers.", "cornstarch.")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Available on every machine; other choices (a flash kernel) depend on the machine, and are made again when loading.
_PORTABLE_ATTENTION = ("eager", "sdpa")

# Where PEFT's layers hold the base: of an adapted layer, a layer trained whole, an embedding with new rows.
_PEFT_BASES = ("base_layer", "original_module", "token_adapter")

ModuleSource = type[nn.Module] | Callable[[], nn.Module] | nn.Module
"""The class of a part, a function that builds it, or the module to load into."""


def strip_wrappers(part: nn.Module) -> nn.Module:
    """Return a part without the wrappers of torch.compile and DDP; PEFT stays."""
    while True:
        if "_orig_mod" in part._modules:
            part = part.get_submodule("_orig_mod")
        elif isinstance(part, DistributedDataParallel):
            part = part.get_submodule("module")
        else:
            return part


def save_part(name: str, part: nn.Module, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> StoredPart:
    """Write a part, or `state_dict` in place of its weights, into its own new folder; return what loading it needs."""
    part = strip_wrappers(part)
    folder.mkdir()
    base, adapters = part, None
    if is_peft(part):
        adapters = _save_adapters(part, folder / ADAPTERS)
        base = part.get_base_model()  # type: ignore[operator]
    elif any(_is_from_peft(module) for module in part.modules()) and isinstance(part, PreTrainedModel):
        raise ConfigError(f"{name} has adapters inside. Wrap it with peft.get_peft_model, then it can be saved.")
    state = dict(base.state_dict() if state_dict is None else state_dict) if adapters is None else _base_state(base)
    kind: Any = "transformers" if isinstance(base, PreTrainedModel) else "module"
    described: nn.Module = base  # whose class is stored
    if isinstance(base, MultimodalProjector) and base.config.projection_type == "custom":
        kind, described = "projector", base.projection
        base.config.save_pretrained(folder)
    try:
        if kind == "transformers":
            base.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
        else:
            _save_tensors(state, folder / WEIGHTS)
    except RuntimeError as error:  # weights that share memory in a way that cannot be restored
        raise ConfigError(f"{name} cannot be saved: {error}") from error
    attention = getattr(getattr(base, "config", None), "_attn_implementation", None)
    dtypes = {key: str(tensor.dtype).removeprefix("torch.") for key, tensor in _collect_weights(part).items()}
    usual, _ = next(iter(Counter(dtypes.values()).most_common(1)), (None, 0))
    others: dict[str, list[str]] = {}
    for key, dtype in dtypes.items():
        if dtype != usual:
            others.setdefault(dtype, []).append(key)
    parameters, fixed = dict(part.named_parameters()), part.__dict__.get(FIXED)
    return StoredPart(
        kind=kind,
        class_path=f"{type(described).__module__}.{type(described).__qualname__}",
        dtype=usual,
        other_dtypes={dtype: tuple(keys) for dtype, keys in others.items()},
        trainable=NameSet.of({key for key, one in parameters.items() if one.requires_grad}, parameters),
        fixed=None if fixed is None else NameSet.of(fixed, parameters),
        attn_implementation=attention if kind == "transformers" and attention in _PORTABLE_ATTENTION else None,
        adapters=adapters,
    )


def _save_tensors(state: dict[str, Any], path: Path) -> None:
    """Write tensors by name; a tensor with several names is written once."""
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


def collect_transient_buffers(part: nn.Module) -> dict[str, Tensor]:
    """Return the non-persistent buffers: a model may have rounded them, and must compute with the rounded values."""
    found = _list_buffers(strip_wrappers(part))
    return {name: buffer.detach().clone().contiguous() for name, buffer, persistent in found if not persistent}


def _list_buffers(part: nn.Module) -> list[tuple[str, Tensor, bool]]:
    return [
        (f"{prefix}.{name}".lstrip("."), buffer, name not in module._non_persistent_buffers_set)
        for prefix, module in part.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _collect_weights(part: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters and persistent buffers of a part."""
    weights: dict[str, Tensor] = dict(part.named_parameters())
    weights.update({name: buffer for name, buffer, persistent in _list_buffers(part) if persistent})
    return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}


def load_part(
    name: str,
    stored: StoredPart,
    folder: Path,
    given: ModuleSource | None,
    buffers: Mapping[str, Tensor],
    chosen_dtype: torch.dtype | None,
    trust_remote_code: bool,
) -> nn.Module:
    """Load a part; `given` is the user's class, function or module, `buffers` its `collect_transient_buffers`."""
    part: nn.Module
    if stored.kind == "transformers":
        model_class = _find_model_class(name, stored, folder, given, trust_remote_code)
        part = _load_transformers(model_class, stored, folder, chosen_dtype)
    else:
        part = _load_module(name, stored, folder, given)
    if stored.adapters is not None:
        part = _load_adapters(part, folder / ADAPTERS, stored.adapters)
    others = {key: dtype for dtype, keys in stored.other_dtypes.items() for key in keys}
    for key, tensor in _collect_weights(part).items():
        wanted = chosen_dtype or parse_dtype(others.get(key, stored.dtype))
        if tensor.dtype != wanted:
            tensor.data = tensor.data.to(wanted)
    if stored.adapters is not None:
        from peft import set_peft_model_state_dict

        for key in stored.adapters.names:  # again, now that dtypes are restored: PEFT chooses its own dtypes
            weights = load_file(folder / ADAPTERS / stored.adapters.place(key) / ADAPTER_WEIGHTS)
            set_peft_model_state_dict(part, weights, adapter_name=key)
    # In another dtype, transformers computes the buffers of its models itself.
    if chosen_dtype is None or stored.kind != "transformers":
        for prefix, module in part.named_modules():
            for key in module._non_persistent_buffers_set:
                found = buffers.get(f"{prefix}.{key}".lstrip("."))
                if found is not None and key in module._buffers:
                    module._buffers[key] = found
    parameters = dict(part.named_parameters())
    trainable = stored.trainable.among(parameters)
    for key, parameter in parameters.items():
        if parameter.is_floating_point():
            parameter.requires_grad_(key in trainable)
    if stored.fixed is not None:
        part.__dict__[FIXED] = stored.fixed.among(parameters)
    return part


def _load_transformers(
    model_class: type[PreTrainedModel], stored: StoredPart, folder: Path, dtype: torch.dtype | None
) -> nn.Module:
    arguments: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update(file.get_slice(key).get_dtype() for key in file.keys())  # noqa: SIM118
    known = [_DTYPES[key] for key in sorted(found) if key in _DTYPES]
    if dtype or known:  # by default, the dtype that represents every stored weight exactly
        arguments["dtype"] = dtype or reduce(torch.promote_types, known)
    if stored.attn_implementation in _PORTABLE_ATTENTION:
        arguments["attn_implementation"] = stored.attn_implementation
    config = folder / "config.json"
    check_layer_count(str(config), parse_json(config, config.read_bytes()))
    loaded: Any = model_class.from_pretrained(folder, **arguments)
    model, report = loaded
    wrong = {reason: list(keys)[:3] for reason, keys in report.items() if keys}
    if wrong:
        raise ConfigError(
            f"The weights in {folder} do not fit {model_class.__name__}: {wrong}. "
            "They were saved from a model with other modules, or by another version of transformers."
        )
    return model


def _find_model_class(
    name: str, stored: StoredPart, folder: Path, given: ModuleSource | None, trust_remote_code: bool
) -> type[PreTrainedModel]:
    found: Any = import_trusted_class(stored.class_path) if given is None else given
    if found is None and trust_remote_code and not stored.class_path.startswith(_TRUSTED):
        references = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map", {})
        for one in references.values():
            if isinstance(one, str) and "--" not in one and _class_name(one) == _class_name(stored.class_path):
                found = get_class_from_dynamic_module(one, str(folder), local_files_only=True)
                break
    if found is None:
        raise ConfigError(
            f"{name} is a {stored.class_path}, which is neither of transformers nor of Cornstarch and is not imported "
            f"because a file names it. Pass the class: "
            f"from_pretrained(…, classes={{{name!r}: {_class_name(stored.class_path)}}})."
        )
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ConfigError(f"{name}: {found!r} is not a class of transformers models; classes[{name!r}] must be one.")
    return found


def _class_name(class_path: str) -> str:
    return class_path.rpartition(".")[2]


def import_trusted_class(class_path: str) -> Any:
    """Return a class of transformers or Cornstarch by its import path; None if it belongs to neither."""
    module_name, _, name = class_path.rpartition(".")
    if not class_path.startswith(_TRUSTED):
        return None
    if module_name.startswith("cornstarch.") and name == MultimodalProjector.__name__:
        return MultimodalProjector  # earlier versions had it in other modules
    try:
        found = getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{class_path} does not exist in the installed version ({error}). "
            "Install the version that cornstarch_model.json states under versions."
        ) from error
    # A class that the module only imports is not its own.
    return found if getattr(found, "__module__", None) == module_name else None


def _load_module(name: str, stored: StoredPart, folder: Path, given: ModuleSource | None) -> nn.Module:
    if given is None:
        raise ConfigError(
            f"{name} is your own module ({stored.class_path}), which only you can make. Pass it, or what makes it: "
            f"from_pretrained(…, classes={{{name!r}: {_class_name(stored.class_path)}(…)}})."
        )
    try:
        module: Any = given if isinstance(given, nn.Module) else given()
    except TypeError as error:
        raise ConfigError(
            f"classes[{name!r}] cannot be called without arguments ({error}). Pass the module itself, or a function."
        ) from error
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


def parse_dtype(name: object) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype = {name!r}: expected a precision of torch, such as torch.bfloat16 or 'bfloat16'.")
    return found


def _is_from_peft(module: nn.Module) -> bool:
    """Whether the module's class comes from PEFT, without importing PEFT."""
    return type(module).__module__.partition(".")[0] == "peft"


def _base_state(base: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the model under the adapters, with the names it has without them."""
    owners = dict(_base_modules(base))
    state = {}
    for name, tensor in base.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner in owners:
            state[f"{owners[owner]}.{leaf}".lstrip(".")] = tensor
    return state


def _base_modules(module: nn.Module, name: str = "", plain: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, name without adapters) of every module that is not an adapter."""
    if _is_from_peft(module):
        inner = next((key for key in _PEFT_BASES if module._modules.get(key) is not None), None)
        if inner is None:
            raise ConfigError(
                f"Base weights cannot be told from adapter weights in PEFT's {type(module).__name__}, so the model "
                "cannot be saved. Use a method that keeps the base in its layers (LoRA and its kin)."
            )
        yield from _base_modules(module.get_submodule(inner), f"{name}.{inner}".lstrip("."), plain)
        return
    yield name, plain
    for key, child in module._modules.items():  # not named_children, which skips a module's second name
        if child is not None:
            yield from _base_modules(child, f"{name}.{key}".lstrip("."), f"{plain}.{key}".lstrip("."))


def _save_adapters(model: Any, folder: Path) -> StoredAdapters:
    layers = [module for module in model.modules() if _is_from_peft(module)]
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        raise ConfigError(
            "Prompt learning (prompt, prefix and p-tuning) cannot be saved with the model, because PEFT cannot load it "
            "for training. Save the adapter by itself with its own save_pretrained."
        )
    if any(getattr(layer, "merged", None) is True for layer in layers):
        raise ConfigError("Adapters are merged into the base weights. Call unmerge_adapter() before saving.")
    if getattr(model.get_base_model(), "hf_quantizer", None) is not None:
        raise ConfigError(
            "The base under the adapters is quantised; transformers cannot save it without them. "
            "Save the adapters by themselves with their own save_pretrained."
        )
    # The base is stored completely, so PEFT does not need to look up the size of the original vocabulary.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    for path in folder.rglob(ADAPTER_CONFIG):
        # PiSSA, OLoRA and similar methods change the base weights when the adapter is created. The saved base includes
        # that change, so keep PEFT from initializing the adapter again when it is loaded.
        config = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(config.get("init_lora_weights"), str):
            config["init_lora_weights"] = True
            path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    # `is True`: on the model itself the name is a method of transformers.
    enabled = not any(getattr(layer, "disable_adapters", None) is True for layer in layers)
    return StoredAdapters(names=tuple(model.peft_config), active=tuple(model.active_adapters), enabled=enabled)


def _load_adapters(base: nn.Module, folder: Path, stored: StoredAdapters) -> Any:
    """Return the PEFT model around `base`, with all adapters trainable."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError(
            f"{folder.parent} has PEFT adapters, but peft is not installed. Run: pip install peft"
        ) from error
    first, *others = stored.names
    model: Any = PeftModel.from_pretrained(
        base, str(folder / stored.place(first)), adapter_name=first, is_trainable=True, torch_device="cpu"
    )
    for name in others:
        model.load_adapter(str(folder / stored.place(name)), adapter_name=name, is_trainable=True, torch_device="cpu")
    if len(stored.active) == 1:
        model.set_adapter(stored.active[0])
    else:
        model.base_model.set_adapter(list(stored.active))
    if not stored.enabled:
        model.base_model.disable_adapter_layers()
    return model
