"""Trains an encoder-decoder, such as T5 or BART, from text to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from cornstarch.config import RunConfig
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.data_report import SampleStats
from cornstarch.data.sample import Message, Sample, SampleError
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.tasks.build_model import WHERE, get_whole_model, load_whole_config, load_whole_model
from cornstarch.tasks.processors import load_tokenizer
from cornstarch.tasks.task import Measures, SamplePreview, TaskInputs, WholeModelTask, refuse_unused
from cornstarch.tasks.text import PreparedText, TextReader, require_text

NAME = "seq2seq-lm"
_MAX_ANSWER = 256  # tokens


def build_seq2seq_task(config: RunConfig, inputs: TaskInputs | None = None) -> Seq2SeqTask:
    """Return the task of a run that trains an encoder-decoder."""
    refuse_unused(config.data, NAME, "packing", "chat_template", "train_on")
    model_config: Any = load_whole_config(config)
    if not model_config.is_encoder_decoder:
        raise ConfigError(
            f"{WHERE}.task = {NAME}\n  A {model_config.model_type!r} model has no encoder and decoder. Expected T5, "
            "BART, …; a plain language model is trained with `task: causal-lm`."
        )
    tokenizer = load_tokenizer(WHERE, get_whole_model(config))
    if getattr(model_config, "decoder_start_token_id", None) is None:  # a config made from sizes: as T5 does
        model_config.decoder_start_token_id = model_config.pad_token_id
    model = load_whole_model(config, model_config, AutoModelForSeq2SeqLM)
    return Seq2SeqTask(NAME, model, Seq2SeqCollator(TextReader(tokenizer, config.data, model)), [tokenizer])


class Seq2SeqCollator:
    """Makes batches of sources and targets."""

    def __init__(self, reader: TextReader) -> None:
        self.reader, self.data = reader, reader.data

    def prepare(self, sample: Sample) -> PreparedText:
        """Tokenize one sample's source and target."""
        question, target = _split_turns(sample)
        if target is None:
            raise SampleError("has no answer to learn; expected `source` and `target`, or a conversation")
        if not target.strip():
            raise SampleError("`target` is empty")
        return PreparedText(sample.id, self.question(sample, question), self.reader.read_target(target, sample.id))

    def question(self, sample: Sample, turns: Sequence[Message] | None = None) -> dict[str, Tensor]:
        """Return the tokens of the source."""
        source = format_turns(_split_turns(sample)[0] if turns is None else turns, self.data.system)
        if not source.strip():
            raise SampleError("`source` is empty")
        return self.reader.read(source, sample.id)

    def join(self, samples: Sequence[PreparedText]) -> CollatedBatch:
        """Return the batch of prepared samples; the model derives its decoder's inputs from the labels."""
        inputs = self.reader.join(samples)
        trained = int((inputs["labels"] != IGNORE_INDEX).sum())
        tokens = sum(len(sample.inputs["input_ids"]) for sample in samples)
        return CollatedBatch(inputs, [sample.id for sample in samples], tokens + trained, trained, {})


def _split_turns(sample: Sample) -> tuple[tuple[Message, ...], str | None]:
    """Return the turns before the last answer, and the answer."""
    places = [number for number, message in enumerate(sample.messages) if message.role == "assistant"]
    if places:
        return sample.messages[: places[-1]], require_text(sample.messages[places[-1]].content)
    if "source" in sample.fields:  # a sample made in Python
        target = sample.fields.get("target")
        return (Message("user", (str(sample.fields["source"]),)),), None if target is None else str(target)
    return sample.messages, None


def format_turns(turns: Sequence[Message], system: str | None) -> str:
    """Return turns as one text: the system prompt first, then the turns, with roles if there are several."""
    prompts = [require_text(turn.content) for turn in turns if turn.role == "system"]
    if not prompts and system is not None:
        prompts = [system]
    spoken = [turn for turn in turns if turn.role != "system"]
    roles = [f"{turn.role}: " if len(spoken) > 1 else "" for turn in spoken]
    lines = [f"{role}{require_text(turn.content)}" for role, turn in zip(roles, spoken, strict=True)]
    return "\n".join([*prompts, *lines]) if any(line.strip() for line in lines) else ""


@dataclass
class Seq2SeqTask(WholeModelTask):
    """A model that writes one text from another."""

    collator: Seq2SeqCollator

    def measure(self, batch: CollatedBatch) -> Measures:
        """Return the loss, the fraction of correct tokens, and the fraction of samples with only correct tokens."""
        output = self._outputs(batch.inputs)
        labels = batch.inputs["labels"]
        wrong = (labels != IGNORE_INDEX) & (output.logits.argmax(-1) != labels)
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
        """Return the greedily decoded target of each sample."""
        reader, model = self.collator.reader, self.model
        options = {"max_new_tokens": min(_MAX_ANSWER, reader.limit), "do_sample": False, "num_beams": 1}
        answers = []
        for sample in samples:
            inputs = self._to_device(reader.pad([self.collator.question(sample)]))
            ids = model.generate(**inputs, **options)[0]  # type: ignore[operator]
            answers.append(str(reader.tokenizer.decode(ids, skip_special_tokens=True)).strip())
        return answers

    def truth(self, sample: Sample) -> str:
        return (_split_turns(sample)[1] or "").strip()

    def preview(self) -> SamplePreview:
        """Return a function that shows the source and the target."""
        return SamplePreview("tokens", self._show)

    def _show(self, sample: Sample) -> SampleStats:
        prepared = self.collator.prepare(sample)
        source, target = prepared.inputs["input_ids"].tolist(), prepared.labels.tolist()
        decode = self.collator.reader.decode
        pieces = ((decode(source), False), (" → ", False), (decode(target), True))
        return SampleStats(len(source) + len(target), len(target), {}, pieces)
