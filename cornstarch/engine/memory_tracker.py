"""The memory of a run's model and optimizer: measured in this process, and estimated by `cornstarch.plan.memory`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from cornstarch.config import OptimizerConfig, RunConfig
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.model_parts import ModelPart
from cornstarch.engine.optimizer import AveragedWeights, make_optimizer
from cornstarch.errors import ConfigError
from cornstarch.kernels.master_weights import has_master, round_to_weight
from cornstarch.parallel.ddp_fsdp import find_frozen_modules, find_fsdp_units
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.plan import DataPlan
from cornstarch.plan.memory import ModelSize, ParameterSize, StateSize, memory_of
from cornstarch.report.number_format import format_bytes as show_size
from cornstarch.trees import tensors_in

_MATRIX, _VECTOR = (6, 10), (7,)  # a state of one of these sizes has it from the parameter


def model_size(model: nn.Module, data: DataPlan, optimizer: OptimizerConfig, averaged: bool = False) -> ModelSize:
    """Return the sizes of the parameters and optimizer states of a model that has the run's precisions, not sharded.

    `data` determines which parameters are gathered together; `averaged`: an average of the weights is kept.
    """
    units: dict[int, int] = {}  # the number of the innermost unit of each parameter that is in one
    if data.kind not in ("ddp", "zero1"):
        found = [*find_fsdp_units(model, data), *(find_frozen_modules(model) if data.kind == "fsdp1" else ())]
        numbered = sorted(enumerate(found), key=lambda pair: -sum(1 for _ in pair[1].parameters()))
        units = {id(parameter): number for number, unit in numbered for parameter in unit.parameters()}
    parameters = tuple(
        ParameterSize(tuple(p.shape), p.element_size(), p.requires_grad, units.get(id(p)), gradient_itemsize(p))
        for p in model.parameters()
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = {(p.dtype, p.dim() > 1) for p in trained}
    with_masters = {p.dtype for p in trained if has_master(p)}
    if data.kind == "fsdp1":
        kinds |= {(dtype, False) for dtype, _ in kinds}  # it flattens all parameters
    states = {
        (dtype.itemsize, is_matrix): state_size(optimizer, dtype, is_matrix, dtype in with_masters)
        for dtype, is_matrix in kinds
    }
    return ModelSize(parameters, _count_bytes(model.buffers()), states, averaged)


def gradient_itemsize(parameter: nn.Parameter) -> int:
    """Return the bytes of a number of a parameter's gradient."""
    dtype: torch.dtype | None = parameter.grad_dtype if parameter.requires_grad else None
    return parameter.element_size() if dtype is None else dtype.itemsize


def state_size(config: OptimizerConfig, dtype: torch.dtype, is_matrix: bool, masters: bool = False) -> StateSize:
    """Return the state of an optimizer for a parameter, found by stepping a small one; `masters`: as in a run."""
    parameter = nn.Parameter(torch.ones(_MATRIX if is_matrix else _VECTOR, dtype=dtype))
    if masters:
        round_to_weight(parameter)
    # The rate and the decay do not change sizes; every optimizer accepts a decay of 0.
    optimizer = make_optimizer(config, [ModelPart("", "", ("",), "full", 1e-3, 0.0, None, {"parameter": parameter})])
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as error:  # an optimizer of the user's, which may need a GPU
        raise ConfigError(
            f"optimizer.name = {config.name}\n  The size of its state cannot be determined: {type(error).__name__}: "
            f"{error}."
        ) from error
    sizes: Counter[str] = Counter()
    by_count = {parameter.numel(): "per_element"}
    by_count |= dict(zip(_MATRIX, ("per_row", "per_column"), strict=True)) if is_matrix else {}
    for tensor in tensors_in(optimizer.state.get(parameter, {})):
        kind = by_count.get(tensor.numel(), "constant")
        sizes[kind] += tensor.nbytes if kind == "constant" else tensor.element_size()
    return StateSize(**sizes)


def measure_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, averages: AveragedWeights | None = None
) -> dict[str, int]:
    """Return the bytes in this process by kind; whole storages count, each once."""
    parameters = list(model.parameters())
    return {
        "parameters": _count_bytes(parameters),
        "gradients": _count_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": _count_bytes(tensor for state in optimizer.state.values() for tensor in tensors_in(state)),
        "averages": 0 if averages is None else _count_bytes(averages.averages.values()),
        "buffers": _count_bytes(model.buffers()),
    }


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        storage = to_local_tensor(tensor.detach()).untyped_storage()
        storages[StorageWeakRef(storage)] = storage.nbytes()
    return sum(storages.values())


class MemoryTracker:
    """Compares, once in a run, the measured memory with the estimate; build it before the model is sharded."""

    def __init__(self, model: nn.Module, config: RunConfig, context: DistributedContext) -> None:
        self._model, self._context = model, context
        self._size: ModelSize | None = None
        self._line: str | None = None
        self._steps = 0
        plan = config.parallel
        if plan.is_pipeline or any(max(one.tp, one.cp, one.ep) > 1 for one in plan.modules.values()):
            return  # these are not estimated per rank yet
        try:
            self._size = model_size(model, plan.data, config.optimizer, config.loop.ema_decay is not None)
        except ConfigError as error:  # the run can train without an estimate
            self._line = f"memory is not estimated: {error}"

    def measure(self, optimizer: torch.optim.Optimizer, averages: AveragedWeights | None) -> None:
        """Measure the second step, before the optimizer's: then both its states and the gradients exist."""
        self._steps += 1
        if self._steps != 2 or self._size is None:
            return
        context, ranks = self._context, self._context.world_size
        # With hsdp, there are several copies of the model.
        memory = memory_of(self._size, context.plan.data, ranks, context.rank, context.layout.replicate or 1)
        expected, measured = memory.persistent, measure_bytes(self._model, optimizer, averages)
        found = sum(measured.values())
        kinds = [f"{name} {show_size(size)}" for name, size in measured.items() if size and name != "buffers"]
        where = "" if ranks == 1 else f" on rank {context.rank} of {ranks}"
        self._line = (
            f"memory{where}: {show_size(found)} measured, {show_size(expected)} estimated "
            f"({(found - expected) / max(expected, 1):+.1%}): {', '.join(kinds)}"
        )
        if context.device.type == "cuda":
            self._line += f"; at most {show_size(context.placement.memory())} so far, activations included"

    def line(self) -> str | None:
        """Return the comparison once; None before and afterwards."""
        line, self._line = self._line, None
        return line
