"""Trains on conversations and documents: composed models, whole multimodal models and plain language models."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from cornstarch.config import RunConfig, WholeModelConfig
from cornstarch.data.collate import ChatCollator, CollatedBatch
from cornstarch.data.data_report import SampleInspector, SampleStats
from cornstarch.data.sample import MediaKind, Message, Sample, SampleError
from cornstarch.data.whole_collate import WholeChatCollator
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.kernels.fused_loss import limit_trained_rows
from cornstarch.models.multimodal_language_model import MultimodalModel, MultimodalProcessor
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX, BatchFacts
from cornstarch.models.multimodal_language_model.import_hf.decompose import UndividedModel
from cornstarch.models.multimodal_language_model.preprocessing.hf_processor import WholeModelProcessor
from cornstarch.models.multimodal_language_model.preprocessing.modality_processors import PROCESSOR_CONFIG
from cornstarch.models.multimodal_language_model.unwrap import is_peft, unwrap
from cornstarch.tasks.build_model import WHERE, add_adapters, build_model, get_whole_model, load_part, load_part_config
from cornstarch.tasks.task import Measures, Task, TaskInputs, build_processor, create_folder, load_tokenizer

PROCESSOR_FOLDER = "processor"  # the folder with tokenizer and processors in that of an exported model
_EXPORTED = "cornstarch_model.json"


@dataclass
class ConversationTask(Task):
    """A multimodal model, or a language model, that learns to answer."""

    name: str
    model: MultimodalModel
    collator: ChatCollator

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        facts: BatchFacts | None = inputs.get("facts")
        with limit_trained_rows(None if facts is None else facts.trained_tokens):
            return (self.wrapped or self.model)(**inputs).loss

    def measure(self, batch: CollatedBatch) -> Measures:
        """Return the loss, and the fractions of correct tokens and of samples that greedy decoding gets right."""
        output = (self.wrapped or self.model)(**batch.inputs)
        labels = batch.inputs["labels"][:, 1:]
        wrong = (labels != IGNORE_INDEX) & (output.logits[:, :-1].argmax(-1) != labels)
        rows, columns = wrong.nonzero(as_tuple=True)
        documents, samples = batch.inputs.get("documents"), len(batch.sample_ids)
        if documents is None:  # a sample is a row; or a document of a packed row
            missed = int(rows.unique().numel())
        else:
            missed = int(torch.stack([rows, documents[:, 1:][rows, columns]]).unique(dim=1).shape[1])
        return Measures(
            {
                "loss": (output.loss.item() * batch.trained_tokens, batch.trained_tokens),
                "token_accuracy": (batch.trained_tokens - int(wrong.sum()), batch.trained_tokens),
                "accuracy": (samples - missed, samples),
            }
        )

    def modalities(self) -> dict[str, MediaKind]:
        return self.collator.media_kinds()

    def answer(self, samples: Sequence[Sample]) -> list[str]:
        """Return the model's answer to each conversation without its last turn."""
        answers = []
        for sample in samples:
            is_answered = sample.messages[-1].role == "assistant"
            question = sample.messages[:-1] if is_answered else sample.messages
            truth = self.collator.processor.llm_tokenizer(self.truth(sample), add_special_tokens=False)["input_ids"]
            answers.append(self.reply(question, most_tokens=min(2 * len(truth) + 8, 256)))
        return answers

    def truth(self, sample: Sample) -> str:
        if not sample.messages or sample.messages[-1].role != "assistant":
            return ""
        return "".join(part for part in sample.messages[-1].content if isinstance(part, str)).strip()

    def reply(self, messages: Sequence[Message], *, most_tokens: int = 128, **options: Any) -> str:
        """Return the model's next turn; `options` are those of `generate` (`do_sample`, `temperature`, `streamer`)."""
        try:
            inputs = self.collator.build_prompt(messages)
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

    def preview(self) -> SampleInspector:
        return preview_chat(self.collator)

    def save(self, folder: Path) -> None:
        """Write the model, adapters merged, with its processor; an undivided model as transformers does."""
        model, processor = self.model, self.collator.processor
        if any(is_peft(module) for module in model.modules()):
            model = copy.deepcopy(model)
            for owner in [*model.encoders.values(), model]:
                attribute = "language_model" if owner is model else "module"
                part = getattr(owner, attribute)
                if is_peft(part):
                    setattr(owner, attribute, part.merge_and_unload())
        with create_folder(folder) as fresh:
            if model.encoders:
                model.save_pretrained(fresh)
                processor.save_pretrained(fresh / PROCESSOR_FOLDER)
            else:
                model.language_model.save_pretrained(fresh)  # type: ignore[operator]
                (processor if isinstance(model, UndividedModel) else processor.llm_tokenizer).save_pretrained(fresh)

    def load(self, folder: Path) -> nn.Module:
        if self.model.encoders:
            return MultimodalModel.from_pretrained(folder)
        model_class: Any = type(unwrap(self.model.language_model))
        loaded = model_class.from_pretrained(folder, dtype="auto")
        if isinstance(self.model, UndividedModel):
            return UndividedModel(loaded, self.model.reason)
        return MultimodalModel({}, loaded)

    def logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the logits, without those at padding."""
        logits: Tensor = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
        return logits[inputs["attention_mask"].bool()]


def preview_chat(collator: ChatCollator) -> SampleInspector:
    """Return a function that shows conversations as tokens, and which of them are trained on."""
    processor = collator.processor
    placeholders = {token: processor.modality_tokens[name] for name, token in processor.modality_token_ids.items()}

    def show(sample: Sample) -> SampleStats:
        prepared = collator.prepare(sample)
        items = {name: len(values) for name, values in prepared.items.items()}
        # Cut the text where the trained part begins or ends, and around items.
        pairs = zip(prepared.input_ids.tolist(), (prepared.labels != IGNORE_INDEX).tolist(), strict=True)
        pieces: list[tuple[str, bool]] = []
        for (placeholder, trained), run in groupby(pairs, lambda pair: (placeholders.get(pair[0]), pair[1])):
            ids = [token for token, _ in run]
            text = str(processor.llm_tokenizer.decode(ids)) if placeholder is None else f"{placeholder}×{len(ids)}"
            pieces.append((text, trained))
        return SampleStats(len(prepared.input_ids), prepared.trained_tokens, items, tuple(pieces))

    return SampleInspector("tokens", show)


def build_composed_task(config: RunConfig, inputs: TaskInputs, weights: bool = True) -> ConversationTask:
    model = build_model(config.model, weights=weights, get_shard=inputs.get_shard)
    collator = ChatCollator(build_processor(config.model, model), config.data)
    return ConversationTask("multimodal" if model.encoders else "causal-lm", model, collator)


def build_causal_lm_task(config: RunConfig, inputs: TaskInputs) -> ConversationTask:
    whole = get_whole_model(config)
    shard = None if inputs.get_shard is None else inputs.get_shard("language_model", False)
    llm = add_adapters(WHERE, whole, load_part(WHERE, whole, auto_class=AutoModelForCausalLM, shard=shard))
    model = MultimodalModel({}, llm).train(llm_mode=whole.train != "frozen")
    processor = MultimodalProcessor({}, load_tokenizer(WHERE, whole), model)
    return ConversationTask("causal-lm", model, ChatCollator(processor, config.data))


def build_multimodal_task(config: RunConfig, inputs: TaskInputs) -> ConversationTask:
    """Return the task of a whole multimodal model, of transformers or exported by Cornstarch."""
    whole = get_whole_model(config)
    model, source = load_multimodal_model(whole), whole.processor or whole.path or ""
    if is_exported(whole):
        folder = Path(str(whole.path)) / PROCESSOR_FOLDER
        if not folder.is_dir():
            raise ConfigError(f"{WHERE}.path = {whole.path}\n  It has no folder {PROCESSOR_FOLDER!r} with a processor.")
        if (folder / PROCESSOR_CONFIG).is_file():
            composed = MultimodalProcessor.from_pretrained(folder, model=model)
            set_trained_parts(model, whole)
            return ConversationTask("multimodal", model, ChatCollator(composed, config.data))
        source = str(folder)
    if isinstance(model, UndividedModel) and config.data.packing:
        raise ConfigError(f"data.packing = true: rows of several samples cannot be given to this model. {model.reason}")
    processor = _load_whole_processor(model, whole, source, config.data.chat_template)
    set_trained_parts(model, whole)
    return ConversationTask("multimodal", model, WholeChatCollator(processor, config.data))


def is_exported(whole: WholeModelConfig) -> bool:
    return whole.path is not None and (Path(whole.path) / _EXPORTED).is_file()


def load_multimodal_model(whole: WholeModelConfig, weights: bool = True) -> MultimodalModel:
    """Return a whole multimodal model in parts, or undivided where its parts would not give its results."""
    if is_exported(whole):  # its folder alone describes its parts, and is read with them
        model = MultimodalModel.from_pretrained(str(whole.path), trust_remote_code=whole.may_run_code())
        return model if weights else model.to("meta")
    names = [name for name in load_part_config(WHERE, whole).architectures or () if hasattr(transformers, name)]
    stored_class = getattr(transformers, names[0]) if names else AutoModelForImageTextToText
    stored = load_part(WHERE, whole, auto_class=stored_class, weights=weights)
    try:
        return MultimodalModel.from_multimodal(stored)
    except UnsupportedModelError as error:
        return UndividedModel(stored, str(error))


def _load_whole_processor(
    model: MultimodalModel, whole: WholeModelConfig, source: str, chat_template: str | None
) -> WholeModelProcessor:
    for name in ("tokenizer", "processor_config"):
        if getattr(whole, name) is not None:
            raise ConfigError(
                f"{WHERE}.{name}: a whole multimodal model is trained with the processor that it is stored with, which "
                "has a tokenizer and settings of its own. Change the files of the processor, and name their folder: "
                "`processor: <folder>`."
            )
    if not source:
        raise ConfigError(f"{WHERE} has no `path`: give `processor: <folder>`, where its processor is.")
    try:
        return WholeModelProcessor.from_pretrained(
            source, model=model, chat_template=chat_template, trust_remote_code=whole.may_run_code(source)
        )
    except ConfigError as error:
        raise ConfigError(f"{WHERE}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{WHERE}: the processor of {source} cannot be loaded: {error}") from error


def set_trained_parts(model: MultimodalModel, whole: WholeModelConfig) -> None:
    """Train everything, nothing, or adapters in the language model, as configured."""
    if whole.train == "lora":
        model.language_model = add_adapters(WHERE, whole, model.language_model)
    modes: dict[str, bool] = dict.fromkeys(model.encoders, whole.train == "full")
    model.train(encoders_mode=modes, llm_mode=whole.train != "frozen")
