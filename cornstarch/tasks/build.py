"""Builds the task that a config describes."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from cornstarch.checkpoint.weights import initialize_from
from cornstarch.config import DataConfig, RunConfig, WholeModelConfig
from cornstarch.data.data_report import SampleInspector
from cornstarch.data.formats import DataSource, open_sources
from cornstarch.data.sample import SampleError
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel.loading import full_read_reason, is_partial, record_full_read
from cornstarch.parallel.tensor import is_sharded
from cornstarch.tasks.build_model import WHERE, GetPartShard, get_whole_model, load_part_config
from cornstarch.tasks.classification import build_image_classification_task, build_sequence_classification_task
from cornstarch.tasks.conversation import (
    build_causal_lm_task,
    build_composed_task,
    build_multimodal_task,
    is_exported,
)
from cornstarch.tasks.masked_lm import build_masked_lm_task
from cornstarch.tasks.module import build_factory_task
from cornstarch.tasks.seq2seq import build_seq2seq_task
from cornstarch.tasks.task import TASKS, Task, TaskInputs, get_model_classes, is_stored_as, register_task

_ROWS_READ = 20  # until one has fields, where the model does not determine the task

# Detection tries the tasks in this order: the lists of multimodal models contain encoder-decoders too, and the list of
# causal LMs contains multimodal models.
register_task("seq2seq-lm", build_seq2seq_task, ("SEQ_TO_SEQ_CAUSAL_LM",), AutoModelForSeq2SeqLM)
register_task(
    "sequence-classification",
    build_sequence_classification_task,
    ("SEQUENCE_CLASSIFICATION",),
    AutoModelForSequenceClassification,
)
register_task(
    "image-classification", build_image_classification_task, ("IMAGE_CLASSIFICATION",), AutoModelForImageClassification
)
register_task("masked-lm", build_masked_lm_task, ("MASKED_LM",), AutoModelForMaskedLM)
# Audio language models are in the first and the last list only, the latter beside encoder-decoders.
register_task("multimodal", build_multimodal_task, ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM"))
register_task("causal-lm", build_causal_lm_task, ("CAUSAL_LM",), AutoModelForCausalLM)
register_task("module", build_factory_task)


def build_task(
    config: RunConfig,
    train: DataSource | None = None,
    evaluation: DataSource | None = None,
    get_shard: GetPartShard | None = None,
) -> Task:
    """Return the task of a run: its model, with adapters and frozen parts as described, and its collator.

    Args:
        config: The run.
        train: The training data, if open already; labels may be read from it.
        evaluation: The evaluation data, likewise.
        get_shard: Which shard of each part this rank reads. Parts that cannot be read in shards are read whole;
            `cornstarch.parallel.loaded_whole` returns the reason.
    """
    model, start = config.model, config.model.start_from
    inputs = TaskInputs(train, evaluation, get_shard if start is None else None)
    if model.language_model is not None:
        task: Task = build_composed_task(config, inputs)
    elif model.factory is not None:
        task = build_factory_task(config, inputs)
    else:
        task = TASKS[resolve_task_name(config, get_whole_model(config), train)].build(config, inputs)
    if start is not None:
        initialize_from(task.model, Path(start))
        _record_why_whole(task.model, "it begins with the weights of another run")
    elif model.whole is not None and model.whole.path is not None:
        _record_why_whole(task.model, f"so are models that are loaded for the task {task.name}")
    return task


def _record_why_whole(model: nn.Module, reason: str) -> None:
    """Record why the unsharded parts of a model were read whole."""
    parts = [model]
    if isinstance(model, MultimodalModel):
        parts = [*(encoder.module for encoder in model.encoders.values()), model.language_model]
    for part in parts:
        if not is_sharded(part) and not is_partial(part) and full_read_reason(part) is None:
            record_full_read(part, reason)


def build_preview(config: RunConfig) -> SampleInspector:
    """Return a function that prepares samples as a run of this config would, and shows the result.

    A composed model is built without weights; any other is built as for the run.
    """
    if config.model.given is not None:
        raise ConfigError(
            f"model.given = {config.model.given}: this model was built in Python and cannot be built from its config. "
            "Look at the rows alone, with --rows."
        )
    if config.data.too_long == "error":  # "skip": all long samples are reported, not only the first
        config = config.model_copy(update={"data": config.data.model_copy(update={"too_long": "skip"})})
    if config.model.language_model is not None:
        return build_composed_task(config, TaskInputs(), weights=False).preview()
    return build_task(config).preview()


# ------------------------------------------------------------------------------------------------ the task's name


def resolve_task_name(config: RunConfig, whole: WholeModelConfig, train: DataSource | None) -> str:
    """Return the name of a whole model's task: as configured, or detected."""
    if whole.task != "auto":
        return whole.task
    if is_exported(whole):
        return "multimodal"
    return detect_task(load_part_config(WHERE, whole), config.data, train)


def detect_task(config: PreTrainedConfig, data: DataConfig, source: DataSource | None = None) -> str:
    """Return the task that a model's config determines; where several are possible, the data decides.

    A masked language model, or a model without a head, is trained as a classifier if the rows have labels.
    """
    names = [name for name, kind in TASKS.items() if kind.model_lists]
    able = {name for name in names if config.model_type in get_model_classes(name)}
    if not config.is_encoder_decoder:
        able.discard("seq2seq-lm")  # an audio language model
    stored = next((name for name in names if name in able and is_stored_as(config, name)), None)
    if stored not in (None, "masked-lm"):
        return stored
    if "seq2seq-lm" in able:
        return "seq2seq-lm"
    fields = _read_fields(open_sources(data.train) if source is None else source)
    if "image" in fields and "label" in fields and "image-classification" in able:
        return "image-classification"
    if "label" in fields and "sequence-classification" in able and (stored or "masked-lm" in able):
        return "sequence-classification"
    if stored is not None:
        return stored
    for name in ("multimodal", "masked-lm", "causal-lm"):
        if name in able:
            return name
    architectures = ", ".join(config.architectures or []) or "no architecture"
    raise ConfigError(
        f"{WHERE}: the task of a {config.model_type!r} model ({architectures}) cannot be detected from its config and "
        f"rows of {sorted(fields)}. Give its `task`: {', '.join(names)}."
    )


def _read_fields(source: DataSource) -> set[str]:
    """Return the fields of the first readable row."""
    for index in range(min(len(source), _ROWS_READ)):
        try:
            return {name for name, value in source[index].fields.items() if value is not None}
        except SampleError:
            continue
    return set()
