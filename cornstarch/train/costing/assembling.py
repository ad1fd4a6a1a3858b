"""The costs of a run, put together from those of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.checks import check_tokens
from cornstarch.parallel.tensor.plan import plan_regions
from cornstarch.plan.cost import LayerCost, ModuleCost, RunCost
from cornstarch.plan.plan import LANGUAGE_MODEL, WHOLE_MODEL
from cornstarch.train.costing.calls import CallCost
from cornstarch.train.costing.portions import Portion
from cornstarch.train.costing.segments import Called, Segment, segments_of
from cornstarch.train.on_meta import calls_of

_SIZES = (1, 2, 4, 8, 16, 32, 64)

Meter = Callable[[Called], CallCost]
"""Says what a call costs."""
MakeMeter = Callable[[bool], Meter]
"""Makes one; told whether attention looks back only."""


def cost_of(
    model: nn.Module,
    portion: Portion,
    meters: MakeMeter,
    *,
    computed_in: torch.dtype,
    on_gpu: bool,
    batch: int | None = None,
    state_bytes: int = 8,
) -> RunCost:
    """Return what the layers of a model cost.

    Args:
        model: On the meta device, its parameters in the precision that they are kept in.
        portion: The microbatch.
        meters: What says what a call costs.
        computed_in: The precision of autocast; float32: without it.
        on_gpu: Whether it is a GPU that computes it.
        batch: Samples of a step. Default: those of the microbatch.
        state_bytes: What the optimizer has for each trained parameter.
    """
    modules, flops = [], 0.0
    for name, part, call in parts_of_portion(model, portion):
        is_language_model = isinstance(model, MultimodalModel) and part is model.language_model
        meter = meters(is_language_model)
        with _explained(name, part):
            segments = segments_of(part, call, computed_in, on_gpu)
            costs = [[meter(one) for one in segment.calls] for segment in segments]
        flops += sum(one.flops for segment in costs for one in segment)
        seen: set[int] = set()
        items = portion.count(name) if isinstance(part, ModalEncoderModule) else 0
        layers = tuple(_layer(segment, own, seen, items) for segment, own in zip(segments, costs, strict=True))
        modules.append(
            ModuleCost(name, layers, tp_sizes=tensor_sizes(part), cp_sizes=context_sizes(part, is_language_model))
        )
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(computed_in, "fp32")
    return RunCost(
        tuple(modules),
        samples=portion.rows,
        batch=batch or portion.rows,
        tokens=float(portion.tokens),
        flops=flops / portion.rows,
        precision=precision,
        state_bytes=state_bytes,
    )


@contextmanager
def _explained(name: str, part: nn.Module) -> Iterator[None]:
    """Tell of what went wrong that no costs come of it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"A layer of {name} does not fit on this device. Measure a smaller microbatch: a larger loop.accumulation, "
            "or a smaller data.max_length."
        ) from error
    except Exception as error:  # a model's own code, where it looks at numbers that are not there
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160].rstrip(".")
        raise ConfigError(
            f"What the layers of {name} ({type(unwrap(part)).__name__}) cost cannot be found out: {reason}."
        ) from error


def parts_of_portion(model: nn.Module, portion: Portion) -> Iterator[tuple[str, nn.Module, Callable[[], Any]]]:
    """Yield what runs one after the other, by the names that plans have for it."""
    if not isinstance(model, MultimodalModel):
        yield WHOLE_MODEL, model, next(calls_of(model, portion.rows, portion.tokens, 1))[2]
        return
    for name, encoder in model.encoders.items():
        calls = {part: call for _, part, call in calls_of(model, portion.count(name), portion.tokens, 1)}
        yield name, encoder, calls[encoder]
    calls = {part: call for _, part, call in calls_of(model, portion.rows, portion.tokens, 1)}
    name = LANGUAGE_MODEL if model.encoders else WHOLE_MODEL
    yield name, model.language_model, calls[model.language_model]


def _layer(segment: Segment, costs: Sequence[CallCost], seen: set[int], items: int) -> LayerCost:
    """Return a layer; parameters that stand at several places are counted at the first."""
    cost = sum(costs, CallCost())
    every = {id(p): p for module in segment.modules for p in module.parameters()}
    own = [parameter for key, parameter in every.items() if key not in seen]
    shared = [parameter for key, parameter in every.items() if key in seen and parameter.requires_grad]
    seen.update(every)
    trained = sum(p.numel() for p in own if p.requires_grad)
    total = sum(p.numel() for p in own)
    is_trained = any(p.requires_grad for p in every.values())
    layers = [(call, one) for call, one in zip(segment.calls, costs, strict=True) if call.is_layer]
    inputs = sum(max((t.numel() * t.element_size() for t in call.inputs), default=0) for call, _ in layers)
    return LayerCost(
        name=segment.name,
        forward=cost.forward,
        input_gradient=cost.input_gradient,
        weight_gradient=cost.weight_gradient,
        parameters=total,
        parameter_bytes=sum(p.numel() * p.element_size() for p in own),
        activation_bytes=cost.kept,
        activation_bytes_recomputed=min(cost.recomputed, cost.kept),
        output_bytes=cost.output,
        trained=is_trained,
        trained_parameters=trained if 0 < trained < total or (is_trained and not trained) else None,
        sums=2 if layers else 0,
        kv_bytes=cost.keys,
        tp_cuts="always" if layers else "vocabulary" if any(one.is_head for one in segment.calls) else "never",
        whole_bytes=min(2 * inputs, cost.kept),
        working_bytes=cost.working,
        again=sum(one.forward for _, one in layers),
        shared_bytes=sum(p.numel() * p.element_size() for p in shared),
        items=float(items),
    )


# ---------------------------------------------------------------------------------------------------- sizes


def tensor_sizes(part: nn.Module) -> tuple[int, ...]:
    """Return over how many ranks all its matrices can be cut that are cut at all."""
    try:
        regions = plan_regions(part).regions
    except (UnsupportedModelError, ConfigError):
        return (1,)
    return tuple(size for size in _SIZES if all(region.fits(size) for region in regions))


def context_sizes(part: nn.Module, is_language_model: bool) -> tuple[int, ...]:
    """Return over how many ranks a language model's tokens, or an encoder's items, can be spread."""
    if not is_language_model:
        return _SIZES[:4] if isinstance(part, ModalEncoderModule) else (1,)
    try:
        check_tokens(part, 2)
    except (UnsupportedModelError, ConfigError):
        return (1,)
    return _SIZES[:4]


__all__ = ["MakeMeter", "Meter", "context_sizes", "cost_of", "parts_of_portion", "tensor_sizes"]
