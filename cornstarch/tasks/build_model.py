"""Builds models from their configs: composed models, and single parts read whole or in shards."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from cornstarch.config import EncoderConfig, LanguageModelConfig, ModelConfig, PartConfig, RunConfig, WholeModelConfig
from cornstarch.errors import ConfigError
from cornstarch.files import as_config_errors, check_layer_count, check_weight_files, find_damaged_weights
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel, MultimodalProjector
from cornstarch.models.multimodal_language_model import configuration_multimodal_language_model as configs
from cornstarch.models.multimodal_language_model.language_model_check import LanguageModelTraits, check_language_model
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.models.twin import add_noise, build_twin_config
from cornstarch.parallel import loading
from cornstarch.parallel.device import DTYPES
from cornstarch.parallel.loading import build_partial_model
from cornstarch.parallel.passes import TensorSharder
from cornstarch.parallel.tensor import is_sharded, use_full_shapes

WHERE = "model.whole"
NEW_WEIGHTS = "cornstarch_new_weights"
"""The attribute of a loaded model that names the weights that its folder did not have."""
# Where a config of several models has the one of its encoder.
_ENCODER_CONFIGS = ("vision_config", "audio_config")


@dataclass(frozen=True)
class PartShard:
    tensors: TensorSharder | None = None  # how matrices are sharded over ranks
    parameters: frozenset[str] | None = None
    """The names of the parameters of this rank's stages, without adapters. None: all."""

    def apply(self, part: PartConfig, model: Any) -> None:
        """Shard the matrices of a part's model; the decoder of an encoder-decoder is dropped from an encoder part."""
        if _is_encoder_of_pair(part, model):
            encoder = model.get_encoder()
            within = set(encoder.modules())
            for module in model.modules():
                if not within.intersection(module.modules()):
                    loading.drop_parameters(module)
            model = encoder
        if self.tensors is not None:
            self.tensors(model)

    def get_names(self, part: PartConfig, model: Any) -> Collection[str]:
        """Return the names of the parameters in a part's model as it is stored."""
        assert self.parameters is not None
        if not _is_encoder_of_pair(part, model):
            return self.parameters
        encoder = model.get_encoder()
        prefix = next(name for name, module in model.named_modules() if module is encoder)
        return {f"{prefix}.{name}" for name in self.parameters}


def _is_encoder_of_pair(part: PartConfig, model: Any) -> bool:
    return isinstance(part, EncoderConfig) and model.config.is_encoder_decoder


GetPartShard = Callable[[str, bool], PartShard | None]
"""Returns this rank's shard of a part, by the part's name and whether it is an encoder. None: the whole part."""


def build_model(config: ModelConfig, *, weights: bool = True, get_shard: GetPartShard | None = None) -> MultimodalModel:
    """Build a composed model: loaded, with adapters and frozen parts; without `weights`, on the meta device."""
    text, where = get_language_model(config), "model.language_model"
    shard = None if get_shard is None else get_shard("language_model", False)
    if shard is not None and shard.parameters is None and text.path is None:
        shard = None  # random weights are made whole, unless some of them belong to other stages
    traits = _check_twin(where, text) if shard is not None and config.encoders else LanguageModelTraits()
    if traits is None:
        language_model = load_part(where, text, weights=weights)
        loading.record_full_read(
            language_model, "there is no small model of its kind that could be checked in its place"
        )
    else:
        language_model = load_part(where, text, weights=weights, shard=shard)
    language_model = add_adapters(where, text, language_model)
    model: MultimodalModel | None = None
    for name, described in config.encoders.items():
        where = f"model.encoders.{name}"
        shard = None if get_shard is None else get_shard(name, True)
        module = add_adapters(where, described, load_part(where, described, weights=weights, shard=shard))
        encoder = ModalEncoderModule(module, attention=described.attention)
        kind = (described.projector, described.activation)
        if shard is not None and shard.parameters is not None:
            encoder.projector = _build_projector(module, language_model, *kind)
        if model is None:  # the constructor checks the language model, once
            model = MultimodalModel({name: encoder}, language_model, None, *kind)
        else:
            model.add_encoder(name, encoder, *kind)
    if model is None:
        model = MultimodalModel({}, language_model)
    if traits is not None and (is_sharded(language_model) or loading.is_partial(language_model)):
        model.traits = traits
    trained = {name: (e.train in ("full", "lora"), e.train != "frozen") for name, e in config.encoders.items()}
    return model.train(encoders_mode=trained, llm_mode=text.train != "frozen")


