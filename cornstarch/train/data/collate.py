"""Samples into the batch of a multimodal model, with labels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalProcessor
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.models.multimodal_language_model.packing import IGNORED, pack
from cornstarch.models.multimodal_language_model.preprocessing.precomputed import PrecomputedFeatureExtractor
from cornstarch.models.multimodal_language_model.preprocessing.subprocessors import item_argument, item_kind, keywords
from cornstarch.models.multimodal_language_model.whole_processing import WholeModelProcessor
from cornstarch.train.config import DataConfig
from cornstarch.train.data.chat import ChatWriter, Rendered, special_tokens
from cornstarch.train.data.lengths import RowLengths
from cornstarch.train.data.media import load_audio, load_features, load_image
from cornstarch.train.data.sample import Media, MediaKind, Message, Sample, SampleError, SampleTooLongError
from cornstarch.train.data.seen import ItemLookup, SeenItem, known_inputs
from cornstarch.train.precision import pinned

_KINDS: dict[MediaKind, str] = {"image": "images", "audio": "audio"}  # ours, and the processor's


@dataclass(frozen=True)
class PreparedSample:
    """One sample as tokens, and its encoders' inputs."""

    id: str
    text: str
    input_ids: Tensor
    """[S], each placeholder repeated to the number of its item's tokens."""
    labels: Tensor
    """[S], -100 where nothing is learned."""
    items: Mapping[str, list[Any]]
    """The decoded items by modality, in order."""
    encoder_inputs: Mapping[str, Any]
    """What the processors made of the items."""
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """What else the processor says of each token, [S]: types of tokens."""
    source: Any = None
    """What the processor made it of, where that is needed again for several samples together."""

    @property
    def trained_tokens(self) -> int:
        """Labels that count: the first token is never predicted."""
        return int((self.labels[1:] != IGNORED).sum())


@dataclass(frozen=True)
class CollatedBatch:
    """What one forward takes, and what is in it."""

    inputs: dict[str, Any]
    sample_ids: list[str]
    """In the order of the rows."""
    tokens: int
    """Without padding."""
    trained_tokens: int
    """Labels that count after the shift: what the sum of losses is divided by."""
    items: dict[str, int]
    """Images, sounds, by modality."""

    def pin_memory(self) -> CollatedBatch:
        """Return the same, ready to be copied to a GPU while something else goes on."""
        return replace(self, inputs=pinned(self.inputs))


