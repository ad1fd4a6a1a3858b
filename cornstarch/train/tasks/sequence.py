"""Text to text through an encoder and a decoder: T5, BART and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.packing import IGNORED
from cornstarch.train.build import tokenizer_of
from cornstarch.train.config import RunConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.sample import Message, Sample, SampleError
from cornstarch.train.tasks.loading import WHERE, WholeTask, load_whole, refuse_unused, whole_config, whole_of
from cornstarch.train.tasks.task import Measures
from cornstarch.train.tasks.text import PreparedText, TextReader, padded_labels, plain_text

NAME = "seq2seq-lm"
_MOST_ANSWERED = 256


def seq2seq_task(config: RunConfig) -> Seq2SeqTask:
    """Return the task of a run that trains a model to write one text from another."""
    refuse_unused(config.data, NAME, "packing", "chat_template", "train_on")
    model_config: Any = whole_config(config)
    if not model_config.is_encoder_decoder:
        raise ConfigError(
            f"{WHERE}.task = {NAME}\n  A {model_config.model_type!r} model has no encoder and decoder. Expected T5, "
            "BART, …; a plain language model is trained with `task: causal-lm`."
        )
    tokenizer = tokenizer_of(WHERE, whole_of(config))
    _name_start(model_config)
    model = load_whole(config, model_config, AutoModelForSeq2SeqLM)
    return Seq2SeqTask(NAME, model, Seq2SeqCollator(TextReader(tokenizer, config.data, model)), [tokenizer])


def _name_start(model_config: Any) -> None:
    """Have the decoder start with padding where a config made from sizes says nothing, as T5 does."""
    if getattr(model_config, "decoder_start_token_id", None) is None:
        model_config.decoder_start_token_id = model_config.pad_token_id


class Seq2SeqCollator:
    """Makes batches of sources and targets."""

    def __init__(self, reader: TextReader) -> None:
        self.reader, self.data = reader, reader.data

    def prepare(self, sample: Sample) -> PreparedText:
        """Tokenize one sample's source and target."""
        question, target = _turns(sample)
        if target is None:
            raise SampleError("has no answer to learn; expected `source` and `target`, or a conversation")
        if not target.strip():
            raise SampleError("`target` is empty")
        return PreparedText(sample.id, self.question(sample, question), self.reader.read_target(target, sample.id))

    def question(self, sample: Sample, turns: Sequence[Message] | None = None) -> dict[str, Tensor]:
        """Return the tokens of what the model answers."""
        source = written(_turns(sample)[0] if turns is None else turns, self.data.system)
        if not source.strip():
            raise SampleError("`source` is empty")
        return self.reader.read(source, sample.id)

    def join(self, samples: Sequence[PreparedText]) -> CollatedBatch:
        """Return the batch of prepared samples; the model makes its decoder's inputs from the labels."""
        inputs: dict[str, Any] = self.reader.padded([sample.inputs for sample in samples])
        inputs["labels"] = padded_labels([sample.labels for sample in samples])
        trained = int((inputs["labels"] != IGNORED).sum())
        tokens = sum(len(sample.inputs["input_ids"]) for sample in samples)
        return CollatedBatch(inputs, [sample.id for sample in samples], tokens + trained, trained, {})


def _turns(sample: Sample) -> tuple[tuple[Message, ...], str | None]:
    """Return what comes before the last answer, and the answer."""
    places = [number for number, message in enumerate(sample.messages) if message.role == "assistant"]
    if places:
        return sample.messages[: places[-1]], plain_text(sample.messages[places[-1]].content)
    if "source" in sample.fields:  # of a sample that was made in Python
        return (Message("user", (str(sample.fields["source"]),)),), _optional(sample.fields.get("target"))
    return sample.messages, None


def _optional(value: Any) -> str | None:
    return None if value is None else str(value)


def written(turns: Sequence[Message], system: str | None) -> str:
    """Return turns as one text: the instruction first, then what was said, with roles if several have spoken."""
    told = [plain_text(turn.content) for turn in turns if turn.role == "system"]
    if not told and system is not None:
        told = [system]
    said = [turn for turn in turns if turn.role != "system"]
    named = len(said) > 1
    lines = [f"{turn.role}: {plain_text(turn.content)}" if named else plain_text(turn.content) for turn in said]
    return "\n".join([*told, *lines]) if any(line.strip() for line in lines) else ""


@dataclass
class Seq2SeqTask(WholeTask):
    """A model that writes one text from another."""

    collator: Seq2SeqCollator

    def measure(self, batch: CollatedBatch) -> Measures:
        """Return the loss, the share of tokens, and the share of samples whose every token is right."""
        output = self._outputs(batch.inputs)
        labels = batch.inputs["labels"]
        wrong = (labels != IGNORED) & (output.logits.argmax(-1) != labels)
        count, rows = batch.trained_tokens, len(labels)
        return Measures(
            {
                "loss": (output.loss.item() * count, count),
                "token_accuracy": (count - int(wrong.sum()), count),
                "accuracy": (rows - int(wrong.any(dim=1).sum()), rows),
            }
        )

    @torch.no_grad()
    def answer(self, samples: Sequence[Sample]) -> list[str]:
        """Return what the model writes, the likeliest token each time."""
        return [self._reply(sample) for sample in samples]

    def _reply(self, sample: Sample) -> str:
        reader = self.collator.reader
        inputs = self._placed(reader.padded([self.collator.question(sample)]))
        most = min(_MOST_ANSWERED, reader.limit)
        model: Any = self.model
        ids = model.generate(**inputs, max_new_tokens=most, do_sample=False, num_beams=1)[0]
        return str(reader.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def truth(self, sample: Sample) -> str:
        """Return the target."""
        return (_turns(sample)[1] or "").strip()


__all__ = ["Seq2SeqCollator", "Seq2SeqTask", "seq2seq_task", "written"]
