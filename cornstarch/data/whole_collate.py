"""Collate samples of a whole multimodal model: the outputs of the model's own processor, with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.config import DataConfig
from cornstarch.data.chat import MARKS, Conversation, RenderedText, WholeChatWriter, mask_trained_tokens
from cornstarch.data.collate import ChatCollator, PreparedSample, concatenate_inputs
from cornstarch.data.sample import MediaKind, Message, Sample, SampleError, SampleTooLongError, as_sample_errors
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.models.multimodal_language_model.preprocessing import hf_processor
from cornstarch.models.multimodal_language_model.preprocessing.modality_processors import build_noise_item
from cornstarch.trees import tensors_in

_KINDS: dict[str, MediaKind] = {"vision": "image", "audio": "audio"}


class WholeChatCollator(ChatCollator):
    """Builds batches that equal, tensor for tensor, the outputs of the model's own processor for the conversations."""

    def __init__(self, processor: hf_processor.WholeModelProcessor, data: DataConfig) -> None:
        super().__init__(processor, data)
        self._own = processor
        self._class_name = type(processor.original).__name__
        self._whole_writer = WholeChatWriter(processor, data.system, data.train_on == "answers")
        # By the keys of the samples: whether their concatenated inputs are what the processor returns for all together.
        self._joins: dict[frozenset[frozenset[str]], bool] = {}
        self._counts_together: dict[str, bool] = {}
        self._takes_any_sound: bool | None = None

    def _prepare(self, sample: Sample) -> PreparedSample:
        items = self._load_items(sample)
        by_name: dict[str, list[Any]] = {}
        for media, item in zip(sample.media, items, strict=True):
            by_name.setdefault(self.modality(media), []).append(item)
        if sample.document:
            return self._prepare_document(sample, by_name)
        conversation = self._whole_writer.conversation(sample, items)
        encoded = self._encode(*self._whole_writer.mark_answers(conversation))
        tokens, encoder_inputs = self._split_inputs(encoded.inputs)
        input_ids, own_labels = tokens.pop("input_ids"), tokens.pop("labels", None)
        if items and not encoder_inputs:
            raise SampleError(f"{self._class_name} leaves its items out")
        text = ""
        if self._own.style == "suffix":
            text = encoded.text or ""
            labels = input_ids.masked_fill(torch.isin(input_ids, self._placeholder_ids), IGNORE_INDEX)
            if own_labels is not None and self.data.train_on == "answers":
                labels = own_labels
        elif self._own.style == "tokens":
            labels = self._label(input_ids, self._mask_answers(conversation, input_ids))
        else:
            if encoded.text is None or encoded.offsets is None:
                raise SampleError(f"{self._class_name} does not give its tokenizer a text, so answers cannot be found")
            rendered = self._whole_writer.find_trained(encoded.text)
            labels = self._label_text(input_ids, encoded.offsets, rendered)
            text = rendered.text
        return PreparedSample(sample.id, text, input_ids, labels, by_name, encoder_inputs, tokens, conversation)

    def _load_items(self, sample: Sample) -> list[Any]:
        return [self._load_item(media, self.modality(media)) for media in sample.media]

    def _encode(
        self, conversation: Conversation, text: str | None = None, prompt: bool = False
    ) -> hf_processor.EncodedConversation:
        with as_sample_errors():
            return self._own.encode(conversation, prompt=prompt, hidden=MARKS, text=text)

    def _split_inputs(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Split a batch of one into values per token, [S], and the encoders' inputs."""
        rows, encoder_inputs = self._own.split_inputs(inputs)
        tokens = {key: value[0] for key, value in rows.items()}
        mask = tokens.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):  # a processor that pads to a length of its own
            tokens = {key: value[mask.bool()] for key, value in tokens.items()}
        return tokens, encoder_inputs

    def _label(self, input_ids: Tensor, trained: Tensor) -> Tensor:
        """Return the ids where they are learned, which is never at a placeholder."""
        return torch.where(trained & ~torch.isin(input_ids, self._placeholder_ids), input_ids, IGNORE_INDEX)

    def _label_text(self, input_ids: Tensor, offsets: np.ndarray | None, rendered: RenderedText) -> Tensor:
        assert offsets is not None
        trained = torch.from_numpy(mask_trained_tokens(offsets, rendered))
        if len(trained) != len(input_ids):
            raise SampleError(
                f"its processor makes {len(input_ids)} tokens of a text of {len(trained)}, so answers cannot be found"
            )
        return self._label(input_ids, trained)

    def _mask_answers(self, conversation: Conversation, input_ids: Tensor) -> Tensor:
        """Return a mask of the answers' tokens, for a chat template that returns tokens instead of text."""
        assert self._own.token_template is not None
        if self.data.train_on != "answers":
            return torch.ones_like(input_ids, dtype=torch.bool)
        trained = torch.zeros_like(input_ids, dtype=torch.bool)
        with as_sample_errors():
            for first, last in self._own.token_template.answers(conversation, input_ids.tolist()):
                trained[first:last] = True
        return trained

    def _max_samples(self, processor: Any) -> int | None:
        limit = super()._max_samples(processor)
        template = self._own.token_template
        if limit is None or template is None:
            return limit
        if self._takes_any_sound is None:  # a template that returns tokens may count those of longer sounds, too
            sounds = (np.zeros(length, dtype=np.float32) for length in (limit, limit + 1))
            taken, longer = (
                len(template.tokens(hf_processor.build_message("audio", [sound]), prompt=True)) for sound in sounds
            )
            self._takes_any_sound = longer > taken
        return None if self._takes_any_sound else limit

    def media_kinds(self) -> dict[str, MediaKind]:
        return {name: _KINDS[name] for name in self._own.encoder_processors}

    def _render_document(self, sample: Sample) -> RenderedText:
        if self._own.style == "tokens":
            raise SampleError(f"{self._class_name} cannot process a text without roles")
        return self._writer.write(sample, lambda media: self._own.placeholder(media.kind))

    def _prepare_document(self, sample: Sample, items: dict[str, list[Any]]) -> PreparedSample:
        rendered = self._render_document(sample)
        if not items:
            ids, trained = self._tokenize_text(rendered)
            return PreparedSample(sample.id, rendered.text, ids, torch.where(trained, ids, IGNORE_INDEX), {}, {})
        encoded = self._own.encode_text(rendered.text, {_KINDS[name]: values for name, values in items.items()})
        if encoded.text is None:
            raise SampleError(f"{self._class_name} cannot process a text without roles")
        whole = replace(rendered, text=encoded.text, trained=((0, len(encoded.text)),))
        tokens, encoder_inputs = self._split_inputs(encoded.inputs)
        input_ids = tokens.pop("input_ids")
        tokens.pop("labels", None)
        labels = self._label_text(input_ids, encoded.offsets, whole)
        return PreparedSample(sample.id, encoded.text, input_ids, labels, items, encoder_inputs, tokens, None)

    def tokenize(self, sample: Sample) -> tuple[Tensor, Tensor]:
        if sample.document:
            return self._tokenize_text(self._render_document(sample))
        if self._own.token_template is not None:
            processors = self._own.encoder_processors
            stand_ins = [build_noise_item(processors[self.modality(media)]) for media in sample.media]
            return self._apply_token_template(self._whole_writer.conversation(sample, stand_ins))
        conversation, text = self._whole_writer.mark_answers(self._whole_writer.conversation(sample))
        text = self._whole_writer.write(conversation) if text is None else text
        return self._tokenize_unexpanded(self._whole_writer.find_trained(text))

    def _tokenize_unexpanded(self, rendered: RenderedText) -> tuple[Tensor, Tensor]:
        """Tokenize a text with one placeholder per item, with the special tokens that the processor adds around it."""
        bos = self._own.llm_tokenizer.bos_token
        return self._tokenize_text(rendered, add_special_tokens=bos is None or not rendered.text.startswith(bos))

    def _apply_token_template(self, conversation: Conversation, prompt: bool = False) -> tuple[Tensor, Tensor]:
        """Return ids with one placeholder per item, and a mask of the trained ones; all items are stand-ins."""
        assert self._own.token_template is not None
        with as_sample_errors():
            ids = torch.tensor(self._own.token_template.tokens(conversation, prompt=prompt))
        trained = torch.zeros_like(ids, dtype=torch.bool) if prompt else self._mask_answers(conversation, ids)
        kept = ~torch.isin(ids, self._placeholder_ids)
        counts = {kind: len(values) for kind, values in hf_processor.collect_items(conversation).items()}
        for name, token in self._own.modality_token_ids.items():
            places, count = (ids == token).nonzero().flatten(), counts.get(_KINDS[name], 0)
            if count:
                kept[places[:: len(places) // count]] = True  # stand-ins have equally many tokens each
        return ids[kept], trained[kept]

    def item_inputs(self, name: str, items: list[Any]) -> tuple[dict[str, Any], list[int]]:
        """Return an encoder's inputs for decoded items, and their numbers of tokens; only the sum is exact."""
        conversation = hf_processor.build_message(_KINDS[name], items)
        taken = len(self._own.encode(conversation, prompt=True).inputs["input_ids"][0])
        if self._own.token_template is not None:
            stand_ins = hf_processor.build_message(
                _KINDS[name], [build_noise_item(self._own.encoder_processors[name])] * len(items)
            )
            unexpanded, _ = self._apply_token_template(stand_ins, prompt=True)
        else:
            unexpanded, _ = self._tokenize_unexpanded(RenderedText(self._own.write(conversation, prompt=True), ()))
        each, more = divmod(taken - len(unexpanded) + len(items), len(items))
        return self._own.encoder_inputs(name, items), [each + (number < more) for number in range(len(items))]

    def counts_together(self, name: str) -> bool:
        """Whether items take other numbers of tokens beside each other than alone: some processors tile lone images."""
        if name not in self._counts_together:
            item = build_noise_item(self._own.encoder_processors[name])
            try:
                alone, both = (sum(self.item_inputs(name, items)[1]) for items in ([item], [item, item]))
                self._counts_together[name] = both != 2 * alone
            except Exception:  # a processor that takes a single item: then no sample has two
                self._counts_together[name] = False
        return self._counts_together[name]

    def build_prompt(self, messages: Sequence[Message]) -> dict[str, Any]:
        sample = Sample("the question", tuple(messages))
        conversation = self._whole_writer.conversation(sample, self._load_items(sample))
        inputs = dict(self._encode(conversation, prompt=True).inputs)
        inputs.pop("labels", None)
        return inputs

    def _truncate(self, sample: PreparedSample, limit: int) -> PreparedSample:
        if bool(torch.isin(sample.input_ids[limit:], self._placeholder_ids).any()):
            raise SampleTooLongError(
                f"has {len(sample.input_ids)} tokens, max_length is {limit}, and an item stands beyond it, which "
                "cannot be cut off"
            )
        tokens = {key: value[:limit] for key, value in sample.token_inputs.items()}
        return replace(sample, input_ids=sample.input_ids[:limit], labels=sample.labels[:limit], token_inputs=tokens)

    def _join_encoder_inputs(self, samples: Sequence[PreparedSample], input_ids: Tensor) -> dict[str, Any]:
        given = [sample.encoder_inputs for sample in samples]
        if not any(given):
            return {}
        joined = concatenate_inputs([inputs for inputs in given if inputs])
        if len(samples) == 1:
            assert joined is not None
            return joined
        keys = frozenset(frozenset(inputs) for inputs in given)
        if joined is not None and self._is_concatenated(keys, samples):
            return joined
        if any(sample.source is None and sample.items for sample in samples):
            raise ConfigError(
                f"{samples[0].id} and its neighbours are texts without roles with items of several sizes, which "
                f"{self._class_name} cannot lay out together. Give conversations, or microbatches of one sample."
            )
        try:
            return self._process_together(samples)
        except ConfigError:
            raise
        except Exception as error:
            if joined is not None:
                return joined
            raise ConfigError(
                f"{self._class_name} cannot process {samples[0].id} and its neighbours together: "
                f"{type(error).__name__}: {error}. Use microbatches of one sample."
            ) from error

    def _process_together(self, samples: Sequence[PreparedSample]) -> dict[str, Any]:
        """Return the encoders' inputs of samples as their processor pads them: items of several sizes, empty rows."""
        made = self._own.encode_batch([sample.source for sample in samples if sample.source is not None])
        return {key: value for key, value in made.items() if any(key in sample.encoder_inputs for sample in samples)}

    def _is_concatenated(self, keys: frozenset[frozenset[str]], samples: Sequence[PreparedSample]) -> bool:
        """Whether the processor only concatenates the inputs of such samples: tried once, on a few of the first."""
        # A processor that leaves out samples without items when there are some changes nothing when there are none.
        if any(keys <= known for known, is_concatenated in self._joins.items() if is_concatenated):
            return True
        if keys not in self._joins:
            tried = _choose_tried(samples)
            if any(sample.source is None and sample.items for sample in tried):
                return False  # a text without roles, which its processor takes only alone
            joined = concatenate_inputs([sample.encoder_inputs for sample in tried if sample.encoder_inputs])
            try:
                self._joins[keys] = joined is not None and _are_equal(joined, self._process_together(tried))
            except ConfigError:
                raise
            except Exception:  # a processor that takes one item per text, for example
                self._joins[keys] = True
        return self._joins[keys]


def _choose_tried(samples: Sequence[PreparedSample]) -> list[PreparedSample]:
    """Return, in order, the samples with the fewest and the most items for each kind of inputs."""
    by_keys: dict[frozenset[str], list[int]] = {}
    for number, sample in enumerate(samples):
        by_keys.setdefault(frozenset(sample.encoder_inputs), []).append(number)
    chosen: set[int] = set()
    for numbers in by_keys.values():
        numbers.sort(key=lambda number: sum(map(len, samples[number].items.values())))
        chosen |= {numbers[0], numbers[-1]} if samples[numbers[0]].encoder_inputs else {numbers[0]}
    return [samples[number] for number in sorted(chosen)]


def _are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    ours, theirs = ([tensor for key in one for tensor in tensors_in(inputs[key])] for inputs in (one, other))
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