class ChatCollator:
    """Makes batches of conversations and documents.

    A sample alone is prepared first, so that whatever is wrong with it concerns no other; then samples are joined.

    Args:
        processor: With `model=`, or functions for the number of tokens of an item. That of a whole model is for
            `WholeChatCollator`.
        data: The limits, the template, what is trained on, and whether samples are packed.
    """

    def __init__(self, processor: MultimodalProcessor | WholeModelProcessor, data: DataConfig) -> None:
        self.processor, self.data = processor, data
        self._lengths = RowLengths.of(data, compiled=False)
        self.features: ItemLookup | None = None
        """What encoders made of items before; None: nothing is kept."""
        tokenizer = processor.llm_tokenizer
        if self._reads_offsets and not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(tokenizer).__name__} cannot say which characters a token stands for, so answers cannot be told "
                "from questions; use its fast version."
            )
        self._writer = ChatWriter(tokenizer, data.chat_template, data.system, data.train_on == "answers")
        self._placeholder_ids = torch.tensor(list(processor.modality_token_ids.values()), dtype=torch.long)
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self._pad = next(token for token in pads if token is not None)

    def __call__(self, samples: Sequence[Sample]) -> CollatedBatch:
        """Return the batch of samples, all of which must be good."""
        return self.join([self.prepare(sample) for sample in samples])

    @property
    def _reads_offsets(self) -> bool:
        """Whether answers are found by the characters that tokens stand for."""
        return True

    def expect_compiled(self) -> None:
        """Make rows of few lengths, if the config leaves that open: the model will be compiled for each of them."""
        self._lengths = RowLengths.of(self.data, compiled=True)

    @property
    def _composed(self) -> MultimodalProcessor:
        assert isinstance(self.processor, MultimodalProcessor)
        return self.processor

    # ------------------------------------------------------------------ one sample

    def prepare(self, sample: Sample) -> PreparedSample:
        """Decode, write and tokenize one sample. What is wrong with it raises SampleError."""
        try:
            return self._prepared(sample)
        except SampleTooLongError as error:
            if self.data.too_long != "error":
                raise
            raise ConfigError(
                f"{sample.id}: {error}. Raise `data.max_length`, shorten it, or set `data.too_long` to skip or cut."
            ) from error

    def _prepared(self, sample: Sample) -> PreparedSample:
        rendered = self._writer.write(sample, lambda media: self.processor.modality_tokens[self.modality(media)])
        items = self._decoded(sample, self.features)
        single, trained = self._tokenized(rendered)
        made: dict[str, Any] = {}
        input_ids = single
        if items or bool(torch.isin(single, self._placeholder_ids).any()):
            made = self._processed_or_broken(items, rendered)
            input_ids = made.pop("input_ids")[0]
        labels = self._labels(input_ids, single, trained)
        prepared = PreparedSample(sample.id, rendered.text, input_ids, labels, items, made)
        return self._within_limits(prepared)

    def _within_limits(self, prepared: PreparedSample) -> PreparedSample:
        """Return a sample cut to the limit, if the config says so; SampleError if it cannot be used."""
        if len(prepared.input_ids) > self.data.max_length:
            prepared = self._shortened(prepared)
        if not prepared.trained_tokens:
            raise SampleError(f"has no token to train on ({self.data.train_on}, {len(prepared.input_ids)} tokens)")
        return prepared

    def written(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the ids of a sample's text, one placeholder for each item, and which are the model's to write."""
        rendered = self._writer.write(sample, lambda media: self.processor.modality_tokens[self.modality(media)])
        return self._tokenized(rendered)

    def item_inputs(self, name: str, items: list[Any]) -> tuple[dict[str, Any], list[int]]:
        """Return what an encoder is given for decoded items, and the tokens that each will take in a text."""
        return self._composed.process_items({name: self._arguments(name, items)})[name]

    def counts_together(self, name: str) -> bool:
        """Whether items take other numbers of tokens beside one another than alone."""
        return False

    def question(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return a batch of one conversation, for the model to continue."""
        sample = Sample("the question", tuple(messages))
        rendered = self._writer.prompt(sample, lambda media: self.processor.modality_tokens[self.modality(media)])
        inputs = self._processed_or_broken(self._decoded(sample), rendered)
        return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}

    @property
    def answer_ends(self) -> list[int]:
        """The tokens that end an answer."""
        turns = (Message("user", ("a",)), Message("assistant", ("a",)))
        rendered = self._writer.write(Sample("an answer", turns), lambda media: "")
        ids, trained = self._tokenized(rendered)
        last = ids[trained][-1:].tolist()
        tokenizer = self.processor.llm_tokenizer
        special = [token for token in last if token in special_tokens(tokenizer)]
        return sorted({*special, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})

    def media_kinds(self) -> dict[str, MediaKind]:
        """Return the kind of media that each modality takes."""
        kinds = {theirs: ours for ours, theirs in _KINDS.items()}
        found = {name: item_kind(item_argument(p)) for name, p in self.processor.encoder_processors.items()}
        return {name: kinds[kind] for name, kind in found.items() if kind in kinds}

    def modality(self, media: Media) -> str:
        """Return the one modality that takes this kind of medium."""
        names = [name for name, kind in self.media_kinds().items() if kind == media.kind]
        if len(names) != 1:
            raise SampleError(
                f"has an {media.kind}, which fits {names or 'none'} of the modalities "
                f"{list(self.processor.encoder_processors)}; expected exactly one"
            )
        return names[0]

    def _decoded(self, sample: Sample, features: ItemLookup | None = None) -> dict[str, list[Any]]:
        """Return the items of a sample, by modality; with `features`, those that were encoded before undecoded."""
        items: dict[str, list[Any]] = {}
        for media in sample.media:
            name = self.modality(media)
            decode = partial(self._item, media, self.processor.encoder_processors[name])
            items.setdefault(name, []).append(decode() if features is None else features.item(name, media, decode))
        return items

    def _item(self, media: Media, processor: Any) -> Any:
        if media.kind == "image":
            return load_image(media, self.data.max_pixels)
        if isinstance(processor, PrecomputedFeatureExtractor):
            return self._features(media, processor)
        sound = load_audio(media, sampling_rate(processor))
        most = self.longest_sound(processor)
        if most is not None and len(sound) > most and self.data.too_long != "cut":
            # The feature extractor would cut it without a word.
            raise SampleTooLongError(f"has a sound of {len(sound)} samples, its feature extractor takes {most}")
        return sound

    def longest_sound(self, processor: Any) -> int | None:
        """Return how many samples of a sound a processor takes; None: any number."""
        return getattr(processor, "n_samples", None)

    def _features(self, media: Media, processor: PrecomputedFeatureExtractor) -> np.ndarray:
        features = load_features(media, processor.feature_size)
        most = processor.max_frames
        if len(features) > most and self.data.too_long != "cut":
            raise SampleTooLongError(f"has a sound of {len(features)} frames, its feature extractor takes {most}")
        return features[:most]

    def encoder_inputs(self, items: Mapping[str, list[Any]]) -> dict[str, Any]:
        """Return what the encoders are given for items without a text."""
        return self._processed(items)

    def _processed_or_broken(self, items: Mapping[str, list[Any]], rendered: Rendered) -> dict[str, Any]:
        try:
            return self._processed(items, rendered)
        except Exception as error:  # whatever a processor stumbles over: an odd image, a count that does not fit
            named = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            raise SampleError(f"cannot be processed: {named}{error}") from error

    def _processed(self, items: Mapping[str, list[Any]], rendered: Rendered | None = None) -> dict[str, Any]:
        """Run the processors on items, and on their text; of what the tokenizer makes, only the ids are kept."""
        if any(isinstance(item, SeenItem) for values in items.values() for item in values):
            return self._processed_fresh(items, rendered)
        given = {name: self._arguments(name, values) for name, values in items.items()}
        if rendered is None:
            return dict(self._composed(given, return_tensors="pt"))
        options = {"text": [rendered.text], "add_special_tokens": rendered.is_document, "verbose": False}
        made = dict(self._composed(given, options, return_tensors="pt"))
        unused = set(self.processor.llm_tokenizer.model_input_names) - {"input_ids"}
        return {key: value for key, value in made.items() if key not in unused}

    def _processed_fresh(self, items: Mapping[str, list[SeenItem]], rendered: Rendered | None) -> dict[str, Any]:
        """Do the same for items of which only those are processed that were not encoded before."""
        inputs: dict[str, Any] = {}
        lengths: dict[str, list[int]] = {}
        for name, values in items.items():
            fresh = [item.decoded for item in values if item.tokens is None]
            made = self._composed.process_items({name: self._arguments(name, fresh) if fresh else None})
            inputs[name], lengths[name] = known_inputs(values, *made.get(name, ({}, [])))
        if rendered is None:
            return inputs
        options = {"add_special_tokens": rendered.is_document, "verbose": False, "return_tensors": "pt"}
        return {**inputs, "input_ids": self._composed.tokenize([rendered.text], lengths, **options)["input_ids"]}

    def _arguments(self, name: str, items: list[Any]) -> dict[str, Any]:
        processor = self.processor.encoder_processors[name]
        arguments: dict[str, Any] = {item_argument(processor): items}
        rate = sampling_rate(processor)
        if rate is not None and "sampling_rate" in keywords(processor):
            arguments["sampling_rate"] = rate
        if _pads_only_when_told(processor):
            arguments["padding"] = True
        return arguments

    # ------------------------------------------------------------------ labels

    def _tokenized(self, rendered: Rendered, add_special_tokens: bool = False) -> tuple[Tensor, Tensor]:
        """Return the ids of a text, its placeholders single, and which of them are the model's to write."""
        added = rendered.is_document or add_special_tokens
        encoded = self.processor.llm_tokenizer(
            rendered.text, add_special_tokens=added, return_offsets_mapping=True, verbose=False
        )
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        ids = torch.tensor(encoded["input_ids"], dtype=torch.long)
        return ids, torch.from_numpy(trained_tokens(offsets, rendered))

    def _labels(self, input_ids: Tensor, single: Tensor, trained: Tensor) -> Tensor:
        """Return the ids where they are learned, which is never at a placeholder."""
        is_text = ~torch.isin(single, self._placeholder_ids)
        own = ~torch.isin(input_ids, self._placeholder_ids)
        if not torch.equal(single[is_text], input_ids[own]):
            raise SampleError("the tokenizer splits the text in another way beside a repeated placeholder")
        labels = torch.full_like(input_ids, IGNORED)
        labels[own] = torch.where(trained[is_text], single[is_text], IGNORED)
        return labels

    # ------------------------------------------------------------------ length

    def _shortened(self, sample: PreparedSample) -> PreparedSample:
        """Cut a sample's end off, at the limit or before the images that stand across it."""
        limit, length = self.data.max_length, len(sample.input_ids)
        if self.data.too_long != "cut":
            raise SampleTooLongError(f"has {length} tokens, max_length is {limit}")
        end = limit
        last = sample.input_ids[limit - 1]
        if sample.input_ids[limit] == last and bool(torch.isin(last, self._placeholder_ids)):
            while end and sample.input_ids[end - 1] == last:
                end -= 1
        items = self._items_before(sample, end)
        encoder_inputs = sample.encoder_inputs
        if items != {name: len(values) for name, values in sample.items.items()}:
            kept = {name: values[: items[name]] for name, values in sample.items.items() if items[name]}
            encoder_inputs = self._processed(kept)
        else:
            kept = dict(sample.items)
        return PreparedSample(sample.id, sample.text, sample.input_ids[:end], sample.labels[:end], kept, encoder_inputs)

    def _items_before(self, sample: PreparedSample, end: int) -> dict[str, int]:
        """Return how many items of each modality stand whole before a place. Items side by side stay together."""
        ids = self.processor.modality_token_ids
        single = self.processor.llm_tokenizer(sample.text, add_special_tokens=False, verbose=False)["input_ids"]
        runs = [(token, len(list(run))) for token, run in groupby(single)]
        counts = {}
        for name in sample.items:
            whole = sum(token == ids[name] for token, _ in groupby(sample.input_ids[:end].tolist()))
            counts[name] = sum([count for token, count in runs if token == ids[name]][:whole])
        return counts

    # ------------------------------------------------------------------ several samples

    def join(self, samples: Sequence[PreparedSample]) -> CollatedBatch:
        """Return the batch of prepared samples: a row for each, or packed."""
        inputs, order = self._packed(samples) if self.data.packing else self._padded(samples)
        ordered = [samples[number] for number in order]
        inputs.update(self._encoder_inputs(ordered, inputs["input_ids"]))
        inputs["facts"] = BatchFacts.of(inputs, self.processor.modality_token_ids)
        items = {name: sum(len(sample.items.get(name, ())) for sample in samples) for name in self._modalities(samples)}
        return CollatedBatch(
            inputs=inputs,
            sample_ids=[sample.id for sample in ordered],
            tokens=int(inputs["attention_mask"].sum()),
            trained_tokens=int((inputs["labels"][:, 1:] != IGNORED).sum()),
            items=items,
        )

    def _modalities(self, samples: Sequence[PreparedSample]) -> list[str]:
        return [name for name in self.processor.modality_tokens if any(name in sample.items for sample in samples)]

    def _alike(self, samples: Sequence[PreparedSample]) -> bool:
        """Whether each modality's inputs are nested under its name in all samples, or in none."""
        for name in self._modalities(samples):
            if len({name in sample.encoder_inputs for sample in samples if name in sample.items}) > 1:
                return False
        return True

    def _padded(self, samples: Sequence[PreparedSample]) -> tuple[dict[str, Any], list[int]]:
        length = self._lengths.of_rows(max(len(sample.input_ids) for sample in samples))

        def rows(tensors: list[Tensor], fill: int) -> Tensor:
            filled = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)
            return torch.nn.functional.pad(filled, (0, length - filled.shape[1]), value=fill)

        inputs = {
            "input_ids": rows([sample.input_ids for sample in samples], self._pad),
            "attention_mask": rows([torch.ones_like(sample.input_ids) for sample in samples], 0),
            "labels": rows([sample.labels for sample in samples], IGNORED),
        }
        for key in _token_keys(samples):
            inputs[key] = rows([_token_input(sample, key) for sample in samples], 0)
        return inputs, list(range(len(samples)))

    def _packed(self, samples: Sequence[PreparedSample]) -> tuple[dict[str, Any], list[int]]:
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

    def _encoder_inputs(self, samples: Sequence[PreparedSample], input_ids: Tensor) -> dict[str, Any]:
        """Return the encoders' inputs of all samples, in the order of their tokens."""
        parts = [sample.encoder_inputs for sample in samples if sample.encoder_inputs]
        joined = concatenated(parts) if self._alike(samples) else None
        if joined is not None:
            return joined
        # Items of several sizes: the processors know how they are filled up.
        items = {name: [item for s in samples for item in s.items.get(name, ())] for name in self._modalities(samples)}
        text = "".join(self.processor.modality_tokens[name] * len(values) for name, values in items.items())
        made = self._processed(items, Rendered(text, ()))
        together = made.pop("input_ids")
        for name in items:
            token = self.processor.modality_token_ids[name]
            alone, filled = int((input_ids == token).sum()), int((together == token).sum())
            if alone != filled:
                raise ConfigError(
                    f"The {name} items of {samples[0].id} and its neighbours take {alone} tokens one by one and "
                    f"{filled} when they are filled up to one size. Use a processor that makes items of one size, or "
                    "portions of one sample."
                )
        return made


