"""The processors of single modalities: how they are called, and how they are saved and loaded."""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.preprocessing.precomputed import PrecomputedFeatureExtractor

# By kind of item: the names of a processor's argument, and of a part of a chat message.
_NAMES: dict[str, tuple[str, ...]] = {
    "images": ("images", "image", "image_url"),
    "audio": ("audio", "raw_speech", "raw_audio", "audio_url", "input_audio"),
    "videos": ("videos", "video", "video_url"),
}
# Dimensions of one item given as an array; an array with more dimensions is a batch of items.
_DIMENSIONS = {"images": 3, "audio": 1, "videos": 4}


def collect_processors(named: Mapping[str, Any] | None, image_processor: Any, feature_extractor: Any) -> dict[str, Any]:
    """Return the processors by modality; a class is built with its defaults."""
    processors = dict(named or {})
    for name, argument, processor in (
        ("vision", "image_processor", image_processor),
        ("audio", "feature_extractor", feature_extractor),
    ):
        if processor is not None and name in processors:
            raise ConfigError(f"{argument} and encoder_processors[{name!r}] are two processors of one modality.")
        if processor is not None:
            processors[name] = processor
    built = {name: given() if isinstance(given, type) else given for name, given in processors.items()}
    for name, processor in built.items():
        if not callable(processor):
            raise ConfigError(f"The {name} processor is a {type(processor).__name__}, which cannot be called.")
    return built


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return, in parentheses, the known name that is closest to a misspelt one, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# ------------------------------------------------------------------------------------------------------ calling


def _get_parameters(processor: Any) -> tuple[str, ...]:
    function: Any = processor if inspect.isroutine(processor) else type(processor)
    return _get_parameters_of(function)


@lru_cache(maxsize=256)  # called several times for every sample, and reading a signature is slow
def _get_parameters_of(function: Any) -> tuple[str, ...]:
    calls = [function.__call__] if isinstance(function, type) else [function]
    calls += [function.preprocess] if hasattr(function, "preprocess") else []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for call in calls for p in inspect.signature(call).parameters.values()]
    return tuple(p.name for p in parameters if p.kind in named and p.name != "self")


def get_keywords(processor: Any) -> set[str]:
    """Return the names of a processor's arguments; image processors list theirs in a typed dictionary."""
    listed = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", {})
    return {*_get_parameters(processor), *listed}


def get_item_argument(processor: Any) -> str:
    """Return the name of the argument that takes the items."""
    if hasattr(processor, "image_processor"):  # a whole Hugging Face processor around one
        return "images"
    if hasattr(processor, "feature_extractor"):
        return "audio"
    return next(iter(_get_parameters(processor)), "")


def get_item_kind(name: str) -> str | None:
    """Return the kind of items that a name stands for: "images", "audio" or "videos"; None if it is unknown."""
    return next((kind for kind, names in _NAMES.items() if name in names), None)


def get_item_dimensions(processor: Any) -> int:
    """Return the dimensions of one item that is given as an array."""
    own = getattr(processor, "item_dimensions", None)
    if isinstance(own, int):
        return own
    return _DIMENSIONS.get(get_item_kind(get_item_argument(processor)) or "", 0)


