"""Optimizers, learning rates and averaged weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from cornstarch.config import OptimizerConfig, ScheduleConfig
from cornstarch.config.sections import OPTIMIZER_NAMES
from cornstarch.config.user_code import import_named
from cornstarch.engine.model_parts import ModelPart
from cornstarch.errors import ConfigError
from cornstarch.kernels.adamw import MasterAdamW, select_optimizer_class
from cornstarch.kernels.master_weights import find_master, has_master
from cornstarch.parallel.distributed import to_local_tensor

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
"""Optimizers that `optimizer.name` knows by a short name; any other is given as `package.module.Class`."""
ELEMENTWISE = {"adamw", "sgd"}
"""Those that step each number by itself, so that ranks may hold any shard of a parameter; others are tried first."""
# Arguments that have a key of their own, because parts may differ in them.
_SAID_ELSEWHERE = {"lr": "optimizer.learning_rate", "weight_decay": "optimizer.weight_decay"}
_IMPLEMENTATIONS = {"foreach", "fused", "differentiable"}


def register_optimizer(name: str, kind: type[torch.optim.Optimizer]) -> None:
    """Make an optimizer available as `optimizer.name`."""
    OPTIMIZERS[name.lower()] = kind
    if name.lower() not in OPTIMIZER_NAMES:
        OPTIMIZER_NAMES.append(name.lower())


def make_optimizer(
    config: OptimizerConfig, parts: Sequence[ModelPart], stepped: Mapping[str, nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of all parts, a group for each; `stepped` has what this rank steps of each parameter."""
    kind = _optimizer_class(config)
    options = _options(config, kind)
    takes = inspect.signature(kind).parameters
    decays = "weight_decay" in takes
    if not decays and any(part.weight_decay for part in parts if part.trained):
        raise ConfigError(f"optimizer.name = {config.name}\n  It knows no weight decay. Set all `weight_decay` to 0.")
    # A process of a pipeline may have nothing to train; its optimizer then has nothing to do.
    groups = [group for part in parts for group in _groups(part, decays, stepped)] or [{"params": []}]
    trained = [parameter for group in groups for parameter in group["params"]]
    # torch 2.11 to 2.13 can fuse only Adam and AdamW of sharded parameters.
    is_unfusable = not issubclass(kind, torch.optim.Adam) and any(isinstance(one, DTensor) for one in trained)
    devices = {parameter.device.type for parameter in trained}
    can_fuse = devices <= {"cpu", "cuda"} and all(map(torch.is_floating_point, trained)) and not is_unfusable
    if "fused" in takes and not _IMPLEMENTATIONS & set(options) and can_fuse:
        options["fused"] = True
        kind = select_optimizer_class(kind) if "cuda" in devices else kind
    if any(map(has_master, trained)):
        kind = MasterAdamW
    try:
        return kind(groups, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer.name = {config.name}\n  {type(error).__name__}: {error}") from error


def make_plain_optimizer(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of parameters that all have the config's own rate and weight decay."""
    kind = _optimizer_class(config)
    decay = {"weight_decay": config.weight_decay} if "weight_decay" in inspect.signature(kind).parameters else {}
    return kind([{"params": list(parameters), "lr": config.learning_rate, **decay}], **_options(config, kind))


def apply_hyperparameters(
    optimizer: torch.optim.Optimizer,
    config: OptimizerConfig,
    parts: Sequence[ModelPart],
    stepped: Mapping[str, nn.Parameter] | None = None,
) -> None:
    """Give an optimizer that was restored from a checkpoint the hyperparameters of the config."""
    fresh = make_optimizer(config, parts, stepped)
    for group, wanted in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        group.update({key: value for key, value in wanted.items() if key not in ("params", "foreach", "fused")})


def scale_rates(optimizer: torch.optim.Optimizer, how: str, replicas: int) -> None:
    """Multiply the learning rates by the number of replicas, or its square root."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * _rate_scale(how, replicas)


def _rate_scale(how: str, replicas: int) -> float:
    return {"none": 1.0, "linear": float(replicas), "sqrt": math.sqrt(replicas)}[how]


def highest_rate(config: OptimizerConfig, parts: Sequence[ModelPart], replicas: int) -> float:
    """Return the highest learning rate of the parts that are trained."""
    return max(part.learning_rate for part in parts if part.trained) * _rate_scale(config.scale_rate, replicas)


def _groups(part: ModelPart, decays: bool, stepped: Mapping[str, nn.Parameter] | None) -> Iterator[dict[str, Any]]:
    """Yield the groups of a part: its biases and norms are in one without weight decay."""
    trained = part.trained
    if stepped is not None:
        trained = {name: stepped[name] for name in trained if name in stepped}
    for vectors in (False, True) if decays else (None,):
        options = {} if vectors is None else {"weight_decay": 0.0 if vectors else part.weight_decay}
        # One kernel for many takes parameters of one mesh only: those cut by tensor parallelism have another.
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for name, parameter in trained.items():
            if vectors is None or part.is_vector(name) == vectors:
                by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        for alike in by_mesh.values():
            yield {"params": alike, "lr": part.learning_rate, **options}


def _optimizer_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    module, _, name = config.name.rpartition(".")
    found: Any = OPTIMIZERS.get(config.name.lower())
    if found is None and module.partition(".")[0] in ("", "torch", "transformers"):
        try:  # nothing but a class of optimizers is accepted, and to import these packages runs nothing else
            found = getattr(import_module(module or "torch.optim"), name)
        except Exception as error:
            raise ConfigError(f"optimizer.name = {config.name}\n  {error}. {_describe_choices()}") from error
    elif found is None:
        try:
            found = import_named(f"optimizer.name = {config.name}", f"{module}:{name}")
        except ConfigError as error:
            raise ConfigError(f"{error}\n  {_describe_choices()}") from error
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise ConfigError(f"optimizer.name = {config.name}\n  This is no class of optimizers.")
    if found is torch.optim.SparseAdam:
        raise ConfigError(f"optimizer.name = {config.name}\n  It takes sparse gradients only; expected adamw, say.")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer.name = {config.name}\n  It computes the loss several times per step, which this loop does not."
        )
    return found


def _describe_choices() -> str:
    return f"Expected {', '.join(OPTIMIZERS)}, or a class such as torch.optim.Adafactor."


def _options(config: OptimizerConfig, kind: type) -> dict[str, Any]:
    takes = inspect.signature(kind).parameters
    for name, key in _SAID_ELSEWHERE.items():
        if name in config.arguments:
            raise ConfigError(f"optimizer.arguments has {name!r}. Give it as {key}, or in a part of the model.")
    unknown = sorted(set(config.arguments) - set(takes))
    if unknown and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values()):
        known = sorted(set(takes) - {"params", "lr", "weight_decay"})
        raise ConfigError(
            f"optimizer.arguments has {unknown}, which {kind.__name__} does not take. It takes {', '.join(known)}."
        )
    adamw, sgd = {"betas": config.betas, "eps": config.eps}, {"momentum": config.momentum}
    options: dict[str, Mapping[str, Any]] = {"adamw": adamw, "sgd": sgd}
    return {**options.get(config.name.lower(), {}), **config.arguments}


def rate_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """Return what the highest learning rate is multiplied by in a step, counted from 0."""
    # It rises in the warm-up, whose steps all learn, and reaches `min_lr_ratio` after the last step.
    warmup = min(round(config.warmup * total) if config.warmup < 1 else int(config.warmup), total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.name == "constant":
        return 1.0
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    left = 1 - done if config.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left


class LearningRate:
    """Sets the rates of an optimizer's groups before each step, of `total`; it has no state of its own."""

    # The optimizer of this rank may step some of the parameters only, or none, so `highest` is the highest rate of all
    # parts of the model, wherever they are; default: that of the optimizer's groups.
    def __init__(
        self, optimizer: torch.optim.Optimizer, config: ScheduleConfig, total: int, highest: float | None = None
    ) -> None:
        self._optimizer, self._config, self._total = optimizer, config, total
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._highest = max(self._rates) if highest is None else highest

    def set(self, step: int) -> float:
        """Set the rates of a step, counted from 0, and return the highest of all parts, the same on every rank."""
        factor = rate_factor(self._config, step, self._total)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor
        return self._highest * factor


class AveragedWeights:
    """An exponential moving average of the trained weights, in float32; each process averages what it holds.

    Weights of which the optimizer has float32 masters are averaged by their masters.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], decay: float, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._parameters, self._optimizer = dict(parameters), optimizer
        self._average = get_ema_multi_avg_fn(decay)
        self.averages = {name: self._read(parameter).clone() for name, parameter in self._parameters.items()}

    def _read(self, parameter: nn.Parameter) -> Tensor:
        master = find_master(self._optimizer, parameter)
        return parameter.detach().float() if master is None else master.read()

    @torch.no_grad()
    def update(self) -> None:
        if not self._parameters:  # a stage that trains nothing
            return
        now = [to_local_tensor(self._read(parameter)) for parameter in self._parameters.values()]
        self._average([to_local_tensor(average) for average in self.averages.values()], now, None)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run a block with the averages in place of the weights."""
        trained = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            self._put(self.averages)
            yield
        finally:
            self._put(trained)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        # In place: a sharded parameter's memory belongs to what shards it.
        for name, parameter in self._parameters.items():
            to_local_tensor(parameter.detach()).copy_(to_local_tensor(values[name]))