def _build_projector(
    module: nn.Module, language_model: nn.Module, kind: str, activation: str
) -> MultimodalProjector | None:
    """Return a new projector with real memory, also between parts without it; None if its width is unknown."""
    parts = [getattr(unwrap(part), "config", None) for part in (module, language_model)]
    width = configs.get_encoder_width(parts[0])
    table = language_model.get_input_embeddings().weight  # type: ignore[operator]
    if width is None:
        return None
    config = configs.MultimodalProjectorConfig(
        encoder_config=parts[0],
        text_config=parts[1],
        projection_type=kind,
        activation=activation,
        in_features=width,
        out_features=table.shape[1],
    )
    projector = MultimodalProjector(config)
    nn.Module.to(projector, dtype=table.dtype)
    return projector


def _check_twin(where: str, part: LanguageModelConfig) -> LanguageModelTraits | None:
    """Return the traits of a tiny twin of a language model, since its shards cannot run yet; None if it has no twin."""
    config = load_part_config(where, part)
    try:
        with torch.random.fork_rng(devices=[]):
            twin = _construct(_get_model_class(where, part, config, None), build_twin_config(config), part)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return None
    add_noise(twin)
    return check_language_model(twin)


def get_language_model(config: ModelConfig) -> LanguageModelConfig:
    if config.language_model is None:
        raise ConfigError("model describes no `language_model`; only composed models have parts and a processor.")
    return config.language_model


def load_part(
    where: str,
    part: PartConfig,
    *,
    config: PreTrainedConfig | None = None,
    auto_class: Any = None,
    weights: bool = True,
    new_head: bool = False,
    shard: PartShard | None = None,
) -> Any:
    """Return a part's model: loaded, or with random weights from its config; without `weights`, on the meta device.

    `where` is the part's place in the run's config. With `new_head`, weights whose shape `config` has changed are new.
    """
    stored_config = config or load_part_config(where, part)
    model_class = _get_model_class(where, part, stored_config, auto_class)
    try:
        if part.path is not None and weights:
            check_weight_files(Path(part.path))
            model = _load_stored(model_class, part, config, new_head, shard)
        else:
            with torch.device("cpu" if weights else "meta"):
                construct = partial(_construct, model_class, stored_config, part)
                if weights and shard is not None and shard.parameters is not None:
                    model = build_partial_model(construct, partial(shard.get_names, part))
                else:
                    model = construct()
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from error
    except SafetensorError as error:
        reason = find_damaged_weights(Path(str(part.path))) or error
        raise ConfigError(f"{where}.path = {part.path}\n  {reason}") from error
    except MemoryError:
        raise
    except Exception as error:  # also by code of transformers that has met values of another kind
        if "Unrecognized configuration class" in str(error):  # the message goes on with the names of all models
            name, kind = getattr(model_class, "__name__", model_class), stored_config.model_type
            raise ConfigError(f"{where}: {name} of transformers knows no {kind!r} model.") from error
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    if isinstance(part, EncoderConfig) and stored_config.is_encoder_decoder:
        whole, model = model, model.get_encoder()
        loading.record_full_read(model, loading.full_read_reason(whole))
        if loading.is_partial(whole):
            loading.mark_partial(model)
    return model if part.dtype is None else model.to(DTYPES[part.dtype])


