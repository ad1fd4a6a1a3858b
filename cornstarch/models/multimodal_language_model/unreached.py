"""Parameters of encoders that no loss reaches: those behind outputs that are not tokens.

CLIP has a norm over its pooled output, SigLIP a head; LLaVA takes tokens from the layer before the last. They never get
gradients, and a plain `DistributedDataParallel` would wait for them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule
from cornstarch.models.multimodal_language_model.preprocessing.config_items import some_item
from cornstarch.models.multimodal_language_model.preprocessing.shape_inference import (
    KnownIntegers,
    Shape,
    is_float,
    weightless,
)
from cornstarch.models.multimodal_language_model.unwrap import is_changed_inside
from cornstarch.trees import map_tensors


def unreached_parameters(encoder: ModalEncoderModule, inputs: dict[str, Any] | None = None) -> list[str]:
    """Return the names of an encoder's trained parameters on which its tokens do not depend.

    A copy of the encoder runs in train mode, on shapes alone. Nothing is returned if it cannot run so, if it draws
    random numbers (the layers in use may then differ from step to step), or if something was put around its modules.

    Args:
        encoder: The encoder, with its projector and callbacks.
        inputs: Some valid input. None: one that follows from the encoder's config.
    """
    trained = [parameter.requires_grad for parameter in encoder.parameters()]
    if not any(trained) or is_changed_inside(encoder):
        return []
    try:
        twin = weightless(encoder).train()
        for shape, is_trained in zip(twin.parameters(), trained, strict=True):
            shape.requires_grad_(is_trained)
        given = map_tensors(_as_shape, encoder.as_arguments(dict(inputs or some_item(encoder.module))))
        with torch.enable_grad(), KnownIntegers(), _watched_randomness() as drew:
            reached = {id(leaf) for leaf in _leaves(twin.features(given).given())}
    except Exception:
        return []  # it cannot be known; torch says which parameter it waits for
    if drew:
        return []
    pairs = zip(encoder.named_parameters(), twin.parameters(), strict=True)
    return [name for (name, parameter), shape in pairs if parameter.requires_grad and id(shape) not in reached]


def _as_shape(tensor: Tensor) -> Tensor:
    return Shape.of(tensor.shape, tensor.dtype) if is_float(tensor) else tensor.cpu()


@contextmanager
def _watched_randomness() -> Iterator[list[str]]:
    """Yield a list that has something in it at the end if random numbers were drawn; they are given back."""
    drew: list[str] = []
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield drew
    finally:
        drew += ["torch"] if not torch.equal(before[0], torch.random.get_rng_state()) else []
        drew += ["numpy"] if repr(before[1]) != repr(np.random.get_state()) else []
        drew += ["random"] if before[2] != random.getstate() else []
        torch.random.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _leaves(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors with a gradient from which others were computed."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        waiting += fresh


__all__ = ["unreached_parameters"]
