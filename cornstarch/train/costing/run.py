"""What the layers of a run cost on a device: reckoned from its description, without weights and without the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from cornstarch.plan.cluster import Device
from cornstarch.plan.cost import RunCost
from cornstarch.train.build import DTYPES
from cornstarch.train.config import OptimizerConfig, Precision, RunConfig
from cornstarch.train.costing.assembling import cost_of
from cornstarch.train.costing.calls import Reckoned, Setting
from cornstarch.train.costing.pace import Pace
from cornstarch.train.costing.portions import Portion, portion_of
from cornstarch.train.estimate import precision_on
from cornstarch.train.footprint import state_size
from cornstarch.train.on_meta import model_on_meta
from cornstarch.train.parts import keep_in_precision, parts_of

if TYPE_CHECKING:
    from cornstarch.plan.facts import DataFacts


def run_cost(
    config: RunConfig, device: Device, facts: DataFacts | None = None, *, is_measured: bool = False
) -> RunCost:
    """Return what the layers of a run cost on a device.

    Only shapes are made: no weights are read, and the device need not be there.

    Args:
        config: The run.
        device: What each rank computes on.
        facts: What the data is like. Default: samples as long as `data.max_length`, one item for each encoder.
        is_measured: Whether the device's figures are measured ones, and not its maker's.
    """
    model, precision = described_model(config, device)
    cost = model_cost(
        model,
        portion_of(config, model, facts),
        device,
        precision,
        compiled=compiles_on(config, device),
        batch=config.loop.batch_size,
        optimizer=config.optimizer,
        is_measured=is_measured,
    )
    return cost if facts is None else replace(cost, straggler=tuple(sorted(facts.straggler.items())))


def described_model(config: RunConfig, device: Device) -> tuple[nn.Module, Precision]:
    """Return a run's model on the meta device, as its weights are kept on a device, and what it computes in there."""
    precision = precision_on(config, device)
    model = model_on_meta(config)
    keep_in_precision(parts_of(model, config.model, config.optimizer), DTYPES[precision])
    return model, precision


def compiles_on(config: RunConfig, device: Device) -> bool:
    """Say whether a run compiles its layers on a device."""
    return config.compile == "layers" or (config.compile == "auto" and device.name != "cpu")


def model_cost(
    model: nn.Module,
    portion: Portion,
    device: Device,
    precision: Precision,
    *,
    compiled: bool | None = None,
    batch: int | None = None,
    optimizer: OptimizerConfig | None = None,
    is_measured: bool = False,
) -> RunCost:
    """Return what the layers of a model cost on a device.

    Args:
        model: On the meta device, its parameters in the precision that they are kept in.
        portion: The microbatch.
        device: What each rank computes on.
        precision: What is computed in.
        compiled: Whether layers are compiled. Default: on GPUs.
        batch: Samples of a step. Default: those of the microbatch.
        optimizer: What has states for trained parameters. Default: AdamW.
        is_measured: Whether the device's figures are measured ones.
    """
    on_gpu = device.name != "cpu"
    pace = Pace.of(device, is_measured)

    def meter(is_causal: bool) -> Reckoned:
        fused = on_gpu if compiled is None else compiled
        return Reckoned(pace, Setting(DTYPES[precision], on_gpu, fused, is_causal, portion.labels))

    return cost_of(
        model,
        portion,
        meter,
        computed_in=DTYPES[precision],
        on_gpu=on_gpu,
        batch=batch,
        state_bytes=states_of(model, optimizer or OptimizerConfig()),
    )


def states_of(model: nn.Module, optimizer: OptimizerConfig) -> int:
    """Return the bytes that an optimizer has for each number of what most of the trained weights are kept in."""
    counts: dict[object, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    if not counts:
        return 0
    most = max(counts, key=lambda dtype: counts[dtype])
    return state_size(optimizer, most, is_matrix=True).per_element  # type: ignore[arg-type]


__all__ = ["compiles_on", "described_model", "model_cost", "run_cost", "states_of"]
