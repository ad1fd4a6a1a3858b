"""How large samples are for a model, from their texts and the headers of their media: nothing is decoded.

    sizer = SampleSizer(collator, FlopCounter(model).step)
    sizer(sample).tokens, sizer(sample).work["vision"]

An item is as large as its file says. What its encoder makes of an item of that size, and computes for it, is found once
for each size, on an item that shows nothing; where images are cut into patches, once for each number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from cornstarch.compute.flops import StepFlops
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.packing import IGNORED
from cornstarch.models.multimodal_language_model.preprocessing.precomputed import PrecomputedFeatureExtractor
from cornstarch.plan.plan import LANGUAGE_MODEL
from cornstarch.train.data.collate import ChatCollator, sampling_rate
from cornstarch.train.data.headers import feature_frames, image_size, sound_length
from cornstarch.train.data.sample import Media, Sample, SampleError, SampleTooLongError

_LENGTHS = 32  # of rows that the language model's work is counted for; between them it is interpolated
_ALIKE = 32  # different sizes of items of which an encoder makes the same, after which all others are believed to be so
_HEAD = 64  # tokens of the row that the work of the head is told by

Step = Callable[[Mapping[str, Any]], StepFlops | None]
"""What forward and backward of a batch multiply: of `FlopCounter`, or of a run's `RunFlops`."""


@dataclass(frozen=True)
class SampleSize:
    """What one sample is to a model."""

    tokens: int
    """In the language model, those of its items among them; nothing is cut off."""
    trained: int
    """Tokens that are learned."""
    items: Mapping[str, int]
    """By encoder."""
    item_tokens: Mapping[str, int]
    """By encoder, of all its items."""
    work: Mapping[str, float]
    """By phase (each encoder, the language model): what forward and backward multiply."""


@dataclass(frozen=True)
class _ItemSize:
    tokens: int
    work: float


