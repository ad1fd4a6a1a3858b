"""Cutting a small model and comparing it with itself in one piece: loss and every gradient, in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import UnsupportedModelError
from cornstarch.pipeline.findings import Survey
from cornstarch.pipeline.parts import StagePart, make_part
from cornstarch.pipeline.payload import put_together, take_apart
from cornstarch.trees import differentiable

_MOST = 4  # stages of a trial

Gradients = dict[str, Tensor | None]


def try_cutting(
    model: nn.Module, inputs: Mapping[str, Any], survey: Survey, starts: Sequence[int] | None = None
) -> None:
    """Raise `UnsupportedModelError` unless a model that is cut as the survey says computes what it computes whole.

    Args:
        model: A small model that was never run; it is copied for each stage.
        inputs: What it is run on.
        survey: How it is made.
        starts: The first segment of each stage. Default: some of the boundaries.
    """
    starts = starts or _spread_out([0, *survey.boundaries], _MOST)
    if len(starts) < 2:
        return
    expected = whole_pass(copy.deepcopy(model), inputs)
    try:
        parts = [make_part(copy.deepcopy(model), survey, starts, stage) for stage in range(len(starts))]
        found = staged_pass(parts, inputs)
    except Exception as error:
        raise UnsupportedModelError(f"a stage of a small copy fails: {type(error).__name__}: {error}") from error
    difference = first_difference(found, expected)
    if difference:
        raise UnsupportedModelError(f"a small copy computes something else when it is cut: {difference}")


def _spread_out(places: Sequence[int], most: int) -> list[int]:
    """Return some of the places, evenly, the first and the last among them."""
    if len(places) <= most:
        return list(places)
    return [places[index * (len(places) - 1) // (most - 1)] for index in range(most)]


def whole_pass(model: nn.Module, inputs: Mapping[str, Any]) -> Gradients:
    """Return the loss of a forward pass, and all gradients, by name."""
    torch.manual_seed(0)
    loss = weighed_loss(model(**inputs))
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


def staged_pass(parts: Sequence[StagePart], inputs: Mapping[str, Any]) -> Gradients:
    """Do the same stage by stage; gradients of parameters that several stages have are added up."""
    received = None
    edges: list[tuple[list[Tensor], list[Tensor]]] = []
    for part in parts:
        torch.manual_seed(0)  # as on the whole model, if something random happens before the layers
        output = part(inputs, received)
        if not part.last:
            form, sent = take_apart(output)
            arrived = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent]
            edges.append((sent, arrived))
            received = put_together(form, arrived)
    loss = weighed_loss(output)
    loss.backward()
    for sent, arrived in reversed(edges):
        pairs = [(s, a.grad) for s, a in zip(sent, arrived, strict=True) if s.requires_grad and a.grad is not None]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    return {"loss": loss.detach(), **added_up(parts)}


def added_up(parts: Sequence[StagePart]) -> Gradients:
    """Return the gradients of all stages by the names of the whole model."""
    total: Gradients = {}
    for part in parts:
        for name, parameter in part.model.named_parameters():
            listed = part.tied.get(name, name)
            known = total.get(listed)
            if known is not None and parameter.grad is not None:
                total[listed] = known + parameter.grad
            else:
                total[listed] = parameter.grad if known is None else known
    return total


def weighed_loss(output: Any) -> Tensor:
    """Return a number that everything in an output has a part in, each element with a weight of its own."""
    noise = torch.Generator().manual_seed(4)
    parts = [
        (tensor.float() * torch.randn(tensor.shape, generator=noise).to(tensor.device)).mean()
        for tensor in differentiable(output)
        if tensor.is_floating_point() and tensor.numel()
    ]
    if not parts:
        raise UnsupportedModelError("nothing in its output has a gradient")
    return torch.stack(parts).sum()


def first_difference(found: Gradients, expected: Gradients) -> str:
    """Say where two passes differ beyond rounding; "" if nowhere."""
    if found.keys() != expected.keys():
        return f"other parameters: {', '.join(sorted(found.keys() ^ expected.keys())[:3])}"
    scale = max(float(value.abs().max()) for value in expected.values() if value is not None and value.numel())
    for name, value in expected.items():
        other = found[name]
        if (value is None) != (other is None):
            return f"{name} has {'no' if other is None else 'a'} gradient"
        if value is None or other is None or not value.numel():
            continue
        distance = float((other - value).abs().max())
        if not distance <= 1e-4 * float(value.abs().max()) + 1e-5 * scale:
            return f"{name} differs by {distance:.2g}"
    return ""


__all__ = ["added_up", "first_difference", "staged_pass", "try_cutting", "weighed_loss", "whole_pass"]
