"""Collate conversations and documents into batches of a multimodal model, with labels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.config import DataConfig
from cornstarch.data.chat import ChatWriter, RenderedText, special_tokens
from cornstarch.data.feature_store import CachedItem, FeatureLookup, merge_cached_items
from cornstarch.data.lengths import RowLengths
from cornstarch.data.media import load_audio, load_features, load_image
from cornstarch.data.sample import Media, MediaKind, Message, Sample, SampleError, SampleTooLongError
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalProcessor
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX, BatchFacts
from cornstarch.models.multimodal_language_model.packing import pack
from cornstarch.models.multimodal_language_model.preprocessing.hf_processor import WholeModelProcessor
from cornstarch.models.multimodal_language_model.preprocessing.modality_processors import (
    get_item_argument,
    get_item_kind,
    get_keywords,
)
from cornstarch.models.multimodal_language_model.preprocessing.precomputed import PrecomputedFeatureExtractor
from cornstarch.parallel.device import pin_batch

_KINDS: dict[str, MediaKind] = {"images": "image", "audio": "audio"}  # the processor's word, and ours


@dataclass(frozen=True)
class PreparedSample:
    """One tokenized sample, and its encoders' inputs."""

    id: str
    text: str
    input_ids: Tensor
    """[S], each placeholder repeated to the number of its item's tokens."""
    labels: Tensor
    """[S], -100 where nothing is learned."""
    items: Mapping[str, list[Any]]
    """The decoded items by modality, in order."""
    encoder_inputs: Mapping[str, Any]
    """The processors' outputs for the items."""
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Further processor outputs with a value per token, [S]: token types."""
    source: Any = None
    """The processor's input, where it is needed again for several samples together."""

    @property
    def trained_tokens(self) -> int:
        """Labels that count: the first token is never predicted."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class CollatedBatch:
    """The inputs of one forward pass, and what they contain."""

    inputs: dict[str, Any]
    sample_ids: list[str]
    """In the order of the rows."""
    tokens: int
    """Without padding."""
    trained_tokens: int
    """Labels that count after the shift: the divisor of the summed loss."""
    items: dict[str, int]
    """The number of images and sounds, by modality."""

    def pin_memory(self) -> CollatedBatch:
        """Return the batch in pinned memory, for asynchronous copies to a GPU."""
        return replace(self, inputs=pin_batch(self.inputs))


class ChatCollator:
    """Builds batches of conversations and documents.

    Each sample is prepared alone, so that an error concerns no other sample; then samples are joined.

    Args:
        processor: With `model=`, or functions for the number of tokens of an item. The processor of a whole model is
            for `WholeChatCollator`.
        data: The limits, the template, what is trained on, and whether samples are packed.
    """

    def __init__(self, processor: MultimodalProcessor | WholeModelProcessor, data: DataConfig) -> None:
        self.processor, self.data = processor, data
        self._lengths = RowLengths.of(data, compiled=False)
        self.features: FeatureLookup | None = None
        """Features of items that were encoded before; None: no feature cache."""
        tokenizer = processor.llm_tokenizer
        if self._reads_offsets and not getattr(tokenizer, "is_fast", False):
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

    @property
    def _reads_offsets(self) -> bool:
        """Whether answers are found by the characters of tokens."""
        return True

    def expect_compiled(self) -> None:
        """Pad rows to few lengths unless the config sets the padding: the model is compiled for each length."""
        self._lengths = RowLengths.of(self.data, compiled=True)

    @property
    def _composed(self) -> MultimodalProcessor:
        assert isinstance(self.processor, MultimodalProcessor)
        return self.processor

    # ------------------------------------------------------------------ one sample

    def prepare(self, sample: Sample) -> PreparedSample:
        """Decode, render and tokenize one sample; SampleError if it cannot be used."""
        try:
            prepared = self._prepare(sample)
            if len(prepared.input_ids) > self.data.max_length:
                prepared = self._truncate(prepared)
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
        """Return a sample of any length."""
        rendered = self._writer.write(sample, self._placeholder)
        items = self._decode_media(sample, self.features)
        single, trained = self._tokenize_text(rendered)
        made: dict[str, Any] = {}
        input_ids = single
        if items or bool(torch.isin(single, self._placeholder_ids).any()):
            with report_processor_errors():
                made = self._run_processors(items, rendered)
            input_ids = made.pop("input_ids")[0]
        # Labels are the ids where they are learned, which is never at a placeholder.
        is_text = ~torch.isin(single, self._placeholder_ids)
        own = ~torch.isin(input_ids, self._placeholder_ids)
        if not torch.equal(single[is_text], input_ids[own]):
            raise SampleError("the tokenizer splits the text in another way beside a repeated placeholder")
        labels = torch.full_like(input_ids, IGNORE_INDEX)
        labels[own] = torch.where(trained[is_text], single[is_text], IGNORE_INDEX)
        return PreparedSample(sample.id, rendered.text, input_ids, labels, items, made)

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
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        ids = torch.tensor(encoded["input_ids"], dtype=torch.long)
        return ids, torch.from_numpy(mask_trained_tokens(offsets, rendered))

    def build_prompt(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return a batch of one conversation, for the model to continue."""
        sample = Sample("the question", tuple(messages))
        rendered = self._writer.prompt(sample, self._placeholder)
        items = self._decode_media(sample)
        with report_processor_errors():
            inputs = self._run_processors(items, rendered)
        return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}

    @property
    def answer_ends(self) -> list[int]:
        """The ids of the tokens that end an answer."""
        tokenizer = self.processor.llm_tokenizer
        ends = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
        try:
            ids, trained = self.tokenize(Sample("an answer", (Message("user", ("a",)), Message("assistant", ("a",)))))
        except SampleError:  # a template that requires an image
            return sorted(ends)
        last = ids[trained][-1:].tolist()
        return sorted({*ends, *(token for token in last if token in special_tokens(tokenizer))})

    # ------------------------------------------------------------------ media

    def media_kinds(self) -> dict[str, MediaKind]:
        """Return the kind of media of each modality."""
        found = {name: get_item_kind(get_item_argument(p)) for name, p in self.processor.encoder_processors.items()}
        return {name: _KINDS[kind] for name, kind in found.items() if kind in _KINDS}

    def modality(self, media: Media) -> str:
        """Return the one modality that takes this kind of media."""
        names = [name for name, kind in self.media_kinds().items() if kind == media.kind]
        if len(names) != 1:
            raise SampleError(
                f"has an {media.kind}, which fits {names or 'none'} of the modalities "
                f"{list(self.processor.encoder_processors)}; expected exactly one"
            )
        return names[0]

    def _decode_media(self, sample: Sample, features: FeatureLookup | None = None) -> dict[str, list[Any]]:
        """Return the items of a sample by modality; with `features`, cached items are not decoded."""
        items: dict[str, list[Any]] = {}
        for media in sample.media:
            name = self.modality(media)
            decode = partial(self._load_item, media, name)
            items.setdefault(name, []).append(decode() if features is None else features.item(name, media, decode))
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

    def encoder_inputs(self, items: Mapping[str, list[Any]]) -> dict[str, Any]:
        """Return the encoders' inputs for items without a text."""
        return self._run_processors(items)

    def _run_processors(self, items: Mapping[str, list[Any]], rendered: RenderedText | None = None) -> dict[str, Any]:
        """Return the encoders' inputs for items, and the ids of their text."""
        options = {} if rendered is None else {"add_special_tokens": rendered.is_document, "verbose": False}
        if any(isinstance(item, CachedItem) for values in items.values() for item in values):
            # Only items that are not in the cache are processed.
            inputs: dict[str, Any] = {}
            lengths: dict[str, list[int]] = {}
            for name, values in items.items():
                fresh = [item.decoded for item in values if item.tokens is None]
                made = self._composed.process_items({name: self._item_arguments(name, fresh) if fresh else None})
                inputs[name], lengths[name] = merge_cached_items(values, *made.get(name, ({}, [])))
            if rendered is None:
                return inputs
            encoded = self._composed.tokenize([rendered.text], lengths, return_tensors="pt", **options)
            return {**inputs, "input_ids": encoded["input_ids"]}
        given = {name: self._item_arguments(name, values) for name, values in items.items()}
        if rendered is None:
            return dict(self._composed(given, return_tensors="pt"))
        made = dict(self._composed(given, {"text": [rendered.text], **options}, return_tensors="pt"))
        unused = set(self.processor.llm_tokenizer.model_input_names) - {"input_ids"}
        return {key: value for key, value in made.items() if key not in unused}

    def _item_arguments(self, name: str, items: list[Any]) -> dict[str, Any]:
        processor = self.processor.encoder_processors[name]
        arguments: dict[str, Any] = {get_item_argument(processor): items}
        rate = sampling_rate(processor)
        if rate is not None and "sampling_rate" in get_keywords(processor):
            arguments["sampling_rate"] = rate
        if get_item_kind(get_item_argument(processor)) == "audio":
            # Some feature extractors pad sounds only on request; others pad to a length of their own.
            padding = inspect.signature(processor.__call__).parameters.get("padding")
            if padding is not None and padding.default in (False, None):
                arguments["padding"] = True
        return arguments

    # ------------------------------------------------------------------ length

    def _truncate(self, sample: PreparedSample) -> PreparedSample:
        """Cut off the end of a sample, at the limit or before the images that cross it."""
        limit, length = self.data.max_length, len(sample.input_ids)
        if self.data.too_long != "cut":
            raise SampleTooLongError(f"has {length} tokens, max_length is {limit}")
        end = limit
        last = sample.input_ids[limit - 1]
        if sample.input_ids[limit] == last and bool(torch.isin(last, self._placeholder_ids)):
            while end and sample.input_ids[end - 1] == last:
                end -= 1
        counts = self._count_items_before(sample, end)
        items = {name: values[: counts[name]] for name, values in sample.items.items() if counts[name]}
        is_same = counts == {name: len(values) for name, values in sample.items.items()}
        encoder_inputs = sample.encoder_inputs if is_same else self._run_processors(items)
        return PreparedSample(
            sample.id, sample.text, sample.input_ids[:end], sample.labels[:end], items, encoder_inputs
        )

    def _count_items_before(self, sample: PreparedSample, end: int) -> dict[str, int]:
        """Return the number of complete items before a token, by modality. Adjacent items are kept together."""
        ids = self.processor.modality_token_ids
        single = self.processor.llm_tokenizer(sample.text, add_special_tokens=False, verbose=False)["input_ids"]
        runs = [(token, len(list(run))) for token, run in groupby(single)]
        counts = {}
        for name in sample.items:
            complete = sum(token == ids[name] for token, _ in groupby(sample.input_ids[:end].tolist()))
            counts[name] = sum([count for token, count in runs if token == ids[name]][:complete])
        return counts

    # ------------------------------------------------------------------ several samples

    def join(self, samples: Sequence[PreparedSample]) -> CollatedBatch:
        """Return the batch of prepared samples: one row each, or packed."""
        inputs, order = self._pack_rows(samples) if self.data.packing else self._pad_rows(samples)
        ordered = [samples[number] for number in order]
        inputs.update(self._join_encoder_inputs(ordered, inputs["input_ids"]))
        inputs["facts"] = BatchFacts.of(inputs, self.processor.modality_token_ids)
        items = {name: sum(len(sample.items.get(name, ())) for sample in samples) for name in self._modalities(samples)}
        return CollatedBatch(
            inputs=inputs,
            sample_ids=[sample.id for sample in ordered],
            tokens=int(inputs["attention_mask"].sum()),
            trained_tokens=int((inputs["labels"][:, 1:] != IGNORE_INDEX).sum()),
            items=items,
        )

    def _modalities(self, samples: Sequence[PreparedSample]) -> list[str]:
        return [name for name in self.processor.modality_tokens if any(name in sample.items for sample in samples)]

    def _pad_rows(self, samples: Sequence[PreparedSample]) -> tuple[dict[str, Any], list[int]]:
        length = self._lengths.of_rows(max(len(sample.input_ids) for sample in samples))

        def pad(tensors: list[Tensor], fill: int) -> Tensor:
            rows = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)
            return torch.nn.functional.pad(rows, (0, length - rows.shape[1]), value=fill)

        inputs = {
            "input_ids": pad([sample.input_ids for sample in samples], self._pad),
            "attention_mask": pad([torch.ones_like(sample.input_ids) for sample in samples], 0),
            "labels": pad([sample.labels for sample in samples], IGNORE_INDEX),
        }
        for key in _token_keys(samples):
            inputs[key] = pad([_token_input(sample, key) for sample in samples], 0)
        return inputs, list(range(len(samples)))

    def _pack_rows(self, samples: Sequence[PreparedSample]) -> tuple[dict[str, Any], list[int]]:
        keys = _token_keys(samples)
        tokens = [
            {
                "input_ids": sample.input_ids,
                "labels": sample.labels,
                "number": torch.full_like(sample.input_ids, number + 1),
                **{key: _token_input(sample, key) for key in keys},
            }
            for number, sample in enumerate(samples)
        ]
        inputs = pack(
            tokens,
            self.data.max_length,
            pad_token_id=self._pad,
            pad_to=self._lengths.of_packed_rows,
            token_keys=("number", *keys),
        )
        numbers = inputs.pop("number").flatten().unique_consecutive()
        return inputs, (numbers[numbers > 0] - 1).tolist()

    def _join_encoder_inputs(self, samples: Sequence[PreparedSample], input_ids: Tensor) -> dict[str, Any]:
        """Return the encoders' inputs of all samples, in the order of their tokens."""
        # Inputs may be nested under the name of their modality: joining needs that in all samples or in none.
        is_alike = all(
            len({name in sample.encoder_inputs for sample in samples if name in sample.items}) == 1
            for name in self._modalities(samples)
        )
        parts = [sample.encoder_inputs for sample in samples if sample.encoder_inputs]
        joined = concatenate_inputs(parts) if is_alike else None
        if joined is not None:
            return joined
        # Items of several sizes: only the processors know how to pad them.
        items = {name: [item for s in samples for item in s.items.get(name, ())] for name in self._modalities(samples)}
        text = "".join(self.processor.modality_tokens[name] * len(values) for name, values in items.items())
        made = self._run_processors(items, RenderedText(text, ()))
        together = made.pop("input_ids")
        for name in items:
            token = self.processor.modality_token_ids[name]
            alone, filled = int((input_ids == token).sum()), int((together == token).sum())
            if alone != filled:
                raise ConfigError(
                    f"The {name} items of {samples[0].id} and its neighbours take {alone} tokens one by one and "
                    f"{filled} when they are filled up to one size. Use a processor that makes items of one size, or "
                    "microbatches of one sample."
                )
        return made


