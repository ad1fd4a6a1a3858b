"""Conversations and documents: composed models, whole multimodal models, plain language models."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.compute.head import trained_rows_at_most
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.models.multimodal_language_model.packing import IGNORED
from cornstarch.models.multimodal_language_model.takeover.undivided import UndividedModel
from cornstarch.models.multimodal_language_model.unwrap import is_peft, unwrap
from cornstarch.train.data.collate import ChatCollator, CollatedBatch
from cornstarch.train.data.sample import MediaKind, Message, Sample, SampleError
from cornstarch.train.tasks.loading import new_folder
from cornstarch.train.tasks.task import Measures

PROCESSOR_FOLDER = "processor"
"""Where a saved model has its tokenizer and processors."""


@dataclass
class ConversationTask:
    """A multimodal model, or a language model, that learns to answer."""

    name: str
    model: MultimodalModel
    collator: ChatCollator
    wrapped: nn.Module | None = field(default=None, init=False, repr=False)
    """What is called instead of the model, where several processes train it together."""

    # ------------------------------------------------------------------ training

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the mean loss over the tokens that are trained on."""
        facts: BatchFacts | None = inputs.get("facts")
        with trained_rows_at_most(None if facts is None else facts.trained_tokens):
            return (self.wrapped or self.model)(**inputs).loss

    def measure(self, batch: CollatedBatch) -> Measures:
        """Return the loss, the share of tokens, and the share of samples whose every token is right.

        The latter is what greedy decoding gets right: it follows the truth for as long as it is right.
        """
        output = (self.wrapped or self.model)(**batch.inputs)
        labels = batch.inputs["labels"][:, 1:]
        counted = labels != IGNORED
        wrong = counted & (output.logits[:, :-1].argmax(-1) != labels)
        samples, missed = len(batch.sample_ids), _samples_with(wrong, batch.inputs.get("documents"))
        return Measures(
            {
                "loss": (output.loss.item() * batch.trained_tokens, batch.trained_tokens),
                "token_accuracy": (batch.trained_tokens - int(wrong.sum()), batch.trained_tokens),
                "accuracy": (samples - missed, samples),
            }
        )

    # ------------------------------------------------------------------ using

    def modalities(self) -> dict[str, MediaKind]:
        """Return the kind of media that each encoder takes."""
        return self.collator.media_kinds()

    def answer(self, samples: Sequence[Sample]) -> list[str]:
        """Return what the model says to each conversation, without its last answer."""
        return [self.reply(_question(sample), most_tokens=self._room(sample)) for sample in samples]

    def truth(self, sample: Sample) -> str:
        """Return the last answer of a conversation."""
        if not sample.messages or sample.messages[-1].role != "assistant":
            return ""
        return "".join(part for part in sample.messages[-1].content if isinstance(part, str)).strip()

    def reply(self, messages: Sequence[Message], *, most_tokens: int = 128, **options: Any) -> str:
        """Return the model's next turn; `options` are those of `generate` (`do_sample`, `temperature`, `streamer`)."""
        try:
            inputs = self.collator.question(messages)
        except SampleError as error:
            raise ConfigError(f"The question {error}.") from error
        device = self.model.device
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        tokenizer = self.collator.processor.llm_tokenizer
        ends = self.collator.answer_ends
        settings = {"max_new_tokens": most_tokens, "do_sample": False, "eos_token_id": ends or None, **options}
        if tokenizer.pad_token_id is not None:
            settings["pad_token_id"] = tokenizer.pad_token_id
        written = self.model.generate(**moved, **settings)[0, inputs["input_ids"].shape[1] :]
        return str(tokenizer.decode(written, skip_special_tokens=True)).strip()

    def _room(self, sample: Sample) -> int:
        tokens = self.collator.processor.llm_tokenizer(self.truth(sample), add_special_tokens=False)["input_ids"]
        return min(2 * len(tokens) + 8, 256)

    # ------------------------------------------------------------------ the folder

    def save(self, folder: Path) -> None:
        """Write the model, adapters merged, with its processor; a model in one piece as transformers does."""
        model, processor = merged(self.model), self.collator.processor
        with new_folder(folder) as fresh:
            if model.encoders:
                model.save_pretrained(fresh)
                processor.save_pretrained(fresh / PROCESSOR_FOLDER)
            else:
                model.language_model.save_pretrained(fresh)  # type: ignore[operator]
                whole = isinstance(model, UndividedModel)
                (processor if whole else processor.llm_tokenizer).save_pretrained(fresh)

    def load(self, folder: Path) -> nn.Module:
        """Return the model of a folder."""
        if self.model.encoders:
            return MultimodalModel.from_pretrained(folder)
        kind: Any = type(unwrap(self.model.language_model))
        loaded = kind.from_pretrained(folder, dtype="auto")
        if isinstance(self.model, UndividedModel):
            return UndividedModel(loaded, self.model.reason)
        return MultimodalModel({}, loaded)

    def logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the logits at tokens that are no padding."""
        logits: Tensor = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
        return logits[inputs["attention_mask"].bool()]


def merged(model: MultimodalModel) -> MultimodalModel:
    """Return a model whose adapters are part of its weights; the given one is left as it is."""
    if not any(is_peft(module) for module in model.modules()):
        return model
    plain = copy.deepcopy(model)
    for holder in [*plain.encoders.values(), plain]:
        attribute = "language_model" if holder is plain else "module"
        part = getattr(holder, attribute)
        if is_peft(part):
            setattr(holder, attribute, part.merge_and_unload())
    return plain


def _question(sample: Sample) -> tuple[Message, ...]:
    return sample.messages[:-1] if sample.messages[-1].role == "assistant" else sample.messages


def _samples_with(marked: Tensor, documents: Tensor | None) -> int:
    """Return how many samples have a marked token: rows, or the documents of packed rows."""
    rows, columns = marked.nonzero(as_tuple=True)
    if documents is None:
        return int(rows.unique().numel())
    numbers = documents[:, 1:][rows, columns]
    return int(torch.stack([rows, numbers]).unique(dim=1).shape[1])
