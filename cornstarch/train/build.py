"""From the description of a composed model to the model and its processor."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from cornstarch.errors import ConfigError
from cornstarch.files import damaged_weights
from cornstarch.models.multimodal_language_model import (
    ModalEncoderModule,
    MultimodalModel,
    MultimodalProcessor,
    MultimodalProjector,
)
from cornstarch.models.multimodal_language_model.configuration_multimodal_language_model import (
    MultimodalProjectorConfig,
    encoder_width,
)
from cornstarch.models.multimodal_language_model.preprocessing.subprocessors import processor_class
from cornstarch.models.multimodal_language_model.preprocessing.vocabulary import check_tokenizer
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.models.multimodal_language_model.verify import LanguageModelTraits, check_language_model
from cornstarch.models.twin import disturb, twin_config
from cornstarch.parallel.loading import (
    is_read_in_part,
    load_cut,
    loaded_whole,
    note_in_part,
    note_whole,
    own_random_numbers,
)
from cornstarch.parallel.making import made_in_part
from cornstarch.parallel.tensor import is_cut, seen_whole
from cornstarch.train.config import EncoderConfig, LanguageModelConfig, ModelConfig, PartConfig, WholeModelConfig
from cornstarch.train.part_cut import Cuts, PartCut

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Where the config of several models in one keeps that of its encoder.
_ENCODER_CONFIGS = ("vision_config", "audio_config")
# The files in which transformers keeps the settings of processors, and the keys for their class.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PROCESSOR_KEYS = ("image_processor_type", "feature_extractor_type")


def build_model(config: ModelConfig, *, weights: bool = True, cuts: Cuts | None = None) -> MultimodalModel:
    """Build the composed model that `config` describes: loaded, with adapters, frozen as it says.

    Args:
        config: A description with a `language_model` (and `encoders`).
        weights: False makes the parts on the meta device from their configs, for what needs their shapes only.
        cuts: How parts that are stored are cut while they are read.
    """
    text, where = language_model_of(config), "model.language_model"
    cut = None if cuts is None else cuts("language_model", False)
    if cut is not None and cut.held is None and text.path is None:
        cut = None  # what has random weights is made whole, unless other stages have some of it
    traits = _small_traits(where, text) if cut is not None and config.encoders else LanguageModelTraits()
    if traits is None:
        language_model = load_part(where, text, weights=weights)
        note_whole(language_model, "there is no small model of its kind that could be checked in its place")
    else:
        language_model = load_part(where, text, weights=weights, cut=cut)
    language_model = adapted(where, text, language_model)
    model: MultimodalModel | None = None
    for name, described in config.encoders.items():
        where = f"model.encoders.{name}"
        cut = None if cuts is None else cuts(name, True)
        module = adapted(where, described, load_part(where, described, weights=weights, cut=cut))
        encoder = ModalEncoderModule(module, attention=described.attention)
        kind = (described.projector, described.activation)
        if cut is not None and cut.held is not None:
            encoder.projector = _projector(module, language_model, *kind)
        if model is None:  # the constructor checks the language model, once
            model = MultimodalModel({name: encoder}, language_model, None, *kind)
        else:
            model.add_encoder(name, encoder, *kind)
    if model is None:
        model = MultimodalModel({}, language_model)
    if traits is not None and (is_cut(language_model) or is_read_in_part(language_model)):
        model.traits = traits
    trained = {name: (e.train in ("full", "lora"), e.train != "frozen") for name, e in config.encoders.items()}
    return model.train(encoders_mode=trained, llm_mode=text.train != "frozen")


def _projector(module: nn.Module, language_model: nn.Module, kind: str, activation: str) -> MultimodalProjector | None:
    """Return a new projector, with memory although the parts beside it may have none; None if its width is unknown."""
    configs = [getattr(unwrap(part), "config", None) for part in (module, language_model)]
    width = encoder_width(configs[0])
    table = language_model.get_input_embeddings().weight  # type: ignore[operator]
    if width is None:
        return None
    config = MultimodalProjectorConfig(
        encoder_config=configs[0],
        text_config=configs[1],
        projection_type=kind,
        activation=activation,
        in_features=width,
        out_features=table.shape[1],
    )
    projector = MultimodalProjector(config)
    nn.Module.to(projector, dtype=table.dtype)
    return projector


def build_processor(config: ModelConfig, model: MultimodalModel) -> MultimodalProcessor:
    """Build the processor of a composed model, and tell the model its placeholder tokens."""
    processors = {name: item_processor(f"model.encoders.{name}", e) for name, e in config.encoders.items()}
    with _encoders_whole(config, model):
        return MultimodalProcessor(
            encoder_processors=processors,
            llm_tokenizer=tokenizer_of("model.language_model", language_model_of(config)),
            model=model,
            predefined_tokens={name: e.token for name, e in config.encoders.items() if e.token is not None},
        )


@contextmanager
def _encoders_whole(config: ModelConfig, model: MultimodalModel) -> Iterator[None]:
    """Show a processor encoders that are cut as they would be whole: it runs copies of them without weights."""
    cut = {name: encoder.module for name, encoder in model.encoders.items() if is_cut(encoder.module)}
    for name, module in cut.items():
        skeleton = load_part(f"model.encoders.{name}", config.encoders[name], weights=False)
        for key, buffer in unwrap(module).named_buffers():  # positions and the like have numbers
            owner, _, leaf = key.rpartition(".")
            skeleton.get_submodule(owner)._buffers[leaf] = buffer
        model.encoders[name].module = skeleton
    try:
        yield
    finally:
        for name, module in cut.items():
            model.encoders[name].module = module


def _small_traits(where: str, part: LanguageModelConfig) -> LanguageModelTraits | None:
    """Return what a tiny twin of a language model is like; the model itself, cut, cannot be run yet. None: no twin."""
    config = part_config(where, part)
    try:
        with torch.random.fork_rng(devices=[]):
            twin = _made(_model_class(where, part, config, None), twin_config(config), part)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return None
    disturb(twin)
    return check_language_model(twin)


def language_model_of(config: ModelConfig) -> LanguageModelConfig:
    """Return the language model of a description, if it is one of a composed model."""
    if config.language_model is None:
        raise ConfigError("model describes no `language_model`; only composed models have parts and a processor.")
    return config.language_model


# ---------------------------------------------------------------------------------------------------- parts


def load_part(
    where: str,
    part: PartConfig,
    *,
    config: PreTrainedConfig | None = None,
    auto_class: Any = None,
    weights: bool = True,
    new_head: bool = False,
    cut: PartCut | None = None,
) -> Any:
    """Return a part's model: loaded, or made from its config with random weights.

    Args:
        where: The part's place in the description, for messages.
        part: The part.
        config: Its config, where that is not simply the one it is stored with.
        auto_class: The Auto class of transformers that makes it. Default: the language model's or encoder's.
        weights: False makes it on the meta device.
        new_head: Weights whose shape the config has changed are made anew.
        cut: What of it this process has: of a part that is stored it reads just that.
    """
    stored_config = config or part_config(where, part)
    model_class = _model_class(where, part, stored_config, auto_class)
    dtype = DTYPES[part.dtype] if part.dtype is not None else None
    try:
        if part.path is not None and weights:
            model = _stored(model_class, part, config, new_head, cut)
        else:
            with torch.device("cpu" if weights else "meta"):
                make = partial(_made, model_class, stored_config, part)
                if weights and cut is not None and cut.held is not None:
                    model = made_in_part(make, partial(cut.names, part))
                else:
                    model = make()
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from error
    except SafetensorError as error:
        raise ConfigError(f"{where}.path = {part.path}\n  {damaged_weights(Path(str(part.path))) or error}") from error
    except (OSError, ValueError, RuntimeError) as error:
        if "Unrecognized configuration class" in str(error):  # followed by the names of all models there are
            name = getattr(model_class, "__name__", model_class)
            raise ConfigError(
                f"{where}: {name} of transformers knows no {stored_config.model_type!r} model."
            ) from error
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    if isinstance(part, EncoderConfig) and stored_config.is_encoder_decoder:
        whole, model = model, model.get_encoder()
        note_whole(model, loaded_whole(whole))
        if is_read_in_part(whole):
            note_in_part(model)
    return model if dtype is None else model.to(dtype)


NEW_WEIGHTS = "cornstarch_new_weights"
"""The attribute of a loaded model that names the weights that its folder did not have."""


def _stored(
    model_class: Any, part: PartConfig, config: PreTrainedConfig | None, new_head: bool, cut: PartCut | None
) -> Any:
    """Return the model of a folder or of the hub."""
    options: dict[str, Any] = {
        "dtype": DTYPES[part.dtype] if part.dtype is not None else "auto",
        "trust_remote_code": part.trust_remote_code,
        "use_safetensors": True,
        "ignore_mismatched_sizes": new_head,
        "output_loading_info": True,
        **({} if config is None else {"config": config}),
    }
    model, told = _read(model_class, part, cut, options)
    missing = told["missing_keys"]
    if missing and all(name in missing for name, _ in model.named_parameters()):
        # The tower of a whole model is stored under the name that it has there.
        prefix = _stored_prefix(model, told["unexpected_keys"])
        if prefix is None:
            raise ConfigError(
                f"{part.path} has none of the weights of {type(model).__name__}; among others it has "
                f"{', '.join(sorted(told['unexpected_keys'])[:3])}. Give the folder of the part itself."
            )
        model, told = _read(model_class, part, cut, {**options, "key_mapping": {f"^{re.escape(prefix)}": ""}})
    mismatched = [entry if isinstance(entry, str) else entry[0] for entry in told["mismatched_keys"]]
    setattr(model, NEW_WEIGHTS, frozenset([*told["missing_keys"], *mismatched]))
    return model


def _read(model_class: Any, part: PartConfig, cut: PartCut | None, options: Mapping[str, Any]) -> Any:
    """Return the model, and what transformers tells about its loading."""
    is_checked_later = part.train == "lora" and cut is not None and cut.sequence
    if cut is None or is_checked_later:
        with own_random_numbers():  # as for what is read in part
            model, told = model_class.from_pretrained(part.path, **options)
        if is_checked_later:
            note_whole(model, "whether its tokens can be cut depends on its adapters")
        return model, told
    held = None if cut.held is None else partial(cut.names, part)
    return load_cut(model_class, str(part.path), partial(cut.cut, part), held=held, **options)


def _stored_prefix(model: nn.Module, stored: Collection[str]) -> str | None:
    """Return what stands before the names of all parameters of a model where they are stored; None if nothing does."""
    names = [name for name, _ in model.named_parameters()]
    prefixes = sorted(key.removesuffix(names[0]) for key in stored if key.endswith(f".{names[0]}"))
    return next((prefix for prefix in prefixes if all(f"{prefix}{name}" in stored for name in names)), None)


def make_part(where: str, part: PartConfig, config: PreTrainedConfig) -> Any:
    """Return a model of a part's class with another config and random weights, whole: an encoder with its decoder."""
    auto_class = None
    if isinstance(part, WholeModelConfig) and part.class_name is None:
        auto_class = getattr(transformers, (config.architectures or [""])[0])
    return _made(_model_class(where, part, config, auto_class), config, part)


