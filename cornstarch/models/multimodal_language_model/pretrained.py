"""Save and load a whole model.

A folder holds `cornstarch_model.json` and one sub-folder per part: `<name>_encoder`, `<name>_projector` and
`language_model`, each of which transformers loads by itself, with PEFT adapters in `<part>/adapter`. Weights are in
safetensors; nothing is unpickled, and no file decides which code is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from os import PathLike
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cornstarch import __version__
from cornstarch.errors import ConfigError
from cornstarch.files import as_config_errors

from . import model_folder, model_part
from .encoder import ModalEncoderModule
from .import_hf.decompose import DecomposedModel, DecomposedOrigin, rebuild
from .language_model_check import LanguageModelTraits
from .modeling_multimodal_language_model import MultimodalModel
from .unwrap import find_tied_names, is_peft, strip_wrapper_names, unwrap

BUFFERS = "cornstarch_buffers.safetensors"
ORIGIN = "origin"  # the key in `classes` for the class of a model that was decomposed

Callbacks = Mapping[str, Mapping[str, Callable[..., Any]]]


def save_pretrained(
    model: MultimodalModel, folder: str | PathLike[str], state_dict: Mapping[str, Tensor] | None = None
) -> None:
    """Save a model so that `from_pretrained` restores it bit for bit, and transformers can load each part.

    The folder appears atomically. A Cornstarch model in the folder is replaced (other files in the folder stay); a
    folder with anything else in it is refused. Callbacks are functions and are not saved: pass them again to
    `from_pretrained`.

    Args:
        model: The model.
        folder: The target folder.
        state_dict: All weights of the model by name, to be saved instead of its own: gathered from shards.
    """
    target = model_folder.check_target(folder)
    parts = _collect_parts(model)
    first: dict[int, str] = {}  # one encoder may serve two modalities: such a module is stored once
    same_as = {name: first[id(part)] for name, part in parts.items() if first.setdefault(id(part), name) != name}
    states = {} if state_dict is None else _split_state(model, parts, state_dict)
    _check_savable(model, parts, same_as, gathered=state_dict is not None)
    with model_folder.replace_folder(target) as fresh:
        stored = model_folder.StoredModel(
            format=model_folder.FORMAT,
            versions={"cornstarch": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
            encoders={
                name: model_folder.StoredEncoder(
                    additional_args=tuple(encoder.additional_args),
                    attention=encoder.attention,
                    callbacks=tuple(key for key in model_folder.ENCODER_CALLBACKS if getattr(encoder, key) is not None),
                )
                for name, encoder in model.encoders.items()
            },
            parts={
                name: model_part.save_part(name, part, fresh / name, states.get(name))
                for name, part in parts.items()
                if name not in same_as
            },
            same_as=same_as,
            modality_token_ids=model.modality_token_ids,
            trains_on_placeholders=model.trains_on_placeholders,
            positions_from_mask=model.positions_from_mask,
            takes_left_padding=model.traits.takes_left_padding,
            has_llm_callback=model.preprocess_llm_callback is not None,
            origin=None if model.origin is None else asdict(model.origin),
        )
        # Outside the parts' folders, where other programs would load non-persistent buffers as weights.
        collected = {part: model_part.collect_transient_buffers(module) for part, module in parts.items()}
        buffers = {f"{part}.{name}": one for part, found in collected.items() for name, one in found.items()}
        if buffers:
            save_file(buffers, fresh / BUFFERS, metadata={"format": "pt"})
        model_folder.finish_folder(fresh, target, stored.model_dump(mode="json", exclude={"files", "sha256"}))


def _split_state(
    model: nn.Module, parts: Mapping[str, nn.Module], state_dict: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Split the whole model's weights into those of each part; names in `state_dict` may have wrappers' prefixes."""
    given = {strip_wrapper_names(name): tensor for name, tensor in state_dict.items()}
    places = {id(module): strip_wrapper_names(f"{name}.") for name, module in model.named_modules()}
    states: dict[str, dict[str, Tensor]] = {}
    for part_name, part in parts.items():
        place, bare = places[id(part)], model_part.strip_wrappers(part)
        names = [strip_wrapper_names(name) for name in bare.state_dict()]
        tied = {name: first for name, first in find_tied_names(bare).items() if place + name not in given}
        missing = [place + name for name in names if place + tied.get(name, name) not in given]
        if missing:
            raise ConfigError(f"state_dict lacks {missing[0]}, and {len(missing) - 1} more weights of {part_name}.")
        states[part_name] = {name: given[place + tied.get(name, name)] for name in names}
    return states


def _collect_parts(model: MultimodalModel) -> dict[str, nn.Module]:
    """Return the modules of a model by the names of their folders, including callbacks with weights."""
    found: dict[str, Any] = {}
    for name, encoder in model.encoders.items():
        found[f"{name}_encoder"] = encoder.module
        found[f"{name}_projector"] = encoder.projector
        found.update({f"{name}_{callback}": getattr(encoder, callback) for callback in model_folder.ENCODER_CALLBACKS})
    found[model_folder.LANGUAGE_MODEL] = model.language_model
    found[model_folder.LLM_CALLBACK] = model.preprocess_llm_callback
    return {name: part for name, part in found.items() if isinstance(part, nn.Module)}


