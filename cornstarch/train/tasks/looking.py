"""Samples as a run's model meets them, for people to look at before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.packing import IGNORED
from cornstarch.train.build import build_model, build_processor
from cornstarch.train.config import RunConfig
from cornstarch.train.data.check import Look, Seen
from cornstarch.train.data.collate import ChatCollator, PreparedSample
from cornstarch.train.data.loader import Collator
from cornstarch.train.data.sample import Sample
from cornstarch.train.tasks.build import build_task
from cornstarch.train.tasks.classify import ClassificationCollator, TextItems
from cornstarch.train.tasks.masked import MaskedCollator
from cornstarch.train.tasks.sequence import Seq2SeqCollator
from cornstarch.train.tasks.stacking import RowCollator

_ARROW = " → "
_SHOWN = 60  # characters of a field


def look_of(config: RunConfig) -> Look:
    """Return what prepares samples as a run of this config would, and tells what they have become.

    A composed model is made without weights; any other is built as for the run.
    """
    if config.model.given is not None:
        raise ConfigError(
            f"model.given = {config.model.given}: only Python can make this model. Look at its rows alone, with --rows."
        )
    if config.data.too_long == "error":  # not at the first of them: all are to be told
        config = config.model_copy(update={"data": config.data.model_copy(update={"too_long": "skip"})})
    if config.model.language_model is None:
        return _look_by(build_task(config).collator)
    model = build_model(config.model, weights=False)
    return ChatLook(ChatCollator(build_processor(config.model, model), config.data))


def _look_by(collator: Collator) -> Look:
    if isinstance(collator, ChatCollator):
        return ChatLook(collator)
    if isinstance(collator, Seq2SeqCollator):
        return PairLook(collator)
    if isinstance(collator, MaskedCollator):
        return HiddenLook(collator)
    if isinstance(collator, ClassificationCollator):
        return LabelLook(collator, "tokens" if isinstance(collator.items, TextItems) else "images")
    assert isinstance(collator, RowCollator)
    return FieldLook(collator)


@dataclass
class ChatLook:
    """Conversations: tokens, of which the answers are trained on."""

    collator: ChatCollator
    unit: str = "tokens"

    def __call__(self, sample: Sample) -> Seen:
        """Prepare a sample as for training."""
        prepared = self.collator.prepare(sample)
        items = {name: len(values) for name, values in prepared.items.items()}
        return Seen(len(prepared.input_ids), prepared.trained_tokens, items, tuple(self._pieces(prepared)))

    def _pieces(self, prepared: PreparedSample) -> Iterator[tuple[str, bool]]:
        """Yield the tokens as text, in pieces that are trained on, or not, or are an item's."""
        processor = self.collator.processor
        placeholders = {token: processor.modality_tokens[name] for name, token in processor.modality_token_ids.items()}
        pairs = zip(prepared.input_ids.tolist(), (prepared.labels != IGNORED).tolist(), strict=True)
        for (placeholder, trained), run in groupby(pairs, lambda pair: (placeholders.get(pair[0]), pair[1])):
            ids = [token for token, _ in run]
            yield (_text(processor.llm_tokenizer, ids) if placeholder is None else f"{placeholder}×{len(ids)}"), trained


@dataclass
class PairLook:
    """A source, and the target that is written from it."""

    collator: Seq2SeqCollator
    unit: str = "tokens"

    def __call__(self, sample: Sample) -> Seen:
        """Prepare a sample as for training."""
        prepared = self.collator.prepare(sample)
        source, target = prepared.inputs["input_ids"].tolist(), prepared.labels.tolist()
        tokenizer = self.collator.reader.tokenizer
        pieces = ((_text(tokenizer, source), False), (_ARROW, False), (_text(tokenizer, target), True))
        return Seen(len(source) + len(target), len(target), {}, pieces)


@dataclass
class HiddenLook:
    """Texts with the words that are to be guessed."""

    collator: MaskedCollator
    unit: str = "tokens"

    def __call__(self, sample: Sample) -> Seen:
        """Prepare a sample as for training; hidden words are shown as what they were."""
        prepared = self.collator.prepare(sample)
        ids, labels = prepared.inputs["input_ids"].tolist(), prepared.labels.tolist()
        words = [
            (label if label != IGNORED else token, label != IGNORED) for token, label in zip(ids, labels, strict=True)
        ]
        tokenizer = self.collator.reader.tokenizer
        runs = [([token for token, _ in run], hidden) for hidden, run in groupby(words, lambda pair: pair[1])]
        pieces = [piece for run, hidden in runs for piece in ((_text(tokenizer, run), hidden), (" ", False))]
        return Seen(len(ids), sum(hidden for _, hidden in words), {}, tuple(pieces[:-1]))


@dataclass
class LabelLook:
    """Texts or images with their labels."""

    collator: ClassificationCollator
    unit: str
    _first: Any = None

    def __call__(self, sample: Sample) -> Seen:
        """Prepare a sample as for training, and join it with the first one, as a run would with others."""
        prepared = self.collator.prepare(sample)
        self._first = prepared if self._first is None else self._first
        self.collator.join([self._first, prepared])
        items = self.collator.items
        text = f"<{items.kind}>" if items.kind else ""
        if isinstance(items, TextItems):
            text = _text(items.reader.tokenizer, prepared.inputs["input_ids"].tolist())
        counted = {items.kind: 1} if items.kind else {}
        word = self.collator.labels.word(prepared.label)
        return Seen(items.tokens(prepared.inputs), None, counted, ((text, False), (_ARROW, False), (word, True)))


@dataclass
class FieldLook:
    """Rows of any fields, for a model of the user's own."""

    collator: RowCollator
    unit: str = "rows"
    _first: Any = field(default=None, repr=False)

    def __call__(self, sample: Sample) -> Seen:
        """Decode a row, and make a batch of it and the first one, as a run would with others."""
        prepared = self.collator.prepare(sample)
        self._first = prepared if self._first is None else self._first
        self.collator.join([self._first, prepared])
        text = ", ".join(f"{name}: {_field(value)}" for name, value in prepared.fields.items())
        return Seen(1, None, prepared.items, ((text, False),))


def _text(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    return str(tokenizer.decode(list(ids)))


def _field(value: Any) -> str:
    if isinstance(value, Tensor) and value.dim():
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = str(value.item() if isinstance(value, Tensor) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


__all__ = ["look_of"]
