"""From the description of a run to its task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel, MultimodalProcessor
from cornstarch.parallel.loading import is_read_in_part, loaded_whole, note_whole
from cornstarch.parallel.tensor import is_cut
from cornstarch.train.build import (
    Cuts,
    adapted,
    build_model,
    build_processor,
    load_part,
    part_config,
    stored_processors,
    tokenizer_of,
)
from cornstarch.train.config import RunConfig, WholeModelConfig
from cornstarch.train.data.collate import ChatCollator
from cornstarch.train.data.formats import SampleSource
from cornstarch.train.tasks.classify import image_classification_task, sequence_classification_task
from cornstarch.train.tasks.conversation import PROCESSOR_FOLDER, ConversationTask
from cornstarch.train.tasks.loading import WHERE, task_of, whole_of
from cornstarch.train.tasks.masked import masked_task
from cornstarch.train.tasks.module import factory_task
from cornstarch.train.tasks.sequence import seq2seq_task
from cornstarch.train.tasks.task import Task
from cornstarch.train.weights import begin_with

_EXPORTED = "cornstarch_model.json"

_CLASSIFICATIONS = {
    "sequence-classification": sequence_classification_task,
    "image-classification": image_classification_task,
}


def build_task(
    config: RunConfig,
    train: SampleSource | None = None,
    evaluation: SampleSource | None = None,
    cuts: Cuts | None = None,
) -> Task:
    """Return what a run trains: its model with adapters and frozen as described, and what belongs to it.

    Args:
        config: The run.
        train: Its training data, if it is open already; it may say which labels there are.
        evaluation: The same for evaluation.
        cuts: How its parts are cut over ranks while they are read. Parts for which that is not possible are whole;
            `cornstarch.parallel.loaded_whole` tells why.
    """
    start = config.model.start_from
    task = _described(config, train, evaluation, cuts if start is None else None)
    if start is not None:
        begin_with(task.model, Path(start))
        _note_whole(task.model, "it begins with the weights of another run")
    elif config.model.whole is not None and config.model.whole.path is not None:
        _note_whole(task.model, f"so are models that are loaded for the task {task.name}")
    return task


def _note_whole(model: nn.Module, reason: str) -> None:
    """Note why the parts of a model that are not cut were read whole."""
    parts = [model]
    if isinstance(model, MultimodalModel):
        parts = [*(encoder.module for encoder in model.encoders.values()), model.language_model]
    for part in parts:
        if not is_cut(part) and not is_read_in_part(part) and loaded_whole(part) is None:
            note_whole(part, reason)


def _described(
    config: RunConfig, train: SampleSource | None, evaluation: SampleSource | None, cuts: Cuts | None
) -> Task:
    if config.model.language_model is not None:
        model = build_model(config.model, cuts=cuts)
        processor = build_processor(config.model, model)
        return ConversationTask(
            "multimodal" if model.encoders else "causal-lm", model, ChatCollator(processor, config.data)
        )
    if config.model.factory is not None:
        return factory_task(config)
    whole = whole_of(config)
    name = task_name(config, whole, train)
    if name == "multimodal":
        return _whole_multimodal(config, whole)
    if name == "causal-lm":
        return _language_model(config, whole, cuts)
    if name in _CLASSIFICATIONS:
        return _CLASSIFICATIONS[name](config, train, evaluation)
    return seq2seq_task(config) if name == "seq2seq-lm" else masked_task(config)


def task_name(config: RunConfig, whole: WholeModelConfig, train: SampleSource | None) -> str:
    if whole.task != "auto":
        return whole.task
    if is_exported(whole):
        return "multimodal"
    return task_of(part_config(WHERE, whole), config.data, train)


def is_exported(whole: WholeModelConfig) -> bool:
    """Whether the model is one that Cornstarch has saved."""
    return whole.path is not None and (Path(whole.path) / _EXPORTED).is_file()


# ---------------------------------------------------------------------------------------------------- conversations


def _language_model(config: RunConfig, whole: WholeModelConfig, cuts: Cuts | None) -> ConversationTask:
    cut = None if cuts is None else cuts("language_model", False)
    llm = adapted(WHERE, whole, load_part(WHERE, whole, auto_class=AutoModelForCausalLM, cut=cut))
    model = MultimodalModel({}, llm).train(llm_mode=whole.train != "frozen")
    processor = MultimodalProcessor({}, tokenizer_of(WHERE, whole), model)
    return ConversationTask("causal-lm", model, ChatCollator(processor, config.data))


def _whole_multimodal(config: RunConfig, whole: WholeModelConfig) -> ConversationTask:
    if is_exported(whole):
        assert whole.path is not None
        model = MultimodalModel.from_pretrained(whole.path, trust_remote_code=whole.trust_remote_code)
        folder = Path(whole.path) / PROCESSOR_FOLDER
        if not folder.is_dir():
            raise ConfigError(f"{WHERE}.path = {whole.path}\n  It has no folder {PROCESSOR_FOLDER!r} with a processor.")
        processor = MultimodalProcessor.from_pretrained(folder, model=model)
    else:
        model = MultimodalModel.from_multimodal(load_part(WHERE, whole, auto_class=multimodal_class(whole)))
        processor = _processor_of(model, whole)
    declare_trained(model, whole)
    return ConversationTask("multimodal", model, ChatCollator(processor, config.data))


def multimodal_class(whole: WholeModelConfig) -> Any:
    for name in part_config(WHERE, whole).architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return AutoModelForImageTextToText


def _processor_of(model: MultimodalModel, whole: WholeModelConfig) -> MultimodalProcessor:
    """Return a processor with the placeholders that a taken-apart model was trained with."""
    tokenizer = tokenizer_of(WHERE, whole)
    items = stored_processors(WHERE, whole, list(model.encoders))
    tokens = {name: str(tokenizer.convert_ids_to_tokens(token)) for name, token in model.modality_token_ids.items()}
    return MultimodalProcessor(items, tokenizer, model, predefined_tokens={name: tokens[name] for name in items})


def declare_trained(model: MultimodalModel, whole: WholeModelConfig) -> None:
    """Set what is trained: everything, nothing, or adapters in the language model."""
    everything = whole.train == "full"
    if whole.train == "lora":
        model.language_model = adapted(WHERE, whole, model.language_model)
    modes: dict[str, bool] = dict.fromkeys(model.encoders, everything)
    model.train(encoders_mode=modes, llm_mode=whole.train != "frozen")