def _check_savable(
    model: MultimodalModel, parts: Mapping[str, nn.Module], same_as: Mapping[str, str], gathered: bool
) -> None:
    """Refuse a model of which a weight or class would be lost."""
    for part_name, part in parts.items():
        shards = [name for name, module in part.named_modules() if type(module).__name__ == "FullyShardedDataParallel"]
        whole = gathered and not is_peft(part)  # adapters are saved by PEFT, from the module
        for name, tensor in [] if whole else [*part.named_parameters(), *part.named_buffers()]:
            if tensor.is_meta or type(tensor).__name__ == "DTensor":
                shards.append(f"{name}, a {type(tensor).__name__} on {tensor.device}")
        if shards:
            raise ConfigError(
                f"{part_name} cannot be saved: this process does not have all of it ({shards[0]}). "
                "Gather the weights before saving, and give them: save_pretrained(folder, state_dict=…)."
            )
    owners: dict[int, str] = {}
    separate = {name: part for name, part in parts.items() if name not in same_as}
    for part_name, part in separate.items():
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            owner = owners.setdefault(tensor.untyped_storage().data_ptr(), part_name) if tensor.numel() else part_name
            if owner != part_name:
                raise ConfigError(
                    f"{part_name}.{name} shares its memory with a weight of {owner}; two parts cannot be saved as one. "
                    "Use the same module in both places, or a copy."
                )
    covered = {id(tensor) for part in parts.values() for tensor in (*part.parameters(), *part.buffers())}
    named = [*model.named_parameters(), *model.named_buffers()]
    lost = [name for name, tensor in named if id(tensor) not in covered]
    odd = [type(encoder).__name__ for encoder in model.encoders.values() if type(encoder) is not ModalEncoderModule]
    if lost or (odd and model.origin is None):
        what = f"{lost[0]} belongs to no part" if lost else f"{odd[0]} is your own class"
        raise ConfigError(
            f"The model cannot be saved: {what}. Save it in your own class, or keep the weights in the encoder, the "
            "projector or a callback of a plain ModalEncoderModule."
        )


def from_pretrained(
    folder: str | PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | int | None = None,
    trust_remote_code: bool = False,
    callbacks: Callbacks | None = None,
    classes: Mapping[str, model_part.ModuleSource] | None = None,
    verify: bool = True,
) -> MultimodalModel:
    """Load a model saved by `save_pretrained`, in eval mode: weights, dtypes, adapters and trainability.

    Args:
        folder: The folder; nothing is downloaded.
        dtype: Load all weights in this dtype instead of the saved ones.
        device: The device of the model; the CPU by default.
        trust_remote_code: Run Python code in a part's folder (an `auto_map` in its config).
        callbacks: The callbacks that the model had, by encoder: `{"vision": {"preprocess_callback": function}}`;
            that of the language model: `{"language_model": {"preprocess_llm_callback": function}}`.
        classes: By part (the name of its folder, such as "vision_encoder"): the class of a transformers model that
            comes neither with transformers nor with Cornstarch; for your own module (a projection, an encoder that is
            no transformers model) the module to load into, or a function without arguments that builds it.
            With the key "origin": the class of the multimodal model that was decomposed.
        verify: Compare every file with its checksum first. Without it, configs may have been edited.
    """
    path = model_folder.check_source(folder)
    content = model_folder.read_description(path, verify)
    stored = model_folder.parse_description(path / model_folder.DESCRIPTION, content)
    model_folder.check_files(path, stored.files, verify)
    model_folder.check_safe(path, stored, trust_remote_code)
    chosen, callback_modules = _check_callbacks(stored, callbacks or {})
    known = [*stored.parts, *([ORIGIN] if stored.origin is not None else [])]
    for name in classes or {}:
        if name not in known:
            raise ConfigError(f"classes has {name!r}; this model has the parts {', '.join(known)}.")
    sources: dict[str, model_part.ModuleSource] = {**(classes or {}), **callback_modules}
    wanted = None if dtype is None else model_part.parse_dtype(dtype)
    frame = _rebuild_origin(stored, sources) if stored.origin is not None else None
    if frame is not None:
        # The class of a part that is a transformers model, or any other module itself.
        modules = {name: unwrap(part) for name, part in _collect_parts(frame).items() if name in stored.parts}
        kinds = {name: stored.parts[name].kind for name in modules}
        own = {name: type(one) if kinds[name] == "transformers" else one for name, one in modules.items()}
        sources = {**own, **sources}
    stored_buffers = load_file(path / BUFFERS) if (path / BUFFERS).is_file() else {}
    parts = {}
    for name, part in stored.parts.items():
        prefix = f"{name}."
        buffers = {key.removeprefix(prefix): one for key, one in stored_buffers.items() if key.startswith(prefix)}
        with as_config_errors(f"{path / name} cannot be loaded. "):
            given = sources.get(name)
            loaded = model_part.load_part(name, part, path / name, given, buffers, wanted, trust_remote_code)
        parts[name] = loaded if device is None else loaded.to(device)
    parts.update({name: parts[other] for name, other in stored.same_as.items()})
    model = _assemble(frame, stored, parts, chosen)
    model.set_modality_token_ids(stored.modality_token_ids)
    model.trains_on_placeholders = stored.trains_on_placeholders
    model.positions_from_mask = stored.positions_from_mask
    model.traits = LanguageModelTraits(takes_left_padding=stored.takes_left_padding)
    model.eval()
    return model


