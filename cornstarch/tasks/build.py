"""Builds the task that a config describes, or its model on the meta device: shapes without numbers, from configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from cornstarch.checkpoint.weights import initialize_from
from cornstarch.config import DataConfig, RunConfig, WholeModelConfig
from cornstarch.data.data_report import SampleInspector
from cornstarch.data.formats import DataSource, open_sources
from cornstarch.data.sample import SampleError
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.shape_inference import build_dummy_items, read_size
from cornstarch.models.multimodal_language_model.unwrap import accepts_argument, get_argument_names, unwrap
from cornstarch.parallel.loading import full_read_reason, is_partial, record_full_read
from cornstarch.parallel.tensor import is_sharded
from cornstarch.tasks import build_model, classification, conversation, text
from cornstarch.tasks.build_model import WHERE, GetPartShard, add_adapters, get_whole_model, load_part
from cornstarch.tasks.module import build_factory_task
from cornstarch.tasks.task import TASKS, Task, TaskInputs, TaskKind, get_model_classes, is_stored_as, register_task

_ROWS_READ = 20  # until one has fields, where the model does not determine the task

# Detection tries the tasks in this order: the lists of multimodal models contain encoder-decoders too, and the list of
# causal LMs contains multimodal models.
register_task("seq2seq-lm", text.build_seq2seq_task, ("SEQ_TO_SEQ_CAUSAL_LM",), transformers.AutoModelForSeq2SeqLM)
register_task(
    classification.SEQUENCE,
    classification.build_sequence_classification_task,
    ("SEQUENCE_CLASSIFICATION",),
    transformers.AutoModelForSequenceClassification,
)
register_task(
    classification.IMAGE,
    classification.build_image_classification_task,
    ("IMAGE_CLASSIFICATION",),
    transformers.AutoModelForImageClassification,
)
register_task("masked-lm", text.build_masked_lm_task, ("MASKED_LM",), transformers.AutoModelForMaskedLM)
# Audio language models are in the first and the last list only, the latter beside encoder-decoders.
_MULTIMODAL = ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM")
register_task("multimodal", conversation.build_multimodal_task, _MULTIMODAL)
register_task("causal-lm", conversation.build_causal_lm_task, ("CAUSAL_LM",), transformers.AutoModelForCausalLM)
TASKS["module"] = TaskKind(build_factory_task, (), None)  # of `model.factory`: no name for `model.whole.task`


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
        task: Task = conversation.build_composed_task(config, inputs)
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
    """Return a function that shows samples as a run of this config prepares them; a composed model has no weights."""
    if config.model.given is not None:
        raise ConfigError(
            f"model.given = {config.model.given}: this model was built in Python and cannot be built from its config. "
            "Look at the rows alone, with --rows."
        )
    if config.data.too_long == "error":  # "skip": all long samples are reported, not only the first
        config = config.model_copy(update={"data": config.data.model_copy(update={"too_long": "skip"})})
    if config.model.language_model is not None:
        return conversation.build_composed_task(config, TaskInputs(), weights=False).preview()
    return build_task(config).preview()


def resolve_task_name(config: RunConfig, whole: WholeModelConfig, train: DataSource | None) -> str:
    if whole.task != "auto":
        return whole.task
    if conversation.is_exported(whole):
        return "multimodal"
    return detect_task(build_model.load_part_config(WHERE, whole), config.data, train)


def detect_task(config: PreTrainedConfig, data: DataConfig, source: DataSource | None = None) -> str:
    """Return the task that a model's config determines; where several are possible, the labels in the rows decide."""
    names = [name for name, kind in TASKS.items() if kind.model_lists]
    able = {name for name in names if config.model_type in get_model_classes(name)}
    if not config.is_encoder_decoder:
        able.discard("seq2seq-lm")  # an audio language model
    stored = next((name for name in names if name in able and is_stored_as(config, name)), None)
    if stored not in (None, "masked-lm"):
        return stored
    if "seq2seq-lm" in able:
        return "seq2seq-lm"
    source = open_sources(data.train) if source is None else source
    fields: set[str] = set()  # of the first readable row
    for index in range(min(len(source), _ROWS_READ)):
        with suppress(SampleError):
            fields = {name for name, value in source[index].fields.items() if value is not None}
            break
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


MetaCall = tuple[str, nn.Module, Callable[[], Any]]  # the name of a part, its module, and a function that runs it