def _made(model_class: Any, config: PreTrainedConfig, part: PartConfig) -> nn.Module:
    if hasattr(model_class, "from_config"):  # an Auto class
        return model_class.from_config(config, trust_remote_code=part.trust_remote_code)
    return model_class(_encoder_config(config, model_class))


def part_config(where: str, part: PartConfig) -> PreTrainedConfig:
    """Return a part's config: the one it is stored with, or one of the sizes that are given."""
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


def _model_class(where: str, part: PartConfig, config: PreTrainedConfig, auto_class: Any) -> Any:
    if part.class_name is not None:
        name = part.class_name.removeprefix("transformers.")
        found = getattr(transformers, name, None)
        if found is None:  # towers of whole models are not exported
            found = next((kind for kind in _own_classes(_encoder_config(config)) if kind.__name__ == name), None)
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
    classes = _own_classes(inner)
    if len(classes) != 1:
        listed = " or ".join(kind.__name__ for kind in classes)
        raise ConfigError(
            f"{where}: transformers does not say which class a {type(inner).__name__} belongs to. Give its "
            f"`class_name`{f': {listed}' if listed else ''}."
        )
    return classes[0]


def _own_classes(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    """Return the models that are written for a config, without those that others are derived from.

    The towers of whole models, Qwen2-VL's for images, say, are in none of transformers' lists.
    """
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
    """Return the config of the encoder in a config of several models (CLIP's text and vision, say)."""
    if model_class is not None and isinstance(config, model_class.config_class):
        return config
    inner = [getattr(config, name) for name in _ENCODER_CONFIGS if getattr(config, name, None) is not None]
    return inner[0] if len(inner) == 1 else config


def adapted(where: str, part: PartConfig, model: nn.Module, trained_whole: Sequence[str] = ()) -> nn.Module:
    """Return the model with adapters, if its description asks for them.

    Weights that were not stored are trained themselves: there is nothing to adapt.

    Args:
        where: The part's place in the description, for messages.
        part: The part.
        model: Its model.
        trained_whole: Names of further modules that are trained themselves.
    """
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
        with seen_whole(model):
            wrapped = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"{where}.lora.targets = {targets}\n  {error}") from error
    for parameter in new.values():
        parameter.requires_grad_(True)
    return wrapped


