"""What a run's model and optimizer take in memory: measured in this process, and as `cornstarch.plan.memory` has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from cornstarch.errors import ConfigError
from cornstarch.parallel.data import frozen_modules, local_value, sharded_units
from cornstarch.plan import DataPlan
from cornstarch.plan.memory import Memory, ModelSize, ParameterSize, StateSize, memory_of
from cornstarch.report.figures import size as show_size
from cornstarch.train.config import OptimizerConfig, RunConfig
from cornstarch.train.optim import AveragedWeights, make_optimizer
from cornstarch.train.parts import Part
from cornstarch.train.precision import Placement
from cornstarch.trees import tensors_in

_MATRIX, _VECTOR = (6, 10), (7,)  # sizes that no state has by chance


# ---------------------------------------------------------------------------------------------------- sizes


def model_size(model: nn.Module, data: DataPlan, optimizer: OptimizerConfig, averaged: bool = False) -> ModelSize:
    """Return what there is to hold of a model; before it is sharded, because shards do not tell what they are of.

    Args:
        model: On any device, its parameters in the precision that they are kept in.
        data: What says which parameters are gathered together.
        optimizer: What has states for those that are trained.
        averaged: Whether an average of the weights is kept.
    """
    units = _unit_numbers(model, data)
    parameters = tuple(
        ParameterSize(tuple(p.shape), p.element_size(), p.requires_grad, units.get(id(p))) for p in model.parameters()
    )
    kinds = {(p.dtype, p.dim() > 1) for p in model.parameters() if p.requires_grad}
    if data.kind == "fsdp1":
        kinds |= {(dtype, False) for dtype, _ in kinds}  # it makes strings of all parameters
    states = {(dtype.itemsize, is_matrix): state_size(optimizer, dtype, is_matrix) for dtype, is_matrix in kinds}
    return ModelSize(parameters, _bytes(model.buffers()), states, averaged)


def _unit_numbers(model: nn.Module, data: DataPlan) -> dict[int, int]:
    """Return the unit of each parameter that is in one; of units inside units it is the inner one."""
    if data.kind in ("ddp", "zero1"):
        return {}
    units = [*sharded_units(model, data), *(frozen_modules(model) if data.kind == "fsdp1" else ())]
    numbered = sorted(enumerate(units), key=lambda pair: -sum(1 for _ in pair[1].parameters()))
    return {id(parameter): number for number, unit in numbered for parameter in unit.parameters()}


def state_size(config: OptimizerConfig, dtype: torch.dtype, is_matrix: bool) -> StateSize:
    """Return what an optimizer has for a parameter, found out by letting it change a small one."""
    parameter = nn.Parameter(torch.ones(_MATRIX if is_matrix else _VECTOR, dtype=dtype))
    # Its rate and decay change no sizes; a decay of 0 is what every optimizer takes.
    optimizer = make_optimizer(config, [Part("", "", ("",), "full", 1e-3, 0.0, None, {"parameter": parameter})])
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as error:  # an optimizer of the user's, which may want a GPU
        raise ConfigError(
            f"optimizer.name = {config.name}\n  What it keeps could not be found out: {type(error).__name__}: {error}."
        ) from error
    sizes = {"per_element": 0, "per_row": 0, "per_column": 0, "constant": 0}
    for tensor in tensors_in(optimizer.state.get(parameter, {})):
        if tensor.shape == parameter.shape:
            sizes["per_element"] += tensor.element_size()
        elif is_matrix and tensor.numel() == _MATRIX[0]:
            sizes["per_row"] += tensor.element_size()
        elif is_matrix and tensor.numel() == _MATRIX[1]:
            sizes["per_column"] += tensor.element_size()
        else:
            sizes["constant"] += tensor.nbytes
    return StateSize(**sizes)


# ---------------------------------------------------------------------------------------------------- measured


def measured_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, averages: AveragedWeights | None = None
) -> dict[str, int]:
    """Return the bytes that are held in this process: `parameters`, `gradients`, `optimizer`, `averages`, `buffers`.

    Memory is counted, not numbers: views of the same memory once, and all of what a part is a view of. Gradients are
    there between a backward pass and the step of the optimizer.
    """
    parameters = list(model.parameters())
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": _bytes(tensor for state in optimizer.state.values() for tensor in tensors_in(state)),
        "averages": 0 if averages is None else _bytes(averages.averages.values()),
        "buffers": _bytes(model.buffers()),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        storage = local_value(tensor.detach()).untyped_storage()
        storages[StorageWeakRef(storage)] = storage.nbytes()
    return sum(storages.values())


# ---------------------------------------------------------------------------------------------------- in a run


class WatchedRun(Protocol):
    """What is looked at of a `Trainer` that is set up."""

    rank: int
    ranks: int
    placement: Placement
    model: nn.Module
    optimizer: torch.optim.Optimizer
    averages: AveragedWeights | None


class MemoryWatch:
    """Says, once in a run, what is held beside what was estimated.

    Make it before the model is sharded, call `look` before each step of the optimizer, and ask `line` afterwards.

    Args:
        model: The model, its parameters in the precision that they are kept in.
        config: The run.
        copies: hsdp: how often the model is there (`Layout.replicate`).
    """

    def __init__(self, model: nn.Module, config: RunConfig, copies: int | None = None) -> None:
        self._data, self._copies = config.parallel.plan().data, copies or 1
        self._size: ModelSize | None = None
        self._line: str | None = None
        self._steps = 0
        plan = config.parallel.plan()
        if plan.is_pipeline or any(module.tp > 1 or module.cp > 1 for module in plan.modules.values()):
            return  # no estimate knows them yet
        try:
            self._size = model_size(model, self._data, config.optimizer, config.loop.ema is not None)
        except ConfigError as error:  # no reason not to train
            self._line = f"memory is not estimated: {error}"

    def look(self, run: WatchedRun) -> None:
        """Look at the second step, before the optimizer's: its states are there, and gradients still."""
        self._steps += 1
        if self._steps == 2 and self._size is not None:
            expected = memory_of(self._size, self._data, run.ranks, run.rank, self._copies)
            self._line = _compared(run, expected)

    def line(self) -> str | None:
        """Return what there is to say, once; None before and afterwards."""
        line, self._line = self._line, None
        return line


def _compared(run: WatchedRun, expected: Memory) -> str:
    """Return what a run holds beside what it should hold."""
    measured = measured_bytes(run.model, run.optimizer, run.averages)
    found = sum(measured.values())
    kinds = [f"{name} {show_size(size)}" for name, size in measured.items() if size and name != "buffers"]
    where = "" if run.ranks == 1 else f" on rank {run.rank} of {run.ranks}"
    line = (
        f"memory{where}: {show_size(found)} measured, {show_size(expected.held)} estimated "
        f"({(found - expected.held) / max(expected.held, 1):+.1%}): {', '.join(kinds)}"
    )
    if run.placement.device.type == "cuda":
        line += f"; at most {show_size(run.placement.memory())} so far, activations included"
    return line
