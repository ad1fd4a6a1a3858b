"""What the layers of a run cost, measured where it will compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from cornstarch.plan.cost import RunCost
from cornstarch.train.config import OptimizerConfig, RunConfig
from cornstarch.train.costing.assembling import cost_of
from cornstarch.train.costing.calls import CallCost, Setting
from cornstarch.train.costing.measured import TURNS, Measured
from cornstarch.train.costing.portions import Portion, portion_of
from cornstarch.train.costing.run import states_of
from cornstarch.train.on_meta import model_on_meta
from cornstarch.train.parts import keep_in_precision, parts_of
from cornstarch.train.precision import Placement, choose_placement
from cornstarch.train.speed import compiles

if TYPE_CHECKING:
    from cornstarch.plan.facts import DataFacts

Tell = Callable[[str], None]


def profile_run(config: RunConfig, facts: DataFacts | None = None, tell: Tell = lambda words: None) -> RunCost:
    """Return what the layers of a run cost on the device that its config means.

    One layer of each kind is made there, with random weights, and run forward and backward. The model itself is not
    made, and no weights are read.

    Args:
        config: The run.
        facts: What the data is like, as in `run_cost`.
        tell: Told what is measured.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    placement = choose_placement(config.device, config.precision, config.attention)
    model = model_on_meta(config)
    keep_in_precision(parts_of(model, config.model, config.optimizer), placement.dtype)
    return profile_model(
        model,
        portion_of(config, model, facts),
        placement,
        compiled=compiles(config.compile, placement.device),
        batch=config.loop.batch_size,
        optimizer=config.optimizer,
        tell=tell,
    )


def profile_model(
    model: nn.Module,
    portion: Portion,
    placement: Placement,
    *,
    compiled: bool | None = None,
    batch: int | None = None,
    optimizer: OptimizerConfig | None = None,
    known: dict[str, CallCost] | None = None,
    tell: Tell = lambda words: None,
) -> RunCost:
    """Return what the layers of a model cost on a device that is there.

    Args:
        model: On the meta device, its parameters in the precision that they are kept in.
        portion: The microbatch.
        placement: The device, and what is computed in.
        compiled: Whether layers are compiled. Default: on GPUs.
        batch: Samples of a step. Default: those of the microbatch.
        optimizer: What has states for trained parameters. Default: AdamW.
        known: What was measured before, which is not measured again; what is measured is added.
        tell: Told what is measured.
    """
    on_gpu = placement.device.type != "cpu"
    fused = compiles("auto", placement.device) if compiled is None else compiled
    known = {} if known is None else known

    meters: list[Measured] = []

    def meter(is_causal: bool) -> Measured:
        setting = Setting(placement.dtype, on_gpu, fused, is_causal, portion.labels)
        meters.append(Measured(placement, setting, known, tell))
        return meters[-1]

    def costs() -> RunCost:
        return cost_of(
            model,
            portion,
            meter,
            computed_in=placement.dtype,
            on_gpu=on_gpu,
            batch=batch,
            state_bytes=states_of(model, optimizer or OptimizerConfig()),
        )

    found = costs()
    if on_gpu:
        return found
    for _ in range(TURNS - 1):
        for one in meters:
            one.again()
    return costs()


__all__ = ["profile_model", "profile_run"]
