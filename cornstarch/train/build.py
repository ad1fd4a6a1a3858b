"""From the description of a composed model to the model and its processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel, MultimodalProcessor
from cornstarch.train.config import EncoderConfig, LanguageModelConfig, ModelConfig, PartConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Where the config of several models in one keeps that of its encoder.
_ENCODER_CONFIGS = ("vision_config", "audio_config")
# The files in which transformers keeps the settings of processors, and the keys for their class.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PROCESSOR_KEYS = ("image_processor_type", "feature_extractor_type")


def build_model(config: ModelConfig, *, weights: bool = True) -> MultimodalModel:
    """Build the composed model that `config` describes: loaded, with adapters, frozen as it says.

    Args:
        config: A description with a `language_model` (and `encoders`).
        weights: False makes the parts on the meta device from their configs, for what needs their shapes only.
    """
    text = language_model_of(config)
    language_model = _adapted("model.language_model", text, _load("model.language_model", text, weights))
    model: MultimodalModel | None = None
    for name, described in config.encoders.items():
        where = f"model.encoders.{name}"
        module = _adapted(where, described, _load(where, described, weights))
        encoder = ModalEncoderModule(module, attention=described.attention)
        kind = (described.projector, described.activation)
        if model is None:  # the constructor checks the language model, once
            model = MultimodalModel({name: encoder}, language_model, None, *kind)
        else:
            model.add_encoder(name, encoder, *kind)
    if model is None:
        model = MultimodalModel({}, language_model)
    trained = {name: (e.train in ("full", "lora"), e.train != "frozen") for name, e in config.encoders.items()}
    return model.train(encoders_mode=trained, llm_mode=text.train != "frozen")


def build_processor(config: ModelConfig, model: MultimodalModel) -> MultimodalProcessor:
    """Build the processor of a composed model, and tell the model its placeholder tokens."""
    return MultimodalProcessor(
        encoder_processors={name: _item_processor(name, encoder) for name, encoder in config.encoders.items()},
        llm_tokenizer=_tokenizer(language_model_of(config)),
        model=model,
        predefined_tokens={name: e.token for name, e in config.encoders.items() if e.token is not None},
    )


def language_model_of(config: ModelConfig) -> LanguageModelConfig:
    """Return the language model of a description, if it is one of a composed model."""
    if config.language_model is None:
        raise ConfigError("model describes no `language_model`; only composed models have parts and a processor.")
    return config.language_model


# ---------------------------------------------------------------------------------------------------- parts


def _load(where: str, part: PartConfig, weights: bool) -> nn.Module:
    """Return a part's model: loaded, or made from its config with random weights (on meta: without)."""
    config = _config(where, part)
    model_class = _model_class(where, part, config)
    dtype = DTYPES[part.dtype] if part.dtype is not None else None
    try:
        if part.path is not None and weights:
            options = {"trust_remote_code": part.trust_remote_code, "use_safetensors": True}
            model = model_class.from_pretrained(part.path, dtype=dtype or "auto", **options)
        else:
            with torch.device("cpu" if weights else "meta"):
                model = _made(model_class, config, part)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    model = model.get_encoder() if isinstance(part, EncoderConfig) and config.is_encoder_decoder else model
    return model if dtype is None else model.to(dtype)


def _made(model_class: Any, config: PreTrainedConfig, part: PartConfig) -> nn.Module:
    if hasattr(model_class, "from_config"):  # an Auto class
        return model_class.from_config(config, trust_remote_code=part.trust_remote_code)
    return model_class(_encoder_config(config, model_class))


