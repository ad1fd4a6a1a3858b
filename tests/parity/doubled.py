"""A second look in float64: what is rounding shrinks by orders of magnitude there, what is wrong stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch

from cornstarch.engine import run_model
from cornstarch.engine.model_parts import ModelPart
from cornstarch.parallel.device import DevicePlacement


@contextmanager
def computed_in_double() -> Iterator[None]:
    """Let trainers that are made in this block keep weights in float64 and compute in it, which no run can ask for."""
    with (
        patch.object(run_model, "cast_parts", _cast_to_double),
        patch.object(DevicePlacement, "dtype", property(lambda self: torch.float64)),
        patch.object(DevicePlacement, "forward_context", lambda self: nullcontext()),
    ):
        yield


def _cast_to_double(parts: list[ModelPart], *_: object) -> None:
    for part in parts:
        for parameter in part.parameters.values():
            parameter.data = parameter.data.double()
