"""Samples into the batch of a whole multimodal model: what the model's own processor makes of them, with labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.packing import IGNORED
from cornstarch.models.multimodal_language_model.preprocessing.subprocessors import noise_item
from cornstarch.models.multimodal_language_model.whole_processing import (
    Encoded,
    WholeModelProcessor,
    items_of,
    message_of,
)
from cornstarch.train.config import DataConfig
from cornstarch.train.data.chat import Rendered, special_tokens
from cornstarch.train.data.collate import ChatCollator, PreparedSample, concatenated, trained_tokens
from cornstarch.train.data.sample import MediaKind, Message, Sample, SampleError, SampleTooLongError
from cornstarch.train.data.whole_chat import MARKS, Conversation, WholeChatWriter
from cornstarch.trees import tensors_in

_KINDS: dict[str, MediaKind] = {"vision": "image", "audio": "audio"}


class WholeChatCollator(ChatCollator):
    """Makes batches that equal, tensor for tensor, what the model's own processor makes of the same conversations.

    Args:
        processor: The whole model's processor.
        data: The limits, the template, what is trained on, and whether samples are packed.
    """

    def __init__(self, processor: WholeModelProcessor, data: DataConfig) -> None:
        super().__init__(processor, data)
        self._own = processor
        self._whole_writer = WholeChatWriter(processor, data.system, data.train_on == "answers")
        # Whether samples' inputs laid end to end are what the processor makes of the samples together; by the keys
        # that the samples have.
        self._joins: dict[frozenset[frozenset[str]], bool] = {}
        self._together_counts: dict[str, bool] = {}
        self._takes_any_sound: bool | None = None

    @property
    def _reads_offsets(self) -> bool:
        assert isinstance(self.processor, WholeModelProcessor)
        return self.processor.style != "tokens"

    # ------------------------------------------------------------------ one sample

    def _prepared(self, sample: Sample) -> PreparedSample:
        if sample.document:
            return self._prepared_document(sample)
        items = [self._load(media) for media in sample.media]
        conversation = self._whole_writer.conversation(sample, items)
        encoded = self._encoded(self._whole_writer.marked(conversation))
        return self._within_limits(self._read(sample, encoded, items, conversation))

    def _encoded(self, conversation: Conversation, prompt: bool = False) -> Encoded:
        with _processing():
            return self._own.encode(conversation, prompt=prompt, hidden=MARKS)

    def _read(self, sample: Sample, encoded: Encoded, items: Sequence[Any], source: Any) -> PreparedSample:
        """Take apart what the processor returned."""
        tokens, encoder_inputs = _take_apart(self._own, encoded.inputs)
        input_ids = tokens.pop("input_ids")
        own_labels = tokens.pop("labels", None)
        if items and not encoder_inputs:
            raise SampleError(f"{type(self._own.original).__name__} leaves its items out")
        if self._own.style == "suffix":
            text = encoded.text or ""
            labels = input_ids.masked_fill(torch.isin(input_ids, self._placeholder_ids), IGNORED)
            if own_labels is not None and self.data.train_on == "answers":
                labels = own_labels
        elif self._own.style == "tokens":
            text = ""
            learned = self._learned(source, input_ids) & ~torch.isin(input_ids, self._placeholder_ids)
            labels = torch.where(learned, input_ids, IGNORED)
        else:
            rendered = self._rendered(encoded)
            labels = self._answers(input_ids, encoded, rendered)
            text = rendered.text
        by_name: dict[str, list[Any]] = {}
        for media, item in zip(sample.media, items, strict=True):
            by_name.setdefault(self.modality(media), []).append(item)
        return PreparedSample(sample.id, text, input_ids, labels, by_name, encoder_inputs, tokens, source)

    def _rendered(self, encoded: Encoded) -> Rendered:
        if encoded.text is None or encoded.offsets is None:
            raise SampleError(
                f"{type(self._own.original).__name__} does not give its tokenizer a text, so answers cannot be told "
                "from questions"
            )
        return self._whole_writer.rendered(encoded.text)

    def _answers(self, input_ids: Tensor, encoded: Encoded, rendered: Rendered) -> Tensor:
        """Return the ids where they are learned, which is never at a placeholder."""
        assert encoded.offsets is not None
        learned = torch.from_numpy(trained_tokens(encoded.offsets, rendered))
        if len(learned) != len(input_ids):
            raise SampleError(
                f"its processor makes {len(input_ids)} tokens of a text of {len(learned)}, so answers cannot be told "
                "from questions"
            )
        learned &= ~torch.isin(input_ids, self._placeholder_ids)
        return torch.where(learned, input_ids, IGNORED)

    def _learned(self, conversation: Conversation, input_ids: Tensor) -> Tensor:
        """Say for each token of a chat template that makes no text whether it is the model's to write."""
        assert self._own.token_template is not None
        if self.data.train_on != "answers":
            return torch.ones_like(input_ids, dtype=torch.bool)
        learned = torch.zeros_like(input_ids, dtype=torch.bool)
        with _processing():
            for first, last in self._own.token_template.answers(conversation, input_ids.tolist()):
                learned[first:last] = True
        return learned

    def _load(self, media: Any) -> Any:
        return self._item(media, self._own.encoder_processors[self.modality(media)])

    def longest_sound(self, processor: Any) -> int | None:
        """Return how many samples of a sound are taken; a template that makes tokens may count those of any number."""
        most = super().longest_sound(processor)
        template = self._own.token_template
        if most is None or template is None:
            return most
        if self._takes_any_sound is None:
            sounds = (np.zeros(length, dtype=np.float32) for length in (most, most + 1))
            taken, longer = (len(template.tokens(message_of("audio", [sound]), prompt=True)) for sound in sounds)
            self._takes_any_sound = longer > taken
        return None if self._takes_any_sound else most

    def media_kinds(self) -> dict[str, MediaKind]:
        """Return the kind of media that each modality takes."""
        return {name: _KINDS[name] for name in self._own.encoder_processors}

    # ------------------------------------------------------------------ documents

    def _check_takes_documents(self) -> None:
        if self._own.style == "tokens":
            raise SampleError(f"{type(self._own.original).__name__} cannot process a text without roles")

    def _prepared_document(self, sample: Sample) -> PreparedSample:
        self._check_takes_documents()
        items = [self._load(media) for media in sample.media]
        given: dict[str, list[Any]] = {}
        for media, item in zip(sample.media, items, strict=True):
            given.setdefault(media.kind, []).append(item)
        rendered = self._writer.write(sample, lambda media: self._own.placeholder(media.kind))
        if not items:
            ids, learned = self._tokenized(rendered)
            labels = torch.where(learned, ids, IGNORED)
            return self._within_limits(PreparedSample(sample.id, rendered.text, ids, labels, {}, {}))
        encoded = self._own.encode_text(rendered.text, given)
        if encoded.text is None:
            raise SampleError(f"{type(self._own.original).__name__} cannot process a text without roles")
        whole = replace(rendered, text=encoded.text, trained=((0, len(encoded.text)),))
        tokens, encoder_inputs = _take_apart(self._own, encoded.inputs)
        input_ids = tokens.pop("input_ids")
        tokens.pop("labels", None)
        labels = self._answers(input_ids, encoded, whole)
        by_name = {name: given[kind] for name, kind in _KINDS.items() if kind in given}
        prepared = PreparedSample(sample.id, encoded.text, input_ids, labels, by_name, encoder_inputs, tokens, None)
        return self._within_limits(prepared)

    # ------------------------------------------------------------------ sizes, questions

    def written(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the ids of a sample's text, one placeholder for each item, and which are the model's to write."""
        if sample.document:
            self._check_takes_documents()
            return self._tokenized(self._writer.write(sample, lambda media: self._own.placeholder(media.kind)))
        if self._own.token_template is not None:
            return self._written_as_tokens(self._whole_writer.conversation(sample, self._stand_ins_of(sample)))
        conversation = self._whole_writer.marked(self._whole_writer.conversation(sample))
        return self._unexpanded(self._whole_writer.rendered(self._whole_writer.write(conversation)))

    def _unexpanded(self, rendered: Rendered) -> tuple[Tensor, Tensor]:
        """Tokenize a text whose placeholders are single, with the tokens around it that the processor adds."""
        bos = self._own.llm_tokenizer.bos_token
        return self._tokenized(rendered, add_special_tokens=bos is None or not rendered.text.startswith(bos))

    def _written_as_tokens(self, conversation: Conversation, prompt: bool = False) -> tuple[Tensor, Tensor]:
        """Do the same for a chat template that makes tokens; all items are stand-ins with as many tokens each."""
        assert self._own.token_template is not None
        with _processing():
            ids = torch.tensor(self._own.token_template.tokens(conversation, prompt=prompt))
        learned = torch.zeros_like(ids, dtype=torch.bool) if prompt else self._learned(conversation, ids)
        kept = ~torch.isin(ids, self._placeholder_ids)
        counts = {kind: len(values) for kind, values in items_of(conversation).items()}
        for name, token in self._own.modality_token_ids.items():
            places, count = (ids == token).nonzero().flatten(), counts.get(_KINDS[name], 0)
            if count:
                kept[places[:: len(places) // count]] = True
        return ids[kept], learned[kept]

    def _stand_ins_of(self, sample: Sample) -> list[Any]:
        processors = self._own.encoder_processors
        return [noise_item(processors[self.modality(media)]) for media in sample.media]

    def item_inputs(self, name: str, items: list[Any]) -> tuple[dict[str, Any], list[int]]:
        """Return what an encoder is given for the decoded items of a sample, and the tokens that they take in its text.

        What stands around an item counts as its own. How the tokens are shared out among several items is not known:
        the sum is right.
        """
        conversation = message_of(_KINDS[name], items)
        taken = len(self._own.encode(conversation, prompt=True).inputs["input_ids"][0])
        if self._own.token_template is not None:
            stand_ins = message_of(_KINDS[name], [noise_item(self._own.encoder_processors[name])] * len(items))
            unexpanded, _ = self._written_as_tokens(stand_ins, prompt=True)
        else:
            unexpanded, _ = self._unexpanded(Rendered(self._own.write(conversation, prompt=True), ()))
        share, more = divmod(taken - len(unexpanded) + len(items), len(items))
        return self._own.encoder_inputs(name, items), [share + (number < more) for number in range(len(items))]

    def counts_together(self, name: str) -> bool:
        """Whether items take other numbers of tokens beside one another than alone: some processors cut lone images."""
        if name not in self._together_counts:
            item = noise_item(self._own.encoder_processors[name])
            try:
                alone, both = (sum(self.item_inputs(name, items)[1]) for items in ([item], [item, item]))
                self._together_counts[name] = both != 2 * alone
            except Exception:  # one that takes a single item: then no sample has two
                self._together_counts[name] = False
        return self._together_counts[name]

    def question(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return a batch of one conversation, for the model to continue."""
        sample = Sample("the question", tuple(messages))
        items = [self._load(media) for media in sample.media]
        inputs = dict(self._encoded(self._whole_writer.conversation(sample, items), prompt=True).inputs)
        inputs.pop("labels", None)
        return inputs

    @property
    def answer_ends(self) -> list[int]:
        """The tokens that end an answer."""
        tokenizer = self._own.llm_tokenizer
        ends = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
        turns = (Message("user", ("a",)), Message("assistant", ("a",)))
        try:
            ids, learned = self.written(Sample("an answer", turns))
        except SampleError:  # a template that wants an image
            return sorted(ends)
        last = ids[learned][-1:].tolist()
        return sorted({*ends, *(token for token in last if token in special_tokens(tokenizer))})

    def _shortened(self, sample: PreparedSample) -> PreparedSample:
        """Cut a sample's end off, if no item is there."""
        limit, length = self.data.max_length, len(sample.input_ids)
        if self.data.too_long != "cut":
            raise SampleTooLongError(f"has {length} tokens, max_length is {limit}")
        if bool(torch.isin(sample.input_ids[limit:], self._placeholder_ids).any()):
            raise SampleTooLongError(
                f"has {length} tokens, max_length is {limit}, and an item stands beyond it, which cannot be cut off"
            )
        tokens = {key: value[:limit] for key, value in sample.token_inputs.items()}
        return replace(sample, input_ids=sample.input_ids[:limit], labels=sample.labels[:limit], token_inputs=tokens)

    # ------------------------------------------------------------------ several samples

    def _encoder_inputs(self, samples: Sequence[PreparedSample], input_ids: Tensor) -> dict[str, Any]:
        """Return the encoders' inputs of all samples, as the processor makes them of the samples together."""
        given = [sample.encoder_inputs for sample in samples]
        if not any(given):
            return {}
        joined = concatenated([inputs for inputs in given if inputs])
        if len(samples) == 1:
            assert joined is not None
            return joined
        kind = frozenset(frozenset(inputs) for inputs in given)
        if joined is not None and self._joins.get(kind):
            return joined
        try:
            together = self._together(samples)  # it knows how items of several sizes, and rows without, are filled up
        except ConfigError:
            raise
        except Exception as error:
            if joined is None:
                raise ConfigError(
                    f"{type(self._own.original).__name__} cannot process {samples[0].id} and its neighbours together: "
                    f"{type(error).__name__}: {error}. Use microbatches of one sample."
                ) from error
            together = joined  # a processor that takes one item per text, say
        if joined is not None and kind not in self._joins:
            self._joins[kind] = _equal(joined, together)
        return together

    def _together(self, samples: Sequence[PreparedSample]) -> dict[str, Any]:
        if any(sample.source is None and sample.items for sample in samples):
            raise ConfigError(
                f"{samples[0].id} and its neighbours are texts without roles with items of several sizes, which "
                f"{type(self._own.original).__name__} cannot lay out together. Give conversations, or microbatches of "
                "one sample."
            )
        made = self._own.encode_together([sample.source for sample in samples if sample.source is not None])
        keys = {key for sample in samples for key in sample.encoder_inputs}
        return {key: value for key, value in made.items() if key in keys}


@contextmanager
def _processing() -> Iterator[None]:
    """Name whatever a processor stumbles over, an odd image or a count that does not fit, as the sample's mistake."""
    try:
        yield
    except Exception as error:
        named = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise SampleError(f"cannot be processed: {named}{error}") from error


def _take_apart(processor: WholeModelProcessor, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what a batch of one says of each token, [S], and what is the encoders'."""
    rows, encoder_inputs = processor.take_apart(inputs)
    tokens = {key: value[0] for key, value in rows.items()}
    mask = tokens.pop("attention_mask", None)
    if mask is not None and not bool(mask.all()):  # a processor that fills up to a length of its own
        tokens = {key: value[mask.bool()] for key, value in tokens.items()}
    return tokens, encoder_inputs


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    for key in one:
        ours, theirs = tensors_in(one[key]), tensors_in(other[key])
        if len(ours) != len(theirs) or not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            return False
    return True


__all__ = ["WholeChatCollator"]