def _load_stored(
    model_class: Any, part: PartConfig, config: PreTrainedConfig | None, new_head: bool, shard: PartShard | None
) -> Any:
    options: dict[str, Any] = {
        "dtype": DTYPES[part.dtype] if part.dtype is not None else "auto",
        "trust_remote_code": part.may_run_code(),
        "use_safetensors": True,
        "ignore_mismatched_sizes": new_head,
        "output_loading_info": True,
        **({} if config is None else {"config": config}),
    }
    model, info = _read(model_class, part, shard, options)
    missing = info["missing_keys"]
    if missing and all(name in missing for name, _ in model.named_parameters()):
        # The vision tower of a whole model is stored under the name that it has there.
        names, stored = [name for name, _ in model.named_parameters()], info["unexpected_keys"]
        prefixes = sorted(key.removesuffix(names[0]) for key in stored if key.endswith(f".{names[0]}"))
        prefix = next((one for one in prefixes if all(f"{one}{name}" in stored for name in names)), None)
        if prefix is None:
            raise ConfigError(
                f"{part.path} has none of the weights of {type(model).__name__}; among others it has "
                f"{', '.join(sorted(stored)[:3])}. Give the folder of the part itself."
            )
        model, info = _read(model_class, part, shard, {**options, "key_mapping": {f"^{re.escape(prefix)}": ""}})
    mismatched = [entry if isinstance(entry, str) else entry[0] for entry in info["mismatched_keys"]]
    setattr(model, NEW_WEIGHTS, frozenset([*info["missing_keys"], *mismatched]))
    return model


def _read(model_class: Any, part: PartConfig, shard: PartShard | None, options: Mapping[str, Any]) -> Any:
    """Return the model, and the loading info of transformers."""
    is_cut = shard is not None and shard.tensors is not None and shard.tensors.sequence  # along tokens
    is_checked_later = part.train == "lora" and is_cut
    if shard is None or is_checked_later:
        with loading.isolate_random_state():  # the same random numbers as when the part is read in shards
            model, info = model_class.from_pretrained(part.path, **options)
        if is_checked_later:
            loading.record_full_read(model, "whether its tokens can be cut depends on its adapters")
        return model, info
    held = None if shard.parameters is None else partial(shard.get_names, part)
    return loading.load_partial(model_class, str(part.path), partial(shard.apply, part), held=held, **options)


def build_part(where: str, part: PartConfig, config: PreTrainedConfig) -> Any:
    """Return a model of a part's class with another config and random weights, including the decoder of an encoder."""
    auto_class = None
    if isinstance(part, WholeModelConfig) and part.class_name is None:
        auto_class = getattr(transformers, (config.architectures or [""])[0])
    return _construct(_get_model_class(where, part, config, auto_class), config, part)


def _construct(model_class: Any, config: PreTrainedConfig, part: PartConfig) -> nn.Module:
    if hasattr(model_class, "from_config"):  # an Auto class
        return model_class.from_config(config, trust_remote_code=part.may_run_code())
    return model_class(_encoder_config(config, model_class))


def load_part_config(where: str, part: PartConfig) -> PreTrainedConfig:
    """Return the transformers config of a part: the stored one, or one of the given sizes."""
    if part.config is not None:
        sizes = dict(part.config)
        kind = sizes.pop("model_type", None)
        if kind is None:
            raise ConfigError(f"{where}.config has no `model_type`; give the name that transformers has for it.")
        check_layer_count(f"{where}.config", sizes)
        with as_config_errors(f"{where}.config: "):
            return AutoConfig.for_model(kind, **sizes)
    assert part.path is not None  # PartConfig
    if part.path.startswith((".", "/")) and not Path(part.path).is_dir():
        raise ConfigError(f"{where}.path = {part.path}\n  There is no such folder.")
    with as_config_errors(f"{where}.path = {part.path}\n  "):
        config: PreTrainedConfig = AutoConfig.from_pretrained(part.path, trust_remote_code=part.may_run_code())
        check_layer_count(part.path, config.to_dict())
    return config