# ------------------------------------------------------------------------------------------------ processors


def tokenizer_of(where: str, part: LanguageModelConfig | WholeModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, if it can encode text."""
    name = part.tokenizer or part.path
    if name is None:
        raise ConfigError(f"{where} has no `path`: say where its tokenizer is, `tokenizer: <folder>`.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=part.trust_remote_code)
        check_tokenizer(tokenizer)
        return tokenizer
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}.tokenizer = {name}\n  {error}") from error


def item_processor(where: str, part: EncoderConfig | WholeModelConfig) -> Any:
    """Return the image processor or feature extractor of a model."""
    if part.processor_config is not None:
        settings = dict(part.processor_config)
        kind = _processor_class(where, str(settings.pop("class_name", None)))
        try:
            return kind(**settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}.processor_config: {error}") from error
    source = part.processor or part.path
    if source is None:
        raise ConfigError(f"{where} has no `path`: give `processor: <folder>` or a `processor_config`.")
    # AutoImageProcessor asks for torchvision in some versions; the class is named in the folder.
    return _processor_class(where, _stored_class(where, source)).from_pretrained(source)


def _processor_class(where: str, name: str) -> Any:
    for candidate in (name, name.removesuffix("Fast")):
        found = processor_class(candidate)
        if found is not None:
            return found
    raise ConfigError(
        f"{where}: transformers and Cornstarch have no processor {name!r}; give `processor_config.class_name`."
    )


def _stored_class(where: str, source: str) -> str:
    stored = _stored_classes(source)
    if not stored:
        raise ConfigError(
            f"{where}: {source} has no settings of an image processor or feature extractor "
            f"({', '.join(_PROCESSOR_FILES)}). Give `processor: <folder>` or a `processor_config`."
        )
    return next(iter(stored.values()))


def _stored_classes(source: str) -> dict[str, str]:
    """Return the names of the processors' classes in a folder, by the key that names them."""
    from transformers.utils import cached_file

    found: dict[str, str] = {}
    for file in _PROCESSOR_FILES:
        try:
            path = str(Path(source) / file) if Path(source).is_dir() else cached_file(source, file)
            content = json.loads(Path(str(path)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for settings in [content, *(value for value in content.values() if isinstance(value, dict))]:
            found = {**{key: str(settings[key]) for key in _PROCESSOR_KEYS if key in settings}, **found}
    return found
