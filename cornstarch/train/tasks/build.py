"""From the description of a run to its task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model import MultimodalModel, MultimodalProcessor
from cornstarch.models.multimodal_language_model.storage.processor import CONFIG_NAME as COMPOSED_PROCESSOR
from cornstarch.models.multimodal_language_model.takeover.undivided import UndividedModel
from cornstarch.models.multimodal_language_model.whole_processing import WholeModelProcessor
from cornstarch.parallel.loading import is_read_in_part, loaded_whole, note_whole
from cornstarch.parallel.tensor import is_cut
from cornstarch.train.build import (
    Cuts,
    adapted,
    build_model,
    build_processor,
    load_part,
    part_config,
    tokenizer_of,
)
from cornstarch.train.config import RunConfig, WholeModelConfig
from cornstarch.train.data.collate import ChatCollator
from cornstarch.train.data.formats import SampleSource
from cornstarch.train.data.whole_collate import WholeChatCollator
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
        if (folder / COMPOSED_PROCESSOR).is_file():
            composed = MultimodalProcessor.from_pretrained(folder, model=model)
            declare_trained(model, whole)
            return ConversationTask("multimodal", model, ChatCollator(composed, config.data))
        source = str(folder)
    else:
        model = whole_multimodal(load_part(WHERE, whole, auto_class=multimodal_class(whole)))
        source = whole.processor or whole.path or ""
    if isinstance(model, UndividedModel) and config.data.packing:
        raise ConfigError(f"data.packing = true: rows of several samples cannot be given to this model. {model.reason}")
    processor = _processor_of(model, whole, source, config.data.chat_template)
    declare_trained(model, whole)
    return ConversationTask("multimodal", model, WholeChatCollator(processor, config.data))


def whole_multimodal(model: Any) -> MultimodalModel:
    """Return a Hugging Face multimodal model in parts, or in one piece where its parts would not give its results."""
    try:
        return MultimodalModel.from_multimodal(model)
    except UnsupportedModelError as error:
        return UndividedModel(model, str(error))


def multimodal_class(whole: WholeModelConfig) -> Any:
    for name in part_config(WHERE, whole).architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return AutoModelForImageTextToText


def _processor_of(
    model: MultimodalModel, whole: WholeModelConfig, source: str, chat_template: str | None
) -> WholeModelProcessor:
    """Return the processor that a whole model is stored with."""
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
            source, model=model, chat_template=chat_template, trust_remote_code=whole.trust_remote_code
        )
    except ConfigError as error:
        raise ConfigError(f"{WHERE}: {error}") from error
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"{WHERE}: the processor of {source} cannot be loaded: {error}") from error


def declare_trained(model: MultimodalModel, whole: WholeModelConfig) -> None:
    """Set what is trained: everything, nothing, or adapters in the language model."""
    everything = whole.train == "full"
    if whole.train == "lora":
        model.language_model = adapted(WHERE, whole, model.language_model)
    modes: dict[str, bool] = dict.fromkeys(model.encoders, everything)
    model.train(encoders_mode=modes, llm_mode=whole.train != "frozen")