def _check_callbacks(
    stored: model_folder.StoredModel, callbacks: Callbacks
) -> tuple[dict[str, dict[str, Callable[..., Any]]], dict[str, nn.Module]]:
    """Return the user's callbacks by encoder, and those that are modules with saved weights by their folders' names.

    Raises `ConfigError` if a callback that the model had is missing.
    """
    needed: dict[str, tuple[str, ...]] = {name: encoder.callbacks for name, encoder in stored.encoders.items()}
    allowed: dict[str, set[str]] = {name: set(model_folder.ENCODER_CALLBACKS) for name in stored.encoders}
    allowed.setdefault(model_folder.LANGUAGE_MODEL, set()).add(model_folder.LLM_CALLBACK)
    if stored.has_llm_callback:
        needed[model_folder.LANGUAGE_MODEL] = (*needed.get(model_folder.LANGUAGE_MODEL, ()), model_folder.LLM_CALLBACK)
    for name, given in callbacks.items():
        unknown = [key for key in given if key not in allowed.get(name, ())]
        if name not in allowed or unknown:
            what = f"callbacks[{name!r}]" + (f"[{unknown[0]!r}]" if unknown else "")
            raise ConfigError(f"{what}: this model knows { ({key: sorted(names) for key, names in allowed.items()}) }.")
    absent = {name: [k for k in keys if callbacks.get(name, {}).get(k) is None] for name, keys in needed.items()}
    missing = {name: dict.fromkeys(keys, "…") for name, keys in absent.items() if keys}
    if missing:
        raise ConfigError(
            "The model was saved with callbacks, which are functions and not part of the files. "
            f"Pass them again: from_pretrained(…, callbacks={missing})."
        )
    modules = {}
    for name, given in callbacks.items():
        for key, callback in given.items():
            part = model_folder.LLM_CALLBACK if key == model_folder.LLM_CALLBACK else f"{name}_{key}"
            if part not in stored.parts:
                continue
            if not isinstance(callback, nn.Module):
                raise ConfigError(
                    f"callbacks[{name!r}][{key!r}] is a {type(callback).__name__}, but the model was saved with a "
                    f"module that has weights ({stored.parts[part].class_path}). Pass such a module."
                )
            modules[part] = callback
    return {name: dict(callbacks.get(name, {})) for name in allowed}, modules


def _rebuild_origin(
    stored: model_folder.StoredModel, sources: Mapping[str, model_part.ModuleSource]
) -> DecomposedModel:
    try:
        origin = DecomposedOrigin(**stored.origin or {})
    except TypeError as error:
        raise ConfigError(f"{model_folder.DESCRIPTION} is damaged: origin is incomplete ({error}).") from error
    model_class: Any = sources.get(ORIGIN) or model_part.import_trusted_class(origin.class_path)
    if model_class is None:
        raise ConfigError(
            f"The model was taken from a {origin.class_path}, which does not come with transformers. Pass the class: "
            f"from_pretrained(…, classes={{{ORIGIN!r}: …}})."
        )
    return rebuild(origin, model_class=model_class)


def _assemble(
    frame: DecomposedModel | None,
    stored: model_folder.StoredModel,
    parts: Mapping[str, nn.Module],
    callbacks: Mapping[str, Any],
) -> MultimodalModel:
    """Compose the loaded parts, or put them into `frame`, a decomposed model without weights."""
    language_model = parts[model_folder.LANGUAGE_MODEL]
    llm_callback = callbacks[model_folder.LANGUAGE_MODEL].get(model_folder.LLM_CALLBACK)
    if frame is None:
        model = MultimodalModel(None, language_model, llm_callback)
    else:
        if tuple(stored.encoders) != frame.encoder_names:
            raise ConfigError(f"The model has the encoders {list(stored.encoders)}, its origin {frame.encoder_names}.")
        model, frame.language_model, frame.preprocess_llm_callback = frame, language_model, llm_callback
    for name, encoder in stored.encoders.items():
        module, projector = parts[f"{name}_encoder"], parts[f"{name}_projector"]
        settings: dict[str, Any] = {key: callbacks[name].get(key) for key in model_folder.ENCODER_CALLBACKS}
        settings |= {"additional_args": list(encoder.additional_args), "attention": encoder.attention}
        if frame is None:
            # Encoders are added one by one, which skips the check of the language model: it passed when it was
            # composed, and a model with two dtypes cannot be run outside of its training loop to check it again.
            model.add_encoder(name, ModalEncoderModule(module, projector, **settings))
        else:
            for key, value in {"module": module, "projector": projector, **settings}.items():
                setattr(frame.encoders[name], key, value)
    return model