def trained_tokens(offsets: np.ndarray, rendered: Rendered) -> np.ndarray:
    """Say for each token, given by its characters [S, 2], whether it is the model's to write.

    It is if all of it is, or all but white space before it: many tokenizers join a word with the space before it, and a
    template may end a prompt with that space.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    added = starts == ends  # by the tokenizer, around a text
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
    """Return what is said of each token; 0 for samples of which nothing is said: text alone."""
    found = sample.token_inputs.get(key)
    return torch.zeros_like(sample.input_ids) if found is None else found


def sampling_rate(processor: Any) -> int | None:
    """Return the rate of the sounds that a processor takes; None if it says none."""
    inner = getattr(processor, "feature_extractor", processor)
    return getattr(inner, "sampling_rate", None)


def _pads_only_when_told(processor: Any) -> bool:
    """Whether several sounds of different lengths need `padding=True`; others fill up to a length of their own."""
    if item_kind(item_argument(processor)) != "audio":
        return False
    padding = inspect.signature(processor.__call__).parameters.get("padding")
    return padding is not None and padding.default in (False, None)


def concatenated(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return inputs one after the other along their first dimension, or None if their other dimensions differ."""
    joined: dict[str, Any] = {}
    for key in {key: None for part in parts for key in part}:
        values = [part[key] for part in parts if key in part]
        if all(isinstance(value, Mapping) for value in values):
            joined[key] = concatenated(values)
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
