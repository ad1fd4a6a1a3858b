"""A run's model and a batch for it on the meta device: shapes without numbers, from configs alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.preprocessing.config_items import items_from_config, size_in
from cornstarch.models.multimodal_language_model.unwrap import accepts, argument_names, unwrap
from cornstarch.train.build import adapted, build_model, load_part
from cornstarch.train.config import RunConfig, WholeModelConfig
from cornstarch.train.data.formats import SampleSource
from cornstarch.train.tasks.build import declare_trained, is_exported, multimodal_class, task_name, whole_multimodal
from cornstarch.train.tasks.loading import WHERE, whole_config, whole_of
from cornstarch.train.tasks.module import factory_task

Call = tuple[str, nn.Module, Callable[[], Any]]
"""What is run, by name: the module, and a function that runs it."""

_CLASSES: dict[str, Any] = {
    "causal-lm": AutoModelForCausalLM,
    "seq2seq-lm": AutoModelForSeq2SeqLM,
    "masked-lm": AutoModelForMaskedLM,
    "sequence-classification": AutoModelForSequenceClassification,
    "image-classification": AutoModelForImageClassification,
}


def model_on_meta(config: RunConfig, train: SampleSource | None = None) -> nn.Module:
    """Return the model of a run, its adapters and what is frozen as described, without weights.

    Of a model on the hub only its config is needed. A function that makes a model is called.

    Args:
        config: The run.
        train: Its training data, if it is open already; it may say which kind of model there is.
    """
    model = config.model
    if model.given is not None:
        raise ConfigError(
            f"model.given = {model.given}: only Python can make this model. A run of it says after its second step "
            "what it holds."
        )
    if model.language_model is not None:
        return build_model(model, weights=False)
    if model.factory is not None:
        return _made(config)
    return _whole(config, whole_of(config), train)


def _made(config: RunConfig) -> nn.Module:
    try:
        with torch.device("meta"):
            return factory_task(config).model
    except ConfigError:
        return factory_task(config).model.to("meta")  # its function looks at numbers: it gets them


def _whole(config: RunConfig, whole: WholeModelConfig, train: SampleSource | None) -> nn.Module:
    task = task_name(config, whole, train)
    if task == "multimodal":
        model = _multimodal(whole)
        declare_trained(model, whole)
        return model
    model_config: Any = whole_config(config)
    if whole.labels is not None:
        model_config.num_labels = len(whole.labels)
    made: Any = load_part(WHERE, whole, config=model_config, auto_class=_CLASSES[task], weights=False)
    if task == "causal-lm":
        return MultimodalModel({}, adapted(WHERE, whole, made)).train(llm_mode=whole.train != "frozen")
    return made.requires_grad_(False) if whole.train == "frozen" else adapted(WHERE, whole, made)


def _multimodal(whole: WholeModelConfig) -> MultimodalModel:
    if is_exported(whole):  # its parts are described by its folder only, and read with it
        assert whole.path is not None
        return MultimodalModel.from_pretrained(whole.path, trust_remote_code=whole.trust_remote_code).to("meta")
    return whole_multimodal(load_part(WHERE, whole, auto_class=multimodal_class(whole), weights=False))


# ---------------------------------------------------------------------------------------------------- a batch


def calls_of(model: nn.Module, rows: int, tokens: int, items: int) -> Iterator[Call]:
    """Yield what runs in a step, one after the other.

    Args:
        model: On the meta device.
        rows: Samples of the batch.
        tokens: Of each.
        items: Of each, for every encoder.
    """
    if not isinstance(model, MultimodalModel):
        yield "model", model, lambda: _run_whole(model, rows, tokens)
        return
    for name, encoder in model.encoders.items():
        yield f"{name} encoder", encoder, partial(_run_encoder, encoder, rows * items)
    trained = any(p.requires_grad for encoder in model.encoders.values() for p in encoder.parameters())
    yield "language model", model.language_model, lambda: _run_language_model(model, rows, tokens, trained)


def is_frozen_encoder(part: nn.Module) -> bool:
    """Whether a part is an encoder that saves next to nothing, because only its projector is trained, or nothing."""
    return isinstance(part, ModalEncoderModule) and not any(p.requires_grad for p in part.module.parameters())


def takes_tokens(model: nn.Module) -> bool:
    """Whether a model reads rows of tokens."""
    return isinstance(model, MultimodalModel) or accepts(model, "input_ids")


def _run_encoder(encoder: ModalEncoderModule, count: int) -> Any:
    return encoder(**items_from_config(encoder.module, count))


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
    names = argument_names(model)
    config = getattr(unwrap(model), "config", None)
    if "labels" not in names:
        raise ConfigError("what it is called with is known to its own code only")
    if "input_ids" in names:
        length = min(tokens, size_in(config, "max_position_embeddings") or tokens)
        inputs: dict[str, Any] = {"input_ids": torch.zeros(rows, length, dtype=torch.long, device="meta")}
        inputs.update(_plain_options(model, rows, length))
    else:
        inputs = dict(items_from_config(model, rows))
    one_label = type(unwrap(model)).__name__.endswith("Classification")
    shape = (rows,) if one_label else tuple(inputs["input_ids"].shape)
    return model(**inputs, labels=torch.zeros(shape, dtype=torch.long, device="meta")).loss


def _plain_options(model: nn.Module, rows: int, tokens: int) -> dict[str, Any]:
    """Return what keeps a model of tokens from looking at numbers to make masks, and from keeping a cache."""
    options: dict[str, Any] = {"use_cache": False} if accepts(model, "use_cache") else {}
    if accepts(model, "attention_mask"):
        config = getattr(unwrap(model), "config", None)
        is_eager = getattr(config, "_attn_implementation", None) == "eager"  # it takes a mask that is made already
        shape = (rows, 1, tokens, tokens) if is_eager else (rows, tokens)
        options["attention_mask"] = torch.ones(shape, device="meta")
    return options
