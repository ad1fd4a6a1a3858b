"""PEFT models on disk: adapters as PEFT saves them, beside base weights that know nothing of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.storage.format import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    StoredAdapters,
)

# Where PEFT's layers keep what they stand for: an adapted layer, a layer trained whole, an embedding with new rows.
_BASES = ("base_layer", "original_module", "token_adapter")


def is_from_peft(module: nn.Module) -> bool:
    """Whether PEFT put this module there, without importing PEFT."""
    return type(module).__module__.partition(".")[0] == "peft"


def base_state(base: nn.Module) -> dict[str, Tensor]:
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
    if is_from_peft(module):
        inner = next((key for key in _BASES if module._modules.get(key) is not None), None)
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


def save_adapters(model: Any, folder: Path) -> StoredAdapters:
    """Write all adapters of a PEFT model as PEFT does."""
    layers = [module for module in model.modules() if is_from_peft(module)]
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
    # The base is stored whole, so PEFT need not look up how large the original vocabulary was.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    for path in folder.rglob(ADAPTER_CONFIG):
        _without_initialisation(path)
    # `is True`: on the model itself the name is a method of transformers.
    enabled = not any(getattr(layer, "disable_adapters", None) is True for layer in layers)
    return StoredAdapters(names=tuple(model.peft_config), active=tuple(model.active_adapters), enabled=enabled)


def _without_initialisation(path: Path) -> None:
    """Keep PEFT from initialising the adapter again when it is loaded.

    PiSSA, OLoRA and their like change the base weights when the adapter is made; the saved base has that already.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(config.get("init_lora_weights"), str):
        config["init_lora_weights"] = True
        path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def load_adapters(base: nn.Module, folder: Path, stored: StoredAdapters) -> Any:
    """Return the PEFT model around `base`, all adapters trainable."""
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


def reload_adapters(model: Any, folder: Path, stored: StoredAdapters) -> None:
    """Read the adapters' weights once more, after the model got its precisions: PEFT loads in its own choice."""
    from peft import set_peft_model_state_dict

    for name in stored.names:
        set_peft_model_state_dict(model, load_file(folder / stored.place(name) / ADAPTER_WEIGHTS), adapter_name=name)
