"""How many microbatches a step is split into: as few as fit the memory of the GPU, by an estimate.

The estimate is coarse: a linear layer keeps most of its input and its output for the backward pass, and nothing is
traced, so that it takes no time and knows any model. On models that were measured it is 1.05 to 1.35 times what
activations really take. Fewer microbatches are faster: with one row each, a GPU waits for the CPU that starts kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.config import RunConfig
from cornstarch.data.loader import RunData
from cornstarch.engine.context import DistributedContext
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel import distributed
from cornstarch.parallel.ddp_fsdp import wrapping_units
from cornstarch.report.number_format import format_bytes
from cornstarch.tasks.task import Task

_USABLE = 0.92  # of the GPU's memory: the rest is for the CUDA context, kernels' workspaces and fragments
_KEPT = 1.7  # bytes per number that passes a linear layer: layers that read the same numbers keep them once
_MOST_EMPTY = 1.25  # rows that are computed, over those that have tokens
_RECOMPUTED = 0.15  # of activations stay where layers recompute them
_STATES = 16  # bytes per trained weight: the weight, its master, its gradient and two moments
_SAMPLES = 8  # inspected for the number and the size of their items
_UNEVEN = 1.3  # a step's items over the mean
_SPLIT_STATES = {"zero1": 0.6, "ddp": 0.0}  # of the states, what is sharded over ranks; all in other kinds


def choose_microbatches(
    task: Task, config: RunConfig, context: DistributedContext, data: RunData, log: Callable[[str], None]
) -> None:
    """Set `loop.gradient_accumulation_steps` of a run that leaves it to us."""
    loop = config.loop
    if loop.gradient_accumulation_steps != "auto":
        return
    loop.set_chosen_microbatches(1)
    modules = context.plan.modules.values()
    if context.device.type != "cuda" or context.is_pipeline or any(max(one.tp, one.cp, one.ep) > 1 for one in modules):
        return
    memory = int(_USABLE * torch.cuda.get_device_properties(context.device).total_memory)
    rows = data.packed.rows_per_step if data.packed is not None else loop.batch_size
    replicas = context.replica.count
    batch = data.peek_batch(task.collator, _SAMPLES)
    if batch is None or "input_ids" not in batch.inputs:  # nothing is known of modules of other kinds
        return
    count, needed = fit_microbatches(
        task.model, config, memory, -(-rows // replicas), loop.batch_size / replicas, batch.inputs,
        len(batch.sample_ids), context.world_size, is_packed=data.packed is not None,
    )  # fmt: skip
    if context.world_size > 1:  # their GPUs may differ
        count = max(distributed.all_gather_json(count))
    loop.set_chosen_microbatches(count)
    if count > 1:
        log(
            f"loop.gradient_accumulation_steps: {count}, because a step at once would take about "
            f"{format_bytes(needed)} of the {format_bytes(memory)} that this GPU has for it"
        )


def fit_microbatches(
    model: nn.Module,
    config: RunConfig,
    memory: int,
    rows: int,
    samples: float,
    batch: Mapping[str, Any],
    inspected: int,
    world: int = 1,
    is_packed: bool = True,
) -> tuple[int, int]:
    """Return the fewest microbatches of a replica's `rows` that fit, and the bytes of a step in one microbatch.

    Args:
        model: The whole model.
        config: The run.
        memory: Bytes that the run may take.
        rows: Rows of a step of a replica. All microbatches have equally many, packed rows also some that are empty.
        samples: Samples of a step of a replica.
        batch: A collated batch of some samples, which tells how large their items are.
        inspected: How many samples it has.
        world: Ranks, for what is sharded.
        is_packed: Whether rows are packed; else the number of microbatches divides that of rows.
    """
    states = estimate_states(model, config, world)
    activations = estimate_activations(model, config, rows, batch, samples / inspected)
    for count in range(1, rows + 1):
        each = -(-rows // count)
        if each * count > (_MOST_EMPTY if is_packed else 1.0) * rows:
            continue
        accumulated = 2 * _count_trained(model) if count > 1 else 0  # gradients in float32
        if states + accumulated + activations * each / rows <= memory:
            break
    return count, int(states + activations)


def estimate_states(model: nn.Module, config: RunConfig, world: int) -> float:
    """Return the bytes of weights, gradients and optimizer states on a rank."""
    trained = _count_trained(model)
    every = sum(parameter.numel() for parameter in model.parameters())
    sharded = _SPLIT_STATES.get(config.parallel.data.kind, 1.0)
    share = 1.0 if world == 1 else 1 - sharded + sharded / world
    averages = 4.0 * trained if config.loop.ema_decay is not None else 0.0
    return share * (_STATES * trained + 2 * (every - trained)) + averages


def _count_trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def estimate_activations(
    model: nn.Module, config: RunConfig, rows: int, batch: Mapping[str, Any], times: float
) -> float:
    """Return the bytes that are kept for the backward pass of all rows, with `times` the items of a batch, at once."""
    total = 0.0
    for name, part, tokens in _list_parts(model, config, rows, batch, times):
        # Frozen layers without trained ones before them keep nothing.
        if any(parameter.requires_grad for parameter in part.parameters()) or name == "language_model":
            kept = _KEPT * tokens * sum(map(_count_features, wrapping_units(part)))
            total += kept * (_RECOMPUTED if config.recomputes else 1.0)
    budget = config.loop.activation_bytes
    return total if budget is None else min(total, rows * budget)


def _list_parts(
    model: nn.Module, config: RunConfig, rows: int, batch: Mapping[str, Any], times: float
) -> Iterator[tuple[str, nn.Module, float]]:
    """Yield the name of a part, the part, and the tokens that pass through its layers in a step."""
    inner = unwrap(model)
    if isinstance(inner, MultimodalModel):
        for name, encoder in inner.encoders.items():
            given = batch.get(name, batch)
            elements = [one.numel() for one in given.values() if isinstance(one, Tensor) and one.is_floating_point()]
            if elements:
                yield name, unwrap(encoder.module), _UNEVEN * times * max(elements) / _patch_size(encoder)
        inner = unwrap(inner.language_model)
    yield "language_model", inner, rows * config.data.max_length


def _patch_size(encoder: nn.Module) -> int:
    """Return how many numbers of an item become a token: what the first layer with weights reads."""
    for module in encoder.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return module.in_channels * math.prod(module.stride)
        if isinstance(module, nn.Linear):
            return module.in_features
    return 1


def _count_features(layer: nn.Module) -> int:
    """Return the numbers per token that the linear layers of a layer keep; adapters keep those of their base layer."""
    linear = [one for name, one in layer.named_modules() if isinstance(one, nn.Linear) and "base_layer" not in name]
    return sum(one.in_features + one.out_features for one in linear)