@contextmanager
def report_processor_errors() -> Iterator[None]:
    """Turn whatever a processor raises, for an odd image or a count that does not fit, into SampleError."""
    try:
        yield
    except Exception as error:
        named = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise SampleError(f"cannot be processed: {named}{error}") from error


def mask_trained_tokens(offsets: np.ndarray, rendered: RenderedText) -> np.ndarray:
    """Return a mask of the trained tokens, given the characters [S, 2] of each token.

    A token is trained if it lies in a trained span, except for white space at its start: many tokenizers merge a word
    with the space before it, and a template may end a prompt with that space.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    added = starts == ends  # special tokens that the tokenizer adds around a text
    trained = added & rendered.is_document
    for first, last in rendered.trained:
        inside = ~added & (ends <= last) & (ends > first)
        for token in np.flatnonzero(inside & (starts < first)):
            inside[token] = not rendered.text[starts[token] : first].strip()
        trained |= inside
    return trained


def _token_keys(samples: Sequence[PreparedSample]) -> list[str]:
    return list(dict.fromkeys(key for sample in samples for key in sample.token_inputs))


def _token_input(sample: PreparedSample, key: str) -> Tensor:
    """Return a value per token; 0 for samples without it: text alone."""
    found = sample.token_inputs.get(key)
    return torch.zeros_like(sample.input_ids) if found is None else found


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
            joined[key] = torch.cat(values) if same else None
        elif all(isinstance(value, list | tuple) for value in values):
            joined[key] = [item for value in values for item in value]
        elif all(np.array_equal(value, values[0]) for value in values):
            joined[key] = values[0]  # an option, the same for all
        else:
            return None
        if joined[key] is None:
            return None
    return joined
