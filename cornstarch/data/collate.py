"""Collate conversations and documents into batches of a multimodal model, with labels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from cornstarch.compat.shared_tensors import build_shared_tensor
from cornstarch.config import DataConfig
from cornstarch.data.chat import ChatWriter, RenderedText, mask_trained_tokens, special_tokens
from cornstarch.data.feature_store import CachedItem, FeatureStore, merge_cached_items
from cornstarch.data.media import load_audio, load_features, load_image
from cornstarch.data.sample import Media, MediaKind, Message, Sample, SampleError, SampleTooLongError, as_sample_errors
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalProcessor, PrecomputedFeatureExtractor
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX, BatchFacts
from cornstarch.models.multimodal_language_model.packing import first_fit_decreasing, pack
from cornstarch.models.multimodal_language_model.preprocessing import modality_processors
from cornstarch.models.multimodal_language_model.preprocessing.hf_processor import WholeModelProcessor
from cornstarch.models.multimodal_language_model.preprocessing.tokenization import offsets_array

_KINDS: dict[str, MediaKind] = {"images": "image", "audio": "audio"}  # the processor's word, and ours


@dataclass(frozen=True)
class PreparedSample:
    """One tokenized sample, and its encoders' inputs."""

    id: str
    text: str
    input_ids: Tensor  # [S], each placeholder repeated to the number of its item's tokens
    labels: Tensor  # [S], -100 where nothing is learned
    items: Mapping[str, list[Any]]  # the decoded items by modality, in order
    encoder_inputs: Mapping[str, Any]  # the processors' outputs for the items
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Further processor outputs with a value per token, [S]: token types."""
    source: Any = None  # the processor's input, where it is needed again for several samples together
    item_tokens: Mapping[str, list[int]] = field(default_factory=dict)
    """The tokens of each item, by modality, where they are counted."""

    @property
    def trained_tokens(self) -> int:
        """Labels that count: the first token is never predicted."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class CollatedBatch:
    """The inputs of one forward pass, and what they contain."""

    inputs: dict[str, Any]
    sample_ids: list[str]  # in the order of the rows
    tokens: int  # without padding
    trained_tokens: int  # labels that count after the shift: the divisor of the summed loss
    items: dict[str, int]  # the number of images and sounds, by modality


