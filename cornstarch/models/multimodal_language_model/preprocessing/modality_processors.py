"""The processors of single modalities: how they are called, saved and loaded. One takes precomputed sound features."""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, SequenceFeatureExtractor

from cornstarch.errors import ConfigError
from cornstarch.files import as_config_errors

from ..unwrap import get_parameter_names

# By kind of item: the names of a processor's argument, and of a part of a chat message.
_NAMES: dict[str, tuple[str, ...]] = {
    "images": ("images", "image", "image_url"),
    "audio": ("audio", "raw_speech", "raw_audio", "audio_url", "input_audio"),
    "videos": ("videos", "video", "video_url"),
}
# Settings that transformers stores beside those of `PrecomputedFeatureExtractor`.
_TRANSFORMERS_SETTINGS = "feature_extractor_type padding_side padding_value return_attention_mask sampling_rate".split()
# Dimensions of one item given as an array; an array with more dimensions is a batch of items.
_DIMENSIONS = {"images": 3, "audio": 1, "videos": 4}


def collect_processors(named: Mapping[str, Any] | None, image_processor: Any, feature_extractor: Any) -> dict[str, Any]:
    """Return the processors by modality; a class is built with its defaults."""
    processors = dict(named or {})
    short = {"vision": ("image_processor", image_processor), "audio": ("feature_extractor", feature_extractor)}
    for name, (argument, processor) in short.items():
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


def _get_parameters(processor: Any) -> tuple[str, ...]:
    own_class: Any = type(processor)
    calls = [processor if inspect.isroutine(processor) else own_class.__call__]
    calls += [own_class.preprocess] if hasattr(own_class, "preprocess") else []
    return tuple(name for call in calls for name in get_parameter_names(call))


def get_keywords(processor: Any) -> set[str]:
    """Return the names of a processor's arguments; image processors list theirs in a typed dictionary."""
    listed = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", {})
    return {*_get_parameters(processor), *listed}


def get_item_argument(processor: Any) -> str:
    if hasattr(processor, "image_processor"):  # a whole Hugging Face processor around one
        return "images"
    if hasattr(processor, "feature_extractor"):
        return "audio"
    return next(iter(_get_parameters(processor)), "")


def get_item_kind(name: str) -> str | None:
    """Return the kind of items that a name stands for: "images", "audio" or "videos"; None if it is unknown."""
    return next((kind for kind, names in _NAMES.items() if name in names), None)


def get_item_dimensions(processor: Any) -> int:
    known = _DIMENSIONS.get(get_item_kind(get_item_argument(processor)) or "", 0)
    return getattr(processor, "item_dimensions", known)


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
    rate = {"sampling_rate": _get_sampling_rate(processor)} if "sampling_rate" in get_keywords(processor) else {}
    return {get_item_argument(processor): [build_noise_item(processor)], **rate}


def _get_sampling_rate(processor: Any) -> int | None:
    return getattr(getattr(processor, "feature_extractor", processor), "sampling_rate", None)


PROCESSOR_CONFIG = "cornstarch_processor.json"
_FORMAT = 1


def save_processor(
    folder: Path, tokenizer: Any, processors: Mapping[str, Any], tokens: Mapping[str, str], functions: Collection[str]
) -> None:
    """Write the tokenizer and each modality's processor into sub-folders that transformers loads.

    `tokens` are the modalities' placeholders, `functions` the modalities with a function of the user's, which cannot
    be stored.
    """
    modalities: dict[str, Any] = {}
    for name, processor in processors.items():
        if not hasattr(processor, "save_pretrained"):
            raise ConfigError(f"The {name} processor ({type(processor).__name__}) has no save_pretrained.")
        own_class, has_function = type(processor).__name__, name in functions
        modalities[name] = {"class": own_class, "token": tokens[name], "has_function": has_function}
    for name, processor in processors.items():
        processor.save_pretrained(folder / f"{name}_processor")
    tokenizer.save_pretrained(folder / "tokenizer")
    # Last and atomically: a folder with this file is complete.
    temporary = folder / f"{PROCESSOR_CONFIG}.tmp"
    temporary.write_text(json.dumps({"format": _FORMAT, "modalities": modalities}, indent=2) + "\n")
    os.replace(temporary, folder / PROCESSOR_CONFIG)


def load_processor(
    folder: Path, counted: Collection[str] | None, classes: Mapping[str, type] | None, trust_remote_code: bool
) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """Return the tokenizer, the processors and the placeholders that `save_processor` wrote.

    `counted` are modalities whose tokens per item can be counted without a stored function; None: all. `classes` are
    those of processors that are not in transformers.
    """
    with as_config_errors(f"{folder} has a processor that cannot be loaded. "):
        return _load_processor(folder, counted, classes, trust_remote_code)