def name_items(processor: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with the items under the processor's own name for them (`raw_speech` for `audio`)."""
    argument = get_item_argument(processor)
    kind = get_item_kind(argument)
    if argument in inputs or kind is None:
        return dict(inputs)
    return {argument if name in _NAMES[kind] else name: value for name, value in inputs.items()}


def build_noise_item(processor: Any) -> Any:
    """Return an item of noise that a processor takes: a small image, or a second of sound."""
    random = np.random.default_rng(0)
    kind = get_item_kind(get_item_argument(processor))
    if kind == "images":
        return Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    if kind == "audio" and get_item_dimensions(processor) == 2:
        return random.standard_normal((2, processor.feature_size)).astype(np.float32)
    if kind == "audio":
        return random.standard_normal(_get_sampling_rate(processor) or 16_000).astype(np.float32)
    raise ConfigError(f"{type(processor).__name__} takes {get_item_argument(processor)!r}; expected images or sounds.")


def build_noise_inputs(processor: Any) -> dict[str, Any]:
    """Return the arguments with which a processor processes one item of noise."""
    rate = {"sampling_rate": _get_sampling_rate(processor)} if "sampling_rate" in get_keywords(processor) else {}
    return {get_item_argument(processor): [build_noise_item(processor)], **rate}


def _get_sampling_rate(processor: Any) -> int | None:
    return getattr(getattr(processor, "feature_extractor", processor), "sampling_rate", None)


# ------------------------------------------------------------------------------------------------------ storing

PROCESSOR_CONFIG = "cornstarch_processor.json"
_FORMAT = 1


@dataclass(frozen=True)
class ProcessorParts:
    """The parts of a `MultimodalProcessor` that can be stored."""

    tokenizer: PreTrainedTokenizerBase
    processors: Mapping[str, Any]
    """By modality."""
    tokens: Mapping[str, str]
    """By modality: its placeholder."""


def save_parts(folder: Path, parts: ProcessorParts, with_functions: Collection[str]) -> None:
    """Write the tokenizer and each modality's processor into sub-folders that transformers loads.

    `with_functions` are modalities with a function of the user's, which cannot be stored.
    """
    modalities: dict[str, Any] = {}
    for name, processor in parts.processors.items():
        if not hasattr(processor, "save_pretrained"):
            raise ConfigError(f"The {name} processor ({type(processor).__name__}) has no save_pretrained.")
        token, has_function = parts.tokens[name], name in with_functions
        modalities[name] = {"class": type(processor).__name__, "token": token, "has_function": has_function}
    for name, processor in parts.processors.items():
        processor.save_pretrained(folder / f"{name}_processor")
    parts.tokenizer.save_pretrained(folder / "tokenizer")
    # Last and atomically: a folder with this file is complete.
    temporary = folder / f"{PROCESSOR_CONFIG}.tmp"
    temporary.write_text(json.dumps({"format": _FORMAT, "modalities": modalities}, indent=2) + "\n")
    os.replace(temporary, folder / PROCESSOR_CONFIG)


def load_parts(
    folder: Path, counted: Collection[str] | None, classes: Mapping[str, type] | None, trust_remote_code: bool
) -> ProcessorParts:
    """Read the parts that `save_parts` wrote; `classes` are those of processors that are not in transformers.

    `counted` are modalities whose tokens per item can be counted without a stored function; None: all.
    """
    stored = _read_json(folder / PROCESSOR_CONFIG)
    if stored.get("format") != _FORMAT:
        found = stored.get("format")
        raise ConfigError(f"{folder / PROCESSOR_CONFIG} has format {found}; this version reads {_FORMAT}.")
    modalities: dict[str, Any] = stored["modalities"]
    for name, entry in modalities.items():
        if entry["has_function"] and counted is not None and name not in counted:
            raise ConfigError(
                f"The processor in {folder} had its own function for the tokens of {name}; functions are not stored. "
                f"Pass num_feature_calculation_funcs={{{name!r}: …}} or model=… to from_pretrained."
            )
    processors = {}
    for name, entry in modalities.items():
        # The class is one of transformers, ours or the user's, never from the folder.
        found_class: Any = (classes or {}).get(name) or find_processor_class(entry["class"])
        if found_class is None:
            raise ConfigError(
                f"The {name} processor is a {entry['class']}, which is not in transformers {transformers.__version__}. "
                f"Pass classes={{{name!r}: {entry['class']}}} to from_pretrained."
            )
        processors[name] = found_class.from_pretrained(folder / f"{name}_processor")
    tokenizer = folder / "tokenizer"
    if "auto_map" in _read_json(tokenizer / "tokenizer_config.json") and not trust_remote_code:
        raise ConfigError(f"The tokenizer in {tokenizer} brings its own code. Pass trust_remote_code=True to run it.")
    return ProcessorParts(
        AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code),
        processors,
        {name: entry["token"] for name, entry in modalities.items()},
    )


def find_processor_class(name: str) -> Any:
    """Return the class of a processor by its name, from transformers or Cornstarch; None if neither has it."""
    own = PrecomputedFeatureExtractor if name == PrecomputedFeatureExtractor.__name__ else None
    return getattr(transformers, name, None) or own


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}. Was the folder made by save_pretrained?"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is damaged: it holds a {type(content).__name__}, expected an object.")
    return content
