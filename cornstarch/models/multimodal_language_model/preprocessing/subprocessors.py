"""The processors of single modalities: how they are called, and how they are found again in a folder."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.preprocessing.precomputed import PrecomputedFeatureExtractor

# Processors that are not in transformers.
_OWN: dict[str, type] = {kind.__name__: kind for kind in (PrecomputedFeatureExtractor,)}
# What takes items of a kind may call its argument so; chats call a part of a message so.
_NAMES: dict[str, tuple[str, ...]] = {
    "images": ("images", "image", "image_url"),
    "audio": ("audio", "raw_speech", "raw_audio", "audio_url", "input_audio"),
    "videos": ("videos", "video", "video_url"),
}
# Dimensions of one item given as an array; an array with more is a batch of items.
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
    built = {name: made() if isinstance(made, type) else made for name, made in processors.items()}
    for name, processor in built.items():
        if not callable(processor):
            raise ConfigError(f"The {name} processor is a {type(processor).__name__}, which cannot be called.")
    return built


def _parameters(processor: Any) -> tuple[str, ...]:
    kind: Any = processor if inspect.isroutine(processor) else type(processor)
    return _parameters_of(kind)


@lru_cache(maxsize=256)  # asked several times for every sample, and reading a signature is slow
def _parameters_of(kind: Any) -> tuple[str, ...]:
    calls = [kind.__call__] if isinstance(kind, type) else [kind]
    calls += [kind.preprocess] if hasattr(kind, "preprocess") else []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for call in calls for p in inspect.signature(call).parameters.values()]
    return tuple(p.name for p in parameters if p.kind in named and p.name != "self")


def keywords(processor: Any) -> set[str]:
    """Return the names of a processor's arguments; image processors list theirs in a typed dictionary."""
    listed = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", {})
    return {*_parameters(processor), *listed}


def item_argument(processor: Any) -> str:
    """Return the name of the argument that takes the items."""
    if hasattr(processor, "image_processor"):  # a whole Hugging Face processor around one
        return "images"
    if hasattr(processor, "feature_extractor"):
        return "audio"
    return next(iter(_parameters(processor)), "")


def item_kind(name: str) -> str | None:
    """Return what a name of items means: "images", "audio", "videos", or None if it is not known."""
    return next((kind for kind, names in _NAMES.items() if name in names), None)


def item_dimensions(processor: Any) -> int:
    """Return the dimensions of one item that is given as an array."""
    own = getattr(processor, "item_dimensions", None)
    if isinstance(own, int):
        return own
    return _DIMENSIONS.get(item_kind(item_argument(processor)) or "", 0)


def noise_item(processor: Any) -> Any:
    """Return an item that a processor takes and that shows nothing: a small image, or a second of sound."""
    random = np.random.default_rng(0)
    kind = item_kind(item_argument(processor))
    if kind == "images":
        return Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    if kind == "audio" and item_dimensions(processor) == 2:
        return random.standard_normal((2, processor.feature_size)).astype(np.float32)
    if kind == "audio":
        return random.standard_normal(_rate(processor) or 16_000).astype(np.float32)
    raise ConfigError(f"{type(processor).__name__} takes {item_argument(processor)!r}; expected images or sounds.")


def noise_inputs(processor: Any) -> dict[str, Any]:
    """Return the arguments with which a processor processes one item of noise."""
    rate = {"sampling_rate": _rate(processor)} if "sampling_rate" in keywords(processor) else {}
    return {item_argument(processor): [noise_item(processor)], **rate}


def _rate(processor: Any) -> int | None:
    return getattr(getattr(processor, "feature_extractor", processor), "sampling_rate", None)


def name_items(processor: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with the items under the processor's own name for them (`raw_speech` for `audio`)."""
    argument = item_argument(processor)
    kind = item_kind(argument)
    if argument in inputs or kind is None:
        return dict(inputs)
    return {argument if name in _NAMES[kind] else name: value for name, value in inputs.items()}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the name that was perhaps meant."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# ---------------------------------------------------------------------------------------- in a folder


def processor_class(name: str) -> Any:
    """Return the class of a processor by its name, from transformers or our own; None if neither has it."""
    return getattr(transformers, name, None) or _OWN.get(name)


def load_processor(folder: Path, modality: str, class_name: str, classes: Mapping[str, type] | None) -> Any:
    """Load a modality's processor; its class is one of transformers, ours or the user's, never from the folder."""
    found: Any = (classes or {}).get(modality) or processor_class(class_name)
    if found is None:
        raise ConfigError(
            f"The {modality} processor is a {class_name}, which is not in transformers {transformers.__version__}. "
            f"Pass classes={{{modality!r}: {class_name}}} to from_pretrained."
        )
    return found.from_pretrained(folder)


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer; code in its folder is run only if the user says so."""
    config = read_json(folder / "tokenizer_config.json")
    if "auto_map" in config and not trust_remote_code:
        raise ConfigError(f"The tokenizer in {folder} brings its own code. Pass trust_remote_code=True to run it.")
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def read_json(file: Path) -> dict[str, Any]:
    """Read a file of settings."""
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