def _load_processor(
    folder: Path, counted: Collection[str] | None, classes: Mapping[str, type] | None, trust_remote_code: bool
) -> tuple[Any, dict[str, Any], dict[str, str]]:
    stored = _read_json(folder / PROCESSOR_CONFIG)
    if stored.get("format") != _FORMAT:
        found = stored.get("format")
        raise ConfigError(f"{folder / PROCESSOR_CONFIG} has format {found}; this version reads {_FORMAT}.")
    modalities: dict[str, Any] = stored["modalities"]
    for name, entry in modalities.items():
        if not isinstance(entry["token"], str):
            raise ConfigError(f"{folder / PROCESSOR_CONFIG} is damaged: the token of {name} is {entry['token']!r:.40}.")
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
    loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)
    return loaded, processors, {name: entry["token"] for name, entry in modalities.items()}


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
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is damaged: it holds a {type(content).__name__}, expected an object.")
    return content


class PrecomputedFeatureExtractor(SequenceFeatureExtractor):
    """Takes precomputed features of sounds instead of waves: cepstra, spectrograms, another model's output.

    A sound is an array [frames, features]. It is normalized, zero-padded to `max_frames`, and transposed to
    [features, frames], the layout of the spectrograms that Whisper's encoder takes.

    Args:
        feature_size: Features per frame.
        max_frames: Frames that every sound is padded to; a longer one is refused.
        mean: Subtracted from the features: a number, or one for each feature. Default: nothing.
        std: Divides the features afterwards. Default: nothing.
    """

    model_input_names = ["input_features"]
    item_dimensions = 2
    """Dimensions of one sound; other extractors take waves, which have one."""

    def __init__(
        self,
        feature_size: int,
        max_frames: int,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in (("feature_size", feature_size), ("max_frames", max_frames)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} = {value!r}; expected a whole number above 0.")
        own = ("feature_size", "max_frames", "mean", "std")
        for name in kwargs:
            if name not in _TRANSFORMERS_SETTINGS:
                hint = suggest_nearest(name, own)
                raise ConfigError(f"{type(self).__name__} has no setting {name!r}{hint}; it has {', '.join(own)}.")
        rate: Any = None  # a frame may last any time
        super().__init__(feature_size, rate, padding_value=0.0, return_attention_mask=False)
        self.max_frames = max_frames
        self.mean = _parse_per_feature("mean", mean, feature_size)
        self.std = _parse_per_feature("std", std, feature_size)
        if self.std is not None and not np.all(np.asarray(self.std) > 0):
            raise ConfigError(f"std = {std!r}; expected numbers above 0.")

    def __call__(self, audio: Any, return_tensors: str | None = None) -> BatchFeature:
        """Return `input_features` [sounds, features, frames].

        Args:
            audio: One sound, an array of several, or a (nested) list of sounds.
            return_tensors: "pt" or "np".
        """
        sounds = [self._normalize_and_pad(np.asarray(one), number) for number, one in enumerate(_iterate_sounds(audio))]
        if not sounds:
            raise ConfigError("There is no sound; expected at least one array [frames, features].")
        return BatchFeature({"input_features": np.stack(sounds)}, tensor_type=return_tensors)

    def _normalize_and_pad(self, sound: np.ndarray, number: int) -> np.ndarray:
        expected = f"expected [frames, {self.feature_size}] of numbers"
        if sound.ndim != 2 or sound.dtype.kind not in "fiu" or sound.shape[1] != self.feature_size:
            wave = " (a wave? This extractor takes features computed beforehand)" if sound.ndim == 1 else ""
            raise ConfigError(f"Sound {number} is an array {list(sound.shape)} of {sound.dtype}{wave}; {expected}.")
        if not 0 < len(sound) <= self.max_frames:
            raise ConfigError(f"Sound {number} has {len(sound)} frames; expected 1 to max_frames = {self.max_frames}.")
        if not np.isfinite(sound).all():
            raise ConfigError(f"Sound {number} has features that are not finite.")
        if self.mean is not None:
            sound = sound - np.asarray(self.mean, np.float32)
        if self.std is not None:
            sound = sound / np.asarray(self.std, np.float32)
        padded = np.zeros((self.feature_size, self.max_frames), np.float32)
        padded[:, : len(sound)] = sound.T
        return padded


def _iterate_sounds(audio: Any) -> Iterator[Any]:
    if isinstance(audio, list | tuple):
        for part in audio:
            yield from _iterate_sounds(part)
    elif getattr(audio, "ndim", 0) == 3:
        yield from audio
    else:
        yield audio


def _parse_per_feature(name: str, value: Any, size: int) -> float | list[float] | None:
    if value is None:
        return None
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    if numbers.shape not in ((), (size,)) or not np.isfinite(numbers).all():
        raise ConfigError(f"{name} = {value!r}; expected a number, or a list of {size}, one for each feature.")
    return numbers.tolist()