def build_meta_model(config: RunConfig, train: DataSource | None = None) -> nn.Module:
    """Return the model of a run without weights, with its adapters and frozen parts; a factory function is called."""
    model = config.model
    if model.given is not None:
        raise ConfigError(
            f"model.given = {model.given}: this model was built in Python and cannot be built from its config. A run "
            "of it reports its memory after the second step."
        )
    if model.language_model is not None:
        return build_model.build_model(model, weights=False)
    if model.factory is not None:
        try:
            with torch.device("meta"):
                return build_factory_task(config, TaskInputs()).model
        except ConfigError:  # its function reads values of tensors
            return build_factory_task(config, TaskInputs()).model.to("meta")
    whole = get_whole_model(config)
    task = resolve_task_name(config, whole, train)
    built: Any
    if task == "multimodal":
        built = conversation.load_multimodal_model(whole, weights=False)
        conversation.set_trained_parts(built, whole)
        return built
    model_config: Any = build_model.load_whole_config(config)
    if whole.labels is not None:
        model_config.num_labels = len(whole.labels)
    built = load_part(WHERE, whole, config=model_config, auto_class=TASKS[task].auto_class, weights=False)
    if task == "causal-lm":
        return MultimodalModel({}, add_adapters(WHERE, whole, built)).train(llm_mode=whole.train != "frozen")
    return built.requires_grad_(False) if whole.train == "frozen" else add_adapters(WHERE, whole, built)


def build_calls(model: nn.Module, rows: int, tokens: int, items: int) -> Iterator[MetaCall]:
    """Yield the calls of a step in order, for a batch of `rows` samples with `tokens` tokens and `items` items each."""
    if not isinstance(model, MultimodalModel):
        yield "model", model, lambda: _run_whole(model, rows, tokens)
        return
    for name, encoder in model.encoders.items():
        yield f"{name} encoder", encoder, partial(_run_encoder, encoder, rows * items)
    trained = any(p.requires_grad for encoder in model.encoders.values() for p in encoder.parameters())
    yield "language model", model.language_model, lambda: _run_language_model(model, rows, tokens, trained)


def is_frozen_encoder(part: nn.Module) -> bool:
    """Whether a part is an encoder that saves almost no activations, since at most its projector is trained."""
    return isinstance(part, ModalEncoderModule) and not any(p.requires_grad for p in part.module.parameters())


def takes_tokens(model: nn.Module) -> bool:
    return isinstance(model, MultimodalModel) or accepts_argument(model, "input_ids")


def _run_encoder(encoder: ModalEncoderModule, count: int) -> Any:
    return encoder(**build_dummy_items(encoder.module, count))


def _run_language_model(model: MultimodalModel, rows: int, tokens: int, needs_gradient: bool) -> Any:
    table: Tensor = model.language_model.get_input_embeddings().weight  # type: ignore[operator]
    ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"labels": ids}
    if model.encoders:
        embedded = torch.empty(rows, tokens, table.shape[1], dtype=table.dtype, device="meta")
        inputs["inputs_embeds"] = embedded.requires_grad_(needs_gradient or table.requires_grad)
    else:
        inputs["input_ids"] = ids
    return model.language_model(**inputs, **_plain_options(model.language_model, rows, tokens)).loss


def _run_whole(model: nn.Module, rows: int, tokens: int) -> Any:
    names = get_argument_names(model)
    config = getattr(unwrap(model), "config", None)
    if "labels" not in names:
        raise ConfigError("what it is called with is known to its own code only")
    if "input_ids" in names:
        length = min(tokens, read_size(config, "max_position_embeddings") or tokens)
        inputs: dict[str, Any] = {"input_ids": torch.zeros(rows, length, dtype=torch.long, device="meta")}
        inputs.update(_plain_options(model, rows, length))
    else:
        inputs = dict(build_dummy_items(model, rows))
    one_label = type(unwrap(model)).__name__.endswith("Classification")
    shape = (rows,) if one_label else tuple(inputs["input_ids"].shape)
    return model(**inputs, labels=torch.zeros(shape, dtype=torch.long, device="meta")).loss


def _plain_options(model: nn.Module, rows: int, tokens: int) -> dict[str, Any]:
    """Return the arguments with which a model neither reads values to build its mask nor keeps a cache."""
    options: dict[str, Any] = {"use_cache": False} if accepts_argument(model, "use_cache") else {}
    if accepts_argument(model, "attention_mask"):
        config = getattr(unwrap(model), "config", None)
        is_eager = getattr(config, "_attn_implementation", None) == "eager"  # eager attention takes a finished mask
        shape = (rows, 1, tokens, tokens) if is_eager else (rows, tokens)
        options["attention_mask"] = torch.ones(shape, device="meta")
    return options
