"""Builds a run's model on the meta device, and the calls of a step on it: shapes without numbers, from configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.config import RunConfig, WholeModelConfig
from cornstarch.data.formats import DataSource
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.shape_inference import build_dummy_items, read_size
from cornstarch.models.multimodal_language_model.unwrap import accepts_argument, get_argument_names, unwrap
from cornstarch.tasks.build import resolve_task_name
from cornstarch.tasks.build_model import (
    WHERE,
    add_adapters,
    build_model,
    get_whole_model,
    load_part,
    load_whole_config,
)
from cornstarch.tasks.conversation import decompose_model, get_multimodal_class, is_exported, set_trained_parts
from cornstarch.tasks.module import build_factory_task
from cornstarch.tasks.task import TASKS, TaskInputs

MetaCall = tuple[str, nn.Module, Callable[[], Any]]
"""The name of a part, its module, and a function that runs it."""


def build_meta_model(config: RunConfig, train: DataSource | None = None) -> nn.Module:
    """Return the model of a run without weights, with its adapters and frozen parts.

    Of a model on the hub only the config is loaded. The function of a `model.factory` is called.

    Args:
        config: The run.
        train: The training data, if open already; the task may depend on it.
    """
    model = config.model
    if model.given is not None:
        raise ConfigError(
            f"model.given = {model.given}: this model was built in Python and cannot be built from its config. A run "
            "of it reports its memory after the second step."
        )
    if model.language_model is not None:
        return build_model(model, weights=False)
    if model.factory is not None:
        try:
            with torch.device("meta"):
                return build_factory_task(config, TaskInputs()).model
        except ConfigError:  # its function reads values of tensors
            return build_factory_task(config, TaskInputs()).model.to("meta")
    return _build_whole_model(config, get_whole_model(config), train)


def _build_whole_model(config: RunConfig, whole: WholeModelConfig, train: DataSource | None) -> nn.Module:
    task = resolve_task_name(config, whole, train)
    if task == "multimodal":
        if is_exported(whole):  # its folder alone describes its parts, and is read with them
            assert whole.path is not None
            model = MultimodalModel.from_pretrained(whole.path, trust_remote_code=whole.trust_remote_code).to("meta")
        else:
            model = decompose_model(load_part(WHERE, whole, auto_class=get_multimodal_class(whole), weights=False))
        set_trained_parts(model, whole)
        return model
    model_config: Any = load_whole_config(config)
    if whole.labels is not None:
        model_config.num_labels = len(whole.labels)
    built: Any = load_part(WHERE, whole, config=model_config, auto_class=TASKS[task].auto_class, weights=False)
    if task == "causal-lm":
        return MultimodalModel({}, add_adapters(WHERE, whole, built)).train(llm_mode=whole.train != "frozen")
    return built.requires_grad_(False) if whole.train == "frozen" else add_adapters(WHERE, whole, built)


# ---------------------------------------------------------------------------------------------------- calls


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
    """Whether a model reads rows of tokens."""
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
