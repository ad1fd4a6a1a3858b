"""What the parts of a model cost, and where to cut so that stages cost the same."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from cornstarch.attention.verify import evaluating
from cornstarch.errors import ConfigError
from cornstarch.pipeline.findings import Survey

WAYS = ("parameters", "flops", "time", "uniform")
_TIMED = 3  # forward passes, of which the fastest counts


class Cost:
    """What each segment of a model costs in a training step, in some unit.

    Args:
        model: The model; its `requires_grad` flags say what is trained.
        survey: How it is made.
        by: The unit: one of `WAYS`.
        inputs: For "time": a batch.
        trained_upstream: Whether something is trained whose results go into the model.
    """

    def __init__(
        self, model: nn.Module, survey: Survey, by: str, inputs: Mapping[str, Any] | None, trained_upstream: bool
    ) -> None:
        if by not in WAYS:
            raise ConfigError(f"by = {by!r}: expected one of {', '.join(WAYS)}.")
        if by == "time" and inputs is None:
            raise ConfigError('by = "time": say what a forward pass is timed on (inputs).')
        self.model, self.survey, self.trained_upstream = model, survey, trained_upstream
        self.forward = self._forward(by, inputs or {})

    def segments(self) -> list[float]:
        """Return the cost of each segment, forward and backward."""
        total = [0.0] * (len(self.survey.layers) + 1)
        upstream = self.trained_upstream
        for name in self.survey.modules:
            module, forward = self.model.get_submodule(name), self.forward[name]
            share = _trained_share(module)
            into = forward if upstream or share else 0.0  # gradients of its input, or inside it
            total[self.survey.segment_of(name)] += forward + into + share * forward
            upstream = upstream or share > 0
        return total

    def _forward(self, by: str, inputs: Mapping[str, Any]) -> dict[str, float]:
        names = self.survey.modules
        if by == "uniform":
            return {name: float(name in self.survey.layers) for name in names}
        if by == "time":
            return _timed(self.model, names, inputs)
        count = _multiplications if by == "flops" else _parameters
        return {name: float(count(self.model.get_submodule(name))) for name in names}


def _trained_share(module: nn.Module) -> float:
    """Return how much of a module is trained, by parameters."""
    total = _parameters(module)
    return sum(p.numel() for p in module.parameters() if p.requires_grad) / total if total else 0.0


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _multiplications(module: nn.Module) -> float:
    """Return the floating-point operations for one token: two for each parameter that is multiplied.

    Tables are looked up, not multiplied; of stacked experts, only some read a token.
    """
    total = 0.0
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        for parameter in part.parameters(recurse=False):
            total += 2.0 * parameter.numel() * _share_of_tokens(part, parameter)
    return total


def _share_of_tokens(part: nn.Module, parameter: torch.Tensor) -> float:
    """Return which share of the tokens reads a parameter: of experts that lie in one tensor, the chosen ones."""
    config = getattr(part, "config", None)
    experts = parameter.shape[0] if parameter.dim() == 3 else 0
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(part, "top_k", None)
    return chosen / experts if experts and isinstance(chosen, int) and chosen <= experts else 1.0


def _timed(model: nn.Module, names: Sequence[str], inputs: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that each module takes in a forward pass: the fastest of a few."""
    best = dict.fromkeys(names, float("inf"))
    started: dict[str, float] = {}
    spent: dict[str, float] = {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise ConfigError('by = "time": the model is on the meta device and cannot be run. Use by="flops".')

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def enter(name: str) -> Any:
        return lambda *_: started.__setitem__(name, now())

    def leave(name: str) -> Any:
        return lambda *_: spent.__setitem__(name, spent.get(name, 0.0) + now() - started[name])

    with ExitStack() as stack, evaluating(model), torch.no_grad():
        for name in names:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(enter(name)).remove)
            stack.callback(module.register_forward_hook(leave(name)).remove)
        for _ in range(_TIMED):
            spent.clear()
            model(inputs["input"]) if isinstance(model, nn.Sequential) else model(**inputs)
            for name in names:
                best[name] = min(best[name], spent.get(name, 0.0))
    return best


def best_starts(costs: Sequence[float], boundaries: Sequence[int], stages: int, name: str) -> list[int]:
    """Return the segments with which stages begin so that the dearest is as cheap as can be, and the rest alike.

    Args:
        costs: Of each segment.
        boundaries: The segments with which a stage may begin, beside the first.
        stages: How many stages.
        name: The model's, for complaints.
    """
    places = [0, *boundaries]
    if not isinstance(stages, int) or stages < 1:
        raise ConfigError(f"{stages!r} stages: expected a number from 1.")
    if stages > len(places):
        raise ConfigError(f"{name} can be cut into at most {len(places)} stages; {stages} were asked for.")
    ends = [*places[1:], len(costs)]
    pieces = [sum(costs[start:end]) for start, end in zip(places, ends, strict=True)]
    limit = _least(pieces, stages, lambda sofar, stage: max(sofar, stage))[0]
    limit *= 1 + 1e-9
    # Among all that keep to it, the one whose stages differ least: largest stages are never made larger.
    _, firsts = _least(pieces, stages, lambda sofar, stage: sofar + (stage**2 if stage <= limit else float("inf")))
    return [places[first] for first in firsts]


def _least(pieces: Sequence[float], stages: int, combine: Any) -> tuple[float, list[int]]:
    """Return the least cost of a cut into runs, and the first piece of each run."""
    sums = [0.0]
    for piece in pieces:
        sums.append(sums[-1] + piece)
    count = len(pieces)
    best: list[tuple[float, list[int]] | None] = [(0.0, [])] + [None] * count  # of the first so many pieces
    for stage in range(stages):
        new: list[tuple[float, list[int]] | None] = [None] * (count + 1)
        for end in range(stage + 1, count + 1):
            for start in range(stage, end):
                known = best[start]
                if known is None:
                    continue
                cost = combine(known[0], sums[end] - sums[start])
                found = new[end]
                if found is None or cost < found[0]:
                    new[end] = (cost, [*known[1], start])
        best = new
    result = best[count]
    assert result is not None
    return result


__all__ = ["WAYS", "Cost", "best_starts"]
