"""A feature extractor for sound features that were computed beforehand."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from transformers import BatchFeature, SequenceFeatureExtractor

from cornstarch.errors import ConfigError

# Settings that transformers stores beside our own.
_TRANSFORMERS_SETTINGS = (
    "feature_extractor_type",
    "padding_side",
    "padding_value",
    "return_attention_mask",
    "sampling_rate",
)
_OWN_SETTINGS = ("feature_size", "max_frames", "mean", "std")


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
        for name in kwargs:
            if name not in _TRANSFORMERS_SETTINGS:
                near = difflib.get_close_matches(name, _OWN_SETTINGS, n=1)
                hint, own = f" (did you mean {near[0]!r}?)" if near else "", ", ".join(_OWN_SETTINGS)
                raise ConfigError(f"{type(self).__name__} has no setting {name!r}{hint}; it has {own}.")
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
        sounds = [
            self._normalize_and_pad(np.asarray(sound), number) for number, sound in enumerate(_iterate_sounds(audio))
        ]
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