class SampleSizer:
    """Tells how large samples are.

    Args:
        collator: Of the run.
        step: Counts what a batch multiplies.
    """

    def __init__(self, collator: ChatCollator, step: Step) -> None:
        self._collator, self._step = collator, step
        self.phases = (*collator.processor.encoder_processors, LANGUAGE_MODEL)
        """Encoders, then the language model."""
        self.data = collator.data
        self._items: dict[str, dict[Any, _ItemSize]] = {}
        placeholders = set(collator.processor.modality_token_ids.values())
        self._word = next(number for number in range(len(placeholders) + 1) if number not in placeholders)
        self._rows: tuple[np.ndarray, np.ndarray, float] | None = None

    def __call__(self, sample: Sample) -> SampleSize:
        """Return a sample's size; SampleError if it cannot be used."""
        ids, trained = self._collator.written(sample)
        counts, tokens = dict.fromkeys(self.phases[:-1], 0), dict.fromkeys(self.phases[:-1], 0)
        work = dict.fromkeys(self.phases, 0.0)
        by_name: dict[str, list[Media]] = {}
        for media in sample.media:
            by_name.setdefault(self._collator.modality(media), []).append(media)
        for name, group in by_name.items():
            together = len(group) > 1 and self._collator.counts_together(name)
            for items in [group] if together else [[media] for media in group]:
                size = self._items_size(name, items)
                counts[name], tokens[name] = counts[name] + len(items), tokens[name] + size.tokens
                work[name] += size.work
        placeholders = torch.tensor(list(self._collator.processor.modality_token_ids.values()))
        learned = int((trained & ~torch.isin(ids, placeholders))[1:].sum())
        length = len(ids) + sum(tokens.values()) - sum(counts.values())
        if not learned:
            raise SampleError(f"has no token to train on ({self.data.train_on}, {length} tokens)")
        work[LANGUAGE_MODEL] = self._row(min(length, self.data.max_length), learned)
        return SampleSize(length, learned, counts, tokens, work)

    # ------------------------------------------------------------------ items

    def _items_size(self, name: str, items: list[Media]) -> _ItemSize:
        """Return the size of an item, or of several that are counted together."""
        processor = self._collator.processor.encoder_processors[name]
        sizes = [self._header(media, processor) for media in items]
        known = self._items.setdefault(name, {})
        key = tuple(_patches(size, processor) or size for size in sizes)
        if key not in known:
            alone = {value for other, value in known.items() if len(other) == 1}
            if len(key) == 1 and len(known) >= _ALIKE and len(alone) == 1:
                return next(iter(alone))  # whatever its size, the processor scales or fills it to one
            known[key] = self._measured(name, [_blank(size, processor) for size in sizes])
        return known[key]

    def _header(self, media: Media, processor: Any) -> Any:
        """Return what of a medium decides how large it is."""
        if media.kind == "image":
            return image_size(media, self.data.max_pixels)
        is_array = isinstance(processor, PrecomputedFeatureExtractor)
        length = feature_frames(media) if is_array else sound_length(media, sampling_rate(processor))
        most = processor.max_frames if is_array else self._collator.longest_sound(processor)
        if most is not None and length > most and self.data.too_long != "cut":
            unit = "frames" if is_array else "samples"
            raise SampleTooLongError(f"has a sound of {length} {unit}, its feature extractor takes {most}")
        return length if most is None else min(length, most)

    def _measured(self, name: str, items: list[Any]) -> _ItemSize:
        try:
            inputs, lengths = self._collator.item_inputs(name, items)
        except Exception as error:  # whatever a processor stumbles over: an odd size
            named = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            raise SampleError(f"cannot be processed: {named}{error}") from error
        parts = self._counted({**self._text(1), name: inputs}).parts
        parts = {part: parts[part] for part in (f"{name} encoder", f"{name} projector") if part in parts}
        return _ItemSize(sum(lengths), sum(part.total + part.recomputed for part in parts.values()))

    # ------------------------------------------------------------------ the language model

    def _row(self, tokens: int, trained: int) -> float:
        if self._rows is None:
            most = self.data.max_length
            lengths = np.unique(np.geomspace(1, most, _LENGTHS).round().astype(int))
            # With items, so that what goes back to encoders is counted.
            items = self._collator.processor.stand_ins()
            work = np.array([self._language_model({**self._text(int(n)), **items}) for n in lengths])
            learned = self._language_model({**self._text(_HEAD, learned=True), **items})
            head = (learned - self._language_model({**self._text(_HEAD), **items})) / (_HEAD - 1)
            self._rows = lengths, work, head
        lengths, work, head = self._rows
        return float(np.interp(tokens, lengths, work)) + head * trained

    def _language_model(self, batch: Mapping[str, Any]) -> float:
        part = self._counted(batch).parts["language model"]
        return part.total + part.recomputed

    def _text(self, tokens: int, learned: bool = False) -> dict[str, Any]:
        ids = torch.full((1, tokens), self._word)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": ids if learned else torch.full_like(ids, IGNORED),
        }

    def _counted(self, batch: Mapping[str, Any]) -> StepFlops:
        found = self._step(batch)
        if found is None:
            raise ConfigError(
                "What this model computes for a sample cannot be counted, so samples cannot be weighed. Leave "
                "`data.balance` off."
            )
        return found


def _patches(size: Any, processor: Any) -> str | None:
    """Return what images have in common that are cut into as many patches, where the processor can say it."""
    inner = getattr(processor, "image_processor", processor)
    count = getattr(inner, "get_number_of_image_patches", None)
    # Of others it counts crops, and what is cut off from those depends on the size, too.
    if count is None or "image_grid_thw" not in getattr(inner, "model_input_names", ()):
        return None
    try:
        return f"{count(size[1], size[0], {})} patches"
    except Exception:  # a size that it refuses: it says so when it is given such an image
        return None


def _blank(size: Any, processor: Any) -> Any:
    """Return an item of a size, that shows nothing."""
    if isinstance(size, tuple):
        return Image.new("RGB", size)
    if isinstance(processor, PrecomputedFeatureExtractor):
        return np.zeros((size, processor.feature_size), np.float32)
    return np.zeros(size, np.float32)


__all__ = ["SampleSize", "SampleSizer", "Step"]
