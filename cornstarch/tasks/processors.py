"""Builds tokenizers, image processors and feature extractors, and the processor of a composed model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from cornstarch.config import EncoderConfig, LanguageModelConfig, ModelConfig, WholeModelConfig
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel, MultimodalProcessor
from cornstarch.models.multimodal_language_model.preprocessing.modality_processors import find_processor_class
from cornstarch.models.multimodal_language_model.preprocessing.tokenization import check_tokenizer
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.tensor import is_sharded
from cornstarch.tasks.build_model import get_language_model, load_part

# The files in which transformers stores the settings of processors, and the keys for their class.
_FILES = ("preprocessor_config.json", "processor_config.json")
_CLASS_KEYS = ("image_processor_type", "feature_extractor_type")


def build_processor(config: ModelConfig, model: MultimodalModel) -> MultimodalProcessor:
    """Build the processor of a composed model, and set the model's placeholder tokens."""
    processors = {name: load_item_processor(f"model.encoders.{name}", e) for name, e in config.encoders.items()}
    with _use_whole_encoders(config, model):
        return MultimodalProcessor(
            encoder_processors=processors,
            llm_tokenizer=load_tokenizer("model.language_model", get_language_model(config)),
            model=model,
            predefined_tokens={name: e.token for name, e in config.encoders.items() if e.token is not None},
        )


@contextmanager
def _use_whole_encoders(config: ModelConfig, model: MultimodalModel) -> Iterator[None]:
    """Replace sharded encoders by whole ones without weights: the processor runs them to learn their output sizes."""
    sharded = {name: encoder.module for name, encoder in model.encoders.items() if is_sharded(encoder.module)}
    for name, module in sharded.items():
        skeleton = load_part(f"model.encoders.{name}", config.encoders[name], weights=False)
        for key, buffer in unwrap(module).named_buffers():  # positions and the like need real values
            owner, _, leaf = key.rpartition(".")
            skeleton.get_submodule(owner)._buffers[leaf] = buffer
        model.encoders[name].module = skeleton
    try:
        yield
    finally:
        for name, module in sharded.items():
            model.encoders[name].module = module


def load_tokenizer(where: str, part: LanguageModelConfig | WholeModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, after checking that it can encode text."""
    name = part.tokenizer or part.path
    if name is None:
        raise ConfigError(f"{where} has no `path`: say where its tokenizer is, `tokenizer: <folder>`.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=part.trust_remote_code)
        check_tokenizer(tokenizer)
        return tokenizer
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}.tokenizer = {name}\n  {error}") from error


def load_item_processor(where: str, part: EncoderConfig | WholeModelConfig) -> Any:
    """Return the image processor or feature extractor of a model."""
    if part.processor_config is not None:
        settings = dict(part.processor_config)
        kind = _get_processor_class(where, str(settings.pop("class_name", None)))
        try:
            return kind(**settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}.processor_config: {error}") from error
    source = part.processor or part.path
    if source is None:
        raise ConfigError(f"{where} has no `path`: give `processor: <folder>` or a `processor_config`.")
    # Not AutoImageProcessor: some versions of it require torchvision.
    return _get_processor_class(where, _read_class_name(where, source)).from_pretrained(source)


def _get_processor_class(where: str, name: str) -> Any:
    for candidate in (name, name.removesuffix("Fast")):
        found = find_processor_class(candidate)
        if found is not None:
            return found
    raise ConfigError(
        f"{where}: transformers and Cornstarch have no processor {name!r}; give `processor_config.class_name`."
    )


def _read_class_name(where: str, source: str) -> str:
    """Return the class of the processor that a folder, or a model on the hub, is stored with."""
    found: dict[str, str] = {}
    for file in _FILES:
        try:
            path = str(Path(source) / file) if Path(source).is_dir() else cached_file(source, file)
            content = json.loads(Path(str(path)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for settings in [content, *(value for value in content.values() if isinstance(value, dict))]:
            found = {**{key: str(settings[key]) for key in _CLASS_KEYS if key in settings}, **found}
    if not found:
        raise ConfigError(
            f"{where}: {source} has no settings of an image processor or feature extractor ({', '.join(_FILES)}). Give "
            "`processor: <folder>` or a `processor_config`."
        )
    return next(iter(found.values()))
