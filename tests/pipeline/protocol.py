"""What a runtime does with stages, in one process: forwards and backwards in any order, tensors cut off in between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.pipeline.message import flatten_payload, unflatten_payload
from cornstarch.pipeline.split import cut
from cornstarch.pipeline.stage import StageModule
from cornstarch.pipeline.template import PipelineTemplate

Inputs = Mapping[str, Any]
LossOf = Callable[[Any], Tensor]
Gradients = dict[str, Tensor | None]


def stages_of(model: nn.Module, template: PipelineTemplate | int) -> list[StageModule]:
    """Cut a copy of a model for each stage."""
    if isinstance(template, int):
        template = PipelineTemplate.split(model, template, by="uniform")
    return [cut(copy.deepcopy(model), template, stage) for stage in range(template.num_stages)]


class Emulation:
    """Stages of a model, and what is in flight between them."""

    def __init__(self, parts: Sequence[StageModule], batches: Sequence[Inputs], loss_of: LossOf, seed: int = 0) -> None:
        self.parts, self.batches, self.loss_of, self.seed = parts, batches, loss_of, seed
        self.losses: dict[int, Tensor] = {}
        self.made: dict[tuple[int, int], list[Tensor]] = {}
        self.given: dict[tuple[int, int], list[Tensor]] = {}
        self.forms: dict[tuple[int, int], Any] = {}

    def forward(self, stage: int, microbatch: int) -> None:
        """Run one stage on one microbatch."""
        received = None
        if stage:
            sent = self.made[stage - 1, microbatch]
            arrived = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in sent]
            self.given[stage, microbatch] = arrived
            received = unflatten_payload(self.forms[stage - 1, microbatch], arrived)
        torch.manual_seed(self.seed + microbatch)
        output = self.parts[stage](self.batches[microbatch], received)
        if self.parts[stage].last:
            self.losses[microbatch] = self.loss_of(output)
        else:
            self.forms[stage, microbatch], self.made[stage, microbatch] = flatten_payload(output)

    def backward(self, stage: int, microbatch: int) -> None:
        """Run the backward pass of one stage for one microbatch."""
        if self.parts[stage].last:
            self.losses[microbatch].backward()
            return
        arrived = self.given[stage + 1, microbatch]
        pairs = [
            (tensor, other.grad)
            for tensor, other in zip(self.made[stage, microbatch], arrived, strict=True)
            if tensor.requires_grad and other.grad is not None
        ]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])

    def run(self, order: Sequence[str]) -> None:
        """Do what the actions of every stage say, stage by stage where they can: "F0", "B0"."""
        last = len(self.parts) - 1
        done: set[tuple[str, int, int]] = set()
        left = {stage: list(order) for stage in range(last + 1)}
        while any(left.values()):
            progress = False
            for stage, actions in left.items():
                if not actions:
                    continue
                kind, microbatch = actions[0][0], int(actions[0][1:])
                before = ("F", stage - 1, microbatch) if kind == "F" else ("B", stage + 1, microbatch)
                first = stage == 0 if kind == "F" else stage == last
                if not first and before not in done:
                    continue
                (self.forward if kind == "F" else self.backward)(stage, microbatch)
                done.add((kind, stage, microbatch))
                actions.pop(0)
                progress = True
            assert progress, left

    def gradients(self) -> Gradients:
        """Return all gradients by the names of the whole model; those of tied parameters added up."""
        total: Gradients = {}
        for part in self.parts:
            for name, parameter in part.model.named_parameters():
                listed = part.tied.get(name, name)
                one, other = total.get(listed), parameter.grad
                total[listed] = (
                    one + other if one is not None and other is not None else (one if other is None else other)
                )
        return total


def whole_gradients(model: nn.Module, batches: Sequence[Inputs], loss_of: LossOf, seed: int = 0) -> Gradients:
    """Return the sum of the losses of some batches, and all gradients, of a model in one piece."""
    model = copy.deepcopy(model)
    total = torch.zeros(())
    for number, batch in enumerate(batches):
        torch.manual_seed(seed + number)
        loss = loss_of(model(**batch))
        loss.backward()
        total = total + loss.detach()
    return {"loss": total, **{name: parameter.grad for name, parameter in model.named_parameters()}}


def collect_staged_gradients(
    parts: Sequence[StageModule], batches: Sequence[Inputs], loss_of: LossOf, order: Sequence[str] | None = None
) -> Gradients:
    """Return the same of a model in stages."""
    numbers = range(len(batches))
    order = order or [*(f"F{number}" for number in numbers), *(f"B{number}" for number in numbers)]
    emulation = Emulation(parts, batches, loss_of)
    emulation.run(order)
    total = sum((loss.detach() for loss in emulation.losses.values()), torch.zeros(()))
    return {"loss": total, **emulation.gradients()}


def assert_same(found: Gradients, expected: Gradients, rtol: float = 1e-5) -> None:
    """Compare loss and every gradient, also which are missing."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            torch.testing.assert_close(
                other, value, rtol=rtol, atol=1e-6 * max(1.0, float(value.abs().max())), msg=name
            )