def _get_model_class(where: str, part: PartConfig, config: PreTrainedConfig, auto_class: Any) -> Any:
    if part.class_name is not None:
        name = part.class_name.removeprefix("transformers.")
        found = getattr(transformers, name, None)
        if found is None:  # transformers does not export the towers of whole models
            found = next((kind for kind in _list_classes(_encoder_config(config)) if kind.__name__ == name), None)
        if found is None:
            raise ConfigError(f"{where}.class_name = {part.class_name}: transformers has no class of this name.")
        return found
    if auto_class is not None:
        return auto_class
    if isinstance(part, LanguageModelConfig):
        return AutoModelForCausalLM
    inner = _encoder_config(config)
    if type(inner) in MODEL_MAPPING:
        found = MODEL_MAPPING[type(inner)]
        return found[0] if isinstance(found, tuple) else found
    classes = _list_classes(inner)
    if len(classes) != 1:
        listed = " or ".join(kind.__name__ for kind in classes)
        raise ConfigError(
            f"{where}: transformers does not say which class a {type(inner).__name__} belongs to. Give its "
            f"`class_name`{f': {listed}' if listed else ''}."
        )
    return classes[0]


def _list_classes(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    """Return the classes for a config that have no subclass: vision towers are in none of transformers' lists."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        module = import_module(name)
    except ImportError:
        return []
    kinds = {kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, PreTrainedModel)}
    own = [kind for kind in kinds if kind.__module__ == name and kind.config_class is type(config)]
    bases = {base for kind in own for base in kind.__mro__[1:]}
    return sorted((kind for kind in own if kind not in bases), key=lambda kind: kind.__name__)


def _encoder_config(config: PreTrainedConfig, model_class: Any = None) -> PreTrainedConfig:
    """Return the encoder's config in a config of several models, such as CLIP's text and vision."""
    if model_class is not None and isinstance(config, model_class.config_class):
        return config
    inner = [getattr(config, name) for name in _ENCODER_CONFIGS if getattr(config, name, None) is not None]
    return inner[0] if len(inner) == 1 else config


def add_adapters(where: str, part: PartConfig, model: nn.Module, trained_whole: Sequence[str] = ()) -> nn.Module:
    """Return the model with LoRA adapters, if configured; new weights and `trained_whole` are trained in full."""
    if part.train != "lora":
        return model
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"{where}.train = lora needs PEFT: pip install peft.") from error
    own = {id(p) for name in trained_whole for p in model.get_submodule(name).parameters()}
    new = {name: p for name, p in model.named_parameters() if id(p) in own or name in getattr(model, NEW_WEIGHTS, ())}
    lora, targets = part.lora, part.lora.targets
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        # Not `modules_to_save`: PEFT would keep the untrained weights beside the trained ones.
        exclude_modules="|".join(sorted({re.escape(name.rpartition(".")[0]) for name in new})) or None,
    )
    try:
        with use_full_shapes(model):
            wrapped = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"{where}.lora.targets = {targets}\n  {error}") from error
    for parameter in new.values():
        parameter.requires_grad_(True)
    return wrapped


def get_whole_model(config: RunConfig) -> WholeModelConfig:
    if config.model.whole is None:
        raise ConfigError("model describes no `whole` model.")
    return config.model.whole


def load_whole_config(config: RunConfig) -> PreTrainedConfig:
    return load_part_config(WHERE, get_whole_model(config))


def load_whole_model(
    run: RunConfig, model_config: PreTrainedConfig, auto_class: Any, new_head: bool = False, trains_head: bool = False
) -> nn.Module:
    """Return the whole model of a run, with adapters or frozen; with `trains_head`, its head is trained in full."""
    part = get_whole_model(run)
    model = load_part(WHERE, part, config=model_config, auto_class=auto_class, new_head=new_head)
    if part.train == "frozen":
        return model.requires_grad_(False)
    body = getattr(model, "base_model_prefix", "")
    head = [name for name, child in model.named_children() if name != body and any(True for _ in child.parameters())]
    return add_adapters(WHERE, part, model, head if trains_head else ())