def _config(where: str, part: PartConfig) -> PreTrainedConfig:
    if part.config is not None:
        sizes = dict(part.config)
        kind = sizes.pop("model_type", None)
        if kind is None:
            raise ConfigError(f"{where}.config has no `model_type`; give the name that transformers has for it.")
        try:
            return AutoConfig.for_model(kind, **sizes)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}.config: {error}") from error
    assert part.path is not None  # PartConfig
    if part.path.startswith((".", "/")) and not Path(part.path).is_dir():
        raise ConfigError(f"{where}.path = {part.path}\n  There is no such folder.")
    try:
        return AutoConfig.from_pretrained(part.path, trust_remote_code=part.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}.path = {part.path}\n  {error}") from error


def _model_class(where: str, part: PartConfig, config: PreTrainedConfig) -> Any:
    if part.class_name is not None:
        name = part.class_name.removeprefix("transformers.")
        found = getattr(transformers, name, None)
        if found is None:
            raise ConfigError(f"{where}.class_name = {part.class_name}: transformers has no class of this name.")
        return found
    if isinstance(part, LanguageModelConfig):
        return AutoModelForCausalLM
    kind = type(_encoder_config(config))
    if kind not in MODEL_MAPPING:
        raise ConfigError(
            f"{where}: transformers does not say which class a {kind.__name__} belongs to. Give its `class_name`."
        )
    found = MODEL_MAPPING[kind]
    return found[0] if isinstance(found, tuple) else found


def _encoder_config(config: PreTrainedConfig, model_class: Any = None) -> PreTrainedConfig:
    """Return the config of the encoder in a config of several models (CLIP's text and vision, say)."""
    if model_class is not None and isinstance(config, model_class.config_class):
        return config
    inner = [getattr(config, name) for name in _ENCODER_CONFIGS if getattr(config, name, None) is not None]
    return inner[0] if len(inner) == 1 else config


def _adapted(where: str, part: PartConfig, model: nn.Module) -> nn.Module:
    """Return the model with adapters, if its description asks for them."""
    if part.train != "lora":
        return model
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"{where}.train = lora needs PEFT: pip install peft.") from error
    lora, targets = part.lora, part.lora.targets
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"{where}.lora.targets = {targets}\n  {error}") from error


# ------------------------------------------------------------------------------------------------ processors


def _tokenizer(part: LanguageModelConfig) -> PreTrainedTokenizerBase:
    name = part.tokenizer or part.path
    if name is None:
        raise ConfigError("model.language_model has no `path`: say where its tokenizer is, `tokenizer: <folder>`.")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=part.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.language_model.tokenizer = {name}\n  {error}") from error


def _item_processor(name: str, encoder: EncoderConfig) -> Any:
    """Return the image processor or feature extractor of an encoder."""
    where = f"model.encoders.{name}"
    if encoder.processor_config is not None:
        settings = dict(encoder.processor_config)
        return _processor_class(where, str(settings.pop("class_name", None)))(**settings)
    source = encoder.processor or encoder.path
    if source is None:
        raise ConfigError(f"{where} has no `path`: give `processor: <folder>` or a `processor_config`.")
    # AutoImageProcessor asks for torchvision in some versions; the class is named in the folder.
    return _processor_class(where, _stored_class(where, source)).from_pretrained(source)


def _processor_class(where: str, name: str) -> Any:
    for candidate in (name, name.removesuffix("Fast")):
        found = getattr(transformers, candidate, None)
        if found is not None:
            return found
    raise ConfigError(f"{where}: transformers has no processor {name!r}; give `processor_config.class_name`.")


def _stored_class(where: str, source: str) -> str:
    from transformers.utils import cached_file

    for file in _PROCESSOR_FILES:
        try:
            path = str(Path(source) / file) if Path(source).is_dir() else cached_file(source, file)
            content = json.loads(Path(str(path)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        inner = [content, *(value for value in content.values() if isinstance(value, dict))]
        for settings in inner:
            for key in _PROCESSOR_KEYS:
                if key in settings:
                    return str(settings[key])
    raise ConfigError(
        f"{where}: {source} has no settings of an image processor or feature extractor "
        f"({', '.join(_PROCESSOR_FILES)}). Give `processor: <folder>` or a `processor_config`."
    )
