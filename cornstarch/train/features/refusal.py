"""Encoders whose features cannot be kept, because they would not be what the encoder makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.items import KNOWN, split_items, token_states
from cornstarch.models.multimodal_language_model.preprocessing.subprocessors import (
    item_argument,
    item_dimensions,
    item_kind,
    noise_item,
)
from cornstarch.models.multimodal_language_model.projector import MultimodalProjector
from cornstarch.train.data.seen import SeenItem
from cornstarch.train.precision import Placement
from cornstarch.train.tasks.conversation import ConversationTask
from cornstarch.train.tasks.task import Task

_CALLBACKS = ("preprocess_callback", "postprocess_module_callback", "postprocess_projector_callback")
_FREELY = ("linear", "mlp")  # projectors that take tokens one by one
# The largest difference between an item alone and in a batch, as a share of the largest number: kernels round
# differently for other sizes, and more is no rounding.
_ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-8}


def check_task(task: Task) -> ConversationTask:
    """Return a task whose encoders' features may be kept; raise ConfigError for others."""
    if not isinstance(task, ConversationTask) or not task.model.encoders:
        raise ConfigError(f"features.cache keeps what the encoders of a multimodal model make; {task.name} has none.")
    if task.model.preprocess_llm_callback is not None:
        raise ConfigError(
            "features.cache: the language model's preprocess_llm_callback may ask for encoders' inputs, which are not "
            "made for items that were encoded before. Leave the cache out."
        )
    for name in task.model.encoders:
        reason = _refusal(task.model, name)
        if reason is not None:
            raise ConfigError(f"features.cache: what the {name} encoder makes cannot be kept: {reason}.")
    return task


def _refusal(model: MultimodalModel, name: str) -> str | None:
    encoder = model.encoders[name]
    if type(encoder) is not ModalEncoderModule:
        return "it belongs to a whole model, whose own method runs encoder and projector as one"
    if any(parameter.requires_grad for parameter in encoder.module.parameters()):
        return "it is trained. Set its `train` to projector or frozen"
    if encoder.module.training:
        return "it is in train mode, where dropout makes every pass another. Freeze it by model.train(encoders_mode=…)"
    for callback in _CALLBACKS:
        if getattr(encoder, callback) is not None:
            return f"it has a {callback}, and when a Python function does something else cannot be told"
    projector = encoder.projector
    if not isinstance(projector, MultimodalProjector) or projector.config.projection_type not in _FREELY:
        return "its projector is a module of your own, which may look at several tokens at once; use linear or mlp"
    return None


def try_encoder(task: ConversationTask, name: str, placement: Placement) -> None:
    """Encode two items together and alone; raise ConfigError unless each comes out the same."""
    items = noise_items(task.collator.processor.encoder_processors[name])
    where = f"features.cache: what the {name} encoder makes cannot be kept:"

    def features(chosen: list[Any]) -> list[Tensor]:
        return _features(task, name, chosen, placement)

    try:
        first, second = _inputs(task, name, items), _inputs(task, name, items)
        together, alone = features(items), [features([item])[0] for item in items]
    except ConfigError:
        raise
    except Exception as error:  # whatever a processor or an encoder stumbles over
        raise ConfigError(f"{where} it was tried on noise, and {type(error).__name__}: {error}") from error
    if not _same(first, second):
        raise ConfigError(f"{where} its processor is random: it makes something else of the same item every time.")
    for one, other in zip(alone, together, strict=True):
        if one.shape != other.shape or _difference(one, other) > _ROUNDING.get(placement.dtype, 0.0):
            raise ConfigError(
                f"{where} an item comes out otherwise beside another one (by padding, or by a norm over all items), so "
                "what was made in one batch is wrong in the next."
            )


def noise_items(processor: Any) -> list[Any]:
    """Return two items of noise of different sizes that a processor takes."""
    first = noise_item(processor)
    random = np.random.default_rng(1)
    if item_kind(item_argument(processor)) == "images":
        return [first, Image.fromarray(random.integers(0, 256, (96, 72, 3), dtype=np.uint8))]
    if item_dimensions(processor) == 2:
        return [first, first[:1] + 1]
    return [first, random.standard_normal(len(first) * 5 // 8).astype(np.float32)]


def _inputs(task: ConversationTask, name: str, items: list[Any]) -> dict[str, Any]:
    return task.collator.encoder_inputs({name: [SeenItem("", item, None) for item in items]})[name]


def _features(task: ConversationTask, name: str, items: list[Any], placement: Placement) -> list[Tensor]:
    encoder = task.model.encoders[name]
    inputs = placement.moved(_inputs(task, name, items))
    known = inputs.pop(KNOWN)
    with torch.no_grad(), placement.computing():
        arguments = encoder.as_arguments(inputs)
        tokens = split_items(encoder.module, arguments, token_states(encoder.encode(arguments))).tokens
    return list(tokens.float().split(known["lengths"]))


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other))