class ChatCollator:
    """Builds batches of conversations and documents.

    Each sample is prepared alone, so that an error concerns no other sample; then samples are joined. `processor` has a
    `model=`, or functions for the number of tokens of an item; that of a whole model is for `WholeChatCollator`.
    """

    def __init__(self, processor: MultimodalProcessor | WholeModelProcessor, data: DataConfig) -> None:
        self.processor, self.data = processor, data
        self._lengths = RowLengths.of(data, compiled=False)
        self.features: Mapping[str, FeatureStore] | None = None  # the cached features of items, by modality
        tokenizer = processor.llm_tokenizer
        reads_offsets = not isinstance(processor, WholeModelProcessor) or processor.style != "tokens"
        if reads_offsets and not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(tokenizer).__name__} does not map tokens to characters, so answers cannot be found; use its "
                "fast version."
            )
        self._writer = ChatWriter(tokenizer, data.chat_template, data.system, data.train_on == "answers")
        self._placeholder_ids = torch.tensor(list(processor.modality_token_ids.values()), dtype=torch.long)
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._pad = next(token for token in pads if token is not None)

    def __call__(self, samples: Sequence[Sample]) -> CollatedBatch:
        """Return the batch of samples, all of which must be valid."""
        return self.join([self.prepare(sample) for sample in samples])

    def expect_compiled(self) -> None:
        """Pad rows to few lengths unless the config sets the padding: the model is compiled for each length."""
        self._lengths = RowLengths.of(self.data, compiled=True)

    @property
    def runs_encoders(self) -> bool:
        """Whether an encoder itself is run to count the tokens of an item, which a worker cannot do on a GPU."""
        return isinstance(self.processor, MultimodalProcessor) and self.processor.runs_encoders

    @property
    def _composed(self) -> MultimodalProcessor:
        assert isinstance(self.processor, MultimodalProcessor)
        return self.processor

    def prepare(self, sample: Sample) -> PreparedSample:
        """Decode, render and tokenize one sample; SampleError if it cannot be used."""
        try:
            prepared = self._prepare(sample)
            length, limit = len(prepared.input_ids), self.data.max_length
            if length > limit:
                if self.data.too_long != "cut":
                    raise SampleTooLongError(f"has {length} tokens, max_length is {limit}")
                prepared = self._truncate(prepared, limit)
        except SampleTooLongError as error:
            if self.data.too_long != "error":
                raise
            raise ConfigError(
                f"{sample.id}: {error}. Raise `data.max_length`, shorten it, or set `data.too_long` to skip or cut."
            ) from error
        if not prepared.trained_tokens:
            raise SampleError(f"has no token to train on ({self.data.train_on}, {len(prepared.input_ids)} tokens)")
        return prepared

    def _prepare(self, sample: Sample) -> PreparedSample:
        rendered = self._writer.write(sample, self._placeholder)
        items = self._decode_media(sample, self.features)
        ids, trained = self._tokenize_text(rendered)
        is_item = torch.isin(ids, self._placeholder_ids)
        # Labels are the ids where they are learned, which is never at a placeholder.
        labels = torch.where(trained & ~is_item, ids, IGNORE_INDEX)
        made: dict[str, Any] = {}
        lengths: dict[str, list[int]] = {}
        if items or bool(is_item.any()):
            with as_sample_errors():
                made, lengths = self.encoder_inputs(items)
                repeats = torch.from_numpy(self._composed.expand_placeholders(ids.numpy(), lengths))
            ids, labels = ids.repeat_interleave(repeats), labels.repeat_interleave(repeats)
        return PreparedSample(sample.id, rendered.text, ids, labels, items, made, item_tokens=lengths)

    def _placeholder(self, media: Media) -> str:
        return self.processor.modality_tokens[self.modality(media)]

    def tokenize(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the ids of a sample's text, with one placeholder per item, and a mask of the trained ones."""
        return self._tokenize_text(self._writer.write(sample, self._placeholder))

    def _tokenize_text(self, rendered: RenderedText, add_special_tokens: bool = False) -> tuple[Tensor, Tensor]:
        encoded = self.processor.llm_tokenizer(
            rendered.text,
            add_special_tokens=rendered.is_document or add_special_tokens,
            return_offsets_mapping=True,
            verbose=False,
        )
        offsets = offsets_array(encoded["offset_mapping"])
        ids = torch.from_numpy(np.array(encoded["input_ids"], dtype=np.int64))
        return ids, torch.from_numpy(mask_trained_tokens(offsets, rendered))

    def build_prompt(self, messages: Sequence[Message]) -> dict[str, Any]:
        sample = Sample("the question", tuple(messages))
        rendered = self._writer.prompt(sample, self._placeholder)
        items = self._decode_media(sample)
        ids, _ = self._tokenize_text(rendered)
        with as_sample_errors():
            inputs, lengths = self.encoder_inputs(items)
            repeats = torch.from_numpy(self._composed.expand_placeholders(ids.numpy(), lengths))
        input_ids = ids.repeat_interleave(repeats)[None]
        return {**inputs, "input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}

    @property
    def answer_ends(self) -> list[int]:
        tokenizer = self.processor.llm_tokenizer
        ends = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
        try:
            ids, trained = self.tokenize(Sample("an answer", (Message("user", ("a",)), Message("assistant", ("a",)))))
        except SampleError:  # a template that requires an image
            return sorted(ends)
        last = ids[trained][-1:].tolist()
        return sorted({*ends, *(token for token in last if token in special_tokens(tokenizer))})

    def media_kinds(self) -> dict[str, MediaKind]:
        kinds = {name: _get_kind(processor) for name, processor in self.processor.encoder_processors.items()}
        return {name: _KINDS[kind] for name, kind in kinds.items() if kind in _KINDS}

    def modality(self, media: Media) -> str:
        names = [name for name, kind in self.media_kinds().items() if kind == media.kind]
        if len(names) != 1:
            raise SampleError(
                f"has an {media.kind}, which fits {names or 'none'} of the modalities "
                f"{list(self.processor.encoder_processors)}; expected exactly one"
            )
        return names[0]

    def _decode_media(self, sample: Sample, features: Mapping[str, FeatureStore] | None = None) -> dict[str, list[Any]]:
        """Return the items of a sample by modality; with `features`, cached items are not decoded."""
        items: dict[str, list[Any]] = {}
        for media in sample.media:
            name = self.modality(media)
            decode = partial(self._load_item, media, name)
            items.setdefault(name, []).append(decode() if features is None else features[name].item(media, decode))
        return items

    def _load_item(self, media: Media, modality: str) -> Any:
        processor = self.processor.encoder_processors[modality]
        if media.kind == "image":
            return load_image(media, self.data.max_pixels)
        if isinstance(processor, PrecomputedFeatureExtractor):
            features = load_features(media, processor.feature_size)
            self.check_sound_length(len(features), processor)
            return features[: processor.max_frames]
        sound = load_audio(media, sampling_rate(processor))
        self.check_sound_length(len(sound), processor)
        return sound

    def check_sound_length(self, length: int, processor: Any) -> int:
        """Return the length that a feature extractor reads of a sound; refuse one that it would cut silently."""
        is_array = isinstance(processor, PrecomputedFeatureExtractor)
        limit = processor.max_frames if is_array else self._max_samples(processor)
        if limit is not None and length > limit and self.data.too_long != "cut":
            unit = "frames" if is_array else "samples"
            raise SampleTooLongError(f"has a sound of {length} {unit}, its feature extractor takes {limit}")
        return length if limit is None else min(length, limit)

    def _max_samples(self, processor: Any) -> int | None:
        return getattr(processor, "n_samples", None)

    def item_inputs(self, name: str, items: list[Any]) -> tuple[dict[str, Any], list[int]]:
        """Return an encoder's inputs for decoded items, and the number of tokens of each item in a text."""
        return self._composed.process_items({name: self._item_arguments(name, items)})[name]

    def counts_together(self, name: str) -> bool:
        """Whether items take other numbers of tokens beside each other than alone."""
        return False

    def encoder_inputs(self, items: Mapping[str, list[Any]]) -> tuple[dict[str, Any], dict[str, list[int]]]:
        """Return the encoders' inputs for items and, by modality, the number of tokens of each item."""
        if not any(isinstance(item, CachedItem) for values in items.values() for item in values):
            return self._composed.encode_items({name: self._item_arguments(name, one) for name, one in items.items()})
        # Only items that are not in the cache are processed.
        inputs: dict[str, Any] = {}
        lengths: dict[str, list[int]] = {}
        for name, values in items.items():
            fresh = [item.decoded for item in values if item.tokens is None]
            made = self._composed.process_items({name: self._item_arguments(name, fresh) if fresh else None})
            inputs[name], lengths[name] = merge_cached_items(values, *made.get(name, ({}, [])))
        return inputs, lengths

    def _item_arguments(self, name: str, items: list[Any]) -> dict[str, Any]:
        processor = self.processor.encoder_processors[name]
        arguments: dict[str, Any] = {modality_processors.get_item_argument(processor): items}
        rate = sampling_rate(processor)
        if rate is not None and "sampling_rate" in modality_processors.get_keywords(processor):
            arguments["sampling_rate"] = rate
        if _get_kind(processor) == "audio":
            # Some feature extractors pad sounds only on request; others pad to a length of their own.
            padding = inspect.signature(processor.__call__).parameters.get("padding")
            if padding is not None and padding.default in (False, None):
                arguments["padding"] = True
        return arguments

    def _truncate(self, sample: PreparedSample, limit: int) -> PreparedSample:
        """Cut off the end of a sample, at the limit or before the images that cross it."""
        end = limit
        last = sample.input_ids[limit - 1]
        if sample.input_ids[limit] == last and bool(torch.isin(last, self._placeholder_ids)):
            while end and sample.input_ids[end - 1] == last:
                end -= 1
        counts = {}
        for name, lengths in sample.item_tokens.items():
            left = int((sample.input_ids[:end] == self.processor.modality_token_ids[name]).sum())
            counts[name] = int(np.searchsorted(np.cumsum(lengths), left, side="right"))
        items = {name: values[: counts[name]] for name, values in sample.items.items() if counts[name]}
        is_same = counts == {name: len(values) for name, values in sample.items.items()}
        encoder_inputs = sample.encoder_inputs if is_same else self.encoder_inputs(items)[0]
        ids, labels = sample.input_ids[:end], sample.labels[:end]
        tokens = {name: lengths[: counts[name]] for name, lengths in sample.item_tokens.items() if counts[name]}
        return PreparedSample(sample.id, sample.text, ids, labels, items, encoder_inputs, item_tokens=tokens)

    def join(self, samples: Sequence[PreparedSample]) -> CollatedBatch:
        """Return the batch of samples: a row each, or with packing as few rows as first-fit-decreasing finds."""
        if not self.data.packing:
            return self._join(samples, None)
        lengths = [len(sample.input_ids) for sample in samples]
        return self._join(samples, first_fit_decreasing(lengths, self.data.max_length))

    def join_rows(self, rows: Sequence[Sequence[PreparedSample]]) -> CollatedBatch:
        """Return the batch of packed rows of `max_length` tokens; one without samples counts nothing."""
        places = iter(range(sum(map(len, rows))))
        return self._join([sample for row in rows for sample in row], [[next(places) for _ in row] for row in rows])

    def _join(self, samples: Sequence[PreparedSample], packed: Sequence[Sequence[int]] | None) -> CollatedBatch:
        keys = list(dict.fromkeys(key for sample in samples for key in sample.token_inputs))
        rows = [
            {
                "input_ids": sample.input_ids,
                "labels": sample.labels,
                # 0 in samples without a value: text alone.
                **{key: sample.token_inputs.get(key, torch.zeros_like(sample.input_ids)) for key in keys},
            }
            for sample in samples
        ]
        if packed is None:
            inputs, ordered = self._pad_rows(rows), list(samples)
        else:
            limit = self.data.max_length  # all rows have one length: the model is compiled once
            # A row of padding alone would begin with padding, which not every model takes: it gets a token.
            filler = {key: torch.zeros(1, dtype=torch.long) for key in keys}
            filler |= {"input_ids": torch.tensor([self._pad]), "labels": torch.tensor([IGNORE_INDEX])}
            filled = [list(row) or [len(rows)] for row in packed]
            inputs = pack([*rows, filler], limit, pad_token_id=self._pad, pad_to=limit, token_keys=keys, rows=filled)
            ordered = [samples[number] for row in packed for number in row]
        inputs.update(self._join_encoder_inputs(ordered, inputs["input_ids"]))
        inputs["facts"] = BatchFacts.of(inputs, self.processor.modality_token_ids)
        names = self._modalities(samples)
        return CollatedBatch(
            inputs=inputs,
            sample_ids=[sample.id for sample in ordered],
            tokens=sum(len(sample.input_ids) for sample in samples),
            trained_tokens=int((inputs["labels"][:, 1:] != IGNORE_INDEX).sum()),
            items={name: sum(len(sample.items.get(name, ())) for sample in samples) for name in names},
        )

    def _modalities(self, samples: Sequence[PreparedSample]) -> list[str]:
        return [name for name in self.processor.modality_tokens if any(name in sample.items for sample in samples)]

    def _pad_rows(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        length = self._lengths.of_rows(max(len(row["input_ids"]) for row in rows))
        rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
        fills = {"input_ids": self._pad, "labels": IGNORE_INDEX}
        inputs = {}
        for key in rows[0]:
            fill = fills.get(key, 0)
            padded = torch.nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True, padding_value=fill)
            inputs[key] = torch.nn.functional.pad(padded, (0, length - padded.shape[1]), value=fill)
        return inputs

    def _join_encoder_inputs(self, samples: Sequence[PreparedSample], input_ids: Tensor) -> dict[str, Any]:
        """Return the encoders' inputs of all samples, in the order of their tokens."""
        # Inputs may be nested under the name of their modality: joining needs that in all samples or in none.
        names = self._modalities(samples)
        nested = [{name in sample.encoder_inputs for sample in samples if name in sample.items} for name in names]
        parts = [sample.encoder_inputs for sample in samples if sample.encoder_inputs]
        joined = concatenate_inputs(parts) if all(len(found) == 1 for found in nested) else None
        if joined is not None:
            return joined
        # Items of several sizes: only the processors know how to pad them.
        items = {name: [item for sample in samples for item in sample.items.get(name, ())] for name in names}
        made, lengths = self.encoder_inputs(items)
        for name in items:
            alone, filled = int((input_ids == self.processor.modality_token_ids[name]).sum()), sum(lengths[name])
            if alone != filled:
                raise ConfigError(
                    f"The {name} items of {samples[0].id} and its neighbours take {alone} tokens one by one and "
                    f"{filled} when they are filled up to one size. Use a processor that makes items of one size, or "
                    "microbatches of one sample."
                )
        return made


def _get_kind(processor: Any) -> str | None:
    return modality_processors.get_item_kind(modality_processors.get_item_argument(processor))


def sampling_rate(processor: Any) -> int | None:
    """Return the sampling rate of a processor's sounds; None if it has none."""
    inner = getattr(processor, "feature_extractor", processor)
    return getattr(inner, "sampling_rate", None)


def concatenate_inputs(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Concatenate inputs along their first dimension; None if their other dimensions differ."""
    joined: dict[str, Any] = {}
    for key in {key: None for part in parts for key in part}:
        values = [part[key] for part in parts if key in part]
        if all(isinstance(value, Mapping) for value in values):
            joined[key] = concatenate_inputs(values)
        elif all(isinstance(value, Tensor) and value.dim() > 0 for value in values):
            same = len({value.shape[1:] for value in values}) == 1
            joined[key] = _concatenate(values) if same else None
        elif all(isinstance(value, list | tuple) for value in values):
            joined[key] = [item for value in values for item in value]
        elif all(np.array_equal(value, values[0]) for value in values):
            joined[key] = values[0]  # an option, the same for all
        else:
            return None
        if joined[key] is None:
            return None
    return joined


def _concatenate(values: list[Tensor]) -> Tensor:
    first = values[0]
    if get_worker_info() is None or len({value.dtype for value in values}) > 1:
        return torch.cat(values) if len(values) > 1 else first
    # Pixels are most of a batch, and travel in shared memory: they are written there at once.
    shared = build_shared_tensor((sum(len(value) for value in values), *first.shape[1:]), first.dtype)
    return torch.cat(values, out=shared)


# ------------------------------------------------------------------------------------------------ padded lengths

_BLOCK = 128  # tokens: the block size of attention kernels
_MAX_LENGTHS = 8  # a model is compiled again for each length
_RANGE = 8  # longest over shortest: shorter rows cost little however far they are padded


@dataclass(frozen=True)
class RowLengths:
    """The lengths that rows are padded to."""

    max_length: int  # the maximum number of tokens of a sample, and of a packed row
    multiple: int | None = None  # pad to a multiple of this, up to `max_length`; None: pad to one of `lengths`
    lengths: tuple[int, ...] = ()  # ascending. Empty: rows are as long as the longest sample in them.

    @classmethod
    def of(cls, data: DataConfig, *, compiled: bool) -> RowLengths:
        if data.pad_to != "auto":
            return cls(data.max_length, multiple=data.pad_to)
        return cls(data.max_length, lengths=few_lengths(data.max_length) if compiled else ())

    def of_rows(self, longest: int) -> int:
        if self.multiple is not None:
            return max(longest, min(-(-longest // self.multiple) * self.multiple, self.max_length))
        return next((length for length in self.lengths if length >= longest), longest)


def few_lengths(max_length: int) -> tuple[int, ...]:
    """Return at most eight lengths up to `max_length`: multiples of 128, each about a third longer than the last."""
    shortest = max_length / _RANGE
    factor = _RANGE ** (1 / (_MAX_LENGTHS - 1))
    wanted = (shortest * factor**number for number in range(_MAX_LENGTHS - 1))
    blocks = sorted({math.ceil(length / _BLOCK - 1e-9) * _BLOCK for length in wanted})
    return (*(length for length in blocks if length < max_length), max_length)
